"""kill -9 of each process in turn, and two of a kind at one address: the others go on, the
restarted one continues, and everything that a living actor pushed is applied exactly once."""
import os
import random
import signal
import time

import pytest

from conftest import SLOW, wait_for
from peer import checkpoints, done, events, kill, opened
from peer import service, tcp_service  # noqa: F401

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
FOREVER = 10**9  # more gradients than a client ever gets to push


@pytest.fixture(params=["ipc", "tcp"])
def either(request):
    return request.getfixturevalue("service" if request.param == "ipc" else "tcp_service")


def row(stats, actor: int) -> dict:
    """What the broker knows of an actor; all None before it has heard of it."""
    return next((each for each in stats["actors"] if each["id"] == actor),
                {"epoch": None, "acknowledged": None})


def endless(service, actor: int, **more):
    settings = {"actor": actor, "count": FOREVER, "seed": SEED + actor, "window": 4, **more}
    return service.client(**settings)


def acknowledged(service, actor: int, above: int = 0) -> dict:
    """Wait until an actor that pushes has had more than `above` gradients settled; its row."""
    stats = service.until(lambda s: (row(s, actor)["acknowledged"] or 0) > above,
                          f"actor {actor} to get more than {above} acknowledged")
    return row(stats, actor)


def finish(service, client) -> dict:
    """SIGTERM and its counts: nothing that it saw was torn, or went back.  A client ends only when
    all that it pushed is settled, so `pushed` of them are."""
    client.signal(signal.SIGTERM)
    count = done(client)
    assert count["status"] == "closed" and (count["torn"], count["fallen"]) == (0, 0), count
    return count


def applied_once(service, clients: list) -> list:
    """End the clients: what they pushed is applied once and can be replayed.  Their counts."""
    counts = [finish(service, client) for client in clients]
    assert all(count["refused"] == 0 for count in counts), counts
    service.until(lambda s: s["optimizer"]["state"] == "alive", "the optimizer to report")
    service.ends_with(sum(count["pushed"] for count in counts))
    return counts


def test_killed_actor_is_not_noticed_by_the_others_and_comes_back_in_a_higher_epoch(service):
    service.up()
    first, *others = [opened(endless(service, i)) for i in range(3)]
    epoch = acknowledged(service, 0)["epoch"]
    kill(first)
    for i in (1, 2):
        acknowledged(service, i, acknowledged(service, i)["acknowledged"] + 100)
    again = opened(endless(service, 0))
    stats = service.until(lambda s: row(s, 0)["epoch"] != epoch
                          and (row(s, 0)["acknowledged"] or 0) > 100, "the new life to get on")
    assert row(stats, 0)["epoch"] > epoch
    for client in (again, *others):
        assert finish(service, client)["refused"] == 0


@pytest.mark.parametrize("fsync", ["never", "interval", "always"])
def test_killed_optimizer_resumes_from_its_last_decision_and_applies_all_once(service, fsync):
    words = ("--checkpoint-interval-s", "0", "--fsync", fsync)
    service.up(*words)
    clients = [opened(endless(service, i)) for i in range(2)]
    for i in range(2):
        acknowledged(service, i, 50)
    service.optimizer.signal(signal.SIGUSR1)
    wait_for(lambda: checkpoints(service.run)[-1] > 0, 20, "a checkpoint")
    saved = checkpoints(service.run)[-1]
    before = service.until(lambda s: s["optimizer"]["version"] > saved + 50, "more than is saved")
    kill(service.optimizer)
    service.start_optimizer("--resume", *words)
    after = service.stats()["optimizer"]
    assert (before["optimizer"]["term"], after["term"]) == (1, 2)
    assert after["start_version"] >= before["optimizer"]["version"] > saved
    assert after["lsn"] > before["optimizer"]["lsn"], "numbers of records go on"
    assert after["rolled_back"] == 0
    for i in range(2):
        acknowledged(service, i, row(service.stats(), i)["acknowledged"] + 100)
    counts = applied_once(service, clients)
    assert all(count["term"] == 2 for count in counts), counts


def test_optimizer_killed_again_and_again_applies_all_once(either):
    service = either
    service.up("--checkpoint-interval-s", "0")
    clients = [opened(endless(service, i)) for i in range(2)]
    for term in range(2, 6):
        for i in range(2):
            acknowledged(service, i, (row(service.stats(), i)["acknowledged"] or 0) + 20)
        kill(service.optimizer)
        service.start_optimizer("--resume", "--checkpoint-interval-s", "0")
        assert service.stats()["optimizer"]["term"] == term
    for i in range(2):
        acknowledged(service, i, row(service.stats(), i)["acknowledged"] + 20)
    applied_once(service, clients)


def test_without_a_journal_a_killed_optimizer_goes_back_to_the_newest_checkpoint(service):
    words = ("--checkpoint-interval-s", "0", "--journal", "off")
    service.up(*words)
    client = opened(endless(service, 0))
    acknowledged(service, 0, 50)
    service.optimizer.signal(signal.SIGUSR1)
    wait_for(lambda: checkpoints(service.run)[-1] > 0, 20, "a checkpoint")
    saved = checkpoints(service.run)[-1]
    before = service.until(lambda s: s["optimizer"]["version"] > saved + 50, "more than is saved")
    kill(service.optimizer)
    kill(client)
    service.start_optimizer("--resume", *words)
    after = service.stats()["optimizer"]
    assert after["start_version"] == saved, "it goes on from the newest checkpoint"
    # What the broker had been told of and the checkpoint does not have.
    assert after["rolled_back"] >= before["optimizer"]["version"] - saved > 0
    assert done(service.client(actor=0, count=50, seed=SEED))["refused"] == 0


def test_without_a_journal_an_actor_that_outlives_the_optimizer_begins_a_new_life(either):
    """The first time its epoch is not in the checkpoint; the second, its numbers are behind."""
    service = either
    words = ("--checkpoint-interval-s", "0", "--journal", "off")
    service.up(*words)
    done(service.client(actor=0, count=1, seed=SEED))  # with it comes the checkpoint of version 0
    client = opened(endless(service, 1))
    for saves in (False, True):
        epoch = acknowledged(service, 1, 50)["epoch"]
        if saves:
            service.optimizer.signal(signal.SIGUSR1)
            wait_for(lambda: checkpoints(service.run)[-1] > 0, 20, "a checkpoint")
            acknowledged(service, 1, row(service.stats(), 1)["acknowledged"] + 100)
        kill(service.optimizer)
        service.start_optimizer("--resume", *words)
        service.until(lambda s, epoch=epoch: (row(s, 1)["epoch"] or 0) > epoch
                      and row(s, 1)["acknowledged"] > 50, "the new life to get on", 30)
    count = finish(service, client)
    assert (count["rolled_back"], count["refused"], count["term"]) == (2, 0, 3), count
    assert 0 <= count["dropped"] <= 2 * 4, "at most a window each time"
    assert 0 <= count["pushed"] - count["acknowledged"] - count["dropped"] <= 4, count


def test_killed_broker_with_a_full_queue_costs_nothing_but_time(either):
    service = either
    # Lane inline: what has left the queue may arrive all the same, and of headers all would have.
    service.up("--checkpoint-interval-s", "0", "--lane", "inline")
    clients = [opened(endless(service, i, window=16, elements=20_000)) for i in range(3)]
    for i in range(3):
        acknowledged(service, i, 50)
    # A queue with something in it dies: the optimizer takes nothing while the broker ends.
    service.optimizer.signal(signal.SIGSTOP)
    service.until(lambda s: s["queue"]["bytes"] >= 10 * 4 * 20_000, "a queue to lose")
    kill(service.broker)
    service.start_broker()
    service.optimizer.signal(signal.SIGCONT)
    # Of the time after: this broker heard of the actors only since it came.
    for i in range(3):
        service.until(lambda s, i=i: any(a["id"] == i and (a["received"] or 0) > 100
                                         for a in s["actors"]), f"actor {i} to go on", 40)
    counts = applied_once(service, clients)
    assert all(count["term"] == 1 for count in counts), counts
    assert sum(count["resent"] for count in counts) >= 10, "what the queue held was sent again"


def test_second_process_with_an_actors_id_ends_the_first_and_nothing_is_applied_twice(either):
    service = either
    service.up("--checkpoint-interval-s", "0")
    first = opened(endless(service, 0))
    epoch = acknowledged(service, 0, 20)["epoch"]
    second = opened(endless(service, 0))
    assert first.wait() == 1, first.report()
    ended = events(first.stdout, "done")[0]
    assert ended["status"] == "fenced", ended
    service.until(lambda s: row(s, 0)["epoch"] > epoch and row(s, 0)["acknowledged"] > 100,
                  "the second one to get on")
    count = finish(service, second)
    # What the first one had on the way when the second came is applied or dropped.
    first_applied = service.last_applied() - count["pushed"]
    assert ended["acknowledged"] <= first_applied <= ended["pushed"], (ended, count)


def test_late_joiner_gets_the_last_version_at_once_from_the_broker(service):
    service.up()
    wire = service.wire(1000, actor=1)
    early = wire.subscribe()  # the broker keeps weights while it has a reader
    assert done(service.client(actor=0, count=50, seed=SEED))["version"] == 50
    wait_for(lambda: wire.next_weights(early)[0].version == 50, 20, "the last version")
    service.optimizer.signal(signal.SIGSTOP)  # so it cannot be the one who answers
    start_s = time.monotonic()
    frame, _ = wire.next_weights(wire.subscribe())
    took_s = time.monotonic() - start_s
    assert frame.version == 50
    # A joiner waits for at most 50 ms of bundling; without the kept version it waits for ever.
    assert took_s < 1 * SLOW, took_s
    service.optimizer.signal(signal.SIGCONT)


def test_second_broker_at_one_address_ends_with_a_sentence_and_disturbs_nothing(either):
    service = either
    service.up()
    client = opened(endless(service, 0))
    second = service.start("gradq-broker", "--address", service.address)
    assert second.wait() == 1
    assert service.address in second.stderr and "another" in second.stderr
    acknowledged(service, 0, (row(service.stats(), 0)["acknowledged"] or 0) + 50)
    applied_once(service, [client])


def test_second_optimizer_in_one_run_directory_ends_with_a_sentence(service):
    service.up()
    first, client = service.optimizer, opened(endless(service, 0))
    second = service.start_optimizer("--resume", wait=False)
    assert second.wait() == 1
    assert "another optimizer works in" in second.stderr
    assert first.running()
    acknowledged(service, 0, (row(service.stats(), 0)["acknowledged"] or 0) + 50)
    assert finish(service, client)["term"] == 1


def test_second_optimizer_of_another_run_is_sent_away_by_the_broker(service):
    service.up()
    first, client = service.optimizer, opened(endless(service, 0))
    second = service.start_optimizer(wait=False, run=service.directory / "other")
    assert second.wait() == 1
    assert "another optimizer" in second.stderr and "stop it first" in second.stderr
    assert first.running()
    acknowledged(service, 0, (row(service.stats(), 0)["acknowledged"] or 0) + 50)
    service.optimizer = first
    applied_once(service, [client])


def test_optimizer_does_not_start_over_a_run_without_resume(service):
    service.up()
    done(service.client(count=5, seed=SEED))
    assert service.optimizer.stop() == 0
    held = checkpoints(service.run)
    again = service.start_optimizer(wait=False)
    assert again.wait() == 78
    assert "--resume" in again.stderr
    assert checkpoints(service.run) == held
