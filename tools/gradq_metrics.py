"""Follow the metrics of a run: rows of all actors in order of time, on one axis of steps.

Not on a gradient's path.  Only reads RUN/metrics.  The recorder of TensorBoard scalars and the
curve at the end must come to one axis, so it is made here.  Must never hold a whole file in memory,
and never stop at what is no row.

An actor counts its steps from 0 in each of its lives and appends to one file, so the axis adds up
lives: a row that counts fewer steps or episodes than the one before begins a new one.
"""

import glob
import json
import math
import os
import zlib
from typing import NamedTuple

RUN_FILE = "run.jsonl"
# Read at once: as much as takes a fraction of a second, for only then SIGTERM is heard.
POLL_BYTES = 256 << 10
FILE_BYTES_MIN = 16 << 10
# By its first bytes a file is known again; every row begins with its time.  Not by its inode: a
# run directory may be copied.
HEAD_BYTES = 256
# Larger counts are nobody's: a double is exact up to here.
COUNT_MAX = 2**53
NEW_FILE = {"offset": 0, "head": [0, 0], "steps": 0, "episodes": 0}


class Row(NamedTuple):
    """time: of the wall, s.  steps: of all actors and lives so far.  kind: "episode", "training" or
    "run".  begins: the first one of a later life of its actor.  values: the row itself, a dict."""
    time: float
    steps: int
    kind: str
    begins: bool
    values: dict


def figure(value):
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value):
    """A count, None for anything else."""
    value = figure(value)
    return int(value) if value is not None and 0 <= value <= COUNT_MAX else None


def parsed(line):
    """A row: an object with a time.  None: a half written, damaged or foreign line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and figure(row.get("time")) is not None else None


class Follower:
    """poll() gives what is new; `state` is plain data to go on from in another process."""

    def __init__(self, directory, state=None):
        self.directory = directory
        self.state = state or {"total": 0, "files": {}}
        self.heads = {}

    def names(self):
        actors = glob.glob(os.path.join(glob.escape(self.directory), "actor-*.jsonl"))
        return sorted(map(os.path.basename, actors)) + [RUN_FILE]

    def poll(self):
        """(rows, more): Rows in order of time, and whether there is more to read at once."""
        names, batch, horizon, more = self.names(), [], math.inf, False
        share = max(FILE_BYTES_MIN, POLL_BYTES // len(names))
        for name in names:
            lines, cut = self.read(name, share)
            if cut:
                # Beyond this file's last line others wait, or their steps would overtake its own.
                horizon, more = min(horizon, lines[-1][0]), True
            batch += lines
        batch.sort(key=lambda line: line[0])
        rows = []
        for when, name, end, row in batch:
            if when > horizon:
                break
            file = self.state["files"][name]
            file["offset"] = end
            if row is not None:
                rows.append(self.place(file, name, row))
        for name, head in self.heads.items():
            file = self.state["files"][name]
            length = min(len(head), file["offset"])
            file["head"] = [length, zlib.crc32(head[:length])]
        return rows, more

    def read(self, name, share):
        """(lines, cut): [(time, name, offset of its end, row or None)], and whether the share ended
        it.  Times never fall within a file, so that a sort keeps its lines in order."""
        file = self.state["files"].setdefault(name, dict(NEW_FILE))
        try:
            with open(os.path.join(self.directory, name), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size == file["offset"]:
                    return [], False
                self.heads[name] = stream.read(HEAD_BYTES)
                length, crc = file["head"]
                if zlib.crc32(self.heads[name][:length]) != crc:
                    file.update(NEW_FILE)  # another file under this name
                elif size < file["offset"]:
                    file["offset"] = size  # the same one, cut: what is left of it is known
                stream.seek(file["offset"])
                data = stream.read(share)
        except FileNotFoundError:
            return [], False
        cut, end, when, lines = len(data) == share, file["offset"], 0.0, []
        *complete, rest = data.split(b"\n")
        for line in complete:
            end += len(line) + 1
            row = parsed(line)
            when = max(when, row["time"]) if row else when
            lines.append((when, name, end, row))
        if cut and not complete:  # a line without an end is no row
            lines.append((when, name, end + len(rest), None))
        return lines, cut

    def place(self, file, name, row):
        """A row on the axis.  A life that nobody heard of until it had more steps and episodes than
        the one before is taken for that one."""
        when, begins = figure(row["time"]), False
        if name == RUN_FILE:
            return Row(when, self.state["total"], "run", begins, row)
        kind = "episode" if "return" in row else "training"
        steps, episodes = whole(row.get("steps")), whole(row.get("episode", row.get("episodes")))
        if steps is None:  # another program's actor may tell lengths only
            steps = file["steps"] + (whole(row.get("length")) or 0)
        elif steps < file["steps"] or (episodes is not None and episodes < file["episodes"]):
            file["steps"], begins = 0, True
        self.state["total"] += steps - file["steps"]
        file["steps"] = steps
        if episodes is not None:
            file["episodes"] = episodes
        return Row(when, self.state["total"], kind, begins, row)
