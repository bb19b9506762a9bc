"""Lane shm between real processes: who gets it, who falls back and how that is said, and that
nothing is lost, doubled, torn or left behind whoever dies."""
import mmap
import os
import random
import signal
import stat
import struct
import subprocess
from pathlib import Path

import numpy
import pytest

from conftest import SLOW, wait_for
from peer import RAW, checkpoint, checkpoints, done, encode, events, kill, opened
from peer import service, tcp_service  # noqa: F401

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
FOREVER = 10**9
AUTO = ("--lane", "auto")
INLINE, SHM = 1, 2  # lane= of tests/main_client.c
# Offsets in a lane file; docs/PROTOCOL.md.
TERM, ACK, LEASE = 72, 88, 196


def endless(service, actor: int, **more):
    return opened(service.client(**{"actor": actor, "count": FOREVER, "seed": SEED + actor,
                                    "window": 4, **more}))


def lane_of(client) -> tuple:
    first = events(client.stdout, "open")[0]
    return first["lane"], first["reason"]


def gets_on(service, actor: int, more: int = 100):
    """Wait until an actor has `more` gradients settled than now."""
    def row(stats):
        return next((each["acknowledged"] or 0 for each in stats["actors"] if each["id"] == actor),
                    0)
    now = row(service.stats())
    return service.until(lambda s: row(s) >= now + more or 0 < row(s) < now, f"actor {actor}")


def finish(client) -> dict:
    client.signal(signal.SIGTERM)
    count = done(client)
    assert count["status"] == "closed" and (count["torn"], count["fallen"]) == (0, 0), count
    assert count["refused"] == 0 and count["dropped"] == 0, count
    return count


def ends_well(service, clients: list) -> list:
    counts = [finish(client) for client in clients]
    service.ends_with(sum(count["pushed"] for count in counts))
    return counts


def lane_files(service) -> list:
    return sorted(path.name for path in (service.run / "lane").glob("actor-*"))


def test_actors_of_this_host_share_memory_and_no_weights_pass_through_sockets(service):
    service.up()  # as it is unless one asks for something else
    clients = [endless(service, i, lane=lane) for i, lane in enumerate((0, SHM))]
    assert [lane_of(client) for client in clients] == [("shm", ""), ("shm", "")]
    for i in range(2):
        gets_on(service, i)
    stats = service.stats()
    assert stats["optimizer"]["published"] == 0 and stats["relay"]["weights"] == 0, stats
    directory = service.run / "lane"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    counts = ends_well(service, clients)
    assert all(count["versions"] > 10 for count in counts), counts
    # The state stays: were the last checkpoint damaged, what was only named would be nowhere else.
    assert [path.name for path in directory.iterdir()] == ["board"]


def test_each_side_may_insist_on_inline(service):
    service.up("--lane", "inline")
    client = endless(service, 0)
    assert lane_of(client)[0] == "inline" and "--lane inline" in lane_of(client)[1]
    refused = service.client(actor=1, lane=SHM)
    assert refused.wait() == 1 and "lane shm" in refused.stderr, refused.report()
    gets_on(service, 0)
    service.optimizer.stop()
    service.start_optimizer("--resume", *AUTO)
    other = endless(service, 1, lane=INLINE)
    assert lane_of(other) == ("inline", "lane inline was asked for")
    gets_on(service, 1)
    ends_well(service, [client, other])


def test_both_lanes_in_one_run_and_each_gradient_once(service):
    service.up(*AUTO, "--checkpoint-interval-s", "0")
    clients = [endless(service, i, lane=lane) for i, lane in enumerate((SHM, INLINE, SHM))]
    for i in range(3):
        gets_on(service, i)
    actors = sorted(service.top()["actors"], key=lambda actor: actor["id"])
    assert [actor["lane"] for actor in actors] == ["shm", "inline", "shm"], actors
    ends_well(service, clients)


@pytest.mark.parametrize("lane, taken", [("shm", "shm"), ("auto", "shm"), ("inline", "inline")])
def test_what_the_environment_says_to_actors_the_optimizer_takes_too(service, lane, taken):
    service.start_broker()
    service.start_optimizer(env={"GRADQ_LANE": lane})
    client = endless(service, 0)
    assert lane_of(client)[0] == taken
    gets_on(service, 0)
    ends_well(service, [client])


def test_the_next_optimizer_takes_up_the_actors_of_the_killed_one(service):
    service.up(*AUTO, "--checkpoint-interval-s", "0")
    clients = [endless(service, i, lane=SHM) for i in range(2)]
    for _ in range(4):
        for i in range(2):
            gets_on(service, i)
        kill(service.optimizer)
        service.start_optimizer("--resume", *AUTO, "--checkpoint-interval-s", "0")
    for i in range(2):
        gets_on(service, i)
    counts = ends_well(service, clients)
    assert all(count["lane"] == "shm" and count["term"] == 5 for count in counts), counts


def test_an_optimizer_without_shared_memory_leads_actors_back_to_inline(service):
    service.up(*AUTO, "--checkpoint-interval-s", "0")
    clients = [endless(service, i, lane=lane) for i, lane in enumerate((SHM, 0, INLINE))]
    for i in range(3):
        gets_on(service, i)
    kill(service.optimizer)
    service.start_optimizer("--resume", "--checkpoint-interval-s", "0", "--lane", "inline")
    for i in range(3):
        gets_on(service, i)
    counts = ends_well(service, clients)
    assert all(count["lane"] == "inline" and count["term"] == 2 for count in counts), counts


def test_killed_broker_costs_nothing(service):
    service.up(*AUTO)
    clients = [endless(service, i, lane=SHM) for i in range(2)]
    for _ in range(3):
        for i in range(2):
            gets_on(service, i)
        kill(service.broker)
        service.start_broker()
    for i in range(2):
        gets_on(service, i)
    ends_well(service, clients)


def test_gradients_that_lie_ready_are_taken_early_and_once_and_are_no_depth(service):
    service.up(*AUTO)
    clients = [endless(service, i, lane=SHM, window=2) for i in range(2)]
    for _ in range(5):
        before = service.stats()["optimizer"].get("taken_early") or 0
        service.until(lambda s: s["optimizer"]["taken_early"] > before
                      and s["queue"]["depth"] <= 4, "gradients taken early, and a true depth")
    ends_well(service, clients)
    assert service.stats()["optimizer"]["duplicates"] == 0


def test_killed_actor_leaves_nothing_behind_and_holds_up_nobody(service):
    service.up(*AUTO)
    victim, other = endless(service, 0, lane=SHM), endless(service, 1, lane=SHM)
    gets_on(service, 0)
    assert len(lane_files(service)) == 2
    kill(victim)
    wait_for(lambda: len(lane_files(service)) == 1, 20, "the dead actor's file to go")
    gets_on(service, 1)
    again = endless(service, 0, lane=SHM)
    gets_on(service, 0)
    finish(other)
    finish(again)
    service.alive()


def test_stopped_and_meddling_actors_hold_up_nobody(service):
    """Whatever their lease words say: an inline reader and other actors see new versions."""
    service.up(*AUTO)
    stopped = [endless(service, i, lane=SHM) for i in range(10)]
    pusher, reader = endless(service, 10, lane=SHM), endless(service, 11, lane=INLINE)
    for i, client in enumerate(stopped):
        gets_on(service, i, 5)
        client.signal(signal.SIGSTOP)
    for block, path in enumerate(sorted((service.run / "lane").glob("actor-[0-6]-*"))):
        with open(path, "r+b") as file:
            file.seek(LEASE)
            file.write(struct.pack("<I", block + 1))
    for i in (10, 11):
        gets_on(service, i, 200)
    service.alive()
    for client in stopped:
        client.signal(signal.SIGCONT)
    counts = ends_well(service, [*stopped, pusher, reader])
    assert counts[-1]["versions"] > 50, counts[-1]


@pytest.mark.parametrize("journal", ["recycle", "keep"])
def test_a_slot_that_changes_on_its_way_harms_neither_journal_nor_weights(service, journal):
    """An actor's bug: it goes on writing.  What is journaled is what was applied, all the same, and
    what is not finite never reaches the weights."""
    service.up(*AUTO, "--checkpoint-interval-s", "0", "--journal", journal)
    victim, other = (endless(service, i, lane=SHM, elements=100_000) for i in range(2))
    for i in range(2):
        gets_on(service, i, 20)
    path = next((service.run / "lane").glob("actor-0-*"))
    generator = numpy.random.default_rng(SEED)
    with open(path, "r+b") as file:
        memory = numpy.frombuffer(mmap.mmap(file.fileno(), 0), "<f4")[3 * 1024:]
        for _ in range(300):
            at = generator.integers(0, memory.size - 5000)
            memory[at:at + 5000] = generator.random(5000, "f4")
            memory[at + generator.integers(0, 5000)] = generator.choice([numpy.nan, -numpy.inf])
    gets_on(service, 1, 20)
    kill(victim)
    other.signal(signal.SIGTERM)
    assert done(other)["status"] == "closed"  # unequal elements are the scribbler's doing
    service.optimizer.stop()
    assert "version" in service.replay("--verify")
    assert not events(service.optimizer.stderr, "checkpoint failed")  # as it does with NaN
    weights, _ = checkpoint(service.run, checkpoints(service.run)[-1])
    assert all(numpy.isfinite(each).all() for each in weights.values())


def test_without_room_for_a_board_all_go_inline_and_one_line_says_so(service, run_dir):
    service.run.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "gradq-test", service.run],
                             capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system to fill: {mounted.stderr.strip()}")
    try:
        service.up(*AUTO, "--journal", "off")
        client = opened(service.client(actor=0, elements=100_000, count=50))
        assert lane_of(client)[0] == "inline", lane_of(client)
        said = events(service.optimizer.stderr, "no shared memory: actors of this host take lane "
                      "inline, too")
        assert len(said) == 1 and "reserve" in said[0]["message"], service.optimizer.stderr
        assert done(client)["acknowledged"] == 50
        assert not list((service.run / "lane").glob("*"))
        service.optimizer.stop()
    finally:
        subprocess.run(["umount", "-l", service.run], check=False)


def test_another_user_goes_inline_with_a_reason(service, build):
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    address = service.address.removeprefix("ipc://")
    service.up(*AUTO)
    opened(service.client(actor=1, count=1))
    for path in (service.directory, *Path(service.directory).glob("control*")):
        os.chmod(path, 0o777)
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups",
             str(build / "tests/main_client"), f"ipc://{address}", "actor=0", "count=20"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60 * SLOW, check=False)
    if "failed to execute" in said.stderr:
        pytest.skip("the build directory is not readable for other users")
    assert said.returncode == 0, said
    first = events(said.stdout, "open")[0]
    assert first["lane"] == "inline" and "cannot open" in first["reason"], first
    assert events(said.stdout, "done")[0]["acknowledged"] == 20


def test_nonsense_in_a_lane_file_harms_only_its_actor(service):
    service.up(*AUTO)
    victim, other = endless(service, 0, lane=SHM), endless(service, 1, lane=SHM)
    for i in range(2):
        gets_on(service, i)
    path = next((service.run / "lane").glob("actor-0-*"))
    generator = random.Random(SEED)
    with open(path, "r+b") as file:
        for _ in range(200):
            file.seek(0)
            file.write(generator.randbytes(4096))
            file.flush()
    gets_on(service, 1, 200)
    victim.kill()  # unless it has ended: it may have read that it is fenced
    assert finish(other)["lane"] == "shm"
    service.alive()


def test_descriptors_that_name_no_slot_of_theirs_are_ignored(service):
    service.up(*AUTO)
    wire = service.wire()
    good = wire.frame(b"", lane=1, count=wire.elements, payload_bytes=4 * wire.elements, sequence=1)
    for slot in (0, 1, 65, 2**32 - 1):
        wire.send(encode(good._replace(reserved_a=slot), payload_crc=0))
    before = service.until(lambda s: s["optimizer"]["malformed"] >= 4, "four to be counted")
    assert before["optimizer"]["applied"] == 0
    # Malformed for the codec: a slot without the lane, the lane with a payload, or of weights.
    for bad in (good._replace(lane=0, reserved_a=1), good._replace(kind=3),
                good._replace(kind=4, encoding=RAW, count=0, payload_bytes=40)):
        wire.send(encode(bad, payload_crc=0))
    wire.send(encode(good, payload_crc=0) + bytes(4 * wire.elements))
    wire.push(sequence=1)
    assert wire.settled(1).cumulative == 1
    service.alive()


def test_a_gradient_is_not_taken_from_a_slot_that_holds_another(service):
    """A descriptor that comes late, when its slot is used anew."""
    service.up(*AUTO)
    client = endless(service, 0, lane=SHM)
    gets_on(service, 0)
    path = next((service.run / "lane").glob("actor-0-*"))
    epoch = int(path.name.split("-")[2])
    client.signal(signal.SIGSTOP)
    stats = service.until(lambda s: s["queue"]["depth"] == 0, "all that was sent to be taken")
    with open(path, "rb") as file:
        words = file.read(4096)
    (term,), (last,) = struct.unpack_from("<I", words, TERM), struct.unpack_from("<Q", words, ACK)
    wire = service.wire(1000, actor=5)
    frame = wire.frame(b"", lane=1, actor=0, epoch=epoch, term=term, count=1000,
                       payload_bytes=4000)
    malformed = stats["optimizer"]["malformed"]
    for slot in range(5):
        wire.send(encode(frame._replace(sequence=last + 20, reserved_a=slot), payload_crc=0))
    after = service.until(lambda s: s["optimizer"]["malformed"] >= malformed + 5, "all five")
    assert after["optimizer"]["applied"] == after["optimizer"]["version"]
    client.signal(signal.SIGCONT)
    finish(client)


def test_an_optimizer_that_forgot_an_actor_gets_it_back_in_a_new_life(service):
    words = (*AUTO, "--checkpoint-interval-s", "0", "--journal", "off")
    service.up(*words)
    client = endless(service, 0, lane=0)
    assert lane_of(client) == ("shm", "")
    gets_on(service, 0)
    kill(service.optimizer)
    service.start_optimizer("--resume", *words)
    service.until(lambda s: s["actors"][0]["epoch"] > 1 and s["actors"][0]["acknowledged"] > 50,
                  "the new life to get on", 30)
    client.signal(signal.SIGTERM)
    count = done(client)
    assert count["rolled_back"] == 1 and (count["torn"], count["fallen"]) == (0, 0), count
