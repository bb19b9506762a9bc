#!/usr/bin/python3
"""What playing Atari costs: the emulator alone, through the Gymnasium bridge, and with the net.

    build/venv/bin/python tools/bench_atari.py [--seconds S] [--games K] [--rounds N] [--json]

One run, one core at a time: agent steps a second (4 frames each) of ale-py's emulator with its grey
screen and nothing else, K games in turn, of the bridge with as many (`gradq-actor --benchmark`,
"games alone"), of the net alone, and of both.  They take turns; medians of the rounds are shown;
`bridge_share`, what the bridge adds as a share of the emulator's own time, is the median of the
rounds' shares, and `shares` are all of them.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time

import ale_py
import gymnasium
import numpy

GAME = ["--env", "gym:ALE/Pong-v5", "--env-set", "repeat_action_probability=0",
        "--net", "conv-lstm", "--normalise", "running", "--reward-clip", "1"]
FRAMES = 4


def emulator_rate(games, seconds):
    """Agent steps a second of the emulator itself."""
    envs = [gymnasium.make("ALE/Pong-v5", repeat_action_probability=0, obs_type="grayscale")
            for _ in range(games)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    emulators = [env.unwrapped.ale for env in envs]
    actions, screen = emulators[0].getMinimalActionSet(), numpy.empty((210, 160), numpy.uint8)
    chance, steps, begun = random.Random(1), 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for emulator in emulators:
            action = chance.choice(actions)
            for _ in range(FRAMES):
                emulator.act(action)
            emulator.getScreenGrayscale(screen)
            if emulator.game_over():
                emulator.reset_game()
        steps += games
    return steps / (time.perf_counter() - begun)


def one_round(options):
    """The rates of one round."""
    emulator = emulator_rate(options.games, options.seconds)
    answer = subprocess.run(
        [os.path.join(options.build, "gradq-actor"), "--benchmark", str(options.seconds), *GAME,
         "--envs-per-actor", str(options.games), "--json"],
        capture_output=True, text=True, check=True)
    actor = json.loads(answer.stdout)
    return {"emulator_per_s": emulator, "bridge_per_s": actor["env_per_s"],
            "net_per_s": actor["net_per_s"], "both_per_s": actor["both_per_s"],
            "bridge_share": emulator / actor["env_per_s"] - 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--games", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--build", default=os.path.join(os.path.dirname(__file__), "..", "build"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.games < 1 or options.rounds < 1 or options.seconds <= 0:
        parser.error("--games, --rounds and --seconds must be above 0")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    rounds = [one_round(options) for _ in range(options.rounds)]
    figures = {"games": options.games}
    for key in rounds[0]:
        figures[key] = round(statistics.median(each[key] for each in rounds), 3)
    figures["shares"] = sorted(round(each["bridge_share"], 3) for each in rounds)
    if options.json:
        print(json.dumps(figures))
    else:
        print("  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
