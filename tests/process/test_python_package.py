"""The package actors/python/gradq as an actor of the real service: what it pushes is applied once
and bit for bit, whatever dies; its time-outs speak; garbage does not harm it."""
import json
import math
import os
import signal
import sys
import threading

import numpy
import pytest

from conftest import ROOT, SLOW, wait_for
from peer import checkpoint, checkpoints, done, kill, opened, rounded
from peer import service, tcp_service  # noqa: F401

PACKAGE = ROOT / "actors/python"
sys.path.insert(0, str(PACKAGE))
sys.path.insert(0, str(ROOT / "tests/chaos"))
import gradq  # noqa: E402
from gradq import crc, frame, link  # noqa: E402
from disk import GRADIENT, read_segment  # noqa: E402

SHAPES = {"weight": (2, 3), "bias": (2,)}
ZEROS = {name: numpy.zeros(shape, "f4") for name, shape in SHAPES.items()}
PYTHON = {"PYTHONPATH": str(PACKAGE)}


@pytest.fixture(params=["service", "tcp_service"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True, params=["inline", "shm"])
def lane(request) -> str:
    """What every client of a test takes, unless it says otherwise."""
    LANE.append(request.param)
    yield request.param
    LANE.pop()


LANE = []
INLINE = pytest.mark.parametrize("lane", ["inline"], indirect=True)
SHM = pytest.mark.parametrize("lane", ["shm"], indirect=True)


def client(service, **settings) -> gradq.Client:  # noqa: F811
    one = gradq.Client(service.address, **{"initial": ZEROS, "timeout": 20 * SLOW,
                                           "lane": LANE[-1], **settings})
    assert one.lane == settings.get("lane", LANE[-1])
    return one


def flat(weights: dict) -> numpy.ndarray:
    return numpy.concatenate([array.ravel() for array in weights.values()])


# Pushing and pulling

def test_a_client_brings_the_model_and_sees_each_step_whole(either):  # noqa: F811
    either.up()  # sgd, learning rate 1
    initial = {"weight": numpy.arange(6.0).reshape(2, 3), "bias": numpy.array([10, 20])}
    with client(either, initial=initial) as one:
        assert one.layout == SHAPES and one.parameters == 8 and one.version == 0
        weights = one.pull()
        assert list(weights) == list(SHAPES)
        assert all((weights[name] == initial[name]).all() for name in SHAPES)
        for step in (1, 2):
            assert one.push({name: numpy.ones(shape) for name, shape in SHAPES.items()}, 5) == step
            one.wait(step)
            assert one.version == step - 1 and one.pull().version == one.version == step
        assert flat(one.pull()).tolist() == [-2, -1, 0, 1, 2, 3, 8, 18]
        assert flat(weights).tolist() == [0, 1, 2, 3, 4, 5, 10, 20], "what was pulled stays"
        with pytest.raises(ValueError, match="read-only"):
            weights["bias"][0] = 1
        assert (one.pushed, one.acknowledged, one.refused, one.resent) == (2, 2, 0, 0)
        assert one.staleness == 0
    either.ends_with(2)


ACTOR = """
import json, signal, sys, numpy, gradq
number, count = int(sys.argv[2]), float(sys.argv[3])
enough = []
signal.signal(signal.SIGTERM, lambda *_: enough.append(True))
generator = numpy.random.default_rng(number)
with gradq.Client(sys.argv[1], layout={"weight": (2, 3), "bias": (2,)}, initial=numpy.zeros(8),
                  actor=number, encoding=sys.argv[4], lane=sys.argv[5], timeout=60) as client:
    while client.pushed < count and not enough:
        client.pull()
        client.push(generator.normal(size=8).astype("f4"))
    client.wait()
    print(json.dumps({"pushed": client.pushed, "acknowledged": client.acknowledged,
                      "refused": client.refused, "resent": client.resent}), flush=True)
"""


def actors(service, start, count: int, pushes: float, encoding: str = "f32"):  # noqa: F811
    """Processes of actors 0 to count - 1; pushes: of each, math.inf: until SIGTERM."""
    return [start(sys.executable, "-c", ACTOR, service.address, number, pushes, encoding,
                  LANE[-1], env=PYTHON) for number in range(count)]


def counted(process) -> dict:
    assert process.wait(120) == 0, process.report()
    return json.loads(process.stdout)


def replayed(service, pushes: list, decoded=lambda vector: vector):  # noqa: F811
    """Weights of SGD in NumPy over the journal's order, every actor's gradients drawn again.

    pushes: how many each actor pushed."""
    generators = [numpy.random.default_rng(number) for number in range(len(pushes))]
    drawn = [[decoded(generator.normal(size=8).astype("f4")) for _ in range(count)]
             for generator, count in zip(generators, pushes)]
    weights, came = numpy.zeros(8, "f4"), []
    for _, head in applied(service):
        came.append((head.actor, head.sequence))
        weights = weights - numpy.float32(0.125) * drawn[head.actor][head.sequence - 1]
    assert sorted(came) == [(actor, sequence) for actor, count in enumerate(pushes)
                            for sequence in range(1, count + 1)], "each once"
    return weights


def applied(service) -> list:  # noqa: F811
    """[(whole frame, header)] of the accepted gradients, as the journal has them."""
    last, found = None, []
    for path in sorted((service.run / "journal").glob("segment-*")):
        for record in read_segment(path, path.read_bytes()[8:24], last):
            last = record
            if record.kind == GRADIENT:
                at = record.payload.index(frame.MAGIC)
                head = frame.decode_header(record.payload[at:])
                assert head is not None, record.place
                found.append((record.payload[at:], head))
    return found


SGD = ("--optimizer", "sgd", "--set", "lr=0.125", "--journal", "keep")


@pytest.mark.parametrize(("lane", "encoding"), [("inline", "f32"), ("inline", "bf16"),
                                                ("shm", "f32")], indirect=["lane"])
def test_weights_of_many_actors_are_those_of_sgd_in_numpy_bit_for_bit(  # noqa: F811
        service, start, encoding):
    service.up(*SGD)
    running = actors(service, start, 3, 60, encoding)
    assert [counted(each) for each in running] == [
        {"pushed": 60, "acknowledged": 60, "refused": 0, "resent": 0}] * 3
    with client(service, initial=None) as reader:
        wait_for(lambda: reader.pull().version == 180, 20, "the last version")
        weights = reader.pull().vector.copy()
    service.ends_with(180)
    decoded = rounded if encoding == "bf16" else lambda vector: vector
    assert weights.tobytes() == replayed(service, [60] * 3, decoded).tobytes()


@INLINE
def test_a_frame_of_the_c_client_is_made_again_byte_for_byte(service):  # noqa: F811
    service.up(*SGD)
    done(service.client(elements=8, count=3, lane=1))
    frames = applied(service)
    assert len(frames) == 3
    for data, head in frames:
        fields = head._asdict()
        payload = data[frame.HEADER_BYTES:]
        for derived in ("magic", "protocol", "payload_crc", "header_crc", "reserved"):
            del fields[derived]
        assert frame.encode_header(crc.crc32c(payload), **fields) + payload == data


def test_python_and_c_actors_share_one_run(service, start):  # noqa: F811
    """The layout of main_client is one tensor, "w"; whoever comes second takes it."""
    service.up(*SGD)
    c = service.client(elements=8, count=200, seed=3)
    opened(c)
    with client(service, initial=None) as one:
        assert one.parameters == 8
        for _ in range(50):
            one.pull()
            one.push(numpy.ones(8))
        one.wait()
        assert (one.acknowledged, one.refused) == (50, 0)
    assert done(c)["acknowledged"] == 200
    service.ends_with(250)


def test_a_client_of_another_model_is_refused(service):  # noqa: F811
    service.up()
    with client(service):
        with pytest.raises(gradq.LayoutMismatch, match="another model"):
            client(service, initial={"weight": numpy.zeros((3, 2)), "bias": numpy.zeros(2)})


# Refusals

def test_refused_gradients_are_counted_by_reason(service):  # noqa: F811
    service.up("--max-staleness", "0")
    with client(service) as one:
        assert one.max_staleness == 0
        for _ in range(2):  # both of version 0
            number = one.push(numpy.ones(8))
        one.wait(number)
        assert one.refused_by == {"stale": 1} and one.staleness == 1
        one.pull()
        one.wait(one.push(numpy.full(8, numpy.nan)))
        assert one.refused_by == {"stale": 1, "nonfinite": 1}
        assert (one.acknowledged, one.refused) == (3, 2)
        one.pull()
        one.wait(one.push(numpy.ones(8)))
        assert one.pull().version == 2 and (one.pull().vector == -2).all()


def test_a_gradient_of_a_wrong_shape_is_not_sent(service):  # noqa: F811
    service.up()
    with client(service) as one:
        for wrong in ({"weight": numpy.zeros((2, 3))}, numpy.zeros(7),
                      {**ZEROS, "bias": numpy.zeros(3)}):
            with pytest.raises(gradq.LayoutMismatch):
                one.push(wrong)
        for samples in (0, 1.5, 1 << 32):
            with pytest.raises(ValueError, match=f"samples {samples}"):
                one.push(numpy.zeros(8), samples)
        for number in (-1, 0, math.nan, 1):
            with pytest.raises(ValueError, match=f"gradient {number}"):
                one.wait(number)
        with pytest.raises(ValueError, match="timeout nan"):
            one.wait(timeout=math.nan)
        assert one.pushed == 0


# Death on the way

def test_kills_of_broker_and_optimizer_lose_and_double_nothing(either, start):  # noqa: F811
    either.up(*SGD, "--checkpoint-interval-s", "0")
    running = actors(either, start, 3, math.inf)

    def got_on(by: int):
        before = either.stats()["optimizer"]["applied"]
        either.until(lambda s: s["optimizer"]["applied"] >= before + by, f"{by} more", 60)
    either.until(lambda s: sum((actor["acknowledged"] or 0) > 0 for actor in s["actors"]) == 3,
                 "all three to get on", 60)
    for _ in range(2):
        kill(either.optimizer)
        either.start_optimizer("--resume", *SGD, "--checkpoint-interval-s", "0")
        got_on(30)
        kill(either.broker)
        either.start_broker()
        either.until(lambda s: s["optimizer"]["state"] == "alive", "the optimizer to be back")
        got_on(30)
    for each in running:
        each.signal(signal.SIGTERM)
    results = [counted(each) for each in running]
    assert all(each["acknowledged"] == each["pushed"] > 0 == each["refused"]
               for each in results), results
    pushes = [each["pushed"] for each in results]
    either.ends_with(sum(pushes))
    tensors, meta = checkpoint(either.run, checkpoints(either.run)[-1])
    saved = numpy.concatenate([tensors[name].ravel() for name in SHAPES])
    assert saved.tobytes() == replayed(either, pushes).tobytes()
    assert int(meta["term"]) == 3


@INLINE
def test_what_a_killed_broker_held_is_sent_again_the_same(either):  # noqa: F811
    elements = 1 << 15  # 128 KiB a frame: few fit between broker and optimizer, beside the queue
    either.up()
    with client(either, initial={"w": numpy.zeros(elements)}, window=16) as one:
        either.optimizer.signal(signal.SIGSTOP)
        for _ in range(16):
            one.push(numpy.ones(elements))
        either.until(lambda stats: stats["queue"]["bytes"] >= 8 * 4 * elements, "a queue to lose")
        kill(either.broker)
        either.start_broker()
        either.optimizer.signal(signal.SIGCONT)
        one.wait()
        assert (one.acknowledged, one.refused) == (16, 0) and one.resent >= 8
        assert (one.pull().vector == -16).all()
    either.ends_with(16)


def test_an_actor_goes_on_after_the_optimizer_s_death_under_its_epoch(service):  # noqa: F811
    service.up("--checkpoint-interval-s", "0")
    with client(service) as one:
        one.wait(one.push(numpy.ones(8)))
        epoch = one.epoch
        kill(service.optimizer)
        number = one.push(numpy.ones(8))
        service.start_optimizer("--resume", "--checkpoint-interval-s", "0")
        one.wait(number)
        assert (one.pull().term, one.version, one.epoch) == (2, 2, epoch)
        assert (one.pull().vector == -2).all() and one.dropped == 0
    service.ends_with(2)


@pytest.mark.parametrize("lost", ["epoch", "numbers"])
def test_an_actor_that_the_optimizer_forgot_begins_a_new_life(service, lost):  # noqa: F811
    words = ("--checkpoint-interval-s", "0", "--journal", "off")
    service.up(*words)
    with client(service) as first:  # version 0 is saved with this grant, and none after it
        other = client(service) if lost == "epoch" else None
        one = other or first
        one.wait(one.push(numpy.ones(8)))
        epoch = one.epoch
        kill(service.optimizer)
        if lost == "epoch":
            one.push(numpy.ones(8))
        service.start_optimizer("--resume", *words)
        wait_for(lambda: one.epoch > epoch, 30, "a new epoch, without a call of ours")
        assert one.dropped == (lost == "epoch")
        wait_for(lambda: one.pull().term == 2, 20, "its weights")
        assert (one.pull().vector == 0).all(), "the steps are lost"
        number = one.push(numpy.ones(8))
        assert number == one.pushed
        one.wait(number)
        assert (one.pull().vector == -1).all()
        if other:
            other.close()
    service.until(lambda stats: stats["optimizer"]["applied"] == 1, "one applied")


def goes_inline(one, service, *words):  # noqa: F811
    """The optimizer dies, and the next one offers no shared memory."""
    kill(service.optimizer)
    service.start_optimizer("--resume", "--lane", "inline", *words)
    wait_for(lambda: one.lane == "inline", 20, "the client to leave its lane")
    assert "no shared memory" in one.lane_reason


@SHM
def test_what_is_on_the_way_goes_on_inline_when_the_next_optimizer_shares_nothing(
        service):  # noqa: F811
    service.up("--checkpoint-interval-s", "0")
    with client(service, window=4) as one:
        one.wait(one.push(numpy.full(8, 1)))
        service.optimizer.signal(signal.SIGSTOP)
        numbers = [one.push(numpy.full(8, 10 ** k)) for k in (1, 2, 3)]
        goes_inline(one, service, "--checkpoint-interval-s", "0")
        one.wait(numbers[-1])
        assert (one.pull().vector == -1111).all() and one.version == 4
        one.wait(one.push(numpy.full(8, 1)))
        assert (one.pull().vector == -1112).all() and one.refused == one.dropped == 0
    service.ends_with(5)


@SHM
def test_a_vector_under_construction_outlives_its_lane(service):  # noqa: F811
    service.up("--checkpoint-interval-s", "0")
    with client(service) as one:
        vector = one.reserve()
        vector[:4] = 1
        goes_inline(one, service, "--checkpoint-interval-s", "0")
        assert one.reserve() is vector
        vector[4:] = 2
        one.wait(one.commit())
        assert one.pull().vector.tolist() == [-1] * 4 + [-2] * 4


@SHM
def test_the_next_optimizer_s_memory_is_taken_up(service):  # noqa: F811
    service.up("--checkpoint-interval-s", "0")
    with client(service) as one:
        for term in (2, 3):
            one.wait(one.push(numpy.ones(8)))
            kill(service.optimizer)
            service.start_optimizer("--resume", "--checkpoint-interval-s", "0")
            one.wait(one.push(numpy.ones(8)))
            wait_for(lambda term=term: one.pull().term == term, 20, "its weights")
            assert one.lane == "shm"
        assert (one.pull().vector == -4).all() and one.resent == 0
    service.ends_with(4)


@SHM
def test_who_insists_on_shared_memory_is_told_why_there_is_none(service):  # noqa: F811
    service.up("--lane", "inline")
    with pytest.raises(gradq.Refused, match="lane shm: the optimizer offers no shared memory"):
        client(service)
    with client(service, lane="inline") as one:
        assert "asked for" in one.lane_reason
    with gradq.Client(service.address, timeout=20 * SLOW) as one:
        assert one.lane == "inline" and "offers no" in one.lane_reason


def test_readers_of_weights_never_see_a_torn_version(service, start):  # noqa: F811
    """Each version has one value in all elements; the steps go on while it is read."""
    elements = 1 << 16
    service.up()
    with client(service, initial={"w": numpy.zeros(elements)}) as reader:
        pusher = service.client(elements=elements, count=10**9, seed=5)
        seen = set()

        def read_some():
            weights = reader.pull()
            if (weights.vector != weights.vector[0]).any():
                return "torn"
            seen.add(weights.version)
            return "whole" if len(seen) > 100 else None
        assert wait_for(read_some, 60, "100 versions") == "whole"
        pusher.signal(signal.SIGTERM)
        assert done(pusher)["pushed"] >= 100


def test_nothing_is_sent_that_was_not_built(service):  # noqa: F811
    service.up()
    with client(service) as one:
        with pytest.raises(ValueError, match="reserve"):
            one.commit()
        one.push(numpy.ones(8))
        with pytest.raises(ValueError, match="reserve"):
            one.commit()


def test_a_second_client_with_an_id_fences_the_first(service):  # noqa: F811
    service.up()
    first = client(service, actor=5)
    first.wait(first.push(numpy.ones(8)))
    with client(service, actor=5) as second:
        assert second.actor == 5 and second.epoch > first.epoch

        def fenced():
            try:
                first.push(numpy.ones(8))
            except gradq.Fenced as error:
                return error
            return None
        assert "actor id 5" in str(wait_for(fenced, 20, "the first to hear of it"))
        with pytest.raises(gradq.Fenced):
            first.close()
        second.pull()
        second.wait(second.push(numpy.ones(8)))
        assert second.acknowledged == 1


def test_a_run_that_was_replaced_is_an_error_that_says_so(service):  # noqa: F811
    service.up()
    with client(service) as one:
        one.wait(one.push(numpy.ones(8)))
        assert service.optimizer.stop() == 0
        path = sorted((service.run / "checkpoints").glob("*.safetensors"))[-1]
        service.start_optimizer("--init", path, run=service.directory / "next")

        def replaced():
            try:
                one.pull()
                one.push(numpy.ones(8), timeout=0.1)
            except gradq.Timeout:
                return None
            except gradq.RunReplaced as error:
                return error
            return None
        assert "open a new client" in str(wait_for(replaced, 20, "the client to notice"))
        with pytest.raises(gradq.RunReplaced):
            one.close()


# While the caller computes

def test_weights_stay_the_newest_and_gradients_are_sent_again_while_the_caller_computes(
        service):  # noqa: F811
    """No call of ours: the client's own thread does it."""
    elements = 1 << 18  # 1 MiB: few versions fit the socket
    service.up()
    with client(service, initial={"w": numpy.zeros(elements)}, window=4, resend=0.2) as idle:
        service.optimizer.signal(signal.SIGSTOP)
        number = idle.push(numpy.ones(elements))
        wait_for(lambda: idle.resent >= 1, 20, "its gradient to be sent again")
        service.optimizer.signal(signal.SIGCONT)
        wait_for(lambda: idle.acknowledged == number, 20, "its acknowledgement")
        with client(service, initial=None) as busy:
            for _ in range(40):
                busy.wait(busy.push(numpy.ones(elements)))
        wait_for(lambda: idle._link.newest_age == (1, 41), 20, "the newest weights to be there")
        assert idle.version == 0 and idle.pull().version == 41
        assert (idle.pull().vector == -41).all()
        seen = service.until(lambda s: s["actors"][0]["acknowledged"] == 1, "its report")
        assert seen["actors"][0]["state"] == "alive"


def test_threads_of_one_client_take_turns(service):  # noqa: F811
    service.up()
    with client(service, window=8) as one:
        def work():
            for _ in range(50):
                one.pull()
                one.push(numpy.ones(8))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 * SLOW)
            assert not thread.is_alive()
        one.wait()
        assert (one.pushed, one.acknowledged, one.refused) == (200, 200, 0)
        assert (one.pull().vector == -200).all()
    service.ends_with(200)


def test_a_child_of_a_fork_can_neither_use_nor_end_its_parent_s_client(service):  # noqa: F811
    service.up()
    with client(service) as one:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                one.__exit__(None)
                one.pull()
            except gradq.Closed:
                status = 7
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        one.wait(one.push(numpy.ones(8)))
        assert one.acknowledged == 1


def test_a_client_that_is_dropped_ends_its_thread(service):  # noqa: F811
    service.up()
    names = lambda: [each.name for each in threading.enumerate()]  # noqa: E731
    one = client(service)
    assert "gradq-client" in names()
    del one
    wait_for(lambda: "gradq-client" not in names(), 10, "the thread to end")


def test_a_program_that_forgets_to_close_ends_by_itself(service, start):  # noqa: F811
    service.up()
    program = start(sys.executable, "-c", "import sys, gradq, numpy\n"
                    "client = gradq.Client(sys.argv[1], initial={'w': numpy.zeros(8)})\n"
                    "client.push(numpy.ones(8))", service.address, env=PYTHON)
    assert program.wait(30) == 0 and program.stderr == "", program.report()


# Time-outs

def test_a_broker_without_an_optimizer_is_said(service):  # noqa: F811
    service.start_broker()
    with pytest.raises(gradq.Timeout, match="no optimizer is connected"):
        client(service, timeout=0.5)


def test_a_run_without_weights_is_said(service):  # noqa: F811
    service.up()
    with pytest.raises(gradq.Timeout, match="no model yet"):
        client(service, initial=None, timeout=0.5)
    # One that brings a layout and promises weights settles it; it is stopped before it sends them.
    service.wire(8, hello=False).ask(service.wire(8, hello=False).hello_request())
    with pytest.raises(gradq.Timeout, match="start the optimizer with --init, or an actor"):
        client(service, initial=None, timeout=1)


def test_time_outs_say_what_was_waited_for_and_what_to_do(service):  # noqa: F811
    service.up()
    with client(service) as one:
        service.optimizer.signal(signal.SIGSTOP)
        one.push(numpy.ones(8))
        one.push(numpy.ones(8))
        with pytest.raises(gradq.Timeout, match=r"waited 0\.1 s for room for a gradient: 2 of 2"):
            one.push(numpy.ones(8), timeout=0.1)
        with pytest.raises(TimeoutError, match="for acknowledgements"):
            one.wait(timeout=0.1)
        wait_for(lambda: one._link.silence > link.HEARD_S, 20, "silence")
        with pytest.raises(gradq.Timeout, match=r"last heard .* s ago: see whether broker"):
            one.wait(timeout=0.1)
        service.optimizer.signal(signal.SIGCONT)
        one.commit()  # what was not sent is still built
        one.wait()
        assert (one.pushed, one.acknowledged) == (3, 3)
        assert (one.pull().vector == -3).all()


def test_closing_says_how_much_is_unacknowledged(service):  # noqa: F811
    service.up("--aggregate", "3")
    one = client(service)
    one.push(numpy.ones(8))
    with pytest.raises(gradq.Timeout, match=r"closed with 1 gradients .* \(--aggregate\)"):
        one.close(0.2)
    one.close()
    with pytest.raises(gradq.Closed):
        one.pull()


@INLINE
def test_a_full_queue_is_waited_for_and_the_newest_weights_are_read_meanwhile(
        service):  # noqa: F811
    elements = 1 << 16  # 256 KiB a frame: few fit into the buffers on the way
    service.up()
    with client(service, initial={"w": numpy.zeros(elements)}, window=64) as one:
        service.broker.signal(signal.SIGSTOP)
        with pytest.raises(gradq.Timeout, match="room"):
            for _ in range(64):
                one.push(numpy.ones(elements), timeout=0.5)
        pushed = one.pushed
        assert 0 < pushed < 64
        service.broker.signal(signal.SIGCONT)
        one.commit()
        one.wait()
        assert one.acknowledged == pushed + 1 and one.refused == 0
        assert (one.pull().vector == -(pushed + 1)).all()
