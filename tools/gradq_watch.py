"""Watch a run: episodes, queue and optimizer figures, the live line, and when it is over.

Not on a gradient's path.  Only reads (metrics/actor-*.jsonl and the output of gradq-top);
writes metrics/run.jsonl.  Must never decide anything from a wall clock but the order of episodes.
"""

import bisect
import glob
import json
import math
import os
import shutil
import subprocess
import sys
import time

from gradq_run import EXIT_FAILED, SIDE_KINDS, actors_said, kind_of
from gradq_super import CRASHES_MAX, Gone

WINDOW = 100  # episodes whose mean return counts: Gymnasium's measure for CartPole
TICK_S = 0.1
REPORT_S = 1.0
PLAIN_LINE_S = 5.0  # without a terminal, a line this often
REFUSED_S = 3.0  # all refused for this long: say so
HINTS = {"nonfinite": "; weights or losses have exploded: lower the learning rate, or clip "
                      "(--set clip_norm=0.5)",
         "stale": "; fewer actors, --actor-option window=1, or a higher max-staleness"}


class Episodes:
    """Episodes of all actors, in order of their time."""

    def __init__(self, directory, offsets):
        self.directory = directory
        self.offsets = dict(offsets)
        self.partial = {}
        self.recent = []
        self.count = 0
        self.steps = 0

    def poll(self):
        for path in sorted(glob.glob(os.path.join(glob.escape(self.directory), "actor-*.jsonl"))):
            name = os.path.basename(path)
            with open(path, "rb") as file:
                file.seek(self.offsets.get(name, 0))
                data = file.read()
            self.offsets[name] = self.offsets.get(name, 0) + len(data)
            *lines, self.partial[name] = (self.partial.get(name, b"") + data).split(b"\n")
            for line in lines:
                self.add(line)

    def add(self, line):
        """One line; what is no episode is skipped."""
        try:
            episode = json.loads(line)
            when, value = float(episode["time"]), float(episode["return"])
            length = int(episode["length"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return
        if not (math.isfinite(when) and math.isfinite(value) and length >= 0):
            return
        self.count += 1
        self.steps += length
        bisect.insort(self.recent, (when, self.count, value))
        del self.recent[:-WINDOW]

    def mean(self):
        """Mean return of the last WINDOW episodes (of fewer at first), None without any."""
        if not self.recent:
            return None
        return sum(value for _, _, value in self.recent) / len(self.recent)

    def reached(self, target):
        return target is not None and len(self.recent) == WINDOW and self.mean() >= target


class Stats:
    """The newest object that a gradq-top child printed."""

    def __init__(self, run):
        self.argv = [run.binary("top"), "--run", run.dir, "--json",
                     "--interval-ms", str(int(REPORT_S * 1000))]
        self.child = None
        self.begun = -math.inf
        self.buffer = b""
        self.newest = {}

    def poll(self):
        if self.child is None or self.child.poll() is not None:
            if time.monotonic() - self.begun < REPORT_S:
                return
            self.begun, self.buffer = time.monotonic(), b""
            # A session of its own, so that Ctrl-C in the terminal does not end it before us.
            self.child = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL,
                                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                          start_new_session=True)
            os.set_blocking(self.child.stdout.fileno(), False)
        data = self.child.stdout.read()
        *lines, self.buffer = (self.buffer + (data or b"")).split(b"\n")
        for line in lines:
            try:
                self.newest = json.loads(line)
            except ValueError:
                continue

    def get(self, *keys):
        """A figure, None when it is not known."""
        value = self.newest
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def close(self):
        if self.child is not None:
            self.child.terminate()
            self.child.wait()
            self.child.stdout.close()


class Refusals:
    """Notices when for some seconds every gradient was refused: nothing is learnt then."""

    def __init__(self):
        self.before, self.since, self.told = None, 0, False

    def look(self, optimizer, now):
        """A sentence, once each time that it begins; else None."""
        seen = {key: (optimizer or {}).get(key) for key in ("applied", "rejected", "rejected_by")}
        if None in seen.values():
            return None
        before = self.before
        # Fewer: the optimizer was started again, and counts anew.
        if (before is None or seen["applied"] != before["applied"]
                or seen["rejected"] < before["rejected"]):
            self.before, self.since, self.told = seen, now, False
            return None
        refused = seen["rejected"] - before["rejected"]
        if self.told or refused == 0 or now - self.since < REFUSED_S:
            return None
        self.told = True
        reasons = [reason for reason, count in seen["rejected_by"].items()
                   if count > before["rejected_by"].get(reason, 0)]
        return (f"nothing is learnt: every gradient of the last {now - self.since:.0f} s was "
                f"refused, {refused:,} of them: {', '.join(reasons) or 'reason unknown'}"
                f"{''.join(HINTS.get(reason, '') for reason in reasons)} "
                "(tools/gradq logs optimizer)")


class Line:
    """The live line: in place on a terminal, now and then elsewhere."""

    def __init__(self):
        self.terminal = sys.stdout.isatty()
        self.last = -math.inf

    def show(self, text, now):
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width] + "\033[K", end="", flush=True)
        elif now - self.last >= PLAIN_LINE_S:
            self.last = now
            print(text, flush=True)

    def end(self):
        if self.terminal:
            print("\r\033[K", end="", flush=True)


def number(value, form="{:,.0f}"):
    return form.format(value) if isinstance(value, (int, float)) else "-"


class Watch:
    """tick() until it answers (exit code, sentence)."""

    def __init__(self, run, supervisor, stopping):
        self.run, self.supervisor, self.stopping = run, supervisor, stopping
        self.settings = run.settings
        self.episodes = Episodes(run.path("metrics"), self.settings["metrics_from"])
        self.stats = Stats(run)
        self.line = Line()
        self.begun = time.monotonic() - max(0.0, time.time() - self.settings["begun"])
        self.reported = time.monotonic()
        self.measured = self.begun  # steps made before we watched belong to the first rate
        self.steps_before = 0
        self.told = set()
        self.refusals = Refusals()

    def until_over(self):
        with open(self.run.path("metrics", "run.jsonl"), "a", encoding="utf-8") as record:
            try:
                while True:
                    over = self.tick(record)
                    if over:
                        return over
                    time.sleep(TICK_S)
            finally:
                self.line.end()
                self.stats.close()

    def tick(self, record):
        now = time.monotonic()
        self.episodes.poll()
        self.stats.poll()
        over = self.verdict(now)
        if over is None and now - self.reported >= REPORT_S:
            self.report(record, now)
            self.tell(self.refusals.look(self.stats.get("optimizer"), now))
            over = self.health()
        return over

    def verdict(self, now):
        settings, episodes = self.settings, self.episodes
        elapsed = now - self.begun
        target, limit = settings["target_return"], settings["max_steps"]
        if episodes.reached(target):
            return 0, (f"solved: mean return {episodes.mean():.1f} of the last {WINDOW} episodes,"
                       f" {elapsed:.1f} s, {episodes.steps:,} steps, seed {settings['seed']}")
        if limit is not None and episodes.steps >= limit:
            if target is None:
                return 0, f"done: {episodes.steps:,} steps, {elapsed:.1f} s"
            return EXIT_FAILED, (f"not solved: mean return {number(episodes.mean(), '{:.1f}')} "
                                 f"after {episodes.steps:,} steps, {elapsed:.1f} s; wanted "
                                 f"{target:g}, seed {settings['seed']}")
        if self.stopping():
            return 0, "stopped"
        return None

    def health(self):
        """Is there still a run to watch?"""
        try:
            failure = self.supervisor.refusal()
            rows = self.supervisor.processes()
        except Gone:
            child = self.supervisor.child
            code = child.wait() if child is not None else 0
            if code == 0:
                return 0, "stopped from outside"
            return EXIT_FAILED, ("supervisord was killed; its processes were told to end. "
                                 "`tools/gradq up --resume` goes on from the last checkpoint")
        if failure:
            return failure.code, str(failure)
        actors = [row for row in rows if kind_of(row["name"]) == "actor"]
        for row in rows:
            if kind_of(row["name"]) in ("actor", *SIDE_KINDS):
                self.tell_ended(row)
        if actors and all(row["over"] for row in actors):
            if self.settings["target_return"] is None:
                return 0, "done: every actor has finished"
            return EXIT_FAILED, "not solved: every actor has finished"
        return None

    def tell_ended(self, row):
        """One sentence when a process that others do not need ends, or keeps crashing."""
        broken = row["crashes"] >= CRASHES_MAX
        if not row["over"] and not broken:
            self.told.discard(row["name"])
        elif row["name"] not in self.told:
            self.told.add(row["name"])
            how = ("keeps crashing" if broken else
                   "has finished" if not row["exit"] else f"ended with exit code {row['exit']}")
            self.tell(f"{row['name']} {how} (tools/gradq logs {row['name']}); the others go on")

    def tell(self, sentence):
        if sentence is not None:
            self.line.end()
            print(sentence, flush=True)

    def before_the_first(self):
        """What a run without an episode waits for."""
        actors = self.stats.get("actors")
        if actors is None:
            return "no figures yet"
        alive = sum(actor.get("state") == "alive" for actor in actors)
        return ("no actor has joined yet" if alive == 0 else
                f"no episode has ended yet ({actors_said(alive)})")

    def report(self, record, now):
        steps_per_s = (self.episodes.steps - self.steps_before) / (now - self.measured)
        self.reported = self.measured = now
        self.steps_before = self.episodes.steps
        elapsed, mean, get = now - self.begun, self.episodes.mean(), self.stats.get
        figures = {
            "time": round(time.time(), 3), "elapsed_s": round(elapsed, 3),
            "steps": self.episodes.steps, "steps_per_s": round(steps_per_s, 1),
            "episodes": self.episodes.count, "return_mean": mean,
            "gradients_per_s": get("out_per_s"), "depth": get("queue", "depth"),
            "capacity": get("queue", "capacity"), "version": get("optimizer", "version"),
            "learning_rate": get("optimizer", "lr"),
            "applied": get("optimizer", "applied"), "rejected": get("optimizer", "rejected"),
            "staleness_p50": get("optimizer", "staleness_p50"),
            "staleness_p99": get("optimizer", "staleness_p99")}
        record.write(json.dumps(figures) + "\n")
        record.flush()
        # What matters most stands first: a narrow terminal cuts the end.
        self.line.show(
            f"{elapsed:6.0f} s  " + (self.before_the_first() if self.episodes.count == 0 else
                                     f"{self.episodes.steps:,} steps  return {mean:.1f} "
                                     f"({min(self.episodes.count, WINDOW)} episodes)  "
                                     f"{steps_per_s:,.0f} steps/s") + "  "
            f"{number(figures['gradients_per_s'])} gradients/s  "
            f"depth {number(figures['depth'])}/{number(figures['capacity'])}  "
            f"staleness {number(figures['staleness_p50'])}/{number(figures['staleness_p99'])}", now)
