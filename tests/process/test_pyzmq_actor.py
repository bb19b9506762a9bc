"""An actor written from docs/PROTOCOL.md alone works: tests/process/pyzmq_actor.py, as a program
that trains, and as a class whose gradients are spoiled one way each."""
import json
import signal
import sys
import time
from pathlib import Path

import numpy
import pytest
import pyzmq_actor
from pyzmq_actor import Actor, Fenced, Refused, bf16, crc32c, decode

import peer
from peer import checkpoint, kill
from peer import service, tcp_service  # noqa: F401

PROGRAM = Path(pyzmq_actor.__file__)
LAYOUT = [("weight", [1, 7]), ("bias", [1])]
RULES = {"sgd": ("--optimizer", "sgd", "--set", "lr=0.02"),
         "adam": ("--optimizer", "adam", "--set", "lr=0.02")}


@pytest.fixture(params=["ipc", "tcp"])
def either(request):
    return request.getfixturevalue({"ipc": "service", "tcp": "tcp_service"}[request.param])


def train(service, actors: int) -> list:  # noqa: F811
    """Run that many programs to the end, every other one with bf16; what they print."""
    programs = [service.start(sys.executable, PROGRAM, env={
        "GRADQ_ADDRESS": service.address, "GRADQ_ACTOR": str(i), "OPENBLAS_NUM_THREADS": "1",
        "GRADQ_ENCODING": ("f32", "bf16")[i % 2]})
        for i in range(actors)]
    for program in programs:
        assert program.wait(150) == 0, program.report()
    return [json.loads(program.stdout) for program in programs]


def opened(service, **settings) -> Actor:  # noqa: F811
    return Actor(service.address, LAYOUT, numpy.arange(8), **settings)


def test_bf16_of_the_page():
    numbers = numpy.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000, 0x7F800001, 0xFF800000,
                           0x80000000, 0x00018000], "<u4").view("<f4")
    assert numpy.frombuffer(bf16(numbers), "<u2").tolist() == [
        0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80, 0x8000, 0x0002]


def test_crc32c_of_the_page():
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("rule", RULES)
def test_two_actors_converge(either, rule):
    either.up(*RULES[rule])
    counts = train(either, 2)
    assert [each["actor"] for each in counts] == [0, 1]
    for each in counts:
        assert each["loss"] < 1e-4
        assert each["pushed"] == each["acknowledged"] >= 20
        assert each["refused"] == 0
    total = sum(each["pushed"] for each in counts)
    stats = either.until(lambda stats: stats["optimizer"]["applied"] == total, "the last report")
    assert [each["state"] for each in stats["actors"]] == ["gone", "gone"]
    assert [each["acknowledged"] for each in stats["actors"]] == [
        each["acknowledged"] for each in counts]

    # One that brings no model takes the run's, and the lowest id that nobody had.
    with Actor(either.address) as reader:
        assert (reader.actor, reader.parameters) == (2, 8)
        reader.latest()
        reader.until(lambda: reader.newest[0].version == total, 20, "the last version")
        weights = reader.latest()
        run = reader.run.hex()
    assert either.optimizer.stop() == 0
    tensors, meta = checkpoint(either.run, total)
    assert [(name, list(array.shape)) for name, array in tensors.items()][:2] == LAYOUT
    saved = numpy.concatenate([tensors[name].ravel() for name, _ in LAYOUT])
    assert saved.tobytes() == weights.tobytes()
    assert (meta["run"], meta["version"], meta["applied"]) == (run, str(total), str(total))
    assert f"version {total} weights" in either.replay("--verify")
    truth = numpy.random.default_rng(1).normal(size=8)
    assert numpy.abs(saved - truth).max() < 0.1


def test_under_max_staleness_0_a_single_actor_is_never_stale(service):  # noqa: F811
    service.up(*RULES["sgd"], "--max-staleness", "0")
    counts, = train(service, 1)
    assert counts["pushed"] == counts["acknowledged"] == counts["version"] > 0
    assert counts["refused"] == 0


def wrong_payload_byte(actor: Actor):
    """The next frame is damaged behind its header."""
    frame = actor.frame

    def damaged(*words, **fields):
        data = bytearray(frame(*words, **fields))
        data[-1] ^= 1
        assert decode(bytes(data)) == (None, b"")
        return bytes(data)
    actor.frame = damaged


SPOILED = {
    "nonfinite": lambda actor: numpy.array([1, 1, 1, 1, 1, 1, 1, numpy.nan]),
    "layout": lambda actor: setattr(actor, "digest", actor.digest ^ 1),
    "count": lambda actor: numpy.ones(9),
    "checksum": wrong_payload_byte,
}


@pytest.mark.parametrize("encoding", pyzmq_actor.ENCODINGS)
@pytest.mark.parametrize("reason", SPOILED)
def test_a_refusal_comes_back_with_its_reason(either, reason, encoding):
    either.up()  # sgd, learning rate 1
    with opened(either, encoding=encoding) as actor:
        assert actor.latest().tolist() == list(range(8)) and actor.version == 0
        assert actor.push(numpy.ones(8), 1) == 1
        actor.wait()
        assert (actor.acknowledged, actor.refused, actor.refused_reason) == (1, 0, None)

        digest, frame = actor.digest, actor.frame
        bad = SPOILED[reason](actor)
        assert actor.push(numpy.ones(8) if bad is None else bad, 1) == 2
        actor.wait()
        assert (actor.acknowledged, actor.refused) == (2, 1)
        assert (actor.refused_reason, actor.refused_sequence) == (reason, 2)
        actor.digest, actor.frame = digest, frame

        # The refused one changed nothing, and what follows is applied.
        assert actor.push(numpy.ones(8), 1) == 3
        actor.wait()
        actor.until(lambda: actor.newest[0].version == 2, 20, "version 2")
        assert actor.latest().tolist() == list(range(-2, 6))
        assert (actor.acknowledged, actor.refused) == (3, 1)


def test_a_gradient_of_older_weights_is_stale(service):  # noqa: F811
    service.up("--max-staleness", "0")
    with opened(service) as actor:
        actor.latest()
        for sequence in (1, 2):  # both from version 0
            assert actor.push(numpy.ones(8), 1) == sequence
        actor.wait()
        assert (actor.refused, actor.refused_sequence, actor.refused_reason) == (1, 2, "stale")


def test_another_model_is_refused_at_hello(either):
    either.up()
    with opened(either) as actor:
        actor.latest()
        with pytest.raises(Refused) as refused:
            Actor(either.address, [("weight", [7, 1]), ("bias", [1])], numpy.zeros(8))
        assert refused.value.word == "layout"
        assert "weight" in str(refused.value)


def test_a_repeated_hello_is_one_request_and_a_new_one_ends_the_life_before(service):  # noqa: F811
    service.up()
    with opened(service, actor=5) as first:
        first.latest()
        epoch = first.epoch
        first.push(numpy.ones(8), 1)
        first.wait()
        first.ask(first.request)  # the same nonce
        assert first.control.poll(20000)
        first.turn()
        assert (first.epoch, first.pushed, first.acknowledged) == (epoch, 1, 1)
        with opened(service, actor=5) as second:
            assert second.actor == 5 and second.epoch > epoch
            second.latest()
            second.push(numpy.ones(8), 1)
            second.wait()
            with pytest.raises(Fenced):
                first.until(lambda: False, 20, "to hear of it")
            with pytest.raises(Fenced):
                first.push(numpy.ones(8), 1)
            second.push(numpy.ones(8), 1)
            second.wait()
    service.until(lambda stats: stats["optimizer"]["applied"] == 3, "three applied")


def losing(actor: Actor, *lost: int) -> list:
    """Of what the actor sends from now on, those (counted from 1) are lost on the way; all sent."""
    put, sent = actor.gradients.send, []

    class Lossy:
        def send(self, frame, flags):
            sent.append(frame)
            if len(sent) not in lost:
                put(frame, flags)

    def lossy_put(frame, record):
        sockets, actor.gradients = actor.gradients, Lossy()
        try:
            Actor.put(actor, frame, record)
        finally:
            actor.gradients = sockets
    actor.put = lossy_put
    return sent


def test_a_lost_gradient_is_sent_again_the_same_and_the_one_after_it_is_settled_before(either):
    either.up()
    with opened(either) as actor:
        actor.latest()
        sent = losing(actor, 1)
        assert [actor.push(numpy.full(8, k), 1) for k in (1, 2)] == [1, 2]
        actor.until(lambda: actor.in_flight < 2, 20, "an acknowledgement of the second")
        assert (list(actor.on_the_way), actor.cumulative, actor.resent) == ([1], 0, 0)
        actor.wait()
        assert (actor.cumulative, actor.resent, actor.refused) == (2, 1, 0)
        assert len(sent) == 3 and sent[2] == sent[0] and sent[1] != sent[0]
        actor.until(lambda: actor.newest[0].version == 2, 20, "version 2")
        assert actor.latest().tolist() == list(range(-3, 5))


def test_a_gradient_that_is_lost_twice_is_sent_a_third_time_after_longer(service,  # noqa: F811
                                                                        monkeypatch):
    monkeypatch.setattr(pyzmq_actor, "RESEND_S", 0.2)
    service.up()
    with opened(service) as actor:
        actor.latest()
        sent = losing(actor, 1, 2)
        actor.push(numpy.ones(8), 1)
        record = actor.on_the_way[1]
        pauses = []
        while record.sends < 3:
            due, sends = record.due - time.monotonic(), record.sends
            pauses.append(due)
            actor.until(lambda n=sends: record.sends > n, 20, "another sending")
        actor.wait()
        assert actor.resent == 2 and sent[0] == sent[1] == sent[2]
        # 0.2 and 0.4 s, within a quarter: less by what passed before we looked.
        assert pauses[0] <= 0.25 and 0.2 < pauses[1] <= 0.5


def test_gradients_sent_again_without_need_are_duplicates(service, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pyzmq_actor, "RESEND_S", 0.02)
    monkeypatch.setattr(pyzmq_actor, "HEARD_S", 1000)
    service.up()
    with opened(service) as actor:
        actor.latest()
        service.optimizer.signal(signal.SIGSTOP)
        for _ in range(2):
            actor.push(numpy.ones(8), 1)
        actor.until(lambda: actor.resent >= 4, 20, "some to be sent again")
        service.optimizer.signal(signal.SIGCONT)
        actor.wait()
        resent = actor.resent
    stats = service.until(lambda stats: stats["optimizer"]["duplicates"] == resent, "all of them")
    assert (stats["optimizer"]["applied"], stats["optimizer"]["malformed"]) == (2, 0)


def test_nothing_is_sent_again_while_the_optimizer_is_away(service, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pyzmq_actor, "RESEND_S", 0.05)
    monkeypatch.setattr(pyzmq_actor, "HEARD_S", 1.5)
    service.up()
    with opened(service) as actor:
        actor.latest()
        kill(service.optimizer)
        actor.push(numpy.ones(8), 1)
        actor.until(lambda: time.monotonic() - actor.heard > pyzmq_actor.HEARD_S, 20, "silence")
        resent, until = actor.resent, time.monotonic() + 1
        actor.until(lambda: time.monotonic() > until, 20, "a second in which it would be due")
        assert actor.resent == resent and actor.in_flight == 1
        service.start_optimizer("--resume")
        actor.wait()
        actor.until(lambda: actor.newest[0].version == 1, 20, "its effect")
    service.until(lambda stats: stats["optimizer"]["applied"] == 1, "one applied")


def test_what_a_killed_broker_held_is_sent_again_and_applied_once(either, monkeypatch):
    elements = 1 << 15  # 128 KiB a frame: few fit between broker and optimizer, beside the queue
    monkeypatch.setattr(pyzmq_actor, "crc32c", peer.crc32c)
    either.up()
    with Actor(either.address, [("w", [elements])], numpy.zeros(elements), window=16) as actor:
        actor.latest()
        either.optimizer.signal(signal.SIGSTOP)
        for _ in range(16):
            actor.push(numpy.ones(elements), 1)
        either.until(lambda stats: stats["queue"]["bytes"] >= 8 * 4 * elements, "a queue to lose")
        kill(either.broker)
        either.start_broker()
        either.optimizer.signal(signal.SIGCONT)
        actor.wait()
        assert (actor.acknowledged, actor.refused) == (16, 0) and actor.resent >= 8
        actor.until(lambda: actor.newest[0].version == 16, 20, "version 16")
        assert (actor.latest() == -16).all()
    either.ends_with(16)


def test_an_actor_goes_on_after_a_kill_of_the_optimizer_where_it_was(either):
    either.up("--checkpoint-interval-s", "0")
    with opened(either) as actor:
        actor.latest()
        epoch = actor.epoch
        actor.push(numpy.ones(8), 1)
        actor.wait()
        kill(either.optimizer)
        assert actor.push(numpy.ones(8), 1) == 2
        either.start_optimizer("--resume", "--checkpoint-interval-s", "0")
        actor.until(lambda: actor.newest[0].term == 2, 20, "the next life's weights")
        actor.wait()
        actor.until(lambda: actor.newest[0].version == 2, 20, "version 2")
        assert actor.latest().tolist() == list(range(-2, 6))
        assert (actor.epoch, actor.acknowledged, actor.refused) == (epoch, 2, 0)
        actor.ask(actor.request)  # the grant is journaled: the same nonce gets the same epoch
        assert actor.control.poll(20000)
        actor.turn()
        assert (actor.epoch, actor.pushed) == (epoch, 2)
    either.ends_with(2)


@pytest.mark.parametrize("lost", ["epoch", "numbers"])
def test_an_actor_whose_past_the_optimizer_lost_begins_a_new_life(service, lost):  # noqa: F811
    words = ("--checkpoint-interval-s", "0", "--journal", "off")
    service.up(*words)
    with opened(service) as first:  # version 0 is saved with this grant, and none after it
        first.latest()
        with opened(service) as other:
            actor = other if lost == "epoch" else first
            actor.latest()
            actor.push(numpy.ones(8), 1)
            actor.wait()
            epoch = actor.epoch
            kill(service.optimizer)
            if lost == "epoch":  # whose gradients nobody takes, so this one is dropped
                assert actor.push(numpy.ones(8), 1) == 2
            service.start_optimizer("--resume", *words)
            actor.until(lambda: actor.epoch > epoch, 30, "a new epoch")
            assert actor.in_flight == 0 and not actor.fenced
            # The broker may still remember those of the life before.
            actor.until(lambda: actor.newest and actor.newest[0].term == 2, 20, "weights")
            assert actor.latest().tolist() == list(range(8)), "the steps are lost"
            assert actor.push(numpy.ones(8), 1) == 1
            actor.wait()
            assert (actor.acknowledged, actor.refused) == (1, 0)
    service.until(lambda stats: stats["optimizer"]["applied"] == 1, "one applied")


@pytest.mark.parametrize("weights", ["with", "without"])
def test_an_actor_joins_the_run_that_replaces_its_own(service, monkeypatch, weights):  # noqa: F811
    """A new run with weights is heard at once; one without says nothing, and waits for those of an
    actor, which must ask by itself."""
    monkeypatch.setattr(pyzmq_actor, "SILENCE_S", 1000 if weights == "with" else 0.5)
    service.up()
    with opened(service) as actor:
        actor.latest()
        run = actor.run
        assert service.optimizer.stop() == 0
        path, = (service.run / "checkpoints").glob("*.safetensors")
        init = ("--init", path) if weights == "with" else ()
        service.start_optimizer(*init, run=service.directory / "next")
        actor.until(lambda: actor.run != run, 20, "the new run")
        assert actor.push(numpy.ones(8), 1) == 0, "a gradient of the old run"
        assert actor.latest().tolist() == list(range(8))
        assert actor.push(numpy.ones(8), 1) == 1
        actor.wait()
        assert (actor.acknowledged, actor.refused) == (1, 0)


def test_push_never_blocks_in_send(service, monkeypatch):  # noqa: F811
    """The broker stands still until the socket takes no more: push says so in time, weights and
    acknowledgements are still read, and afterwards everything arrives."""
    elements = 1 << 16  # 256 KiB a frame: few fit into the buffers on the way
    monkeypatch.setattr(pyzmq_actor, "crc32c", peer.crc32c)
    service.up()
    with Actor(service.address, [("w", [elements])], numpy.zeros(elements), window=64) as actor:
        actor.latest()
        service.broker.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            for _ in range(64):
                actor.push(numpy.ones(elements), 1, timeout=0.5)
        assert 0 < actor.pushed < 64 and actor.outbox
        service.broker.signal(signal.SIGCONT)
        actor.wait()
        assert (actor.acknowledged, actor.refused) == (actor.pushed, 0)
