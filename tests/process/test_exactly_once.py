"""Exactly once: what was acknowledged stands in the journal once, and replays to the live weights.

Short forms of tests/chaos/chaos.py, whose oracle (tests/chaos/oracle.py) judges each run directory
from its own reading of the bytes; and the cases that chance does not bring: each crash point, two
of a kind, a damaged journal, a full disk.
"""
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SLOW, wait_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "chaos"))
import oracle  # noqa: E402
import plan  # noqa: E402
from disk import read_segment  # noqa: E402
from chaos import CRASHES, Chaos  # noqa: E402

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
RAGE_S = 3
# What a seed would choose otherwise, see tests/chaos/plan.py.
PLAIN = {"rules": [["adam"]], "aggregate": 1, "max-staleness": "inf", "window": 4, "half": 32,
         "pause": 1000, "journal": "keep", "checkpoint-interval-s": 0.3, "publish-interval-ms": 0,
         "bf16": 0, "inline": 0}
# How gradients come: through sockets only; in memory shared with actors; or with the broker.
WAYS = {"inline": {"lane": "inline"}, "shm": {"lane": "auto"},
        "hop": {"lane": "auto", "inline": 4, "half": plan.MIDDLE_HALF}}
# On lane inline, where the journal holds gradients: one that only names them fills no segment.
LARGE = {"half": 50_000, "pause": 5000, "journal": "recycle", "checkpoint-interval-s": 0.1,
         "publish-interval-ms": 50, "lane": "inline"}
FENCED = 4  # exit of tests/chaos/client.c


@pytest.fixture
def chaos(build, run_dir):
    """chaos(mode, **settings) -> Chaos that has begun; ended, whatever happens."""
    runs = []

    def begin(mode: str = "ipc", **settings) -> Chaos:
        print(f"SEED={SEED}")
        one = Chaos(build, SEED, RAGE_S, mode, run_dir, slow=SLOW, **{**PLAIN, **settings})
        one.create()
        runs.append(one)
        one.begin()
        assert not one.wrong, one.wrong
        return one

    yield begin
    for one in runs:
        one.end()


def examined(one: Chaos) -> dict:
    """Stop it all; the oracle's findings, when nothing was wrong."""
    one.heal()
    one.stop()
    assert not one.wrong, one.wrong
    found = one.examine()
    assert found["promised"] > 0 and found["looks"] > 0 and found["applied"] > 0, found
    return found


def replay(one: Chaos, *words) -> subprocess.CompletedProcess:
    return subprocess.run([one.build / "gradq-replay", "--run", one.run, *words],
                          capture_output=True, text=True, timeout=60 * SLOW, check=False)


ALL_WAYS = pytest.mark.parametrize("way", WAYS)


@ALL_WAYS
@pytest.mark.parametrize("fsync", ["never", "always"])
@pytest.mark.parametrize("mode", ["ipc", "tcp"])
def test_random_kills_lose_double_and_tear_nothing(chaos, mode, fsync, way):
    one = chaos(mode, fsync=fsync, **WAYS[way])
    one.rage()
    examined(one)
    assert one.counts["kill optimizer"] > 0 and one.counts["kill broker"] > 0, one.counts


def test_kills_and_changes_of_the_rule_replay_to_the_same_bits(chaos):
    chance = random.Random(SEED)
    names = chance.sample(("adam", "adamw", "rmsprop", "adagrad", "sgd", "lion"), 3)
    one = chaos(rules=[plan.rule(chance, name, 64) for name in names], **plan.steps(chance))
    print(plan.text(one.settings))
    one.weights = {"swap": 2, "optimizer": 1, "client": 1}
    one.rage()
    assert examined(one)["swaps"] > 0


def test_kills_with_float32_and_bf16_side_by_side_lose_double_and_change_nothing(chaos):
    one = chaos(bf16=2, lane="inline")
    one.rage()
    found = examined(one)
    assert 0 < found["halves"] < found["applied"]


def test_kills_while_the_journal_is_recycled_lose_nothing(chaos):
    one = chaos(**LARGE)
    one.weights = {"optimizer": 1, "broker": 1, "client": 1}

    def deleted():
        names = {path.name for path in (one.run / "journal").iterdir()}
        return any(name.startswith("segment-") and name not in names for name in one.archived)

    # A segment is deleted when two checkpoints of one life cover it, for which the kills leave no
    # time on a slow disk: each time that they may, the run is left alone until one is gone.
    for _ in range(2):
        one.rage()
        one.archived.clear()
        one.wait(deleted, 60, "a segment to be deleted")
    assert examined(one)["recycled"] > 0


@ALL_WAYS
def test_a_network_that_drops_doubles_swaps_and_resets_loses_and_doubles_nothing(chaos, way):
    one = chaos("relay", fsync="never", **WAYS[way])
    one.weights = {"client": 1}
    one.rage()
    examined(one)
    one.end()
    # "lost": no copy had come through when it was dropped.  "resent": it came again, where that is
    # needed: on lane shm the optimizer finds it by itself.
    wanted = ("drop", "duplicate", "reorder", "lost", *(("resent",) if way != "shm" else ()))
    assert not one.wrong and all(one.counts["relay " + each] > 0 for each in wanted), one.counts


@pytest.mark.parametrize(("point", "way"), [(point, way) for point in CRASHES for way in WAYS
                                            if way != "inline" or "commit" not in point])
def test_death_at_a_named_point_loses_and_doubles_nothing(chaos, point, way):
    # The state is committed only where it outlives the process: with the defaults.
    one = chaos(fsync="never", journal="keep" if way == "inline" else "recycle", **WAYS[way])
    for _ in range(20):
        one.crash(point)
        if one.counts["crash " + point] > 0:
            break
    assert one.counts["crash " + point] > 0, f"{point} was never reached"
    examined(one)


def test_second_optimizer_on_a_run_directory_exits_and_says_why(chaos):
    one = chaos()
    second = subprocess.run(one.optimizer.words, capture_output=True, text=True,
                            timeout=20 * SLOW, check=False)
    assert second.returncode == 1 and "another optimizer works in" in second.stderr, second
    examined(one)


def test_second_process_with_an_actor_id_fences_the_first(chaos, start):
    one = chaos()
    words = list(one.clients[1].words)
    second = start(*words)
    wait_for(lambda: one.clients[1].popen.poll() is not None, 20, "the first process to end")
    assert one.clients[1].popen.returncode == FENCED, one.clients[1].tail()
    assert "fenced: another process" in one.clients[1].tail()
    # It is started again by the run, and so fences the second.
    one.clients[1].start()
    assert second.wait() == FENCED, second.report()
    examined(one)


def killed_run(chaos) -> Chaos:
    """A run whose optimizer was killed, with all but its first weights in the journal only."""
    one = chaos(**{"checkpoint-interval-s": 0})
    one.wait(one.all_get_on(), 10, "some gradients")
    # The clients first: a kill in the middle of an append would leave a torn record of its own.
    for child in one.clients:
        child.popen.send_signal(signal.SIGTERM)
    for child in one.clients:
        wait_for(lambda child=child: not child.running(), 20, f"{child.name} to settle all")
        child.killed = True
    one.kill(one.optimizer)
    return one


def last_record(path: Path) -> tuple:
    """(offset, size of the file) of the last record."""
    run = path.read_bytes()[8:24]
    *_, last = read_segment(path, run, None)
    return int(last.place.rsplit(":", 1)[1]), path.stat().st_size


def test_unfinished_last_record_is_cut_off_and_the_run_goes_on(chaos):
    one = killed_run(chaos)
    segment = sorted((one.run / "journal").iterdir())[-1]
    offset, size = last_record(segment)
    with open(segment, "r+b") as file:
        # An actor may know of this record: what is tested is the cut, so its promises go as well.
        file.truncate(random.Random(SEED).randrange(offset + 1, size))
    for log in one.logs:
        Path(f"{log}.ack").unlink()
        Path(f"{log}.see").unlink()
    said = replay(one)
    assert said.returncode == 0 and f"torn tail: {segment.stat().st_size - offset} bytes in " \
        f"{segment.name} behind offset {offset}" in said.stdout, said
    with pytest.raises(oracle.Wrong, match="torn"):
        oracle.examine(one.run)
    one.optimizer.start()
    examined(one)


def test_flipped_byte_stops_recovery_and_is_explained_with_its_place(chaos):
    one = killed_run(chaos)
    segment = sorted((one.run / "journal").iterdir())[-1]
    data = bytearray(segment.read_bytes())
    offset, _ = last_record(segment)
    at = random.Random(SEED).randrange(64, offset)
    data[at] ^= 1 << random.Random(SEED).randrange(8)
    segment.write_bytes(data)
    print(f"flipped a bit of byte {at} of {len(data)}")
    with pytest.raises(oracle.Wrong, match=segment.name) as ours:
        oracle.examine(one.run)
    place = str(ours.value).split(": ", 1)[0].rsplit(":", 1)[1]
    said = replay(one)
    assert said.returncode == 1 and f"{segment.name} at offset {place}" in said.stderr, said
    refused = subprocess.run(one.optimizer.words, capture_output=True, text=True,
                             timeout=20 * SLOW, check=False)
    assert refused.returncode == 78 and f"{segment.name} at offset {place}" in refused.stderr, \
        refused


def test_full_disk_stops_the_taking_until_there_is_room_and_loses_nothing(chaos, run_dir):
    run = run_dir / "run"
    run.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "gradq-test", run],
                             capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system to fill: {mounted.stderr.strip()}")
    try:
        ballast = run / "ballast"
        ballast.write_bytes(bytes(1_300_000))
        one = chaos(**{"checkpoint-interval-s": 0})
        log = one.directory / "optimizer.log"
        one.wait(lambda: "no space for the journal" in log.read_text(), 20, "a full disk")
        assert not one.wrong, one.wrong
        # It says so, takes nothing, and lives.
        size = sum(path.stat().st_size for path in (run / "journal").iterdir())
        assert not one.wait(one.all_get_on(), 1)
        assert sum(path.stat().st_size for path in (run / "journal").iterdir()) == size
        assert one.optimizer.lives == 1 and one.optimizer.running()
        ballast.unlink()
        examined(one)
    finally:
        subprocess.run(["umount", "-l", run], check=False)
