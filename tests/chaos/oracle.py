#!/usr/bin/python3
"""What a run directory must hold, worked out again from its bytes alone.

Usage: tests/chaos/oracle.py RUN [--build DIR] [--seed N --log STEM...]

Reads journal and checkpoints from its own reading of the formats (docs/PROTOCOL.md), never through
gradq's code, and applies every accepted gradient again in a plain NumPy float32 loop (rules.py)
from the oldest checkpoint that is left.  Then
    journal     headers, numbers, chain and checksums are right, and nothing is torn at the end
    once        each (actor, epoch, sequence) stands in it at most once, in a granted epoch
    kept        whatever a client was told is settled (LOG.ack of chaos_client) stands in it
    content     each gradient has the bytes that its client made (a function of the seed)
    judged      what was refused, and only that, had to be
    replayed    every checkpoint has weights, slots, scalars, counters and ledger of the loop
    seen        every version that a client saw (LOG.see) has the bits of the loop's
    gradq       gradq-replay --verify agrees, and so do its digests of some versions

--archive names a directory with the segments and checkpoints that the optimizer has deleted
meanwhile (chaos.py keeps links to them).  Without it, what older segments held is known only from
the ledger of the oldest checkpoint.
"""
import argparse
import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy

from disk import (FRAME, FRAME_BYTES, FRAME_MAGIC, GRADIENT, GRANT, NAMED, REFUSAL, TERM, Record,
                  Wrong, check, crc32c, newest, read_checkpoint, read_journal, xxh64)
from rules import F32, RULES

# gradq/status.h, by position.
NONFINITE, STALE = 8, 9
F32_VECTOR, BF16_VECTOR = 1, 2  # encodings of a frame
DIGESTS = 5  # versions at which gradq-replay is asked

# ---- what chaos_client pushes ----

U64 = (1 << 64) - 1


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9 & U64
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb & U64
    return z ^ (z >> 31)


def key_of(seed: int, actor: int, epoch: int, sequence: int) -> int:
    return mix((mix((mix(seed) + (actor << 32) + epoch) & U64) + sequence) & U64)


def is_odd(key: int, odd: int) -> bool:
    return odd != 0 and key % odd < 2


def samples_of(key: int) -> int:
    return 1 + (key >> 32) % 8


def halves_of(vector: numpy.ndarray) -> bytes:
    """Finite float32 numbers as bf16: of the two around each, both exact, the nearer, else the even
    one."""
    low = vector.view("<u4") >> numpy.uint32(16)  # towards zero
    around = [(each << numpy.uint32(16)).view("<f4").astype(float) for each in (low, low + 1)]
    below, above = (numpy.abs(vector - each) for each in around)
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return (low + up).astype("<u2").tobytes()


def floats_of(halves: bytes) -> numpy.ndarray:
    return (numpy.frombuffer(halves, "<u2").astype("<u4") << numpy.uint32(16)).view("<f4")


class Filler:
    """The vector behind a key."""

    def __init__(self, half: int):
        with numpy.errstate(over="ignore"):
            self.steps = numpy.arange(1, half + 1, dtype=numpy.uint64) * numpy.uint64(
                0x9e3779b97f4a7c15)

    def vector(self, key: int) -> numpy.ndarray:
        with numpy.errstate(over="ignore"):
            z = numpy.uint64(key) + self.steps
            z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xbf58476d1ce4e5b9)
            z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94d049bb133111eb)
        z ^= z >> numpy.uint64(31)
        bits = (z >> numpy.uint64(40)).astype(numpy.int64) - (1 << 23)
        half = (bits / numpy.float64(1 << 23)).astype("<f4")  # 24 bits: exact
        return numpy.concatenate((half, half))


def read_lines(paths: list, ending: str, fields: int):
    """The whole lines of all logs; a last one that a kill cut is no promise."""
    for stem in paths:
        path = Path(f"{stem}.{ending}")
        if path.exists():
            text = path.read_text()
            for line in text[:text.rfind("\n") + 1].splitlines():
                words = line.split()
                if len(words) == fields:
                    yield words


# ---- the replay ----

def received(entry: dict) -> tuple:
    """What an actor's entry in a ledger says has come: (all up to, those beyond)."""
    cumulative, beyond = entry["received"][0], int(entry["received"][1], 16)
    return cumulative, {cumulative + 1 + i for i in range(64) if beyond >> i & 1}


class Retired(NamedTuple):
    """What a rule left when another one took over at `version`."""
    name: str
    version: int
    state: dict
    numbers: dict
    steps: int


def retired_in(meta: dict, vector):
    """What a checkpoint holds of it, None for nothing."""
    if "retired" not in meta:
        return None
    entry = json.loads(meta["retired"])
    name = entry["optimizer"]
    return Retired(name, entry["version"],
                   {slot: vector(f"retired.{name}.{slot}.") for slot in entry["slots"]},
                   {key: float(value) for key, value in entry["scalars"]},
                   entry["optimizer_steps"])


class Oracle:
    def __init__(self, directory: Path, seed: int = None, odd: int = 64, archive: Path = None):
        self.directory, self.seed, self.odd = directory, seed, odd
        self.run = bytes.fromhex(json.loads((directory / "identity.json").read_text())["run"])
        pattern = "checkpoint-*.safetensors"
        self.kept = sorted(int(read_checkpoint(path)[1]["version"])
                           for path in (directory / "checkpoints").glob(pattern))
        check(self.kept, directory.name, "no checkpoint")
        self.checkpoints = [read_checkpoint(path)
                            for path in newest(directory / "checkpoints", archive, pattern)]
        self.checkpoints.sort(key=lambda each: int(each[1]["lsn"]))
        self.segments = newest(directory / "journal", archive, "segment-*")
        # Does the journal tell all, or does a checkpoint stand for what came before?
        self.whole = bool(self.segments) and self.segments[0].name == f"segment-{1:016}"
        self.epochs = {}       # actor: (epoch, nonce)
        self.came = {}         # actor: what came in its epoch
        self.settled = set()   # (actor, epoch, sequence) in the journal
        self.before = {}       # actor: (epoch, came) in the first checkpoint, unless whole
        self.refused = self.halves = 0  # halves: frames in bf16
        self.crcs = {}         # version: CRC32C of the weights
        self.digests = {}      # version: XXH64 of the weights
        self.terms = {}        # term: first version
        self.weights = self.rule = self.retired = self.filler = self.sum = None
        self.version = self.applied = self.held = 0
        self.held_weight = 0.0
        self.staleness_sum, self.staleness_count = 0.0, 0
        self.life = {}
        self.compared = self.swaps = self.named = 0
        self.lsn = self.chain = 0

    def replay(self):
        waiting = list(self.checkpoints)
        first_lsn = int(waiting[0][1]["lsn"])
        for record in read_journal(self.segments, self.run):
            self.lsn, self.chain = record.lsn, record.crc
            check(record.kind in (TERM, GRANT, GRADIENT, REFUSAL, NAMED), record.place, "kind")
            if not self.whole and record.lsn <= first_lsn:
                self.note_early(record)
            elif record.kind == TERM:
                self.take_term(record)
            elif record.kind == GRANT:
                self.take_grant(record)
            else:
                self.take_frame(record)
            while waiting and int(waiting[0][1]["lsn"]) == record.lsn:
                self.meet(*waiting.pop(0))
        check(not waiting, self.directory.name, "a checkpoint is ahead of the journal")
        check(self.weights is not None, self.directory.name, "no weights")

    def note_early(self, record: Record):
        """Before the first checkpoint of a journal whose beginning is gone: names only."""
        if record.kind in (GRADIENT, REFUSAL, NAMED):
            frame = FRAME.unpack_from(record.payload, 8 if record.kind == REFUSAL else 0)
            name = (frame[3], frame[4], frame[10])
            check(name not in self.settled, record.place, f"{name} stands there twice: doubled")
            self.settled.add(name)

    def begin(self, tensors: dict, meta: dict, vector):
        """The loop starts from this checkpoint."""
        self.weights = vector()
        if not self.whole:
            self.life = json.loads(meta["life"])
            self.terms[self.life["term"]] = self.life["version"]
            self.version, self.applied = int(meta["version"]), int(meta["applied"])
            self.held, self.held_weight = int(meta["held"]), float(meta["held_weight"])
            self.staleness_sum = float(meta["staleness_sum"])
            self.staleness_count = int(meta["staleness_count"])
            for each in json.loads(meta["ledger"]):
                self.epochs[each["actor"]] = (each["epoch"], bytes.fromhex(each["nonce"]))
                self.came[each["actor"]] = received(each)
            self.before = {actor: (epoch, self.came[actor])
                           for actor, (epoch, _) in self.epochs.items()}
        self.rule = self.new_rule()
        self.rule.state = {slot: vector(slot + ".") for slot in self.rule.slots}
        self.rule.numbers = {name: float(meta["scalar." + name]) for name in self.rule.scalars}
        self.rule.steps = int(meta["optimizer_steps"])
        self.retired = retired_in(meta, vector)
        check(int(meta["version"]) > 0 or self.rule.steps == 0, "checkpoint 0", "steps")
        if self.held:
            self.sum = vector("held.")
        self.note_version()

    def meet(self, tensors: dict, meta: dict):
        """A checkpoint was made here: the first one starts the loop, the others must equal it."""
        place = f"checkpoint {meta['version']}"
        names = [each["name"] for each in json.loads(meta["layout"])]
        check(int(meta["chain"]) == self.chain, place, "chain")

        def vector(prefix=""):
            return numpy.concatenate([tensors[prefix + name] for name in names])
        if self.weights is None:
            self.begin(tensors, meta, vector)
        check(meta["optimizer"] == self.rule.name, place, "rule")
        pairs = [("weights", self.weights, vector())]
        pairs += [(slot, self.rule.state[slot], vector(slot + ".")) for slot in self.rule.slots]
        if self.held:
            pairs.append(("held", self.sum, vector("held.")))
        retired = retired_in(meta, vector)
        if retired is not None and self.retired is not None:
            pairs += [(f"retired {slot}", each, retired.state[slot])
                      for slot, each in self.retired.state.items()]
        check((retired and retired._replace(state=None))
              == (self.retired and self.retired._replace(state=None)), place,
              f"retired {retired}, not {self.retired}")
        for name, ours, theirs in pairs:
            check(ours.tobytes() == theirs.tobytes(), place, f"{name} differ from the replay")
        counters = {"version": self.version, "applied": self.applied, "held": self.held,
                    "optimizer_steps": self.rule.steps, "staleness_sum": self.staleness_sum,
                    "staleness_count": self.staleness_count,
                    **({"held_weight": self.held_weight} if self.held else {}),
                    **{"scalar." + name: each for name, each in self.rule.numbers.items()}}
        for name, ours in counters.items():
            check(float(meta[name]) == float(ours), place, f"{name} {meta[name]}, not {ours}")
        self.compare_ledger(place, json.loads(meta["ledger"]))
        self.compared += 1

    def compare_ledger(self, place: str, ledger: list):
        """What a checkpoint says has come is what stands in the journal up to it."""
        check({each["actor"]: each["epoch"] for each in ledger}
              == {actor: epoch for actor, (epoch, _) in self.epochs.items()}, place, "epochs")
        for each in ledger:
            check(received(each) == self.came.get(each["actor"], (0, set())), place,
                  f"ledger of actor {each['actor']}")

    def enter(self, actor: int, sequence: int):
        """Keep the two in the form of a ledger: all up to a number, and what lies beyond."""
        cumulative, more = self.came.get(actor, (0, set()))
        more = more | {sequence}
        while cumulative + 1 in more:
            cumulative += 1
            more.discard(cumulative)
        self.came[actor] = (cumulative, more)

    def new_rule(self):
        settings = dict(word.split("=", 1) for word in self.life["set"])
        name = self.life["plugin"]
        check(name in RULES, name, "a rule this oracle lacks")
        return RULES[name](name, settings, self.weights.size)

    def change_rule(self):
        """The same rule goes on; of others, only the one just before may."""
        rule, before = self.new_rule(), self.rule
        if rule.name == before.name:
            rule.resume(before)
        else:
            self.swaps += 1
            if self.retired is not None and self.retired.name == rule.name:
                rule.resume(self.retired)
            self.retired = Retired(before.name, self.version, before.state, before.numbers,
                                   before.steps)
        self.rule = rule

    def take_term(self, record: Record):
        life = json.loads(record.payload)
        check(life["term"] not in self.terms and life["term"] > max(self.terms, default=0),
              record.place, f"term {life['term']} does not rise")
        check(life["version"] == self.version, record.place, "a life that begins elsewhere")
        self.terms[life["term"]] = life["version"]
        self.life = life
        if self.weights is not None:
            self.change_rule()
        if self.held:
            self.finish_step()

    def take_grant(self, record: Record):
        check(len(record.payload) == 24, record.place, "length of a grant")
        actor, epoch, nonce = struct.unpack("<II16s", record.payload)
        before = self.epochs.get(actor, (0, b""))
        check(epoch > before[0], record.place, f"epoch {epoch} of actor {actor} was granted before")
        check(nonce != before[1], record.place, f"two epochs for one hello of actor {actor}")
        self.epochs[actor] = (epoch, nonce)
        self.came.pop(actor, None)

    def take_frame(self, record: Record):
        data, reason = record.payload, 0
        if record.kind == REFUSAL:
            reason, zero = struct.unpack_from("<II", data)
            data = data[8:]
            check(len(data) == FRAME_BYTES and zero == 0 and reason != 0, record.place, "refusal")
        (magic, protocol, kind, actor, epoch, _, encoding, lane, _, run, sequence, version, count,
         samples, *_, payload_crc, header_crc) = FRAME.unpack_from(data)
        # What is kept of a refused one is the header, as it came; a whole one is of lane inline.
        lanes = {GRADIENT: (0,), NAMED: (0, 1), REFUSAL: (0, 1)}[record.kind]
        check((magic, protocol, kind) == (FRAME_MAGIC, 1, 1) and lane in lanes
              and (encoding == F32_VECTOR or (encoding == BF16_VECTOR and lane == 0))
              and run == self.run and samples >= 1, record.place, "no gradient of this run")
        self.halves += encoding == BF16_VECTOR
        check(header_crc == crc32c(data[:FRAME_BYTES - 4]), record.place, "checksum of the frame")
        name = (actor, epoch, sequence)
        check(self.epochs.get(actor, (0,))[0] == epoch, record.place, f"{name}: not its epoch")
        check(name not in self.settled, record.place, f"{name} stands there twice: doubled")
        self.settled.add(name)
        self.enter(actor, sequence)
        if self.filler is None:
            self.filler = Filler(count // 2)
        staleness = max(0, self.version - version)
        self.judge(record, name, staleness, samples, reason, encoding,
                   payload_crc if lane == 0 else None)
        if record.kind == REFUSAL:
            self.refused += 1
            return
        if record.kind == NAMED:  # its bytes lay in shared memory: those that the client made
            check(len(data) == FRAME_BYTES + 8, record.place, "length of a name")
            check(self.seed is not None, record.place, "only named, and no seed to make it from")
            gradient = self.filler.vector(key_of(self.seed, *name))
            if encoding == BF16_VECTOR:
                gradient = floats_of(halves_of(gradient))
            self.named += 1
        else:
            payload = data[FRAME_BYTES:]
            check(payload_crc == crc32c(payload), record.place, "checksum of the payload")
            gradient = (floats_of(payload) if encoding == BF16_VECTOR
                        else numpy.frombuffer(payload, "<f4"))
        check(gradient.size == count, record.place, "count")
        self.apply(gradient, staleness, samples)

    def judge(self, record: Record, name: tuple, staleness: int, samples: int, reason: int,
              encoding: int, payload_crc: int):
        """Was the decision the right one, and are the bytes those that the client made?"""
        limit = self.life["max_staleness"]
        stale = limit is not None and not self.life["damp"] and staleness > limit
        if self.seed is None:
            return
        key = key_of(self.seed, *name)
        check(samples == samples_of(key), record.place, f"{name}: samples")
        expected = NONFINITE if is_odd(key, self.odd) else STALE if stale else 0
        check(reason == expected, record.place, f"{name}: decided {reason}, not {expected}")
        if not is_odd(key, self.odd):
            made = self.filler.vector(key)
            made = halves_of(made) if encoding == BF16_VECTOR else made.tobytes()
            check(payload_crc in (None, crc32c(made)), record.place, f"{name}: not what was pushed")
            check(record.kind != GRADIENT or record.payload[FRAME_BYTES:] == made, record.place,
                  f"{name}: torn")

    def damping(self, staleness: int) -> float:
        self.staleness_sum += staleness
        self.staleness_count += 1
        mean = self.staleness_sum / self.staleness_count
        if not self.life["damp"] or staleness == 0 or mean >= staleness:
            return 1.0
        return mean / staleness

    def apply(self, gradient: numpy.ndarray, staleness: int, samples: int):
        factor = self.damping(staleness)
        if self.life["aggregate"] == 1:
            self.step(gradient, F32(factor))
            self.applied += 1
            return
        weight = float(samples) if self.life["weigh_samples"] else 1.0
        if self.weights is not None:
            scaled = F32(weight * factor) * gradient
            self.sum = scaled if self.held == 0 else self.sum + scaled
        self.held_weight = weight if self.held == 0 else self.held_weight + weight
        self.held += 1
        self.finish_step()

    def finish_step(self):
        if self.held >= self.life["aggregate"]:
            self.step(self.sum, F32(1.0 / self.held_weight))
            self.applied += self.held
            self.held = 0

    def step(self, gradient: numpy.ndarray, scale):
        self.version += 1
        if self.weights is not None:  # else a checkpoint will say what they are
            self.weights = self.rule.step(self.weights, gradient, scale)
            self.note_version()

    def note_version(self):
        data = self.weights.tobytes()
        self.crcs[self.version] = crc32c(data)
        self.digests[self.version] = xxh64(data)

    # ---- against what the clients wrote down ----

    def check_promises(self, logs: list) -> tuple:
        promised = {tuple(map(int, words)) for words in read_lines(logs, "ack", 3)}
        lost = sorted(name for name in promised - self.settled if not self.stood(*name))
        check(not lost, self.directory.name,
              f"{len(lost)} acknowledged gradients are lost, first {lost[:3]}")
        looks = 0
        for term, version, crc in read_lines(logs, "see", 3):
            term, version = int(term), int(version)
            place = f"term {term} version {version}, seen by a client"
            if version < self.oldest:
                continue
            check(self.crcs.get(version) == int(crc, 16), place, "is not what the journal leads to")
            check(version >= self.terms.get(term, math.inf) or not self.whole, place,
                  "is older than that term")
            looks += 1
        return len(promised), looks

    @property
    def oldest(self) -> int:
        """The first version that the loop had."""
        return min(self.crcs)

    def stood(self, actor: int, epoch: int, sequence: int) -> bool:
        """Was this in a part of the journal that is gone, as far as a ledger can tell?"""
        known, (cumulative, more) = self.before.get(actor, (0, (0, set())))
        return epoch < known or (epoch == known and (sequence <= cumulative or sequence in more))

    def check_replay(self, build: Path):
        """gradq-replay comes to the same."""
        def ask(*words):
            done = subprocess.run([build / "gradq-replay", "--run", self.directory, *words],
                                  capture_output=True, text=True, timeout=300, check=False)
            check(done.returncode == 0, "gradq-replay " + " ".join(words), done.stderr.strip())
            return done.stdout
        text = ask("--verify")
        # Between two checkpoints gradients may only be named: then ledger and counters agree.
        names = r"|not replayed \d+ -> \d+: \d+ gradients .*" if self.named else ""
        steps = len(re.findall(rf"^(verified {names})", text, re.MULTILINE))
        check(steps == len(self.kept) - 1, "gradq-replay --verify",
              f"{steps} steps for {len(self.kept)} checkpoints")
        first = self.kept[0]
        wanted = {first + (self.version - first) * i // DIGESTS for i in range(DIGESTS + 1)}
        if self.named:
            wanted = {version for version, _ in zip(reversed(self.kept), range(DIGESTS))}
        texts = [text] + [ask("--until", str(version)) for version in sorted(wanted)]
        for version, each in zip([self.version] + sorted(wanted), texts):
            found = re.findall(r"^version (\d+) weights xxh64:([0-9a-f]{16})$", each, re.MULTILINE)
            check(found == [(str(version), f"{self.digests[version]:016x}")],
                  f"gradq-replay of version {version}", f"says {found}")


def examine(directory: Path, build: Path = None, seed: int = None, logs: list = (),
            odd: int = 64, archive: Path = None) -> dict:
    """Every check; what was found, or Wrong."""
    oracle = Oracle(directory, seed, odd, archive)
    oracle.replay()
    promised, looks = oracle.check_promises(logs)
    if build is not None:
        oracle.check_replay(build)
    gone = len(oracle.segments) - len(list((directory / "journal").glob("segment-*")))
    return {"records": oracle.lsn, "version": oracle.version, "applied": oracle.applied,
            "refused": oracle.refused, "named": oracle.named, "halves": oracle.halves,
            "promised": promised,
            "looks": looks,
            "checkpoints": oracle.compared, "terms": len(oracle.terms), "swaps": oracle.swaps,
            "grants": len({name[:2] for name in oracle.settled}),
            "segments": len(oracle.segments), "recycled": gone}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--log", action="append", default=[])
    parser.add_argument("--archive", type=Path)
    words = parser.parse_args()
    try:
        print(json.dumps(examine(words.run, words.build, words.seed, words.log,
                                 archive=words.archive)))
    except Wrong as wrong:
        print(f"WRONG: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
