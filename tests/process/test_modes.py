"""--aggregate and --max-staleness make every mode, checkpoints are the weights that were published,
and another rule takes weights over.  Numbers come from the formulas, not from earlier runs."""
import os
import random
import signal

import numpy
import pytest

from conftest import wait_for
from peer import checkpoint, checkpoints, done, events, kill, read_safetensors
from peer import service  # noqa: F401

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))


def vectors(count: int, elements: int = 8) -> list:
    print(f"SEED={SEED}")
    generator = numpy.random.default_rng(SEED)
    return [generator.uniform(-1, 1, elements).astype(numpy.float32) for _ in range(count)]


def newest(wire, socket, version: int) -> numpy.ndarray:
    """The weights of that version, from a subscriber that keeps them all."""
    while True:
        frame, vector = wire.next_weights(socket)
        assert frame.version <= version
        if frame.version == version:
            return vector


def test_synchronous_each_step_is_one_gradient_of_each_of_four_actors(service):
    service.up("--optimizer", "adam", "--aggregate", 4, "--max-staleness", 0, "--log-level",
               "debug")
    # 20 rollouts of 20 steps each.
    actors = [service.actor("--actor", i, "--seed", SEED, "--rollout", 20, "--max-steps", 400)
              for i in range(4)]
    for actor in actors:
        assert actor.wait(60) == 0, actor.report()
    assert service.optimizer.stop() == 0
    log = service.optimizer.stderr
    steps = events(log, "applied")
    assert [line["version"] for line in steps] == list(range(1, 21))
    takers = {version: [] for version in range(20)}
    for line in events(log, "applied") + events(log, "held"):
        # A held gradient is logged with the version before its step, the last one with its own.
        takers[line["version"] - (line["event"] == "applied")].append(line["actor"])
        assert line["from_version"] == line["version"] - (line["event"] == "applied")
    assert all(sorted(each) == [0, 1, 2, 3] for each in takers.values()), takers
    assert not events(log, "refused")


def test_backup_worker_too_late_for_a_step_is_refused_as_stale(service):
    service.up("--aggregate", 2, "--max-staleness", 0)
    wires = [service.wire(actor=i) for i in range(3)]
    socket = wires[0].subscribe()
    gradients = vectors(3)
    for i in range(2):
        wires[i].push(gradients[i], version=0)
        if i == 0:
            service.until(lambda s: s["queue"]["delivered"] >= 2, "the first one to be in")
    assert wires[0].settled().version == wires[1].settled().version == 1
    wires[2].push(gradients[2], version=0)
    ack = wires[2].settled()
    assert (ack.refused, ack.refused_sequence, ack.refused_reason) == (1, 1, "stale")
    # The mean of two: sum in float32, then scaled by 1/2, exactly.
    assert numpy.array_equal(newest(wires[0], socket, 1),
                             -((gradients[0] + gradients[1]) * numpy.float32(0.5)))
    wires[2].push(gradients[2], version=1)
    wires[0].push(gradients[0], version=1)
    assert wires[2].settled().version == wires[0].settled().version == 2
    service.until(lambda s: (s["optimizer"]["version"], s["optimizer"]["applied"]) == (2, 4)
                  and s["optimizer"]["rejected_by"] == {"stale": 1}, "the counts")


@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_aggregate_is_the_mean_with_equal_weights_or_by_samples(service, weights):
    service.up("--aggregate", 3, "--aggregate-weights", weights)
    wires = [service.wire(actor=i) for i in range(3)]
    socket = wires[0].subscribe()
    gradients, samples = vectors(3), [3, 5, 20]
    for i, wire in enumerate(wires):
        wire.push(gradients[i], samples=samples[i])
    for wire in wires:
        assert wire.settled().version == 1
    by = samples if weights == "samples" else [1, 1, 1]
    mean = sum(k * g.astype(numpy.float64) for k, g in zip(by, gradients)) / sum(by)
    # Against a float64 twin: three products and sums and one scaling in float32.
    numpy.testing.assert_allclose(newest(wires[0], socket, 1), -mean, rtol=0, atol=5 * 2**-24)


def test_bounded_staleness_takes_up_to_the_bound_and_refuses_beyond_it(service):
    service.up("--max-staleness", 2)
    wire = service.wire()
    for staleness in range(3):
        wire.push(version=0)
        ack = wire.settled()
        assert (ack.version, ack.refused) == (staleness + 1, 0), ack
    wire.push(version=0)
    ack = wire.settled()
    assert (ack.version, ack.refused, ack.refused_reason) == (3, 1, "stale")
    wire.push(version=3)
    ack = wire.settled()
    assert (ack.version, ack.refused) == (4, 1)
    stats = service.until(lambda s: s["optimizer"]["rejected"] == 1, "the count")["optimizer"]
    assert (stats["applied"], stats["staleness_max"]) == (4, 2)


def test_damp_scales_by_mean_staleness_over_staleness_and_refuses_none(service):
    service.up("--max-staleness", 1, "--staleness-policy", "damp")
    wire = service.wire()
    socket = wire.subscribe()
    expected, total = 0.0, 0
    ones = numpy.ones(wire.elements, numpy.float32)
    for staleness in range(20):
        wire.push(ones, version=0)
        ack = wire.settled()
        assert (ack.version, ack.refused) == (staleness + 1, 0)
        total += staleness
        mean = total / (staleness + 1)  # over all so far, this one included
        expected -= min(1.0, mean / staleness) if staleness else 1.0
    vector = newest(wire, socket, 20)
    assert (vector == vector[0]).all()
    # 20 float32 additions, each of which rounds once (2^-24 relative), against float64.
    assert vector[0] == pytest.approx(expected, rel=20 * 2**-24)
    assert service.until(lambda s: s["optimizer"]["applied"] == 20, "20")["optimizer"][
        "rejected"] == 0


def test_sigusr1_writes_a_checkpoint_of_the_current_version(service):
    service.up("--checkpoint-interval-s", 0)
    wire = service.wire()
    socket = wire.subscribe()
    wire.push(vectors(1)[0])
    assert wire.settled().version == 1
    assert checkpoints(service.run) == [0]  # of the first weights
    service.optimizer.signal(signal.SIGUSR1)
    wait_for(lambda: checkpoints(service.run) == [0, 1], 20, "a checkpoint of version 1")
    tensors, meta = checkpoint(service.run, 1)
    assert numpy.array_equal(tensors["w"], newest(wire, socket, 1))
    assert (meta["version"], meta["applied"], meta["optimizer"]) == ("1", "1", "sgd")
    service.alive()


def test_sigterm_leaves_a_checkpoint_of_the_last_version_published(service):
    service.up("--checkpoint-interval-s", 0)
    wire = service.wire()
    socket = wire.subscribe()
    gradients = vectors(7)
    for gradient in gradients:
        wire.push(gradient)
    assert wire.settled().version == 7
    published = newest(wire, socket, 7)
    assert service.optimizer.stop() == 0
    assert checkpoints(service.run)[-1] == 7
    assert numpy.array_equal(checkpoint(service.run, 7)[0]["w"], published)
    weights = numpy.zeros(wire.elements, numpy.float32)
    for gradient in gradients:
        weights = weights - gradient
    assert numpy.array_equal(published, weights)


def test_another_rule_takes_the_weights_over_on_resume(service):
    service.up("--optimizer", "adam", "--checkpoint-interval-s", 0)
    done(service.client(actor=0, count=20, seed=SEED))
    assert service.optimizer.stop() == 0
    tensors, meta = checkpoint(service.run, 20)
    assert meta["optimizer"] == "adam" and {"w", "exp_avg.w", "exp_avg_sq.w"} <= set(tensors)

    service.start_optimizer("--optimizer", "rmsprop", "--resume", "--checkpoint-interval-s", 0)
    assert "takes over the weights" in service.optimizer.stderr
    wire = service.wire(1000, actor=1)
    socket = wire.subscribe()
    frame, vector = wire.next_weights(socket)
    while frame.term == 1:  # the broker still had the last one of the life before
        frame, vector = wire.next_weights(socket)
    assert (frame.version, frame.term) == (20, 2)
    assert numpy.array_equal(vector, tensors["w"])
    wire.push(numpy.ones(1000))
    assert wire.settled().version == 21
    assert (newest(wire, socket, 21) < vector).all()
    assert service.optimizer.stop() == 0
    assert checkpoint(service.run, 21)[1]["optimizer"] == "rmsprop"


def test_the_same_rule_resumes_as_if_it_had_never_stopped(service):
    """Moments too: 10 + 10 gradients with a stop between are the 20 without."""
    gradients = vectors(20)
    results = []
    for stops in ((20,), (10, 20)):
        run = service.directory / f"run-{len(stops)}"
        service.start_broker()
        done_so_far = 0
        for stop in stops:
            service.start_optimizer("--optimizer", "adam", "--resume", run=run)
            wire = service.wire(actor=0)
            for gradient in gradients[done_so_far:stop]:
                wire.push(gradient)
            assert wire.settled().refused == 0
            assert service.optimizer.stop() == 0
            done_so_far = stop
        assert service.broker.stop() == 0
        service.run = run
        results.append(checkpoint(run, 20)[0])
    for name, array in results[0].items():
        assert numpy.array_equal(array, results[1][name]), name


def test_resume_passes_over_a_damaged_newest_checkpoint_and_replays_the_journal(service):
    service.up("--checkpoint-interval-s", 0)
    done(service.client(actor=0, count=3, seed=SEED))
    assert service.optimizer.stop() == 0
    path = service.run / "checkpoints/checkpoint-000000000003.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    service.start_optimizer("--resume")
    assert service.stats()["optimizer"]["start_version"] == 3
    assert "damaged" in service.optimizer.stderr
    # Asked for, so it is written although the version is the same.
    service.optimizer.signal(signal.SIGUSR1)
    wait_for(lambda: path.read_bytes() != sound[:-1] + bytes([sound[-1] ^ 1])
             and checkpoint(service.run, 3)[1]["term"] == "2", 20, "a sound one in its place")
    path.with_name("before").write_bytes(sound)
    assert numpy.array_equal(read_safetensors(path.with_name("before"))[0]["w"],
                             checkpoint(service.run, 3)[0]["w"])
    service.alive()


def test_every_version_of_a_kept_journal_can_be_reproduced(service):
    service.up("--optimizer", "adam", "--journal", "keep", "--checkpoints-kept", 100,
               "--checkpoint-interval-s", 0)
    wire = service.wire()
    socket = wire.subscribe()
    published = []
    for version, gradient in enumerate(vectors(6), 1):
        wire.push(gradient)
        assert wire.settled().version == version
        published.append(newest(wire, socket, version))
    assert service.optimizer.stop() == 0
    out = service.directory / "out.safetensors"
    for version, vector in enumerate(published, 1):
        assert f"version {version} weights" in service.replay("--until", str(version), "--out", out)
        assert numpy.array_equal(read_safetensors(out)[0]["w"], vector)


def test_a_gradient_that_comes_late_and_waits_for_its_step_lets_its_actor_go_on(service):
    """Number 1 is lost; it comes when its actor, the only one, has given out all that it may
    without it.  It is said to have come, and that its step waits, however often it comes again."""
    service.up("--aggregate", 3)
    wire = service.wire()
    gradients = dict(enumerate(vectors(66), 1))
    for sequence in range(2, 65):
        wire.push(gradients[sequence], sequence=sequence)
    all_but_the_first = 2 ** 64 - 2
    ack = wire.until_acknowledged(lambda ack: ack.beyond == all_but_the_first)
    assert (ack.cumulative, ack.held, ack.version) == (0, 0, 21)
    wire.push(gradients[1], sequence=1)
    ack = wire.until_acknowledged(lambda ack: ack.held == 64)
    assert (ack.cumulative, ack.beyond, ack.version) == (0, all_but_the_first, 21)

    def warned():
        wire.push(gradients[1], sequence=1)
        return "a step waits for gradients" in service.optimizer.stderr
    wait_for(warned, 30, "the optimizer to say that a step waits")
    for sequence in (65, 66):
        wire.push(gradients[sequence], sequence=sequence)
    assert wire.settled(66).version == 22
    assert service.stats()["optimizer"]["duplicates"] > 0


@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_a_step_that_was_half_aggregated_survives_a_kill(service, weights):
    """Three gradients a step; killed with two of them in hand, which nobody has acknowledged."""
    words = ("--aggregate", 3, "--aggregate-weights", weights, "--checkpoint-interval-s", 0)
    service.up(*words)
    wires = [service.wire(actor=i) for i in range(3)]
    gradients, samples = vectors(3), [3, 5, 20]
    for wire, gradient, count in zip(wires[:2], gradients, samples):
        wire.push(gradient, samples=count)
        service.until(lambda s, n=count: s["optimizer"]["lsn"] >= 4 + samples.index(n) + 1,
                      "a term, three grants and it in the journal")
    kill(service.optimizer)
    service.start_optimizer("--resume", *words)
    socket = wires[0].subscribe()
    wires[2].push(gradients[2], samples=samples[2])
    for wire in wires:
        assert wire.settled().version == 1
    by = samples if weights == "samples" else [1, 1, 1]
    mean = sum(k * g.astype(numpy.float64) for k, g in zip(by, gradients)) / sum(by)
    # Against a float64 twin: three products and sums and one scaling in float32.
    numpy.testing.assert_allclose(newest(wires[0], socket, 1), -mean, rtol=0, atol=5 * 2**-24)
    assert service.optimizer.stop() == 0
    assert "version 1 weights" in service.replay("--verify")
