"""A gradq peer in Python, and a service of real processes for it to talk to.

Written from include/gradq/protocol.h and the control messages, not from the C client, so that both
sides of the wire are checked by something that does not share their code.  It can say what no
sound peer says: every field of a frame can be set, and left inconsistent.

    Frame, encode, decode    one frame
    Wire                     a peer's sockets: control, gradients, weights, acks
    greeted                  a bare connection behind its handshake
    Service                  broker, optimizer, clients; `service` and `tcp_service` are fixtures
    value                    what tests/main_client.c pushes
    halves, rounded          bf16, and what it leaves of a float32
    safetensors, read_safetensors
"""
import ctypes
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import zmq

from conftest import SLOW, wait_for

MAGIC, PROTOCOL = 0x31515247, 1
GRADIENT, INIT, WEIGHTS, ACK = 1, 2, 3, 4
RAW, F32, BF16 = 0, 1, 2
# The offsets at the top of src/frame.c, as one struct: fields, then two checksums.
LAYOUT = struct.Struct("<IHHIIIHHQ16sQQQIIQQQQQ")
CHECKSUMS = struct.Struct("<II")
HEADER_BYTES = LAYOUT.size + CHECKSUMS.size
assert HEADER_BYTES == 128
ENDINGS = ("", ".gradients-in", ".gradients-out", ".weights-in", ".weights-out", ".acks-out")

_isal = ctypes.CDLL("libisal.so.2")
_isal.crc32_iscsi.restype = ctypes.c_uint
_isal.crc32_iscsi.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]


def crc32c(data) -> int:
    """CRC-32C (Castagnoli), as iSCSI uses it."""
    array = numpy.frombuffer(data, numpy.uint8)
    return _isal.crc32_iscsi(array.ctypes.data, array.size, 0xffffffff) ^ 0xffffffff


assert crc32c(b"123456789") == 0xe3069283  # the check value of RFC 3720's polynomial


class Frame(NamedTuple):
    magic: int = MAGIC
    protocol: int = PROTOCOL
    kind: int = GRADIENT
    actor: int = 0
    epoch: int = 1
    term: int = 1
    encoding: int = F32
    lane: int = 0
    digest: int = 0
    run: bytes = bytes(16)
    sequence: int = 1
    version: int = 0
    count: int = 0
    samples: int = 1
    reserved_a: int = 0
    sent_ns: int = 0
    applied: int = 0
    payload_bytes: int = 0
    reserved_b: int = 0
    reserved_c: int = 0


def encode(frame: Frame, payload: bytes = b"", payload_crc: int = None,
           header_crc: int = None) -> bytes:
    """The bytes of a frame; checksums are right unless they are given."""
    head = LAYOUT.pack(*frame)
    head += struct.pack("<I", crc32c(payload) if payload_crc is None else payload_crc)
    return head + struct.pack("<I", crc32c(head) if header_crc is None else header_crc) + payload


def decode(data) -> Frame:
    """Fields of a frame whose checksums and sizes hold; anything else is an AssertionError."""
    view = memoryview(data)
    frame = Frame(*LAYOUT.unpack_from(view))
    payload_crc, header_crc = CHECKSUMS.unpack_from(view, LAYOUT.size)
    assert (frame.magic, frame.protocol) == (MAGIC, PROTOCOL)
    assert header_crc == crc32c(view[:HEADER_BYTES - 4]), "header checksum"
    assert payload_crc == crc32c(view[HEADER_BYTES:]), "payload checksum"
    assert frame.payload_bytes == len(view) - HEADER_BYTES
    return frame


class Ack(NamedTuple):
    cumulative: int
    beyond: int
    refused: int
    refused_sequence: int
    refused_reason: str
    held: int
    epoch: int
    version: int


# gradq/status.h, by position.
STATUS = ("ok again timeout full malformed checksum layout count nonfinite stale run unreachable "
          "invalid notfound abi io memory refused closed fenced").split()


def value(seed: int, sequence) -> numpy.ndarray:
    """float32 in [-1, 1) that main_client pushes as gradient `sequence` (number or array)."""
    with numpy.errstate(over="ignore"):
        z = (numpy.uint64(seed) << numpy.uint64(32)) + numpy.asarray(
            sequence, numpy.uint64) * numpy.uint64(0x9e3779b97f4a7c15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xbf58476d1ce4e5b9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94d049bb133111eb)
    z = z ^ (z >> numpy.uint64(31))
    bits = (z >> numpy.uint64(40)).astype(numpy.int64) - (1 << 23)
    return (bits / numpy.float64(1 << 23)).astype(numpy.float32)  # 24 bits: exact


def halves(vector) -> bytes:
    """A finite float32 vector as bf16: half of the last place that stays, and ties to even."""
    bits = numpy.asarray(vector, "<f4").view("<u4").astype(numpy.uint64)
    rest, kept = bits % 65536, bits // 65536
    return (kept + ((rest > 32768) | ((rest == 32768) & (kept % 2 == 1)))).astype("<u2").tobytes()


def rounded(vector) -> numpy.ndarray:
    """What is left of a finite float32 vector in bf16, as float32."""
    return (numpy.frombuffer(halves(vector), "<u2").astype("<u4") * 65536).view("<f4")


def safetensors(path: Path, tensors: dict) -> Path:
    """Write float32 arrays; the format is a length, a JSON header, the data."""
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text
                     + b"".join(array.astype("<f4").tobytes() for array in tensors.values()))
    return path


def read_safetensors(path: Path) -> tuple:
    """(tensors, metadata) of float32 tensors."""
    data = path.read_bytes()
    size, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    meta = header.pop("__metadata__", {})
    return {name: numpy.frombuffer(data[8 + size + each["data_offsets"][0]:
                                        8 + size + each["data_offsets"][1]], "<f4")
            .reshape(each["shape"]) for name, each in header.items()}, meta


def checkpoints(run: Path) -> list:
    """Versions of the whole checkpoints in a run directory, rising."""
    return sorted(int(path.stem.split("-")[1])
                  for path in (run / "checkpoints").glob("checkpoint-*.safetensors"))


def checkpoint(run: Path, version: int) -> tuple:
    return read_safetensors(run / f"checkpoints/checkpoint-{version:012}.safetensors")


def events(text: str, event: str) -> list:
    """The JSON lines of that event in a log; a line cut by a kill is left out."""
    mark, found = f'"event":"{event}"', []
    for line in text.splitlines():
        if mark in line.replace('": "', '":"'):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def rss(pid: int) -> int:
    """Bytes of memory that a process has resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ZMTP 3.0: signature, version, mechanism, as-server, filler.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
assert len(GREETING) == 64


def ready(kind: bytes) -> bytes:
    """ZMTP 3.0's READY command of a socket of that kind."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return bytes([4, len(body)]) + body


def greeted(port: int, kind: bytes) -> socket.socket:
    """A bare connection to a port of the broker whose handshake is done: only frames follow."""
    one = socket.create_connection(("127.0.0.1", port), timeout=10 * SLOW)
    one.sendall(GREETING + ready(kind))
    answer = b""
    while len(answer) < 64 + 2 or len(answer) < 66 + answer[65]:
        data = one.recv(4096)
        assert data, "the handshake failed"
        answer += data
    return one


class Wire:
    """One peer's sockets.  Sockets are made when first used; close() closes them all."""

    def __init__(self, address: str, elements: int = 8, name: bytes = None):
        self.address, self.elements = address, elements
        self.context = zmq.Context()
        self.context.linger = 0
        self.control = self.context.socket(zmq.DEALER)
        if name is not None:
            self.control.setsockopt(zmq.IDENTITY, name)
        self.control.connect(address)
        self.nonces = itertools.count()
        self.grant, self.run, self.sequence = None, bytes(16), 0
        self.gradients = self.acks = None
        self.sockets = []

    def close(self):
        self.context.destroy(linger=0)
        self.sockets.clear()

    def ask(self, request, timeout: float = 5) -> dict:
        """Send one request; the next answer, or None when there is none in time."""
        self.control.send(request if isinstance(request, bytes) else json.dumps(request).encode())
        return self.answer(timeout)

    def answer(self, timeout: float = 5):
        if not self.control.poll(int(timeout * SLOW * 1000)):
            return None
        return json.loads(self.control.recv())

    def hello_request(self, **changes) -> dict:
        request = {"op": "hello", "protocol": PROTOCOL, "role": "actor",
                   "nonce": os.urandom(16).hex(), "lanes": ["inline"],
                   "layout": [{"name": "w", "shape": [self.elements]}], "initial": True}
        request.update(changes)
        return {key: each for key, each in request.items() if each is not ...}

    def hello(self, **changes) -> dict:
        """Say hello until granted, connect to what the answer names, offer zeros if wanted."""
        request = self.hello_request(**changes)

        def granted():
            answer = self.ask(request, 1)
            while answer is not None and answer.get("nonce") != request["nonce"]:
                answer = self.answer(1)
            if answer is not None and "challenge" in answer:
                request["challenge"] = answer["challenge"]
            assert answer is not None and answer["ok"], answer
            return answer
        self.grant = wait_for(granted, 20, "a hello to be granted")
        self.run, self.elements = bytes.fromhex(self.grant["run"]), self.grant["parameters"]
        self.sequence = 0
        ends = self.grant["endpoints"]
        if self.gradients is None:
            self.gradients = self.connect(zmq.PUSH, ends["gradients"])
            self.acks = self.connect(zmq.SUB, ends["acks"])
        self.acks.setsockopt(zmq.SUBSCRIBE, struct.pack("<IHHI", MAGIC, PROTOCOL, ACK,
                                                        self.grant["actor"]))
        if self.grant["need_weights"]:
            zeros = bytes(4 * self.elements)
            self.send(encode(self.frame(zeros, kind=INIT, sequence=0, samples=0), zeros))
        return self.grant

    def connect(self, kind: int, endpoint: str, **options):
        socket = self.context.socket(kind)
        self.sockets.append(socket)  # nobody refers to some; they must not be closed for that
        for name, each in options.items():
            socket.setsockopt(getattr(zmq, name), each)
        socket.connect(endpoint)
        return socket

    def subscribe(self, **options):
        """A SUB socket on the weights, by default one that keeps every version."""
        options = options or {"RCVHWM": 100000}
        socket = self.connect(zmq.SUB, self.grant["endpoints"]["weights"], **options)
        socket.setsockopt(zmq.SUBSCRIBE, struct.pack("<IHH", MAGIC, PROTOCOL, WEIGHTS))
        return socket

    def next_weights(self, socket, timeout: float = 5) -> tuple:
        """(frame, vector) of the next publication."""
        assert socket.poll(int(timeout * SLOW * 1000)), "no weights in time"
        data = socket.recv()
        return decode(data), numpy.frombuffer(data, "<f4", offset=HEADER_BYTES)

    def frame(self, payload: bytes, **changes) -> Frame:
        """The sound frame for this payload, with `changes` made to it."""
        fields = {"actor": self.grant["actor"], "epoch": self.grant["epoch"],
                  "term": self.grant["term"], "digest": int(self.grant["digest"], 16),
                  "run": self.run, "sequence": self.sequence, "count": len(payload) // 4,
                  "payload_bytes": len(payload)}
        fields.update(changes)
        return Frame(**fields)

    def send(self, data, timeout: float = 10):
        assert self.gradients.poll(int(timeout * SLOW * 1000), zmq.POLLOUT), "the queue is full"
        if isinstance(data, (list, tuple)):
            self.gradients.send_multipart(data)
        else:
            self.gradients.send(data)

    def push(self, vector=None, payload_crc: int = None, header_crc: int = None, **changes) -> int:
        """Push the next gradient (zeros by default); its sequence number."""
        if "sequence" not in changes:
            self.sequence += 1
        array = numpy.zeros(self.elements) if vector is None else vector
        payload = numpy.asarray(array, "<f4").tobytes()
        self.send(encode(self.frame(payload, **changes), payload, payload_crc, header_crc))
        return changes.get("sequence", self.sequence)

    def next_ack(self, timeout: float = 5) -> Ack:
        assert self.acks.poll(int(timeout * SLOW * 1000)), "no acknowledgement in time"
        data = self.acks.recv()
        frame = decode(data)
        *numbers, reason, held = struct.unpack_from("<QQQQII", data, HEADER_BYTES)
        return Ack(*numbers, STATUS[reason], held, frame.epoch, frame.version)

    def until_acknowledged(self, condition, timeout: float = 10) -> Ack:
        """The first acknowledgement of our epoch for which condition(ack) holds."""
        deadline, ack = time.monotonic() + timeout * SLOW, None
        while time.monotonic() < deadline:
            ack = self.next_ack(timeout)
            if ack.epoch == self.grant["epoch"] and condition(ack):
                return ack
        pytest.fail(f"the last acknowledgement is {ack}")

    def settled(self, sequence: int = None, timeout: float = 10) -> Ack:
        """The ack that settles `sequence` (the last one pushed by default)."""
        wanted = self.sequence if sequence is None else sequence
        return self.until_acknowledged(lambda ack: ack.cumulative >= wanted, timeout)


class Service:
    """A broker, an optimizer, and how to start peers of them."""

    def __init__(self, start, build, directory: Path, address: str):
        self.start, self.build, self.directory, self.address = start, build, directory, address
        self.run = directory / "run"
        self.broker = self.optimizer = None
        self.wires = []

    def endpoints(self) -> list:
        if self.address.startswith("ipc://"):
            return [self.address + ending for ending in ENDINGS]
        stem, port = self.address.rsplit(":", 1)
        return [f"{stem}:{int(port) + i}" for i in range(len(ENDINGS))]

    def start_broker(self, *words):
        self.broker = self.start("gradq-broker", "--address", self.address, *words)
        wait_for(lambda: events(self.broker.stderr, "ready") or not self.broker.running(), 20,
                 "the broker")
        assert self.broker.running(), self.broker.report()
        return self.broker

    def start_optimizer(self, *words, wait: bool = True, run: Path = None, env: dict = None):
        """--optimizer sgd --set lr=1 unless `words` say otherwise."""
        rule = () if "--optimizer" in words else ("--optimizer", "sgd", "--set", "lr=1")
        self.optimizer = self.start("gradq-optimizer", "--address", self.address, "--run",
                                    run or self.run, *rule, *words, env=env)
        if wait:
            ready = wait_for(lambda: events(self.optimizer.stderr, "ready")
                             or not self.optimizer.running(), 20, "the optimizer")
            assert ready is not True, self.optimizer.report()
            wait_for(lambda: self.stats()["optimizer"]["term"] == ready[0]["term"]
                     and self.stats()["optimizer"]["state"] == "alive", 20, "its first report")
        return self.optimizer

    def up(self, *words, broker: tuple = ()):
        self.start_broker(*broker)
        self.start_optimizer(*words)
        return self

    def client(self, env: dict = None, **settings):
        """tests/main_client.c"""
        return self.start(self.build / "tests/main_client", self.address,
                          *(f"{key}={each}" for key, each in settings.items()), env=env)

    def actor(self, *words):
        """gradq-actor"""
        return self.start("gradq-actor", "--address", self.address, *words,
                          env={"OPENBLAS_NUM_THREADS": "1"})

    def wire(self, elements: int = 8, hello: bool = True, name: bytes = None, **changes) -> Wire:
        wire = Wire(self.address, elements, name)
        self.wires.append(wire)
        if hello:
            wire.hello(**changes)
        return wire

    def stats(self) -> dict:
        """What the broker says; ConnectionError when it does not."""
        wire = Wire(self.address)
        try:
            answer = wire.ask({"op": "stats"}, 2)
        finally:
            wire.close()
        if answer is None:
            raise ConnectionError("no stats")
        return answer

    def top(self) -> dict:
        """gradq-top --once --json"""
        answer = subprocess.run([self.build / "gradq-top", "--address", self.address, "--once",
                                 "--json", "--wait-ms", str(5000 * SLOW)], capture_output=True,
                                text=True, timeout=60 * SLOW, check=False)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    def replay(self, *words) -> str:
        """What gradq-replay prints about the run directory, once it has found nothing wrong."""
        answer = subprocess.run([self.build / "gradq-replay", "--run", self.run, *words],
                                capture_output=True, text=True, timeout=60 * SLOW, check=False)
        assert answer.returncode == 0, (answer.stdout, answer.stderr)
        return answer.stdout

    def last_applied(self) -> int:
        """Stop the optimizer, whose actors are done: how many gradients are in its last version, to
        whose bits the journal leads.

        For --aggregate 1, where versions count gradients, and a run with more than one checkpoint:
        --verify compares two.
        """
        self.until(lambda s: s["queue"]["depth"] == 0, "an empty queue")
        assert self.optimizer.stop() == 0
        last = checkpoints(self.run)[-1]
        assert checkpoint(self.run, last)[1]["applied"] == str(last)
        said = self.replay("--verify")
        # Gradients that lay in shared memory are only named: then ledger and counters agree.
        assert f"-> {last} (" in said or f"-> {last}: " in said, said
        assert f"version {last} weights" in said, said
        return last

    def ends_with(self, total: int):
        """As last_applied, and the number is `total`, neither more nor fewer; gradq-top says so."""
        self.until(lambda s: s["optimizer"]["applied"] == s["optimizer"]["version"] == total,
                   f"{total} applied")
        assert self.last_applied() == total

    def until(self, condition, what: str, timeout: float = 20) -> dict:
        """The first stats for which condition(stats) holds."""
        def asked():
            stats = self.stats()
            assert condition(stats), stats
            return stats
        return wait_for(asked, timeout, what)

    def alive(self):
        assert self.broker.running(), self.broker.report()
        assert self.optimizer.running(), self.optimizer.report()

    def close(self):
        for wire in self.wires:
            wire.close()


def done(process, timeout: float = 60) -> dict:
    """What a main_client counted, once it has ended well."""
    assert process.wait(timeout) == 0, process.report()
    return events(process.stdout, "done")[0]


def opened(process, timeout: float = 30):
    """Wait until a main_client is open."""
    wait_for(lambda: events(process.stdout, "open") or not process.running(), timeout,
             "a client to open")
    assert process.running() or events(process.stdout, "open"), process.report()
    return process


def kill(process):
    """kill -9, and nothing else."""
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.fixture
def service(run_dir, ipc_address, build, start):
    one = Service(start, build, run_dir, ipc_address)
    yield one
    one.close()


@pytest.fixture
def tcp_service(run_dir, tcp_address, build, start):
    one = Service(start, build, run_dir, tcp_address)
    yield one
    one.close()
