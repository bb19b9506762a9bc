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
import concurrent.futures
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

import oracle
import plan
from processes import Child, Network, free_ports, namespaces_work
from summary import CRASHES, Result, summarise

HERE = Path(__file__).resolve().parent
CLIENTS = 4
MODES = ("ipc", "tcp", "relay", "cut")
RECOVERY_KILLS = 10
PROGRESS_S = 5    # from healing until every client gets on: the promise
PROGRESS_LINES = 10  # more than a window: something new was pushed and settled
STUCK_S = 30
STOP_S = 20
UNSETTLED = 5  # chaos_client, told twice to stop
# Faults and how often each is chosen.  The first three are what the promise is about.
WEIGHTS = {"broker": 6, "optimizer": 3, "client": 5, "together": 2, "stop": 1.5, "crash": 3,
           "storm": 0.2, "swap": 2, "cut": 2}
POLL_S = 0.005
ARCHIVE_S = 0.02
DISTURBANCES = 25  # how many of the last ones are told when there is no progress


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
        self.settings = {**plan.choose(seed), **settings}
        self.rule = self.rule_before = 0  # places in settings["rules"]
        if len(self.settings["rules"]) == 1:
            self.weights.pop("swap")
        self.may_wait = self.settings["aggregate"] > 1  # a last step for gradients that never come
        self.archive = directory / "archive" if self.settings["journal"] == "recycle" else None
        self.archived = {}  # name: inode
        self.archive_due = 0.0
        self.network = self.relay = None
        self.progress = {}  # client: seconds from healing until it got on
        self.disturbed = deque(maxlen=DISTURBANCES)  # (when, what)

    # ---- the processes ----

    def optimizer_words(self) -> list:
        return [self.build / "gradq-optimizer", "--address", self.address, "--run", self.run,
                "--resume", *plan.rule_words(self.settings["rules"][self.rule]),
                *plan.option_words(self.settings)]

    def create(self):
        host = "127.0.0.1"
        if self.archive:
            self.archive.mkdir()
        if self.mode == "cut":
            self.network = Network()
            host = self.network.host
        self.address = (f"ipc://{self.directory}/control" if self.mode == "ipc"
                        else f"tcp://{host}:{free_ports(6)}")
        reached = self.address
        if self.mode == "relay":
            listen = free_ports(6)
            reached = f"tcp://{host}:{listen}"
            self.relay = Child(self.directory, "relay", [
                "/usr/bin/python3", HERE / "relay.py", listen, self.address.rsplit(":", 1)[1],
                self.seed, self.directory / "relay.json"])
        # Either the optimizer or some clients stand behind the cable that is cut.
        far = self.network.prefix if self.network else []
        far_optimizer = self.random.random() < 0.5
        self.broker = Child(self.directory, "broker", [self.build / "gradq-broker", "--address",
                                                       self.address])
        self.optimizer = Child(self.directory, "optimizer", self.optimizer_words(),
                               far if far_optimizer else [])
        self.logs = [self.directory / f"client{i}" for i in range(CLIENTS)]
        keys = {"half": self.settings["half"], "window": self.settings["window"],
                "pause_us": self.settings["pause"]}
        self.clients = [Child(self.directory, f"client{i}", [
            self.build / "tests/chaos_client", reached, i, self.seed, log,
            *(f"{key}={value}" for key, value in keys.items()),
            f"bf16={int(i < self.settings['bf16'])}",
            f"inline={int(i < self.settings['inline'])}"],
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
        if self.archive and now >= self.archive_due:
            self.archive_due = now + ARCHIVE_S
            self.keep_files()

    def keep_files(self):
        """Links to segments and checkpoints, for the oracle, before the optimizer deletes them."""
        for folder, stem in (("journal", "segment-"), ("checkpoints", "checkpoint-")):
            try:
                entries = [each for each in os.scandir(self.run / folder)
                           if each.name.startswith(stem) and not each.name.endswith(".tmp")]
            except FileNotFoundError:
                continue
            for entry in entries:
                if self.archived.get(entry.name) == entry.inode():
                    continue
                link = self.archive / entry.name
                link.unlink(missing_ok=True)  # of a file that was begun anew
                try:
                    os.link(entry.path, link)
                    self.archived[entry.name] = entry.inode()
                except FileNotFoundError:
                    pass

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
        """A condition: every client has had more settled than a window since now.  It notes in
        self.progress how long each one took."""
        def lines(log):
            try:
                return Path(f"{log}.ack").read_bytes().count(b"\n")
            except FileNotFoundError:
                return 0
        before, start = [lines(log) for log in self.logs], time.monotonic()
        self.progress = {}

        def all_got_on():
            for child, log, base in zip(self.clients, self.logs, before):
                if child.name not in self.progress and lines(log) >= base + PROGRESS_LINES:
                    self.progress[child.name] = time.monotonic() - start
            return len(self.progress) == len(self.clients)
        return all_got_on

    # ---- faults ----

    def note(self, what: str):
        self.disturbed.append((time.monotonic(), what))

    def kill(self, child: Child) -> bool:
        done = child.kill()
        self.counts["kill " + child.kind] += done
        self.note(f"kill {child.name}")
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
            seconds = self.random.uniform(0.2, 4)
            self.counts["stop " + child.kind] += child.stop_for(seconds)
            self.note(f"stop {child.name} for {seconds:.1f} s")
        elif fault == "crash":
            self.crash(next(self.crashes))
        elif fault == "storm":
            self.storm()
        elif fault == "swap":
            self.swap()
        elif fault == "cut":
            seconds = self.random.uniform(0.2, 3)
            name = self.random.choice(("cut", "hole"))
            self.counts[name] += self.network.cut(seconds, name == "hole")
            self.note(f"{name} for {seconds:.1f} s")

    def swap(self):
        """What `gradq swap` does, also in place of a killed optimizer: another rule, half of the
        times the one before; and other ways to make steps."""
        if self.random.random() < 0.5:
            self.kill(self.optimizer)
            self.counts["swap after kill"] += 1
        else:
            self.optimizer.go_on()
            # Killed by it when it came before the program listened.
            self.finish(self.optimizer, (0, -signal.SIGTERM))
            self.counts["swap after stop"] += 1
        rules = range(len(self.settings["rules"]))
        others = [each for each in rules if each != self.rule]
        back = self.rule_before != self.rule and self.random.random() < 0.5
        self.rule, self.rule_before = (self.rule_before if back else self.random.choice(others),
                                       self.rule)
        self.settings.update(plan.steps(self.random))
        self.may_wait = self.may_wait or self.settings["aggregate"] > 1
        self.note(f"swap to {self.settings['rules'][self.rule][0]}")
        self.optimizer.set_words(self.optimizer_words())
        self.optimizer.start()

    def crash(self, name: str):
        """Start the optimizer so that it dies at this point, and give it the time to get there."""
        self.kill(self.optimizer)
        self.note(f"crash point {name}")
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
        """Disturb the run for self.seconds, and at least once in each way."""
        deadline = time.monotonic() + self.seconds
        names, weights = list(self.weights), list(self.weights.values())
        # Each once, the longest first, however few a slow machine has time for.
        due = sorted(names, key=lambda name: (name not in ("swap", "storm"), self.random.random()))
        while (due or time.monotonic() < deadline) and len(self.wrong) < 5:
            self.disturb(due.pop(0) if due else self.random.choices(names, weights)[0])
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
        self.wait(self.all_get_on(), STUCK_S, "every client to get on after healing")
        late = [child.name for child in self.clients
                if self.progress.get(child.name, STUCK_S * self.slow) > PROGRESS_S * self.slow]
        if late:
            self.wrong.append(f"{', '.join(late)}: no progress within {PROGRESS_S} s of healing\n"
                              + self.account(start))

    @property
    def progress_s(self):
        """The slowest client's; None when one did not get on."""
        return max(self.progress.values()) if len(self.progress) == len(self.clients) else None

    def account(self, start: float) -> str:
        """What was disturbed before `start`, when each client got on, and what all said last."""
        lines = [f"{when - start:7.2f} s  {what}" for when, what in self.disturbed]
        lines += [f"{seconds:+7.2f} s  {name} got on" for name, seconds in self.progress.items()]
        for child in self.children:
            lines += [f"{child.name}:", *("  " + line for line in child.tail().splitlines())]
        return "\n".join("    " + line for line in lines)

    def finish(self, child: Child, wanted: tuple = (0,)):
        """SIGTERM, and the exit status that a clean stop has."""
        if not child.running():
            self.ended(child)
            return
        child.popen.send_signal(signal.SIGTERM)
        try:
            child.popen.wait(STOP_S * self.slow)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{child.name} does not stop: {child.tail()}")
            child.kill()
            return
        if child.popen.returncode == -signal.SIGKILL:  # it met its crash point meanwhile
            self.ended(child)
        elif child.popen.returncode not in wanted:
            self.wrong.append(f"{child.name} stopped with {child.popen.returncode}: {child.tail()}")

    def stop(self):
        """Clients settle what is on the way; only a step that lacks gradients may keep them."""
        for child in self.clients:
            child.popen.send_signal(signal.SIGTERM)
        if self.may_wait:
            deadline = time.monotonic() + 3 * self.slow
            while any(child.running() for child in self.clients) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for child in self.clients:
            if self.may_wait and child.running():
                child.popen.send_signal(signal.SIGTERM)
            try:
                code = child.popen.wait(STOP_S * self.slow)
            except subprocess.TimeoutExpired:
                code = f"nothing, for its gradients are not settled {STOP_S} s after healing"
            if code not in (0, UNSETTLED if self.may_wait else 0):
                self.wrong.append(f"{child.name} stopped with {code}: {child.tail()}")
        for child in (self.optimizer, self.broker):
            self.finish(child)
        if self.archive:
            self.keep_files()

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
            # On lane shm the optimizer finds a gradient whose descriptor was dropped by itself.
            inline = self.settings["lane"] == "inline"
            if not self.counts["relay lost"] or (inline and not self.counts["relay resent"]):
                self.wrong.append("the relay dropped no gradient that only a resend brings back")
            self.relay = None
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
            found = self.examine()
        except (oracle.Wrong, OSError) as wrong:
            self.wrong.append(f"oracle: {wrong}")
        return found

    def examine(self) -> dict:
        """The oracle's findings; of a journal that is recycled, for what is left of it as well."""
        found = oracle.examine(self.run, self.build, self.seed, self.logs, archive=self.archive)
        if found["recycled"]:
            oracle.examine(self.run, None, self.seed, self.logs)
        return found


def run_seed(build: Path, seed: int, seconds: float, mode: str) -> Result:
    """One seed, its line, and its directory away if all was well."""
    directory = Path(tempfile.mkdtemp(prefix="gq-chaos-", dir="/tmp"))
    chaos = Chaos(build, seed, seconds, mode, directory)
    words = plan.text(chaos.settings)
    found = chaos.go()
    worst = "-" if chaos.progress_s is None else f"{chaos.progress_s:.2f} s"
    lines = [f"seed {seed} {mode} ({words}): progress {worst}, "
             + ", ".join(f"{each} {key}" for key, each in found.items())]
    lines += [f"  WRONG: {wrong}" for wrong in chaos.wrong]
    if chaos.wrong:
        lines.append(f"  kept: {directory}; again: --seed {seed} --mode {mode} "
                     f"--seconds {seconds:g}")
    else:
        shutil.rmtree(directory)
    print("\n".join(lines), flush=True)
    return Result(seed, chaos.wrong, chaos.counts, found, chaos.progress_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", type=Path, default=HERE.parent.parent / "build")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time")
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
    with concurrent.futures.ProcessPoolExecutor(words.jobs) as pool:
        futures = [pool.submit(run_seed, words.build.resolve(), seed, words.seconds,
                               modes[seed % len(modes)]) for seed in seeds]
        results = [each.result() for each in futures]
    return 0 if summarise(results, modes, words.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
