"""The hop: between broker and optimizer of one host large vectors go through memory."""
import json
import signal
import struct

import pytest
import zmq

from conftest import wait_for

LARGE, SMALL = 1024, 1023  # elements: 4,096 bytes take the hop
# In the file, see docs/PROTOCOL.md: the numbers done with, and the last one that was given.
DONE_AT, SLOTS, LAST_AT = 88, 3, 136

WEIGHTS = struct.pack("<IHH", 0x31515247, 1, 3)
VERSION_AT, HEADER_BYTES = 56, 128


def version_in(reader) -> int:
    """Of the next weights, which are whole."""
    assert reader.poll(20_000), "no weights came"
    frame = reader.recv()
    assert len(frame) == HEADER_BYTES + 4 * LARGE
    return struct.unpack_from("<Q", frame, VERSION_AT)[0]


def numbers_at(run, offset: int, count: int = 1) -> int:
    """The highest of `count`."""
    with open(run / "lane" / "broker", "rb") as file:
        file.seek(offset)
        return max(struct.unpack(f"<{count}Q", file.read(8 * count)))


def numbers_given(run) -> int:
    return numbers_at(run, LAST_AT)


@pytest.fixture
def serve(build, start, run_dir, ipc_address):
    """serve(*words of the optimizer) -> (broker, optimizer, push); push(elements, count) -> what a
    client of lane inline says at its end."""
    def broker():
        return start("gradq-broker", "--address", ipc_address)

    def begin(*words):
        optimizer = start("gradq-optimizer", "--address", ipc_address, "--run", run_dir / "run",
                          "--optimizer", "sgd", *words)

        def client_of(elements: int, count: int, pause: int = 0):
            return start(build / "tests/main_client", ipc_address, f"elements={elements}",
                         f"count={count}", "lane=1", "window=2", f"pause={pause}")

        def push(elements: int, count: int) -> dict:
            client = client_of(elements, count)
            assert client.wait(60) == 0, client.report()
            said = json.loads(client.stdout.splitlines()[-1])
            assert (said["status"], said["acknowledged"], said["torn"], said["lane"]) == \
                ("ok", count, 0, "inline"), said
            return said

        push.begin = client_of
        return broker(), optimizer, push, broker

    return begin


def shared(broker, times: int = 1) -> bool:
    return broker.stderr.count("shares memory with the optimizer") >= times


def test_large_gradients_take_the_hop_also_of_a_broker_that_comes_back(serve, run_dir):
    broker, _, push, again = serve()
    push(LARGE, 20)  # they may all be through before the broker has heard of the memory
    wait_for(lambda: shared(broker), 20, "the broker to share memory")
    before = numbers_given(run_dir / "run")
    said = push(LARGE, 50)
    assert numbers_given(run_dir / "run") >= before + 50
    assert said["version"] == 70
    broker.kill()
    broker = again()
    wait_for(lambda: shared(broker), 20, "the next broker to share memory")
    before = numbers_given(run_dir / "run")
    said = push(LARGE, 30)
    assert numbers_given(run_dir / "run") >= before + 30
    assert said["version"] == 100


def test_tickets_that_a_stranger_took_do_not_end_the_hop(serve, run_dir, ipc_address):
    broker, _, push, _ = serve()
    push(LARGE, 1)
    wait_for(lambda: shared(broker), 20, "the broker to share memory")
    with zmq.Context() as context, context.socket(zmq.PULL) as stranger:
        stranger.linger = 0
        stranger.connect(f"{ipc_address}.gradients-out")
        client = push.begin(LARGE, 20)
        for _ in range(SLOTS):
            assert stranger.poll(20_000), "the stranger got nothing"
            stranger.recv()
    # What it was given comes again, and the broker lets go of the slots that it had.
    assert client.wait(60) == 0, client.report()
    wait_for(lambda: shared(broker, 2), 20, "the broker to share memory again")
    before = numbers_given(run_dir / "run")
    push(LARGE, 30)
    assert numbers_given(run_dir / "run") >= before + 30


def test_small_gradients_go_through_the_sockets(serve, run_dir):
    broker, _, push, _ = serve()
    push(SMALL, 1)
    wait_for(lambda: shared(broker), 20, "the broker to share memory")
    push(SMALL, 20)
    assert numbers_given(run_dir / "run") == 0


def test_an_optimizer_that_shares_no_memory_is_served_through_sockets(serve, run_dir):
    broker, optimizer, push, _ = serve("--lane", "inline")
    push(LARGE, 20)
    assert not (run_dir / "run" / "lane").exists()
    assert optimizer.running() and not shared(broker)


def test_at_a_clean_end_the_last_version_still_arrives_whole_and_the_file_goes(
        serve, run_dir, ipc_address):
    # So long a pause that nothing is published between the first version and the last.
    broker, optimizer, push, _ = serve("--publish-interval-ms", "60000")
    run = run_dir / "run"
    client = push.begin(LARGE, 20, pause=1)
    wait_for(lambda: "open" in client.stdout and shared(broker), 20, "a client and the hop")
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger = 0
        reader.subscribe(WEIGHTS)
        reader.connect(f"{ipc_address}.weights-out")
        versions = [version_in(reader)]
        client.signal(signal.SIGUSR1)
        wait_for(lambda: numbers_at(run, DONE_AT, SLOTS) >= numbers_given(run) >= 20, 20,
                 "all gradients to be applied")
        assert optimizer.stop() == 0, optimizer.report()
        while versions[-1] != 20:
            versions.append(version_in(reader))
    assert versions[0] < 20 and not (run / "lane" / "broker").exists()
