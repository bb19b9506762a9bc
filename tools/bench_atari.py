#!/usr/bin/python3
"""What playing Atari costs: the emulator alone, through the Gymnasium bridge, and with the net.

    build/venv/bin/python tools/bench_atari.py [--seconds S] [--games K] [--json]

One run, one core at a time: agent steps a second (4 frames each) of ale-py's emulator with its grey
screen and nothing else, of the bridge (`gradq-actor --benchmark`, "games alone"), of the net alone,
and of both.  `bridge_share` is what the bridge adds, as a share of the emulator's own time.
"""

import argparse
import json
import os
import subprocess
import time

import ale_py
import gymnasium
import numpy

GAME = ["--env", "gym:ALE/Pong-v5", "--env-set", "repeat_action_probability=0",
        "--net", "conv-lstm", "--normalise", "running", "--reward-clip", "1"]
FRAMES = 4


def emulator_rate(seconds):
    """Agent steps a second of the emulator itself."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", repeat_action_probability=0, obs_type="grayscale")
    env.reset(seed=1)
    ale = env.unwrapped.ale
    actions, screen = ale.getMinimalActionSet(), numpy.empty((210, 160), numpy.uint8)
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(FRAMES):
            ale.act(actions[steps % len(actions)])
        ale.getScreenGrayscale(screen)
        if ale.game_over():
            ale.reset_game()
        steps += 1
    return steps / (time.perf_counter() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--games", type=int, default=4)
    parser.add_argument("--build", default=os.path.join(os.path.dirname(__file__), "..", "build"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    before = emulator_rate(options.seconds)
    answer = subprocess.run(
        [os.path.join(options.build, "gradq-actor"), "--benchmark", str(options.seconds), *GAME,
         "--envs-per-actor", str(options.games), "--json"],
        capture_output=True, text=True, check=True)
    actor = json.loads(answer.stdout)
    emulator = (before + emulator_rate(options.seconds)) / 2
    figures = {"games": options.games, "emulator_per_s": round(emulator, 1),
               "bridge_per_s": actor["env_per_s"], "net_per_s": actor["net_per_s"],
               "both_per_s": actor["both_per_s"],
               "bridge_share": round(emulator / actor["env_per_s"] - 1, 3)}
    if options.json:
        print(json.dumps(figures))
    else:
        print("  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
