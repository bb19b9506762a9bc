"""The depth that gradq-top shows is the true one, on both lanes: it counts what waits between
broker and optimizer as well.  And it has an end: with the optimizer stopped the queue fills to its
bound in gradients or in bytes, actors wait but live, and nothing is lost."""
import json
import os
import random
import signal

import pytest
import zmq

from conftest import SANITIZED, SLOW, wait_for
from peer import Frame, done, encode, kill, opened, rss
from peer import service, tcp_service  # noqa: F401

CAPACITY = 4
WINDOW = 60
SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
MIB = 1 << 20
# What each connection may hold beside the queue: one message in each of the two pipes' ends (their
# high-water marks are 1), one being read, and what the kernel has of the next (SNDBUF, RCVBUF).
FRAMES_PER_CONNECTION = 3
# lane= of tests/main_client.c.  Of headers alone, lane shm, hundreds lie in kernel buffers.
LANES = pytest.mark.parametrize("lane", [1, 2], ids=["inline", "shm"])
FOREVER = 10**9


def full(service, depth: int) -> dict:
    """Wait until gradq-top shows `depth` or more and nothing moves any more, though every actor
    lives.

    No look may see more than the capacity.  One round ends when each actor has reported once more.
    """
    seen = {}  # actor: milliseconds since its last report

    def round_ended(again):
        now = service.top()
        assert now["queue"]["depth"] <= now["queue"]["capacity"]
        for actor in now["actors"]:
            assert actor["state"] != "gone", actor
            if actor["last_seen_ms"] < seen.get(actor["id"], 0):
                again.add(actor["id"])
            seen[actor["id"]] = actor["last_seen_ms"]
        return again == set(seen) and now["queue"]

    def settled():
        before = service.top()["queue"]
        after = wait_for(lambda again=set(): round_ended(again), 30, "a report of every actor")
        assert after == before and after["depth"] >= depth, (before, after)
        return after
    return wait_for(settled, 60, f"a queue that stays at a depth of {depth}")


def stopped_with(service, clients: list) -> dict:
    """With the optimizer stopped, let paused clients fill their windows: the queue, whose depth
    grows by all that comes from then on.  What clients before them sent twice may still be on its
    way when the queue is empty, so it is looked at once more behind the stop."""
    service.until(lambda s: s["queue"]["depth"] == 0, "an empty queue")
    service.optimizer.signal(signal.SIGSTOP)

    def at_rest():
        queue = service.stats()["queue"]
        assert queue == service.stats()["queue"]
        return queue
    before = wait_for(at_rest, 20, "a queue at rest")
    for client in clients:
        client.signal(signal.SIGUSR1)
    pushed = before["depth"] + WINDOW * len(clients)
    after = service.until(lambda s: s["queue"]["depth"] >= pushed, f"a depth of {pushed}")["queue"]
    assert after["depth"] - before["depth"] == after["received"] - before["received"], (before,
                                                                                       after)
    return after


def paused(service, actors: range, lane: int) -> list:
    return [opened(service.client(actor=i, count=FOREVER, window=WINDOW, seed=SEED + i, lane=lane,
                                  pause=1)) for i in actors]


def ends_well(service, clients: list):
    """Everything that waited is settled in the end, and nothing waits."""
    service.until(lambda s: len(s["actors"]) == len(clients) and all(
        (a["acknowledged"] or 0) > WINDOW for a in s["actors"]), "every client to get on", 60)
    for client in clients:
        client.signal(signal.SIGTERM)
        count = done(client)
        assert count["status"] == "closed" and (count["torn"], count["refused"]) == (0, 0), count
    service.until(lambda s: s["queue"]["depth"] == s["queue"]["bytes"] == 0, "an empty queue")


def test_stats_ask_for_the_newest_count_and_do_not_wait_for_who_is_silent(service):
    """With an optimizer of our own, which tells what it has taken only when it likes."""
    service.start_broker()
    wire = service.wire(hello=False)
    ends = service.endpoints()
    into, out = wire.connect(zmq.PUSH, ends[1]), wire.connect(zmq.PULL, ends[2])

    def push(sequence):
        into.send(encode(Frame(count=1, payload_bytes=4, sequence=sequence), bytes(4)))

    def arrives(size):
        assert out.poll(5000 * SLOW), f"no message of {size} bytes"
        data = out.recv()
        assert len(data) == size
        return data

    def taken(mark, count):
        wire.control.send_json({"op": "taken", "mark": mark.hex(), "count": count})

    push(1)
    arrives(132)
    mark = arrives(16)  # the first one: it may have been handed to somebody before
    assert service.stats()["queue"]["depth"] == 1  # though nobody answers
    taken(mark, 0)
    service.until(lambda s: s["queue"]["depth"] == 0, "the answer to count")
    push(2)
    arrives(132)
    # In its own time the next mark is due only after 100 ms, or an answer after 10.
    for _ in range(3):
        wire.control.send(b'{"op": "stats"}')
        while out.poll(100 * SLOW):
            mark = arrives(16)
        answer = json.loads(wire.control.recv())
        assert answer["queue"]["depth"] == 1 and answer["queue"]["delivered"] == 1, answer
    for wrong in ("", "00" * 16, mark.hex()[:-1], mark.hex() + "00", 7, None):
        wire.control.send_json({"op": "taken", "mark": wrong, "count": 1})
    taken(mark, 2**63)
    taken(mark, -1)
    assert service.stats()["queue"]["depth"] == 1
    taken(mark, 0)
    push(3)
    arrives(132)
    wire.control.send(b'{"op": "stats"}')
    taken(arrives(16), 0)
    answer = json.loads(wire.control.recv())
    assert answer["queue"]["depth"] == 0 and answer["queue"]["received"] == 3, answer


@LANES
def test_depth_counts_what_waits_between_broker_and_optimizer(service, lane):
    service.up("--lane", "auto")
    clients = paused(service, range(3), lane)
    queue = stopped_with(service, clients)
    assert queue["depth"] <= queue["capacity"]
    service.optimizer.signal(signal.SIGCONT)
    ends_well(service, clients)


@LANES
def test_the_capacity_bounds_what_waits_wherever_it_lies(service, lane):
    service.up("--lane", "auto", broker=("--capacity", CAPACITY))
    clients = paused(service, range(3), lane)
    service.optimizer.signal(signal.SIGSTOP)
    for client in clients:
        client.signal(signal.SIGUSR1)
    queue = full(service, CAPACITY)
    assert queue["depth"] == queue["capacity"] == CAPACITY
    service.optimizer.signal(signal.SIGCONT)
    ends_well(service, clients)


@LANES
def test_what_was_handed_to_a_killed_optimizer_waits_no_more(service, lane):
    service.up("--lane", "auto", "--checkpoint-interval-s", "0")
    clients = paused(service, range(2), lane)
    queue = stopped_with(service, clients)
    frame = 128 if lane == 2 else 128 + 4 * 1000
    inside = queue["bytes"] // frame
    assert queue["depth"] > inside, "some are on their way"
    kill(service.optimizer)
    # What the actors send again meanwhile lies in the queue, too: nobody takes it.
    service.until(lambda s: s["queue"]["depth"] == s["queue"]["bytes"] // frame, "that to be lost")
    service.start_optimizer("--resume", "--lane", "auto", "--checkpoint-interval-s", "0")
    ends_well(service, clients)


@LANES
def test_depth_is_true_after_a_restart_of_either_side(service, lane):
    service.up("--lane", "auto", "--checkpoint-interval-s", "0")
    first = paused(service, range(2), lane)
    for client in first:
        client.signal(signal.SIGUSR1)
    service.until(lambda s: s["optimizer"]["applied"] > 100, "training")
    kill(service.broker)
    service.start_broker()
    ends_well(service, first)
    again = paused(service, range(2), lane)
    stopped_with(service, again)
    service.optimizer.signal(signal.SIGCONT)
    ends_well(service, again)
    kill(service.optimizer)
    service.start_optimizer("--resume", "--lane", "auto", "--checkpoint-interval-s", "0")
    last = paused(service, range(2), lane)
    stopped_with(service, last)
    service.optimizer.signal(signal.SIGCONT)
    ends_well(service, last)


def test_depth_rises_to_the_capacity_and_no_further_while_actors_wait(service):
    service.up("--optimizer", "adam", broker=("--capacity", CAPACITY))
    actors = [service.actor("--actor", i, "--window", 8, "--seed", SEED)
              for i in range(4)]
    service.until(lambda s: s["optimizer"]["applied"] > 20 and len(s["actors"]) == 4,
                  "four actors that train")
    service.optimizer.signal(signal.SIGSTOP)
    queue = full(service, CAPACITY)
    assert queue["capacity"] == CAPACITY
    assert all(actor.running() for actor in actors)

    service.optimizer.signal(signal.SIGCONT)
    service.until(lambda s: s["queue"]["received"] > queue["received"] + 100, "training to go on")
    for actor in actors:
        assert actor.stop() == 0, actor.report()
    stats = service.until(lambda s: s["queue"]["depth"] == 0 and all(
        a["pushed"] == a["acknowledged"] for a in s["actors"]), "everything acknowledged")
    assert [a["refused"] for a in stats["actors"]] == [0] * 4, stats["actors"]
    assert stats["queue"]["received"] == stats["queue"]["delivered"]


def test_sigterm_ends_an_actor_that_waits_for_a_full_queue(service):
    service.up("--optimizer", "adam", broker=("--capacity", CAPACITY))
    actors = [service.actor("--actor", i, "--window", 8, "--seed", SEED)
              for i in range(4)]
    service.until(lambda s: s["optimizer"]["applied"] > 20 and len(s["actors"]) == 4,
                  "four actors that train")
    service.optimizer.signal(signal.SIGSTOP)
    full(service, CAPACITY)
    for actor in actors:
        assert actor.stop() == 0, actor.report()
    service.optimizer.signal(signal.SIGCONT)
    service.until(lambda s: s["queue"]["depth"] == 0, "the queue to drain")


def test_all_that_waited_is_applied_and_acknowledged_after_sigcont(tcp_service):
    service = tcp_service
    service.up(broker=("--capacity", CAPACITY))
    # More than fits: each client pushes until the window or the queue stops it.
    clients = [opened(service.client(actor=i, count=60, window=16, seed=SEED + i, elements=50_000,
                                     pause=1)) for i in range(4)]
    service.optimizer.signal(signal.SIGSTOP)
    for client in clients:
        client.signal(signal.SIGUSR1)
    full(service, CAPACITY)
    assert all(client.running() for client in clients)
    service.optimizer.signal(signal.SIGCONT)
    for client in clients:
        count = done(client)
        assert count["pushed"] == count["acknowledged"] == 60, count
        assert (count["refused"], count["torn"], count["fallen"]) == (0, 0, 0)
    stats = service.until(lambda s: s["optimizer"]["applied"] == 240, "240 applied")
    assert stats["queue"]["depth"] == stats["queue"]["bytes"] == 0


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's shadow and quarantine are not ours to bound")
def test_the_brokers_memory_stays_within_the_byte_bound(service):
    elements, clients, bound = 1_000_000, 4, 16 * MIB
    frame = 128 + 4 * elements
    service.up("--lane", "inline", broker=("--queue-bytes", "16M"))
    running = [opened(service.client(actor=i, count=12, window=12, seed=SEED + i,
                                     elements=elements, pause=1))
               for i in range(clients)]
    service.optimizer.signal(signal.SIGSTOP)
    for client in running:
        client.signal(signal.SIGUSR1)
    depth = bound // frame
    queue = full(service, depth)
    assert queue["bytes"] == depth * frame <= queue["bytes_capacity"] == bound
    # And what has left it for the optimizer, which has not read it.
    assert queue["depth"] - depth <= FRAMES_PER_CONNECTION, queue
    # Program and libraries, tables of 4,096 actors, one copy of the weights kept for late joiners
    # and two on their way to each subscriber: the broker's, whatever the queue holds.
    fixed = 32 * MIB + frame * (1 + 2)
    connections = clients + 1  # and the optimizer
    allowed = bound + connections * FRAMES_PER_CONNECTION * frame + fixed
    used = rss(service.broker.pid)
    print(f"broker: {used / MIB:.0f} MiB resident, {allowed / MIB:.0f} MiB allowed")
    assert used <= allowed
    service.optimizer.signal(signal.SIGCONT)
    for client in running:
        count = done(client)
        assert count["pushed"] == count["acknowledged"] == 12 and count["refused"] == 0, count


def test_other_requests_and_weights_pass_a_full_queue(service):
    # Lane inline: weights pass through the broker's sockets.
    service.up("--lane", "inline", broker=("--capacity", CAPACITY))
    wire = service.wire(1000, actor=1)
    # More than it ever gets to push.
    client = opened(service.client(actor=0, count=10**9, window=64, seed=SEED))
    service.optimizer.signal(signal.SIGSTOP)
    service.until(lambda s: s["queue"]["depth"] == CAPACITY, "a full queue")
    # The relay and the control socket have threads of their own.
    late = wire.subscribe(CONFLATE=1)
    frame, vector = wire.next_weights(late)
    assert frame.count == 1000 and (vector == vector[0]).all()
    assert service.stats()["queue"]["depth"] == CAPACITY
    assert service.wire(hello=False).ask({"op": "nonsense"})["error"] == "invalid"
    service.optimizer.signal(signal.SIGCONT)
    client.signal(signal.SIGTERM)
    assert done(client)["status"] == "closed"
