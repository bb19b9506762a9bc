#!/usr/bin/python3
"""Learning goes on while its processes are killed: `gradq up` under kill -9, until it has solved.

Usage: tests/chaos/learning.py [--build DIR] [--seed S] [--env ENV] [--actors N] [--target R]
                               [--every S] [--first S] [--limit S] [--rounds N]

Starts `tools/gradq up` and kills one of its actors, the optimizer and the broker, in a random order
that spares none, every --every seconds, the first after --first, until the run ends by itself.
Prints the kills and the seconds.  Exit 1 when it did not end with exit 0 and "solved", in --limit
seconds, or before each kind was killed once.  --rounds: so many seeds, one after another.
"""
import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STOP_S = 150
POLL_S = 0.01
KINDS = ("broker", "optimizer", "actor")


def children_of(pid: int) -> list:
    """Processes below pid.  One that ends meanwhile has none."""
    found = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            words = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for word in words:
            found += [int(word), *children_of(int(word))]
    return found


def gradq_name(pid: int) -> str:
    """actor-2 of "gradq-actor ... --actor 2", "" for any other program."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    found = re.fullmatch(r"gradq-(broker|optimizer|actor)", os.path.basename(words[0]))
    if not found:
        return ""
    return found[1] + (f"-{words[words.index('--actor') + 1]}" if "--actor" in words else "")


def kill_one(up: int, chance: random.Random, kills: Counter):
    """kill -9 to one process below `up`, of the kind that was killed least."""
    victims = {}
    for pid in children_of(up):
        kind = gradq_name(pid).split("-")[0]
        if kind in KINDS:
            victims.setdefault(kind, []).append(pid)
    kind = min(sorted(victims), key=lambda each: (kills[each], chance.random()), default=None)
    if kind is None:
        return
    try:
        os.kill(chance.choice(victims[kind]), signal.SIGKILL)
        kills[kind] += 1
    except ProcessLookupError:
        pass


def episodes_in(run: Path) -> int:
    """How many were played to their end so far."""
    return sum(path.read_bytes().count(b'"return"') for path in run.glob("metrics/actor-*"))


def end(up: subprocess.Popen) -> str:
    """Stop it; more that is wrong."""
    up.send_signal(signal.SIGINT)
    try:
        up.wait(STOP_S)
    except subprocess.TimeoutExpired:
        up.kill()
        return f", and it does not stop within {STOP_S} s"
    return ""


def learn(build: Path, run: Path, seed: int, env: str = "CartPole-v1", actors: int = 4,
          target: float = 475, every: float = 0.4, first: float = 0.1, limit: float = 300,
          between: int = 10) -> tuple:
    """(what was wrong, "" when it solved; output; kills by kind; seconds)

    A kill comes `every` seconds after the one before, and not before `between` episodes were played
    since: on a slow machine nothing would ever be learnt between two of them.
    """
    chance, kills, said = random.Random(seed), Counter(), Path(f"{run}.out")
    command = [ROOT / "tools/gradq", "up", "--run", run, "--build", build, "--env", env,
               "--actors", actors, "--target-return", target, "--seed", seed]
    with open(said, "w", encoding="utf-8") as out, subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
            stderr=out, start_new_session=True) as up:
        start = time.monotonic()
        due = None  # counted from the moment at which all is ready
        played = 0  # episodes at which the next one may come
        while up.poll() is None and time.monotonic() < start + limit:
            now = time.monotonic()
            if due is None and "address: " in said.read_text():
                due = now + first
            if due is not None and now >= due and episodes_in(run) >= played:
                kill_one(up.pid, chance, kills)
                due = now + every
                played = episodes_in(run) + between
            time.sleep(POLL_S)
        seconds = time.monotonic() - start
        wrong = f"not solved after {limit} s" + end(up) if up.poll() is None else ""
    missed = [kind for kind in KINDS if not kills[kind]]
    if not wrong and (up.returncode != 0 or "solved: mean return" not in said.read_text()):
        wrong = f"ended with exit {up.returncode}"
    elif not wrong and missed:
        wrong = f"solved before {', '.join(missed)} was killed; kill sooner"
    return wrong, said.read_text(), kills, seconds


def round_of(words, seed: int) -> bool:
    directory = Path(tempfile.mkdtemp(prefix="gq-learn-", dir="/tmp"))
    wrong, said, kills, seconds = learn(
        words.build.resolve(), directory / "run", seed, words.env, words.actors, words.target,
        words.every, words.first, words.limit)
    print(f"seed {seed}, {words.env}, {words.actors} actors, a kill each {words.every:g} s: "
          f"{sum(kills.values())} kills ({', '.join(f'{kills[kind]} {kind}' for kind in KINDS)}), "
          f"{'WRONG: ' + wrong if wrong else 'solved'}, {seconds:.1f} s", flush=True)
    if wrong:
        print(f"{said}\nkept: {directory}", flush=True)
    else:
        shutil.rmtree(directory)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 20))
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--target", type=float, default=475)
    parser.add_argument("--every", type=float, default=0.4)
    parser.add_argument("--first", type=float, default=0.1)
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=1)
    words = parser.parse_args()
    good = [round_of(words, words.seed + i) for i in range(words.rounds)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
