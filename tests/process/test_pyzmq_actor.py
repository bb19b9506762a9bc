"""An actor written from docs/PROTOCOL.md alone works: tests/process/pyzmq_actor.py, as a program
that trains, and as a class whose gradients are spoiled one way each."""
import json
import signal
import sys
from pathlib import Path

import numpy
import pytest
import pyzmq_actor
from pyzmq_actor import Actor, Refused, crc32c, decode

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
    """Run that many programs to the end; what they print."""
    programs = [service.start(sys.executable, PROGRAM, env={
        "GRADQ_ADDRESS": service.address, "GRADQ_ACTOR": str(i), "OPENBLAS_NUM_THREADS": "1"})
        for i in range(actors)]
    for program in programs:
        assert program.wait(150) == 0, program.report()
    return [json.loads(program.stdout) for program in programs]


def opened(service, **settings) -> Actor:  # noqa: F811
    return Actor(service.address, LAYOUT, numpy.arange(8), **settings)


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
        assert each["refused"] == each["lost"] == 0
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


@pytest.mark.parametrize("reason", SPOILED)
def test_a_refusal_comes_back_with_its_reason(either, reason):
    either.up()  # sgd, learning rate 1
    with opened(either) as actor:
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
        assert (actor.acknowledged, actor.refused, actor.lost) == (3, 1, 0)


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
            first.push(numpy.ones(8), 1)  # nobody answers this one
            first.until(lambda: not first.outbox, 20, "its last frame to leave")
            second.push(numpy.ones(8), 1)
            second.wait()
        assert first.in_flight == 1
    service.until(lambda stats: stats["optimizer"]["applied"] == 3, "three applied")


def test_a_lost_number_is_given_up_and_counted(service, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pyzmq_actor, "GIVE_UP_S", 0.3)
    service.up()
    with opened(service) as actor:
        actor.latest()
        actor.pushed += 1  # as if its frame had gone down with a broker
        actor.wait()
        assert (actor.acknowledged, actor.lost) == (0, 1)
        assert actor.push(numpy.ones(8), 1) == 2
        actor.until(lambda: actor.acknowledged == 2, 20, "the number after it")
    service.until(lambda stats: stats["optimizer"]["lost"] == 1, "the optimizer to count it")


def test_an_actor_goes_on_after_a_restart_of_the_optimizer(service):  # noqa: F811
    service.up("--checkpoint-interval-s", "0")
    with opened(service) as actor:
        actor.latest()
        epoch = actor.epoch
        actor.push(numpy.ones(8), 1)
        actor.wait()
        kill(service.optimizer)
        service.start_optimizer("--resume", "--checkpoint-interval-s", "0")
        actor.until(lambda: actor.newest[0].term == 2, 20, "the next life's weights")
        assert actor.latest().tolist() == list(range(8)), "back at the last checkpoint"
        assert actor.push(numpy.ones(8), 1) == 2
        actor.until(lambda: actor.acknowledged == 2, 20, "an acknowledgement")
        assert (actor.epoch, actor.lost, actor.refused) == (epoch, 0, 0)


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
        assert (actor.acknowledged, actor.refused, actor.lost) == (actor.pushed, 0, 0)
