"""The optimizer's state in shared memory: killed under load, again and again, it leads to the bits
that the gradients have, worked out again from what the journal names."""
import math
import os
import random
import signal
import struct

import numpy
import pytest

from conftest import BUILD, wait_for
from peer import LAYOUT, Frame, checkpoint, checkpoints, done, events, kill
from peer import service  # noqa: F401

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
KILLS = 6
HALF = 20000  # elements in each of two tensors: a step has 157 blocks
SHARED_HALF = 40000  # and of a step that threads share
LR, MOMENTUM = 0.125, 0.9
SEGMENT, RECORD = 64, struct.Struct("<IIQQII")
GRADIENT, NAMED = 3, 5
WORDS = ("--optimizer", "sgd", "--set", f"lr={LR}", "--set", f"momentum={MOMENTUM}",
         "--lane", "auto", "--checkpoint-interval-s", "0")


def mix(z):
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xbf58476d1ce4e5b9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94d049bb133111eb)
    return z ^ (z >> numpy.uint64(31))


def vector(key, half: int) -> numpy.ndarray:
    """What tests/chaos/client.c fills a gradient with."""
    z = key + numpy.arange(1, half + 1, dtype=numpy.uint64) * numpy.uint64(0x9e3779b97f4a7c15)
    bits = (mix(z) >> numpy.uint64(40)).astype(numpy.int64) - (1 << 23)
    values = (bits / numpy.float64(1 << 23)).astype(numpy.float32)
    return numpy.concatenate([values, values])


def gradient(actor: int, epoch: int, sequence: int, half: int) -> numpy.ndarray:
    key = mix(mix(mix(numpy.uint64(SEED)) + numpy.uint64((actor << 32) + epoch))
              + numpy.uint64(sequence))
    return vector(key, half)


def records(run):
    """(kind, payload) of the journal, all of which is there: it is shorter than a segment."""
    for path in sorted((run / "journal").iterdir()):
        data, at = path.read_bytes(), SEGMENT
        while at < len(data):
            _, kind, _, size, _, _ = RECORD.unpack_from(data, at)
            yield kind, data[at + RECORD.size:at + RECORD.size + size]
            at += RECORD.size + size + -size % 8


def worked_out(run, half: int) -> tuple:
    """Weights and momentum that the accepted gradients lead to, and how many records name one."""
    with numpy.errstate(over="ignore"):
        weights, slot, named = vector(mix(numpy.uint64(SEED)), half), numpy.float32(0), 0
        lr, momentum = numpy.float32(LR), numpy.float32(MOMENTUM)
        for kind, payload in records(run):
            if kind not in (GRADIENT, NAMED):
                continue
            frame = Frame(*LAYOUT.unpack_from(payload))
            named += kind == NAMED
            slot = momentum * slot + gradient(frame.actor, frame.epoch, frame.sequence,
                                              half)
            weights = weights - lr * slot
    return weights, slot, named


@pytest.mark.parametrize(("journal", "half", "threads"),
                         [("recycle", HALF, 1), ("recycle", SHARED_HALF, 3), ("keep", HALF, 1)])
def test_killed_under_load_again_and_again_it_has_the_bits_of_what_was_named(
        service, run_dir, journal, half, threads):
    print(f"seed {SEED}")
    words = (*WORDS, "--journal", journal, "--threads", threads)
    service.up(*words)
    clients = [service.start(BUILD / "tests/chaos_client", service.address, actor, SEED,
                             run_dir / f"log{actor}", f"half={half}", "odd=0", "pause_us=0")
               for actor in range(2)]
    random.seed(SEED)
    for _ in range(KILLS):
        before = service.stats()["optimizer"]["version"] or 0
        more = random.randrange(20, 60)
        service.until(lambda s: s["optimizer"]["version"] > before + more, f"{more} steps more")
        kill(service.optimizer)
        service.start_optimizer("--resume", *words)
    assert all(client.running() for client in clients)
    for client in clients:
        client.signal(signal.SIGTERM)
    for client in clients:
        assert client.wait(60) == 0, client.report()
    acknowledged = sum(len((run_dir / f"log{actor}.ack").read_text().splitlines())
                       for actor in range(2))
    last = service.last_applied()
    assert last == acknowledged, "each once"
    tensors, _ = checkpoint(service.run, last)
    weights, slot, named = worked_out(service.run, half)
    for name, part in (("a", slice(half)), ("b", slice(half, None))):
        assert tensors[name].tobytes() == weights[part].tobytes(), f"{name}: other weights"
        assert tensors[f"momentum_buffer.{name}"].tobytes() == slot[part].tobytes(), name
    if journal == "recycle":
        assert named == last, "nothing was copied"
        recovered = events(service.optimizer.stderr, "recovered")
        assert recovered and recovered[0]["live_lsn"] > 0
        assert "only named" in service.replay("--verify")
    else:
        assert named == 0 and "only named" not in service.replay("--verify")
    assert math.isfinite(float(numpy.abs(weights).max()))
    assert (service.run / "lane/board").exists() == (journal == "recycle")


def test_without_its_state_it_says_what_is_lost_and_cut_goes_back(service, run_dir):
    service.up(*WORDS)
    client = service.start(BUILD / "tests/chaos_client", service.address, 0, SEED,
                           run_dir / "log0", f"half={HALF}", "odd=0", "pause_us=1000")
    service.until(lambda s: (s["optimizer"]["version"] or 0) > 20, "20 steps")
    service.optimizer.signal(signal.SIGUSR1)
    wait_for(lambda: checkpoints(service.run)[-1] > 0, 20, "a checkpoint")
    saved = checkpoints(service.run)[-1]
    service.until(lambda s: s["optimizer"]["version"] > saved + 20, "20 steps more")
    kill(service.optimizer)
    kill(client)
    board = service.run / "lane/board"
    data = bytearray(board.read_bytes())
    data[data.rindex(b"GQL1") + 8] ^= 1  # the number of the boot
    board.write_bytes(data)
    optimizer = service.start_optimizer("--resume", *WORDS, wait=False)
    assert optimizer.wait() != 0
    assert "restarted" in optimizer.stderr and "only names its gradient" in optimizer.stderr
    assert "--cut" in optimizer.stderr
    cut = service.start("gradq-replay", "--run", service.run, "--cut")
    assert cut.wait() == 0 and "is gone" in cut.stderr, cut.report()
    assert "the last record is" in cut.stdout and f"version {saved} weights" in cut.stdout
    assert cut.stdout.splitlines()[-1] == service.replay().splitlines()[-1]
    service.start_optimizer("--resume", *WORDS)
    assert service.stats()["optimizer"]["version"] == saved


def test_a_journal_whose_beginning_is_gone_is_not_cut(service):
    service.up(*WORDS[:-2], "--checkpoint-interval-s", "0", "--journal", "keep")
    done(service.client(count=20, seed=SEED))
    kill(service.optimizer)
    first, *_ = sorted((service.run / "journal").iterdir())
    data = bytearray(first.read_bytes())
    data[0] ^= 1
    first.write_bytes(data)
    cut = service.start("gradq-replay", "--run", service.run, "--cut")
    assert cut.wait() == 1 and first.name in cut.stderr, cut.report()
    assert "cut " not in cut.stdout and first.read_bytes() == data


@pytest.mark.parametrize("lane", ["auto", "inline"])
def test_a_start_that_dies_before_its_checkpoint_leaves_the_state_where_it_was(
        service, run_dir, lane):
    service.up(*WORDS)
    client = service.start(BUILD / "tests/chaos_client", service.address, 0, SEED,
                           run_dir / "log0", f"half={HALF}", "odd=0", "pause_us=1000")
    service.until(lambda s: (s["optimizer"]["version"] or 0) > 20, "20 steps")
    kill(service.optimizer)
    kill(client)
    reached = [line for line in service.replay().splitlines() if line.startswith("version ")]
    words = (*WORDS[:-4], "--lane", lane, *WORDS[-2:])
    dead = service.start_optimizer("--resume", *words, wait=False,
                                   env={"GRADQ_TEST_CRASH": "checkpointing:1"})
    assert dead.wait() == -signal.SIGKILL, dead.report()
    assert [line for line in service.replay().splitlines()
            if line.startswith("version ")] == reached
    service.start_optimizer("--resume", *words)
    version = int(reached[0].split()[1])
    assert version > 20 and checkpoints(service.run)[-1] == version
