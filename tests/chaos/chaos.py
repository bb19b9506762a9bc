#!/usr/bin/python3
"""Kill, stop and cut everything at random; then let the oracle say whether a promise was broken.

Usage: tests/chaos/chaos.py [--build DIR] [--seeds N] [--seconds S] [--seed SEED] [--mode MODE]

Each seed is one run of a broker, an optimizer and four clients that push for ever.  This program
restarts at once whatever ends.  After --seconds of faults it heals everything, measures how long
until every client gets on, stops all cleanly, and has tests/chaos/oracle.py examine the run
directory.  Exit 1 when a promise was broken; the run directory is then kept, and --seed tries the
same plan again (the plan, not the moments: those are the machine's).
"""
import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import oracle

HERE = Path(__file__).resolve().parent
CLIENTS = 4
MODES = ("ipc", "tcp", "relay", "cut")
CRASHES = {  # name: highest N of "die at pass N" that a short life is likely to reach
    "after-receive": 60, "appending": 120, "before-apply": 60, "before-publish": 60,
    "recovering": 20, "checkpointing": 2}
RECOVERY_KILLS = 10
PROGRESS_S = 5    # from healing until every client gets on: the promise
PROGRESS_LINES = 10  # more than a window: something new was pushed and settled
STUCK_S = 30
STOP_S = 20
UNSETTLED = 5  # chaos_client, told twice to stop
# Faults and how often each is chosen.  The first three are what the promise is about.
WEIGHTS = {"broker": 6, "optimizer": 3, "client": 5, "together": 2, "stop": 1.5, "crash": 3,
           "storm": 0.2, "cut": 2}
POLL_S = 0.005


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, below those that the kernel gives out."""
    for _ in range(200):
        first = random.SystemRandom().randrange(15000, 32000 - count)
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, each in enumerate(sockets):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("0.0.0.0", first + i))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports")


class Child:
    """One process of the run, started again and again."""

    def __init__(self, chaos, name: str, words: list, prefix: list = ()):
        self.chaos, self.name = chaos, name
        self.words = [*map(str, prefix), *map(str, words)]
        self.kind = name.rstrip("0123456789")
        self.popen = None
        self.killed = False   # by us
        self.crash = None     # name of the point at which it is to die
        self.stopped_until = None
        self.lives = 0

    def start(self, crash: str = None, number: int = 1):
        env = {k: v for k, v in os.environ.items() if not k.startswith("GRADQ_")}
        if crash:
            env["GRADQ_TEST_CRASH"] = f"{crash}:{number}"
        self.crash, self.killed, self.stopped_until = crash, False, None
        self.lives += 1
        with open(self.chaos.directory / f"{self.name}.log", "ab") as log:
            self.popen = subprocess.Popen(self.words, env=env, stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log, start_new_session=True)

    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> bool:
        """kill -9; false when it had ended by itself before."""
        if not self.running():
            return False
        self.killed = True
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()
        return True

    def stop_for(self, seconds: float) -> bool:
        if not self.running() or self.stopped_until is not None:
            return False
        self.popen.send_signal(signal.SIGSTOP)
        self.stopped_until = time.monotonic() + seconds
        return True

    def go_on(self):
        if self.stopped_until is not None and self.running():
            self.popen.send_signal(signal.SIGCONT)
        self.stopped_until = None

    def tail(self) -> str:
        lines = (self.chaos.directory / f"{self.name}.log").read_text(errors="replace")
        return lines[-500:].strip()


class Network:
    """A second network namespace, reached over a pair of virtual cables."""

    def __init__(self):
        number = os.getpid() % 60000
        self.name, self.outer, self.inner = f"gqc{number}", f"gqo{number}", f"gqi{number}"
        net = f"10.{200 + number // 250 // 250}.{number // 250 % 250}.{number % 63 * 4}"
        stem, last = net.rsplit(".", 1)
        self.host = f"{stem}.{int(last) + 1}"
        self.prefix = ["ip", "netns", "exec", self.name]
        self.down_until = None
        try:
            self.ip("netns", "add", self.name)
            self.ip("link", "add", self.outer, "type", "veth", "peer", "name", self.inner)
            self.ip("link", "set", self.inner, "netns", self.name)
            self.ip("addr", "add", f"{self.host}/30", "dev", self.outer)
            self.ip("link", "set", self.outer, "up")
            self.ip("-n", self.name, "addr", "add", f"{stem}.{int(last) + 2}/30", "dev", self.inner)
            self.ip("-n", self.name, "link", "set", self.inner, "up")
            self.ip("-n", self.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            self.close()
            raise

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    def cut(self, seconds: float) -> bool:
        if self.down_until is not None:
            return False
        self.ip("link", "set", self.outer, "down")
        self.down_until = time.monotonic() + seconds
        return True

    def heal(self):
        if self.down_until is not None:
            self.ip("link", "set", self.outer, "up")
        self.down_until = None

    def close(self):
        for words in (("link", "del", self.outer), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=10)


def namespaces_work() -> str:
    """"" or why not."""
    try:
        Network().close()
    except OSError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return error.stderr.decode(errors="replace").strip()
    return ""


class Chaos:
    """One seed."""

    def __init__(self, build: Path, seed: int, seconds: float, mode: str, directory: Path,
                 slow: float = 1, **settings):
        self.build, self.seed, self.seconds, self.mode = build, seed, seconds, mode
        self.slow = slow  # factor for all that has a limit: sanitizers cost one
        self.random = random.Random(seed)
        self.directory, self.run = directory, directory / "run"
        self.counts = Counter()
        self.wrong = []
        self.weights = dict(WEIGHTS)
        if mode != "cut":
            self.weights.pop("cut", None)
        names = list(CRASHES)
        self.crashes = itertools.cycle(names[seed % len(names):] + names[:seed % len(names)])
        self.settings = {
            "optimizer": self.random.choice(("sgd", "sgd momentum", "adam")),
            "fsync": self.random.choice(("never", "never", "interval", "always")),
            "aggregate": self.random.choice((1, 1, 3)),
            "max-staleness": self.random.choice(("inf", "inf", "8")),
            "checkpoint-interval-s": 0.3, **settings}
        self.network = self.relay = None
        self.progress_s = None

    # ---- the processes ----

    def rule(self) -> list:
        return {"sgd": ["sgd", "--set", "lr=0.01"],
                "sgd momentum": ["sgd", "--set", "lr=0.01", "--set", "momentum=0.9"],
                "adam": ["adam"]}[self.settings["optimizer"]]

    def create(self):
        address, host = f"ipc://{self.directory}/control", "127.0.0.1"
        if self.mode == "cut":
            self.network = Network()
            host = self.network.host
        if self.mode != "ipc":
            address = f"tcp://{host}:{free_ports(6)}"
        reached = address
        if self.mode == "relay":
            listen = free_ports(6)
            reached = f"tcp://{host}:{listen}"
            self.relay = Child(self, "relay", [
                "/usr/bin/python3", HERE / "relay.py", listen, address.rsplit(":", 1)[1], self.seed,
                self.directory / "relay.json"])
        # Either the optimizer or some clients stand behind the cable that is cut.
        far = self.network.prefix if self.network else []
        far_optimizer = self.random.random() < 0.5
        self.broker = Child(self, "broker", [self.build / "gradq-broker", "--address", address])
        self.optimizer = Child(self, "optimizer", [
            self.build / "gradq-optimizer", "--address", address, "--run", self.run, "--resume",
            "--optimizer", *self.rule(), "--journal", "keep", "--checkpoints-kept", 1000,
            "--checkpoint-interval-s", self.settings["checkpoint-interval-s"],
            "--fsync", self.settings["fsync"],
            "--aggregate", self.settings["aggregate"],
            "--max-staleness", self.settings["max-staleness"]], far if far_optimizer else [])
        self.logs = [self.directory / f"client{i}" for i in range(CLIENTS)]
        self.clients = [Child(self, f"client{i}", [
            self.build / "tests/chaos_client", reached, i, self.seed, log],
            far if not far_optimizer and i % 2 == 0 else []) for i, log in enumerate(self.logs)]
        self.children = [self.broker, self.optimizer, *self.clients]

    def begin(self):
        for child in [self.relay] * (self.relay is not None) + self.children:
            child.start()
        self.wait(self.all_get_on(), STUCK_S, "the first gradients of every client")

    # ---- what is watched all the time ----

    def ended(self, child: Child):
        """It ended: by us, at its crash point, or against the rules."""
        code = child.popen.returncode
        if child.killed:
            return
        if code == -signal.SIGKILL and child.crash:
            self.counts["crash " + child.crash] += 1
            return
        self.wrong.append(f"{child.name} ended by itself with {code}: {child.tail()}")

    def watch(self):
        """Restart what ended, wake what has slept, mend the cable."""
        now = time.monotonic()
        for child in self.children:
            if child.stopped_until is not None and now >= child.stopped_until:
                child.go_on()
            if not child.running():
                self.ended(child)
                child.start()
        if self.network and now >= (self.network.down_until or now + 1):
            self.network.heal()

    def wait(self, condition, seconds: float, what: str = None) -> bool:
        deadline = time.monotonic() + seconds * (self.slow if condition else 1)
        while time.monotonic() < deadline and len(self.wrong) < 5:
            self.watch()
            if condition is not None and condition():
                return True
            time.sleep(POLL_S)
        if what is not None:
            self.wrong.append(f"waited {seconds} s in vain for {what}")
        return False

    def all_get_on(self):
        """A condition: every client has had more settled than a window since now."""
        def lines(log):
            try:
                return Path(f"{log}.ack").read_bytes().count(b"\n")
            except FileNotFoundError:
                return 0
        before = [lines(log) for log in self.logs]
        return lambda: all(lines(log) >= base + PROGRESS_LINES
                           for log, base in zip(self.logs, before))

    # ---- faults ----

    def kill(self, child: Child) -> bool:
        done = child.kill()
        self.counts["kill " + child.kind] += done
        return done

    def disturb(self, fault: str):
        if fault == "broker":
            self.kill(self.broker)
        elif fault == "optimizer":
            self.kill(self.optimizer)
        elif fault == "client":
            self.kill(self.random.choice(self.clients))
        elif fault == "together":
            chosen = self.random.sample(self.children, self.random.randint(2, len(self.children)))
            self.counts["kill together"] += sum([self.kill(child) for child in chosen]) > 1
        elif fault == "stop":
            child = self.random.choice([self.broker, self.optimizer, *self.clients[:2]])
            self.counts["stop " + child.kind] += child.stop_for(self.random.uniform(0.2, 4))
        elif fault == "crash":
            self.crash(next(self.crashes))
        elif fault == "storm":
            self.storm()
        elif fault == "cut":
            self.counts["cut"] += self.network.cut(self.random.uniform(0.2, 3))

    def crash(self, name: str):
        """Start the optimizer so that it dies at this point, and give it the time to get there."""
        self.kill(self.optimizer)
        self.optimizer.start(name, self.random.randint(1, CRASHES[name]))
        life = self.optimizer.lives
        self.wait(lambda: self.optimizer.lives != life, 1)

    def storm(self):
        """Kill it again and again while it recovers, by a crash point or from outside."""
        self.kill(self.optimizer)
        for _ in range(RECOVERY_KILLS):
            if self.random.random() < 0.5:
                self.optimizer.start("recovering", self.random.randint(1, 5))
            else:
                self.optimizer.start()
            try:
                self.optimizer.popen.wait(self.random.uniform(0.002, 0.03))
                self.ended(self.optimizer)
            except subprocess.TimeoutExpired:
                self.counts["kill at start"] += self.kill(self.optimizer)
        self.counts["storm"] += 1

    def rage(self):
        deadline = time.monotonic() + self.seconds
        names, weights = list(self.weights), list(self.weights.values())
        first = [name for name in ("storm",) if name in self.weights]
        while time.monotonic() < deadline and len(self.wrong) < 5:
            self.disturb(first.pop() if first else self.random.choices(names, weights)[0])
            self.wait(None, self.random.uniform(0.3, 1) if self.random.random() < 0.15
                      else self.random.uniform(0.005, 0.12))

    # ---- the end ----

    def heal(self):
        for child in self.children:
            child.go_on()
        if self.optimizer.crash:  # still armed: it would die after the healing
            self.kill(self.optimizer)
        if self.network:
            self.network.heal()
        if self.relay:
            self.relay.popen.send_signal(signal.SIGUSR1)
        self.watch()
        start = time.monotonic()
        if self.wait(self.all_get_on(), STUCK_S, "every client to get on after healing"):
            self.progress_s = time.monotonic() - start
            if self.progress_s > PROGRESS_S * self.slow:
                self.wrong.append(f"a client needed {self.progress_s:.1f} s to get on")

    def finish(self, child: Child):
        """SIGTERM, and the exit status that a clean stop has."""
        if not child.running():
            self.wrong.append(f"{child.name} ended before it was told to: {child.tail()}")
            return
        child.popen.send_signal(signal.SIGTERM)
        try:
            child.popen.wait(STOP_S * self.slow)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{child.name} does not stop: {child.tail()}")
            child.kill()
            return
        if child.popen.returncode != 0:
            self.wrong.append(f"{child.name} stopped with {child.popen.returncode}: {child.tail()}")

    def stop(self):
        """Clients settle what is on the way; only a step that lacks gradients may keep them."""
        for child in self.clients:
            child.popen.send_signal(signal.SIGTERM)
        if self.settings["aggregate"] > 1:
            deadline = time.monotonic() + 3 * self.slow
            while any(child.running() for child in self.clients) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for child in self.clients:
            if self.settings["aggregate"] > 1 and child.running():
                child.popen.send_signal(signal.SIGTERM)
            try:
                code = child.popen.wait(STOP_S * self.slow)
            except subprocess.TimeoutExpired:
                code = f"nothing, for its gradients are not settled {STOP_S} s after healing"
            if code not in (0, UNSETTLED if self.settings["aggregate"] > 1 else 0):
                self.wrong.append(f"{child.name} stopped with {code}: {child.tail()}")
        for child in (self.optimizer, self.broker):
            self.finish(child)

    def end(self):
        """Nothing of it goes on, whatever happened."""
        for child in [*self.children, *([self.relay] if self.relay else [])]:
            if child is self.relay and child.running():
                child.popen.send_signal(signal.SIGTERM)
                try:
                    child.popen.wait(5)
                except subprocess.TimeoutExpired:
                    pass
            child.kill()
        if self.relay:
            try:
                for name, count in json.loads((self.directory / "relay.json").read_text()).items():
                    self.counts["relay " + name] += count
            except (OSError, ValueError):
                self.wrong.append("the relay left no counts")
        if self.network:
            self.network.close()

    def go(self) -> dict:
        """The whole run; what the oracle found, {} when it did not come to that."""
        found = {}
        self.create()
        try:
            self.begin()
            if not self.wrong:
                self.rage()
                self.heal()
                self.stop()
        finally:
            self.end()
        try:
            found = oracle.examine(self.run, self.build, self.seed, self.logs)
        except (oracle.Wrong, OSError) as wrong:
            self.wrong.append(f"oracle: {wrong}")
        return found


def run_seed(build: Path, seed: int, seconds: float, mode: str, **settings) -> Chaos:
    """One seed, its line, and its directory away if all was well."""
    directory = Path(tempfile.mkdtemp(prefix="gq-chaos-", dir="/tmp"))
    chaos = Chaos(build, seed, seconds, mode, directory, **settings)
    found = chaos.go()
    worst = "-" if chaos.progress_s is None else f"{chaos.progress_s:.2f} s"
    words = ", ".join(f"{key} {each}" for key, each in chaos.settings.items())
    print(f"seed {seed} {mode} ({words}): progress {worst}, "
          + ", ".join(f"{each} {key}" for key, each in found.items()), flush=True)
    for wrong in chaos.wrong:
        print(f"  WRONG: {wrong}", flush=True)
    if chaos.wrong:
        print(f"  kept: {directory}; again: --seed {seed} --mode {mode} --seconds {seconds:g}",
              flush=True)
    else:
        shutil.rmtree(directory)
    chaos.found = found
    return chaos


def summarise(runs: list):
    counts, found = Counter(), Counter()
    for run in runs:
        counts.update(run.counts)
        found.update(run.found)
    print(f"== {len(runs)} seeds")
    for name in sorted(counts):
        print(f"{name:24}{counts[name]:8}")
    for name in ("records", "promised", "refused", "looks", "checkpoints", "terms"):
        print(f"{name:24}{found[name]:8}")
    worst = max((run.progress_s for run in runs if run.progress_s is not None), default=None)
    print("worst time to progress  " + ("none" if worst is None else f"{worst:6.2f} s"))
    for name in CRASHES:
        if not counts["crash " + name]:
            print(f"never reached: crash point {name}")
    bad = [str(run.seed) for run in runs if run.wrong]
    print(f"{len(runs) - len(bad)} passed, {len(bad)} failed"
          + (f": seeds {' '.join(bad)}" if bad else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", type=Path, default=HERE.parent.parent / "build")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--first", type=int, default=1, help="the first of --seeds")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--mode", choices=MODES, help="only this one")
    words = parser.parse_args()
    modes = list(MODES) if words.mode is None else [words.mode]
    problem = namespaces_work() if "cut" in modes else ""
    if problem:
        print(f"skipped: link cuts, for network namespaces do not work here: {problem}")
        modes.remove("cut")
        if not modes:
            return 1
    seeds = [words.seed] if words.seed is not None else range(words.first,
                                                              words.first + words.seeds)
    runs = [run_seed(words.build.resolve(), seed, words.seconds, modes[seed % len(modes)])
            for seed in seeds]
    summarise(runs)
    return 1 if any(run.wrong for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
