"""--encoding bf16: gradients in half the bytes, and otherwise exactly what float32 gradients of the
rounded values would have done, at once and in every replay."""
import json
import sys
from pathlib import Path

import numpy
import pytest

from peer import (BF16, F32, HEADER_BYTES, checkpoint, checkpoints, decode, done, encode, halves,
                  rounded, value)
from peer import service  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "chaos"))
import oracle  # noqa: E402
from disk import GRADIENT, newest, read_journal  # noqa: E402

SEED = 7
COUNT, ELEMENTS = 40, 100
ADAM = ("--optimizer", "adam", "--journal", "keep", "--checkpoint-interval-s", 0)


def journaled(run: Path) -> list:
    """(frame, whole bytes) of each gradient in the journal."""
    segments = newest(run / "journal", None, "segment-*")
    identity = json.loads((run / "identity.json").read_text())["run"]
    return [(decode(record.payload), record.payload)
            for record in read_journal(segments, bytes.fromhex(identity))
            if record.kind == GRADIENT]


def test_weights_are_those_of_float32_gradients_that_were_rounded_before(service):
    service.up(*ADAM)
    count = done(service.client(count=COUNT, elements=ELEMENTS, seed=SEED, lane=1, bf16=1))
    assert count["refused"] == 0
    service.ends_with(COUNT)
    frames = journaled(service.run)
    assert len(frames) == COUNT
    for number, (frame, data) in enumerate(frames, 1):
        made = numpy.full(ELEMENTS, value(SEED, number))
        assert (frame.encoding, frame.count, frame.payload_bytes) == (BF16, ELEMENTS, 2 * ELEMENTS)
        assert data[HEADER_BYTES:] == halves(made), f"gradient {number}"
    assert service.broker.stop() == 0
    short = checkpoint(service.run, COUNT)[0]

    service.run = service.directory / "run-f32"
    service.up(*ADAM)
    wire = service.wire(ELEMENTS)
    for number in range(1, COUNT + 1):
        made = numpy.full(ELEMENTS, value(SEED, number))
        assert not numpy.array_equal(made, rounded(made)), "nothing was rounded"
        wire.push(rounded(made))
    assert wire.settled().refused == 0
    service.ends_with(COUNT)
    assert {frame.encoding for frame, _ in journaled(service.run)} == {F32}
    long = checkpoint(service.run, COUNT)[0]
    assert short.keys() == long.keys()
    for name, array in short.items():
        assert array.tobytes() == long[name].tobytes(), name


@pytest.mark.parametrize("lane", ["inline", "auto"])
def test_actors_of_both_encodings_train_in_one_run(service, build, lane):
    """With lane auto gradients lie in shared memory: float32, whatever the actor asks for."""
    service.up(*ADAM, "--lane", lane)
    actors = [service.actor("--actor", i, "--encoding", encoding, "--max-steps", 2000)
              for i, encoding in enumerate(("f32", "bf16", "bf16"))]
    for actor in actors:
        assert actor.wait(60) == 0, actor.report()
    assert service.last_applied() > 0
    spoken = {(frame.actor, frame.encoding) for frame, _ in journaled(service.run)}
    short = BF16 if lane == "inline" else F32
    assert spoken == {(0, F32), (1, short), (2, short)}
    # Every step again, in NumPy, from the bytes of the journal.
    found = oracle.examine(service.run, build)
    assert (found["version"], found["refused"]) == (checkpoints(service.run)[-1], 0)
    assert (found["halves"] > 0) == (lane == "inline")


def test_each_wrong_use_of_bf16_is_refused_and_counted(service):
    service.up()
    wire = service.wire()
    whole = halves(numpy.ones(wire.elements))
    good = wire.frame(whole, encoding=BF16, count=wire.elements, sequence=1)
    wrong = [good._replace(**changes) for changes in (
        {"kind": 2}, {"kind": 3}, {"kind": 4}, {"lane": 1}, {"encoding": F32}, {"encoding": 3},
        {"count": wire.elements // 2}, {"count": wire.elements + 1}, {"count": 0},
        {"count": (1 << 63) + wire.elements}, {"payload_bytes": 4 * wire.elements})]
    for frame in wrong:
        wire.send(encode(frame, whole))
    wire.send(encode(good, whole)[:-1])
    wire.send(encode(good, whole) + b"\0")
    service.until(lambda s: s["queue"]["refused"] == len(wrong) + 2, "all of them refused")
    for bits, reason in ((b"\x80\x7f", "nonfinite"), (b"\xc0\xff", "nonfinite")):
        wire.sequence += 1
        bad = whole[:-2] + bits
        wire.send(encode(good._replace(sequence=wire.sequence), bad))
        assert wire.settled().refused_reason == reason
    wire.sequence += 1
    wire.send(encode(good._replace(sequence=wire.sequence), whole))
    ack = wire.settled()
    assert (ack.version, ack.refused) == (1, 2)
    service.alive()
