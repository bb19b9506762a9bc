"""Record a run as TensorBoard scalars: RUN/metrics/*.jsonl -> RUN/tensorboard/.

Usage: PYTHON gradq_tensorboard.py RUN [--once]
  PYTHON needs the package tensorboard (`make venv`).  Follows the run until SIGTERM; --once: write
  what is there and end.

Not on a gradient's path.  Only reads metrics.  Must never get in the way of training: it polls once
a second at low priority, its failure ends nothing, and it stops STOP_S and a batch after SIGTERM.

TensorBoard's own package writes its records: it is what reads them, and needs neither TensorFlow
nor torch.  Not its EventFileWriter: that writes from a thread of its own, and here the length of
the file must be known.

Each row becomes one event, once.  recorder.json tells what has been read, and how long the event
file was then; it is replaced whole after each batch.  So whatever a killed life wrote after that is
cut off by the next one and read again: kill -9 costs nothing, though a TensorBoard that was looking
on may show some points twice until it is started anew.  Neither file is forced to the disk; a loss
of power may cost points of the last seconds.  Each life writes to a file of its own: TensorBoard
goes on to it, and never reads on in a file that was cut.

    RUN/tensorboard/events.out.tfevents.TIME.LIFE.gradq   one of each life of the recorder
    RUN/tensorboard/recorder.json                         how far it is
    RUN/tensorboard/recorder.lock                         held by the living one
"""

import argparse
import collections
import fcntl
import glob
import json
import os
import signal
import sys
import time

from gradq_metrics import Follower, figure

EXIT_FAILED, EXIT_CONFIG = 1, 78
POLL_S = 1.0
STOP_S = 5.0  # reading on after SIGTERM; --resume goes on with the rest
NICENESS = 5
WINDOW = 100  # episodes in the mean return, as in gradq_watch.py
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

# Kind of row: its fields, and the tag that each becomes.
SCALARS = {
    "episode": {"return": "episode/return", "length": "episode/length",
                "return_mean": "episode/return_mean"},
    "training": {"policy_loss": "train/policy_loss", "value_loss": "train/value_loss",
                 "entropy": "train/entropy", "gradient_norm": "train/gradient_norm",
                 "learning_rate": "train/learning_rate", "staleness": "train/staleness",
                 "steps_per_s": "train/steps_per_s"},
    "run": {"depth": "run/depth", "learning_rate": "run/learning_rate",
            "steps_per_s": "run/steps_per_s", "gradients_per_s": "run/gradients_per_s",
            "staleness_p50": "run/staleness_p50", "staleness_p99": "run/staleness_p99"},
}


class Recorder:
    """One life: from one state to the next, batch by batch."""

    def __init__(self, run, event, records):
        """event, records: TensorBoard's Event message, and its writer of records."""
        self.metrics = os.path.join(run, "metrics")
        self.directory = os.path.join(run, "tensorboard")
        self.event, self.records = event, records
        self.lock = self.file = self.saved = None

    def path(self, name):
        return os.path.join(self.directory, name)

    def begin(self):
        """Take up the last state, and open this life's file.  False: another recorder lives here
        (one that was told to end may still be writing), or the run directory is not there."""
        try:
            os.mkdir(self.directory)
        except FileExistsError:
            pass
        except FileNotFoundError:
            return False  # not made anew: somebody has moved the run away
        self.lock = open(self.path("recorder.lock"), "w", encoding="utf-8")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.end()
            return False
        self.state = self.load() or self.anew()
        self.follower = Follower(self.metrics, self.state["follower"])
        self.returns = collections.deque(self.state["returns"], WINDOW)
        # The name sorts behind earlier ones.  It is in the state before the file holds anything:
        # what a file that no state names holds would come twice.
        self.state["life"] += 1
        self.state["time"] = max(int(time.time()), self.state["time"])
        self.state["file"] = (f"events.out.tfevents.{self.state['time']:010d}."
                              f"{self.state['life']:06d}.gradq")
        self.save(0)
        self.file = open(self.path(self.state["file"]), "wb")
        self.writer = self.records(self.file)
        self.write(self.event(wall_time=time.time(), file_version="brain.Event:2"))
        return True

    def load(self):
        """The last state, with its event file as long as it says; None when there is none."""
        try:
            with open(self.path("recorder.json"), encoding="utf-8") as file:
                state = json.load(file)
            path = self.path(state["file"])
            # A file that was deleted is not written again; a shorter one has lost to a power cut.
            if os.path.exists(path) and os.path.getsize(path) > state["bytes"]:
                os.truncate(path, state["bytes"])
            return state
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def anew(self):
        """The state before the first row.  Without one nobody knows what our files hold."""
        for path in glob.glob(os.path.join(glob.escape(self.directory), "*.gradq")):
            os.unlink(path)
        return {"life": 0, "time": 0, "follower": None, "returns": []}

    def save(self, length):
        """The state, when it is another one: whole or not at all."""
        self.state.update(bytes=length, follower=self.follower.state, returns=list(self.returns))
        text = json.dumps(self.state)
        if text != self.saved:
            with open(self.path("recorder.json.new"), "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(self.path("recorder.json.new"), self.path("recorder.json"))
            self.saved = text

    def in_place(self):
        """Is our file where it was?  A user may have deleted it, or moved the run away."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()),
                                    os.stat(self.path(self.state["file"])))
        except FileNotFoundError:
            return False

    def poll(self):
        """One batch.  Is there more to read at once?"""
        if self.file is None or not self.in_place():
            self.end()
            if not self.begin():
                return False
        rows, more = self.follower.poll()
        for row in rows:
            self.add(row)
        self.file.flush()
        self.save(self.file.tell())
        return more

    def add(self, row):
        """One row, one event, with those of its scalars that it has."""
        values = row.values
        if row.kind == "episode" and figure(values["return"]) is not None:
            self.returns.append(figure(values["return"]))
            values = {**values, "return_mean": sum(self.returns) / len(self.returns)}
        event = self.event(wall_time=row.time, step=row.steps)
        for field, tag in SCALARS[row.kind].items():
            value = figure(values.get(field))
            if value is not None:
                event.summary.value.add(tag=tag, simple_value=value)
        if event.summary.value:
            self.write(event)

    def write(self, event):
        self.writer.write(event.SerializeToString())

    def end(self):
        for file in (self.file, self.lock):
            if file is not None:
                file.close()
        self.lock = self.file = self.saved = None


def follow(recorder):
    """Until told to stop; then on to the end of what is there, for a short time."""
    more = recorder.poll()
    while not signal.sigtimedwait(STOPS, 0 if more else POLL_S):
        more = recorder.poll()
    deadline = time.monotonic() + STOP_S
    while recorder.poll() and time.monotonic() < deadline:
        pass
    recorder.end()
    return 0


def once(recorder):
    if not recorder.begin():
        print(f"gradq: {recorder.directory} cannot be written: no run directory, or the recorder "
              "of a living run writes it (`tools/gradq down` ends that)", file=sys.stderr)
        return EXIT_FAILED
    while recorder.poll():
        pass
    recorder.end()
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--once", action="store_true", help="write what is there and end")
    options = parser.parse_args()
    # Asked for between batches only: no row is left half written.  Before the imports, which take
    # half a second; tools/gradq has them blocked from the first.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        print(f"gradq: {sys.executable} cannot import tensorboard ({error}); `make venv` puts it "
              "into build/venv", file=sys.stderr)
        return EXIT_CONFIG
    os.nice(NICENESS)  # not before: on a busy machine the imports alone would outlast a short run
    recorder = Recorder(options.run, Event, RecordWriter)
    try:
        return once(recorder) if options.once else follow(recorder)
    except OSError as error:
        print(f"gradq: {recorder.directory} cannot be written: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
