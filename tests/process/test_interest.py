"""Weights travel only while somebody subscribes to them, whoever is killed or restarted meanwhile;
who subscribes first gets the newest version at once."""
import struct

import numpy
import pytest
import zmq

from conftest import wait_for
from peer import MAGIC, PROTOCOL, WEIGHTS, kill, opened
from peer import service, tcp_service  # noqa: F401

# A version goes out only on a first subscription: the time of the next one is after the test.
RARELY = ("--publish-interval-ms", "60000")


@pytest.fixture(params=["ipc", "tcp"])
def either(request):
    return request.getfixturevalue("service" if request.param == "ipc" else "tcp_service")


def step(service, wire) -> dict:
    """One version more; the first stats of the optimizer that count it."""
    wire.push(numpy.ones(wire.elements))
    version = wire.settled().version
    return service.until(lambda s: (s["optimizer"]["version"] or 0) >= version,
                         f"a report of version {version}")["optimizer"]


def quiet(service, wire):
    """Wait until no version is sent, neither a new one nor, after a second, an old one again."""
    def unchanged():
        before = step(service, wire)["published"]
        return step(service, wire)["published"] == before
    wait_for(unchanged, 20, "weights to stop")


def newest(wire, socket, version: int, term: int = 1):
    """Read until that version is here."""
    def read():
        frame, vector = wire.next_weights(socket)
        assert (frame.term, frame.version) <= (term, version)
        return (frame.term, frame.version) == (term, version) and (vector == -version).all()
    wait_for(read, 10, f"version {version} of term {term}")


def test_nothing_is_published_to_nobody_and_the_first_one_gets_the_newest_at_once(either):
    service = either
    service.up(*RARELY)
    wire = service.wire()
    for version in range(1, 4):
        assert step(service, wire)["published"] == 0
    assert service.stats()["relay"]["weights"] == 0
    socket = wire.subscribe()
    frame, vector = wire.next_weights(socket)
    assert frame.version == version and (vector == -version).all()
    socket.close()
    quiet(service, wire)
    # After a pause: not what the broker had before it.
    version = service.stats()["optimizer"]["version"]
    frame, vector = wire.next_weights(wire.subscribe())
    assert frame.version == version and (vector == -version).all()


def test_a_subscriber_that_is_killed_ends_the_traffic(either):
    service = either
    service.up("--lane", "inline")
    client = opened(service.client(actor=0, elements=8, pause=1))
    wire = service.wire(actor=1)
    before = step(service, wire)["published"]
    assert step(service, wire)["published"] > before
    kill(client)
    quiet(service, wire)


def test_a_subscriber_that_subscribes_twice_counts_once(service):
    service.up()
    wire, other = service.wire(actor=0), service.wire(actor=1)
    socket = other.subscribe()
    other.next_weights(socket)
    socket.setsockopt(zmq.SUBSCRIBE, struct.pack("<IHH", MAGIC, PROTOCOL, WEIGHTS))
    step(service, wire)
    other.close()
    quiet(service, wire)


def test_a_restarted_broker_asks_for_weights_only_when_its_readers_do(either):
    service = either
    service.up()
    wire = service.wire()
    socket = wire.subscribe()
    newest(wire, socket, 0)
    socket.close()
    quiet(service, wire)
    published = step(service, wire)["published"]
    kill(service.broker)
    service.start_broker()
    assert step(service, wire)["published"] == published
    # With a reader, whose socket finds the broker again.
    socket = wire.subscribe()
    newest(wire, socket, wire.sequence)
    kill(service.broker)
    service.start_broker()
    step(service, wire)
    newest(wire, socket, wire.sequence)


def test_weights_that_nobody_reads_stop_when_the_broker_dies_with_its_readers(service):
    service.up()
    wire, reader = service.wire(actor=0), service.wire(actor=1)
    socket = reader.subscribe()
    newest(reader, socket, 0)
    kill(service.broker)
    reader.close()
    service.start_broker()
    quiet(service, wire)


def test_a_restarted_optimizer_publishes_only_when_the_broker_has_readers(either):
    service = either
    service.up()
    wire = service.wire()
    assert step(service, wire)["published"] == 0
    kill(service.optimizer)
    service.start_optimizer("--resume")
    assert step(service, wire)["published"] == 0
    socket = wire.subscribe()
    newest(wire, socket, 2, 2)
    kill(service.optimizer)
    service.start_optimizer("--resume")
    newest(wire, socket, 2, 3)
    step(service, wire)
    newest(wire, socket, 3, 3)


def test_the_broker_repeats_the_last_version_of_an_optimizer_that_left_while_it_has_a_reader(
        service):
    service.up()
    wire = service.wire()
    socket = wire.subscribe()
    step(service, wire)
    newest(wire, socket, 1)
    assert service.optimizer.stop() == 0
    late = wire.subscribe()
    newest(wire, late, 1)
    socket.close()
    late.close()
    # Now nobody was subscribed, and nobody keeps it: it comes back with the optimizer.
    service.until(lambda s: s["optimizer"]["state"] == "gone", "the bye")
    late = wire.subscribe()
    service.start_optimizer("--resume")
    newest(wire, late, 1, 2)
