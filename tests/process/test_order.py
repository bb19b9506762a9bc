"""One order, and never torn: every version that anybody sees is a whole one, and the weights are
the float32 sum of the gradients in the order in which the optimizer says that it applied them.

Eight clients push vectors whose elements are all one value, so a version that mixes two steps, or
that is written while it is read, has unequal elements.  sgd with lr 1 computes w - g.
"""
import os
import random
import threading
import time

import numpy
import zmq

from conftest import SANITIZED, wait_for
from peer import HEADER_BYTES, WEIGHTS, checkpoint, decode, done, events, value
from peer import service  # noqa: F401

CLIENTS = 8
ELEMENTS = 100_000
# A tenth under a sanitizer: the claim is the same and each gradient costs ten times as much.
GRADIENTS = 1_000 if SANITIZED else 10_000
SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))


class Subscriber(threading.Thread):
    """Reads publications until told to end, and checks each; the first fault is kept."""

    def __init__(self, wire, **options):
        super().__init__(daemon=True)
        self.socket = wire.subscribe(**options)
        self.over, self.fault = threading.Event(), None
        self.seen = []  # (term, version)
        self.values = []

    def run(self):
        while not (self.over.is_set() or self.fault):
            if self.socket.poll(50):
                try:
                    self.check(self.socket.recv(copy=False).buffer)
                except AssertionError as error:
                    self.fault = error

    def check(self, data):
        vector = numpy.frombuffer(data, "<f4", offset=HEADER_BYTES)
        head = decode(data)
        assert head.kind == WEIGHTS and head.count == ELEMENTS
        different = numpy.count_nonzero(vector != vector[0])
        assert different == 0, (f"torn: version {head.version} has {different} elements that "
                                 f"differ from its first")
        assert head.applied == head.version, "K = 1: every step is one gradient"
        # The last one is sent again each second, and to those who join.
        assert not self.seen or (head.term, head.version) >= self.seen[-1], "versions fall"
        self.seen.append((head.term, head.version))
        self.values.append(vector[0])

    def end(self):
        self.over.set()
        self.join(30)
        assert not self.is_alive()


def check_log(applied: list, total: int) -> list:
    """Each gradient once, each step one version; (actor, sequence) in order."""
    versions = [line["version"] for line in applied]
    assert versions == list(range(1, total + 1)), "versions rise by one per gradient applied"
    order = [(line["actor"], line["sequence"]) for line in applied]
    each = total // CLIENTS
    assert sorted(order) == [(actor, sequence) for actor in range(CLIENTS)
                             for sequence in range(1, each + 1)], "each applied exactly once"
    return order


def test_every_version_is_whole_and_the_weights_are_the_sum_in_the_order_applied(service):
    print(f"SEED={SEED}")
    service.up("--log-level", "debug", "--checkpoint-interval-s", "0")
    wire = service.wire(ELEMENTS, actor=CLIENTS)  # the id above the clients'
    subscribers = [Subscriber(wire), Subscriber(wire), Subscriber(wire, CONFLATE=1)]
    for subscriber in subscribers:
        subscriber.start()
    start_s = time.monotonic()
    each = GRADIENTS // CLIENTS
    clients = [service.client(actor=i, elements=ELEMENTS, count=each, seed=SEED + i, window=4)
               for i in range(CLIENTS)]
    counts = [done(client, 120) for client in clients]
    print(f"{GRADIENTS / (time.monotonic() - start_s):.0f} gradients/s")

    for count in counts:
        assert (count["torn"], count["fallen"]) == (0, 0), count
        assert count["pushed"] == count["acknowledged"] == each, count
        assert count["refused"] == 0, count
    total = each * CLIENTS
    for subscriber in subscribers:
        wait_for(lambda s=subscriber: s.fault or s.seen and s.seen[-1][1] == total, 20,
                 "the last version")
        subscriber.end()
        print(f"a subscriber saw {len(set(subscriber.seen))} of {total} versions")
        assert subscriber.fault is None, subscriber.fault
    assert service.optimizer.stop() == 0

    order = check_log(events(service.optimizer.stderr, "applied"), total)
    gradients = [value(SEED + actor, numpy.arange(1, each + 1)) for actor in range(CLIENTS)]
    weight = numpy.float32(0)
    weights = [weight]
    for actor, sequence in order:
        weight = numpy.float32(weight - gradients[actor][sequence - 1])
        weights.append(weight)
    for subscriber in subscribers:
        expected = numpy.array(weights, numpy.float32)[[v for _, v in subscriber.seen]]
        assert numpy.array_equal(numpy.array(subscriber.values, numpy.float32).view(numpy.uint32),
                                 expected.view(numpy.uint32)), "a version holds another sum"
    final = checkpoint(service.run, total)[0]["w"]
    assert numpy.all(final.view(numpy.uint32) == weight.view(numpy.uint32)), (final, weight)
    # The test must be able to see an order: another one gives other bits.
    other = numpy.float32(0)
    for actor, sequence in sorted(order):
        other = numpy.float32(other - gradients[actor][sequence - 1])
    assert other != weight
