"""kill -9 of each process in turn, and two of a kind at one address: the others go on, the
restarted one continues, and what was in flight is counted where it was lost."""
import os
import random
import signal
import time

import pytest

from conftest import SLOW, wait_for
from peer import checkpoints, done, kill, opened
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
    """SIGTERM and its counts: nothing that it saw was torn, or went back."""
    client.signal(signal.SIGTERM)
    count = done(client)
    assert count["status"] == "closed" and (count["torn"], count["fallen"]) == (0, 0), count
    return count


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
        count = finish(service, client)
        assert (count["lost"], count["refused"]) == (0, 0), count


def test_killed_optimizer_resumes_from_the_newest_checkpoint_in_a_higher_term(either):
    service = either
    service.up("--checkpoint-interval-s", "0")
    clients = [opened(endless(service, i, ack_timeout_ms=1000)) for i in range(2)]
    for i in range(2):
        acknowledged(service, i, 50)
    service.optimizer.signal(signal.SIGUSR1)
    wait_for(lambda: checkpoints(service.run)[-1] > 0, 20, "a checkpoint")
    saved = checkpoints(service.run)[-1]
    before = service.until(lambda s: s["optimizer"]["version"] > saved + 50, "more than is saved")
    kill(service.optimizer)
    service.start_optimizer("--resume", "--checkpoint-interval-s", "0")
    after = service.stats()["optimizer"]
    assert (before["optimizer"]["term"], after["term"]) == (1, 2)
    assert after["start_version"] == saved, "it goes on from the newest checkpoint"
    # What the broker had been told of and the checkpoint does not have.
    assert after["rolled_back"] >= before["optimizer"]["version"] - saved > 0
    for i in range(2):
        acknowledged(service, i, row(service.stats(), i)["acknowledged"] + 100)
    for client in clients:
        count = finish(service, client)
        assert count["term"] == 2 and count["refused"] == 0, count


def test_killed_broker_comes_back_at_its_address_and_every_loss_is_counted(either):
    service = either
    service.up("--checkpoint-interval-s", "0")
    clients = [opened(endless(service, i, ack_timeout_ms=1000, window=16, elements=20_000))
               for i in range(3)]
    for i in range(3):
        acknowledged(service, i, 50)
    # A queue with something in it dies: the optimizer takes nothing while the broker ends.
    service.optimizer.signal(signal.SIGSTOP)
    service.until(lambda s: s["queue"]["depth"] >= 10, "a queue to lose")
    kill(service.broker)
    service.start_broker()
    service.optimizer.signal(signal.SIGCONT)
    # Of the time after: this broker heard of the actors only since it came.
    for i in range(3):
        service.until(lambda s, i=i: any(a["id"] == i and (a["received"] or 0) > 100
                                         for a in s["actors"]), f"actor {i} to go on", 40)
    counts = [finish(service, client) for client in clients]
    assert all(count["term"] == 1 and count["refused"] == 0 for count in counts), counts
    pushed = sum(count["pushed"] for count in counts)
    service.until(lambda s: s["optimizer"]["state"] == "alive", "the optimizer to report again")
    stats = service.until(lambda s: s["queue"]["depth"] == 0 and
                          s["optimizer"]["applied"] + s["optimizer"]["lost"] == pushed,
                          f"all {pushed} to be applied or counted as lost", 10)["optimizer"]
    assert stats["lost"] > 0 and stats["rejected"] == 0


def test_late_joiner_gets_the_last_version_at_once_from_the_broker(service):
    service.up()
    wire = service.wire(1000, actor=1)
    assert done(service.client(actor=0, count=50, seed=SEED))["version"] == 50
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
    assert finish(service, client)["lost"] == 0


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
    count = finish(service, client)
    assert (count["refused"], count["lost"]) == (0, 0)


def test_optimizer_does_not_start_over_a_run_without_resume(service):
    service.up()
    done(service.client(count=5, seed=SEED))
    assert service.optimizer.stop() == 0
    held = checkpoints(service.run)
    again = service.start_optimizer(wait=False)
    assert again.wait() == 78
    assert "--resume" in again.stderr
    assert checkpoints(service.run) == held
