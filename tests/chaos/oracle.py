#!/usr/bin/python3
"""What a run directory must hold, worked out again from its bytes alone.

Usage: tests/chaos/oracle.py RUN [--build DIR] [--seed N --log STEM...]

Reads journal and checkpoints from its own reading of the formats (docs/PROTOCOL.md), never through
gradq's code, and applies every accepted gradient again in a plain NumPy float32 loop from the first
checkpoint that is left.  Then
    journal     headers, numbers, chain and checksums are right, and nothing is torn at the end
    once        each (actor, epoch, sequence) stands in it at most once, in a granted epoch
    kept        whatever a client was told is settled (LOG.ack of chaos_client) stands in it
    content     each gradient has the bytes that its client made (a function of the seed)
    judged      what was refused, and only that, had to be
    replayed    every checkpoint has weights, slots, scalars, counters and ledger of the loop
    seen        every version that a client saw (LOG.see) has the bits of the loop's
    gradq       gradq-replay --verify agrees, and so do its digests of some versions

Needs --journal keep (or a run so short that no segment was deleted) and the rules sgd or adam.
"""
import argparse
import ctypes
import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy

SEGMENT = struct.Struct("<II16sQI24sI")
RECORD = struct.Struct("<IIQQII")
SEGMENT_MAGIC, RECORD_MAGIC = 0x314a5147, 0x31435247
TERM, GRANT, GRADIENT, REFUSAL = 1, 2, 3, 4
FRAME = struct.Struct("<IHHIIIHHQ16sQQQIIQQQQQII")
FRAME_MAGIC, FRAME_BYTES = 0x31515247, 128
assert (SEGMENT.size, RECORD.size, FRAME.size) == (64, 32, FRAME_BYTES)
# gradq/status.h, by position.
NONFINITE, STALE = 8, 9
# Settings of the host that would change the step: the loop below knows none of them.
HOST_PLAIN = {"clip_norm": "0", "schedule": "constant"}
DIGESTS = 5  # versions at which gradq-replay is asked

_isal = ctypes.CDLL("libisal.so.2")
_isal.crc32_iscsi.restype = ctypes.c_uint
_isal.crc32_iscsi.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint]
_xxhash = ctypes.CDLL("libxxhash.so.0")
_xxhash.XXH64.restype = ctypes.c_uint64
_xxhash.XXH64.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]


class Wrong(Exception):
    """The run directory breaks a promise."""


def crc32c(data: bytes) -> int:
    return _isal.crc32_iscsi(data, len(data), 0xffffffff) ^ 0xffffffff


def xxh64(data: bytes) -> int:
    return _xxhash.XXH64(data, len(data), 0)


assert crc32c(b"123456789") == 0xe3069283  # RFC 3720's polynomial
assert xxh64(b"") == 0xef46db3751d8e999  # of xxHash's specification


# ---- what is on the disk ----

class Record(NamedTuple):
    lsn: int
    kind: int
    payload: bytes
    crc: int
    place: str


def check(condition, place: str, text: str):
    if not condition:
        raise Wrong(f"{place}: {text}")


def read_segment(path: Path, run: bytes, last: Record):
    """Records of one segment, which has to follow `last` (None: whatever it begins with)."""
    data = path.read_bytes()
    check(len(data) >= SEGMENT.size, path.name, "no header")
    magic, version, of, first, chain, zero, crc = SEGMENT.unpack_from(data)
    check((magic, version, zero) == (SEGMENT_MAGIC, 1, bytes(24)), path.name, "header")
    check(crc == crc32c(data[:SEGMENT.size - 4]), path.name, "checksum of the header")
    check(of == run, path.name, "another run's")
    check(path.name == f"segment-{first:016}", path.name, f"begins with record {first}")
    if last is None:
        last = Record(first - 1, 0, b"", chain, path.name)
    check((first, chain) == (last.lsn + 1, last.crc), path.name, f"does not follow {last.place}")
    at = SEGMENT.size
    while at < len(data):
        place = f"{path.name}:{at}"
        check(len(data) - at >= RECORD.size, place, "torn")
        magic, kind, lsn, size, chain, crc = RECORD.unpack_from(data, at)
        payload = data[at + RECORD.size:at + RECORD.size + size]
        check(magic == RECORD_MAGIC and len(payload) == size, place, "torn, or no record")
        check(crc == crc32c(data[at:at + RECORD.size - 4] + payload), place, "checksum")
        check((lsn, chain) == (last.lsn + 1, last.crc), place, "does not follow the one before")
        last = Record(lsn, kind, payload, crc, place)
        yield last
        at += RECORD.size + size
        check(not any(data[at:at + -size % 8]), place, "padding")
        at += -size % 8


def read_journal(directory: Path, run: bytes):
    last = None
    for path in sorted((directory / "journal").glob("segment-*")):
        for last in read_segment(path, run, last):
            yield last


def read_checkpoint(path: Path) -> tuple:
    """(tensors in the order of their bytes, metadata)"""
    data = path.read_bytes()
    size, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    meta = header.pop("__metadata__", {})
    body = data[8 + size:]
    order = sorted(header, key=lambda name: header[name]["data_offsets"])
    tensors = {name: numpy.frombuffer(body[slice(*header[name]["data_offsets"])], "<f4")
               for name in order}
    check(int(meta["data_xxh64"], 16) == xxh64(body), path.name, "checksum of the data")
    return tensors, meta


# ---- the step, naively ----

class Rule:
    """One update rule in NumPy float32: constants are doubles, rounded once."""
    slots, scalars = (), ()

    def __init__(self, settings: dict, count: int, before=None):
        for name, plain in HOST_PLAIN.items():
            check(settings.get(name, plain) == plain, name, "this oracle knows only " + plain)
        self.set = settings
        self.state = {name: numpy.zeros(count, numpy.float32) for name in self.slots}
        self.numbers = dict.fromkeys(self.scalars, 1.0)
        self.steps = 0
        if before is not None and type(before) is type(self):
            self.state, self.numbers, self.steps = before.state, before.numbers, before.steps


class Sgd(Rule):
    slots = ("momentum_buffer",)

    def step(self, w, gradient, scale):
        f32 = numpy.float32
        lr, momentum = f32(float(self.set["lr"])), f32(float(self.set["momentum"]))
        g = gradient * scale
        if momentum == 0:
            return w - lr * g
        b = momentum * self.state["momentum_buffer"] + g
        self.state["momentum_buffer"] = b
        return w - lr * (g + momentum * b if self.set["nesterov"] == "true" else b)


class Adam(Rule):
    slots = ("exp_avg", "exp_avg_sq")
    scalars = ("beta1_power", "beta2_power")

    def step(self, w, gradient, scale):
        f32 = numpy.float32
        beta1, beta2 = float(self.set["beta1"]), float(self.set["beta2"])
        self.numbers["beta1_power"] *= beta1
        self.numbers["beta2_power"] *= beta2
        correction1 = 1 - self.numbers["beta1_power"]
        correction2 = math.sqrt(1 - self.numbers["beta2_power"])
        lr = float(self.set["lr"])
        torch = self.set["epsilon"] == "torch"
        step = f32(lr / correction1 if torch else lr * correction2 / correction1)
        root = f32(1 / correction2 if torch else 1)
        eps, decay = f32(float(self.set["eps"])), f32(float(self.set["weight_decay"]))
        g = gradient * scale + decay * w
        m = f32(beta1) * self.state["exp_avg"] + f32(1 - beta1) * g
        v = f32(beta2) * self.state["exp_avg_sq"] + f32(1 - beta2) * (g * g)
        self.state.update(exp_avg=m, exp_avg_sq=v)
        return w - step * (m / (numpy.sqrt(v) * root + eps))


RULES = {"sgd": Sgd, "adam": Adam}


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

class Oracle:
    def __init__(self, directory: Path, seed: int = None, odd: int = 64):
        self.directory, self.seed, self.odd = directory, seed, odd
        self.run = bytes.fromhex(json.loads((directory / "identity.json").read_text())["run"])
        self.checkpoints = [read_checkpoint(path) for path in
                            sorted((directory / "checkpoints").glob("checkpoint-*.safetensors"))]
        check(self.checkpoints, directory.name, "no checkpoint")
        self.checkpoints.sort(key=lambda each: int(each[1]["lsn"]))
        self.epochs = {}       # actor: (epoch, nonce)
        self.came = {}         # actor: what came in its epoch
        self.settled = set()   # (actor, epoch, sequence) in the journal
        self.refused = 0
        self.crcs = {}         # version: CRC32C of the weights
        self.digests = {}      # version: XXH64 of the weights
        self.terms = {}        # term: first version
        self.weights = self.rule = self.filler = None
        self.version = self.applied = self.held = 0
        self.held_weight = 0.0
        self.sum = None
        self.life = {}
        self.compared = 0
        self.lsn = self.chain = 0

    def replay(self):
        first_lsn = int(self.checkpoints[0][1]["lsn"])
        waiting = list(self.checkpoints)
        for record in read_journal(self.directory, self.run):
            self.lsn, self.chain = record.lsn, record.crc
            if record.kind == TERM:
                self.take_term(record)
            elif record.kind == GRANT:
                self.take_grant(record)
            else:
                check(record.kind in (GRADIENT, REFUSAL), record.place, "kind")
                check(record.lsn > first_lsn or self.weights is not None, record.place,
                      "a gradient before the first checkpoint: nothing to apply it to")
                self.take_frame(record)
            while waiting and int(waiting[0][1]["lsn"]) == record.lsn:
                self.meet(*waiting.pop(0))
        check(not waiting, self.directory.name, "a checkpoint is ahead of the journal")
        check(self.weights is not None, self.directory.name, "no weights")

    def meet(self, tensors: dict, meta: dict):
        """A checkpoint was made here: the first one starts the loop, the others must equal it."""
        place = f"checkpoint {meta['version']}"
        names = [each["name"] for each in json.loads(meta["layout"])]
        check(int(meta["chain"]) == self.chain, place, "chain")

        def vector(prefix=""):
            return numpy.concatenate([tensors[prefix + name] for name in names])
        if self.weights is None:
            check(int(meta["version"]) == 0, place, "checkpoint 0 is gone")
            self.weights = vector()
            self.filler = Filler(self.weights.size // 2)
            self.rule = self.new_rule(None)
            self.note_version()
        pairs = [("weights", self.weights, vector())]
        pairs += [(slot, self.rule.state[slot], vector(slot + ".")) for slot in self.rule.slots]
        if self.held:
            pairs.append(("held", self.sum, vector("held.")))
        for name, ours, theirs in pairs:
            check(ours.tobytes() == theirs.tobytes(), place, f"{name} differ from the replay")
        counters = {"version": self.version, "applied": self.applied, "held": self.held,
                    "optimizer_steps": self.rule.steps,
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
            cumulative, beyond = each["received"][0], int(each["received"][1], 16)
            more = {cumulative + 1 + i for i in range(64) if beyond >> i & 1}
            check((cumulative, more) == self.came.get(each["actor"], (0, set())), place,
                  f"ledger of actor {each['actor']}")

    def enter(self, actor: int, sequence: int):
        """Keep the two in the form of a ledger: all up to a number, and what lies beyond."""
        cumulative, more = self.came.get(actor, (0, set()))
        more = more | {sequence}
        while cumulative + 1 in more:
            cumulative += 1
            more.discard(cumulative)
        self.came[actor] = (cumulative, more)

    def new_rule(self, before) -> Rule:
        settings = dict(word.split("=", 1) for word in self.life["set"])
        check(self.life["plugin"] in RULES, self.life["plugin"], "a rule this oracle lacks")
        return RULES[self.life["plugin"]](settings, self.weights.size, before)

    def take_term(self, record: Record):
        life = json.loads(record.payload)
        check(life["term"] not in self.terms and life["term"] > max(self.terms, default=0),
              record.place, f"term {life['term']} does not rise")
        check(life["version"] == self.version, record.place, "a life that begins elsewhere")
        check(not life["damp"] and not life["weigh_samples"], record.place, "unknown to the oracle")
        self.terms[life["term"]] = life["version"]
        self.life = life
        if self.weights is not None:
            self.rule = self.new_rule(self.rule)
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
        check((magic, protocol, kind, encoding, lane) == (FRAME_MAGIC, 1, 1, 1, 0)
              and run == self.run and samples == 1, record.place, "no gradient of this run")
        check(header_crc == crc32c(data[:FRAME_BYTES - 4]), record.place, "checksum of the frame")
        name = (actor, epoch, sequence)
        check(self.epochs.get(actor, (0,))[0] == epoch, record.place, f"{name}: not its epoch")
        check(name not in self.settled, record.place, f"{name} stands there twice: doubled")
        self.settled.add(name)
        self.enter(actor, sequence)
        self.judge(record, name, version, reason, payload_crc)
        if record.kind == REFUSAL:
            self.refused += 1
            return
        gradient = numpy.frombuffer(data, "<f4", offset=FRAME_BYTES)
        check(gradient.size == count == self.weights.size, record.place, "count")
        self.apply(gradient)

    def judge(self, record: Record, name: tuple, version: int, reason: int, payload_crc: int):
        """Was the decision the right one, and are the bytes those that the client made?"""
        staleness = max(0, self.version - version)
        limit = self.life["max_staleness"]
        stale = limit is not None and staleness > limit
        if self.seed is None:
            return
        key = key_of(self.seed, *name)
        expected = NONFINITE if is_odd(key, self.odd) else STALE if stale else 0
        check(reason == expected, record.place, f"{name}: decided {reason}, not {expected}")
        if not is_odd(key, self.odd):
            made = self.filler.vector(key).tobytes()
            check(payload_crc == crc32c(made), record.place, f"{name}: not what was pushed")
            check(record.kind == REFUSAL or record.payload[FRAME_BYTES:] == made, record.place,
                  f"{name}: torn")

    def apply(self, gradient: numpy.ndarray):
        if self.life["aggregate"] == 1:
            self.step(gradient, numpy.float32(1))
            self.applied += 1
            return
        scaled = numpy.float32(1) * gradient
        self.sum = scaled if self.held == 0 else self.sum + scaled
        self.held_weight = 1.0 if self.held == 0 else self.held_weight + 1.0
        self.held += 1
        self.finish_step()

    def finish_step(self):
        if self.held >= self.life["aggregate"]:
            self.step(self.sum, numpy.float32(1.0 / self.held_weight))
            self.applied += self.held
            self.held = 0

    def step(self, gradient: numpy.ndarray, scale):
        self.weights = self.rule.step(self.weights, gradient, scale)
        self.rule.steps += 1
        self.version += 1
        self.note_version()

    def note_version(self):
        data = self.weights.tobytes()
        self.crcs[self.version] = crc32c(data)
        self.digests[self.version] = xxh64(data)

    # ---- against what the clients wrote down ----

    def check_promises(self, logs: list) -> tuple:
        promised = {tuple(map(int, words)) for words in read_lines(logs, "ack", 3)}
        lost = sorted(promised - self.settled)
        check(not lost, self.directory.name,
              f"{len(lost)} acknowledged gradients are lost, first {lost[:3]}")
        looks = 0
        for term, version, crc in read_lines(logs, "see", 3):
            term, version = int(term), int(version)
            place = f"term {term} version {version}, seen by a client"
            check(self.crcs.get(version) == int(crc, 16), place, "is not what the journal leads to")
            check(version >= self.terms.get(term, math.inf), place, "is older than that term")
            looks += 1
        return len(promised), looks

    def check_replay(self, build: Path):
        """gradq-replay comes to the same."""
        def ask(*words):
            done = subprocess.run([build / "gradq-replay", "--run", self.directory, *words],
                                  capture_output=True, text=True, timeout=300, check=False)
            check(done.returncode == 0, "gradq-replay " + " ".join(words), done.stderr.strip())
            return done.stdout
        text = ask("--verify")
        steps = len(re.findall(r"^verified ", text, re.MULTILINE))
        versions = {int(meta["version"]) for _, meta in self.checkpoints}
        check(steps == len(versions) - 1, "gradq-replay --verify",
              f"{steps} steps for {len(versions)} checkpoints")
        wanted = {self.version * i // DIGESTS for i in range(DIGESTS + 1)}
        texts = [text] + [ask("--until", str(version)) for version in sorted(wanted)]
        for version, each in zip([self.version] + sorted(wanted), texts):
            found = re.findall(r"^version (\d+) weights xxh64:([0-9a-f]{16})$", each, re.MULTILINE)
            check(found == [(str(version), f"{self.digests[version]:016x}")],
                  f"gradq-replay of version {version}", f"says {found}")


def examine(directory: Path, build: Path = None, seed: int = None, logs: list = (),
            odd: int = 64) -> dict:
    """Every check; what was found, or Wrong."""
    oracle = Oracle(directory, seed, odd)
    oracle.replay()
    promised, looks = oracle.check_promises(logs)
    if build is not None:
        oracle.check_replay(build)
    return {"records": oracle.lsn, "version": oracle.version, "applied": oracle.applied,
            "refused": oracle.refused, "promised": promised, "looks": looks,
            "checkpoints": oracle.compared, "terms": len(oracle.terms),
            "grants": len({name[:2] for name in oracle.settled})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--log", action="append", default=[])
    words = parser.parse_args()
    try:
        print(json.dumps(examine(words.run, words.build, words.seed, words.log)))
    except Wrong as wrong:
        print(f"WRONG: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
