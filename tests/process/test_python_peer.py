"""The package actors/python/gradq where no service is: settings and addresses that make no sense, a
broker that lies, and how the package is installed."""
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
import zmq

from conftest import ROOT, SLOW

PACKAGE = ROOT / "actors/python"
sys.path.insert(0, str(PACKAGE))
import gradq  # noqa: E402
from gradq import crc, frame  # noqa: E402


def test_nobody_at_the_address_is_said(run_dir):
    with pytest.raises(gradq.Unreachable, match="no broker answers .*: start it"):
        gradq.Client(f"ipc://{run_dir}/control", timeout=0.3)


@pytest.mark.parametrize(("settings", "said"), [
    ({"address": "5600"}, "tcp://HOST:PORT"), ({"address": "tcp://nowhere"}, "cannot be used"),
    ({"window": 65}, "1 to 64"), ({"window": 0}, "1 to 64"), ({"actor": 4096}, "0 to 4095"),
    ({"encoding": "f16"}, "f32 or bf16"), ({"resend": 0}, "more than 0"),
    ({"initial": numpy.zeros(3)}, "layout")], ids=str)
def test_settings_that_make_no_sense_are_said(settings, said):
    with pytest.raises(ValueError, match=said):
        gradq.Client(**{"address": "ipc:///tmp/x", "timeout": 0.3, **settings})


class Liar:
    """A broker that is none: it answers a hello soundly, and says what it likes after that."""

    def __init__(self, directory: Path):
        self.address = f"ipc://{directory}/control"
        self.context = zmq.Context()
        self.context.linger = 0
        self.control = self.bind(zmq.ROUTER, "")
        self.gradients = self.bind(zmq.PULL, ".gradients-in")
        self.weights = self.bind(zmq.XPUB, ".weights-out")
        self.acks = self.bind(zmq.XPUB, ".acks-out")
        self.run, self.said = bytes(range(16)), []
        self.too_large = 0  # messages above the client's MAXMSGSIZE that are still to be sent
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def bind(self, kind: int, ending: str):
        socket = self.context.socket(kind)
        socket.bind(self.address + ending)
        return socket

    def answer(self, asked: dict) -> dict:
        return {"op": "hello", "ok": True, "nonce": asked["nonce"], "protocol": 1,
                "run": self.run.hex(), "term": 1, "version": 0, "actor": 0, "epoch": 1,
                "layout": [{"name": "w", "shape": [8]}], "parameters": 8, "digest": "00" * 8,
                "lane": "inline", "aggregate": 1, "max_staleness": None, "need_weights": False,
                "optimizer": "liar", "endpoints": {
                    name: f"{self.address}.{ending}" for name, ending in (
                        ("gradients", "gradients-in"), ("weights", "weights-out"),
                        ("acks", "acks-out"))}}

    def frame(self, kind: int, payload: bytes, **fields) -> bytes:
        return frame.encode_header(crc.crc32c(payload), kind=kind, run=self.run, term=1,
                                   payload_bytes=len(payload), **fields) + payload

    def weight(self, version: int) -> bytes:
        return self.frame(frame.WEIGHTS, numpy.full(8, version, "<f4").tobytes(), count=8,
                          encoding=frame.F32, version=version)

    def ack(self, cumulative: int, **fields) -> bytes:
        return self.frame(frame.ACK, frame.ACK_PAYLOAD.pack(cumulative, 0, 0, 0, 0, 0),
                          **{"epoch": 1, "sequence": cumulative, **fields})

    def garbage(self, chance) -> list:
        """(socket, parts): bytes, cut and damaged frames, parts, and sound frames of others; all
        of them small enough to reach the client."""
        sound = [self.weight(1 << 40), self.ack(1)]
        odd = [b"", b"\0", chance.bytes(127), chance.bytes(128)]
        for data in sound:
            odd += [data[:size] for size in (8, 127, 128, len(data) - 1)]
            for _ in range(50):
                damaged = bytearray(data)
                damaged[8 + chance.integers(len(data) - 8)] ^= 1 << chance.integers(8)
                odd.append(bytes(damaged))
        odd += [self.frame(frame.WEIGHTS, bytes(28), count=7, encoding=1, version=9),
                self.frame(frame.WEIGHTS, bytes(32), count=8, encoding=1, version=9, digest=1),
                self.ack(1 << 60), self.ack(1, actor=1), self.ack(1, epoch=0)]
        many = [[each] for each in odd] + [[sound[0], b"more"], [sound[1], b"", b""]]
        found = []
        for socket, topic, limit in ((self.weights, frame.topic(frame.WEIGHTS), 160),
                                     (self.acks, frame.topic(frame.ACK, 0), 168)):
            for first, *rest in many:
                first = first if first.startswith(topic) else topic + first
                found += [(socket, [first, *rest])] if len(first) <= limit else []
        return found

    def serve(self):
        chance = numpy.random.default_rng(1)
        while not self.stop.is_set():
            if self.control.poll(20):
                peer, data = self.control.recv_multipart()
                asked = json.loads(data)
                for odd in (b"", b"\xff", b"[]", b'{"op": "hello"', b"[" * 20000,
                            json.dumps({"op": "hello", "ok": True, "nonce": "other"}).encode()):
                    self.control.send_multipart([peer, odd])
                self.control.send_multipart([peer, b'{"op": "hello"}', b"more"])
                if asked["op"] == "hello":
                    self.control.send_multipart([peer, json.dumps(self.answer(asked)).encode()])
            for socket, parts in self.garbage(chance):
                socket.send_multipart(parts)
            if self.too_large > 0 and self.said:
                self.too_large -= 1
                self.weights.send(frame.topic(frame.WEIGHTS) + bytes(1000))
                self.acks.send(frame.topic(frame.ACK, 0) + bytes(1000))
            self.weights.send(self.weight(5))
            if self.gradients.poll(0):
                self.said.append(frame.decode_header(self.gradients.recv()))
                self.acks.send(self.ack(self.said[-1].sequence, version=5))

    def close(self):
        self.stop.set()
        self.thread.join(20)
        self.context.destroy(linger=0)


@pytest.fixture
def liar(run_dir):
    one = Liar(run_dir)
    yield one
    one.close()


@pytest.mark.parametrize("too_large", [0, 1])
def test_garbage_from_a_broker_is_dropped_and_what_is_sound_is_taken(liar, too_large):
    """One too large ends a connection for good; the client makes new ones."""
    liar.too_large = too_large
    with gradq.Client(liar.address, timeout=20 * SLOW) as one:
        for number in range(1, 21):
            weights = one.pull()
            assert weights.version == 5 and (weights.vector == 5).all()
            assert one.push(numpy.ones(8)) == number
            one.wait(number)
        assert one.acknowledged == 20 and one._link.grant.epoch == 1
    said = {head.sequence: head for head in liar.said}
    assert list(said) == list(range(1, 21))
    assert all(head == said[head.sequence] for head in liar.said), "the same bytes again"
    assert too_large == 0 or len(liar.said) > 20


@pytest.mark.parametrize("changes", [
    {"run": 3}, {"epoch": 0}, {"layout": 7}, {"digest": None}, {"endpoints": {}},
    {"endpoints": {"gradients": "x", "weights": "y", "acks": "z"}},
    {"layout": [{"name": "w", "shape": [0]}]}], ids=str)
def test_a_grant_that_makes_no_sense_is_an_error_that_says_so(liar, changes):
    sound = liar.answer
    liar.answer = lambda asked: {**sound(asked), **changes}
    with pytest.raises(gradq.Error, match="makes no sense|shape"):
        gradq.Client(liar.address, timeout=5 * SLOW)


# The package

def test_pip_installs_it_and_it_imports_nothing_that_is_large(tmp_path, gymnasium):
    # A copy, for building leaves files behind.
    shutil.copytree(PACKAGE, tmp_path / "source")
    installed = subprocess.run(
        [gymnasium, "-m", "pip", "install", "--no-deps", "-q", "--retries", "2", "--target",
         tmp_path / "target", tmp_path / "source"], capture_output=True, text=True,
        timeout=120 * SLOW, check=False)
    assert installed.returncode == 0, installed.stderr
    said = subprocess.run(
        [sys.executable, "-c", "import gradq, sys; print(gradq.__file__, 'torch' in sys.modules)"],
        capture_output=True, text=True, timeout=60 * SLOW, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "target")}).stdout
    assert said.split() == [str(tmp_path / "target/gradq/__init__.py"), "False"]
    assert not list((tmp_path / "target").glob("gym_bridge*"))
