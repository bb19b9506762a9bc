"""The depth that gradq-top shows is the true one, and it has an end: with the optimizer stopped the
queue fills to its bound in gradients or in bytes, actors wait but live, and nothing is lost."""
import os
import random
import signal

import pytest

from conftest import SANITIZED, wait_for
from peer import done, opened, rss
from peer import service, tcp_service  # noqa: F401

CAPACITY = 4
SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
MIB = 1 << 20
# What each connection may hold beside the queue: one message in each of the two pipes' ends (their
# high-water marks are 1), one being read, and what the kernel has of the next (SNDBUF, RCVBUF).
FRAMES_PER_CONNECTION = 3


def full(service, depth: int) -> dict:
    """Wait until gradq-top shows `depth` and nothing moves any more, though every actor lives.

    Every look may see at most `depth`.  One round ends when each actor has reported once more.
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
        assert after == before and after["depth"] == depth, (before, after)
        return after
    return wait_for(settled, 60, f"a queue that stays at a depth of {depth}")


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
    service.up(broker=("--queue-bytes", "16M"))
    running = [opened(service.client(actor=i, count=12, window=12, seed=SEED + i,
                                     elements=elements, pause=1))
               for i in range(clients)]
    service.optimizer.signal(signal.SIGSTOP)
    for client in running:
        client.signal(signal.SIGUSR1)
    depth = bound // frame
    queue = full(service, depth)
    assert queue["bytes"] == depth * frame <= queue["bytes_capacity"] == bound
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
    service.up(broker=("--capacity", CAPACITY))
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
