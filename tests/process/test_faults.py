"""A file system that writes in part, is interrupted or fails, a wall clock that is off, descriptors
that run out, a reader that stands still: nothing that was acknowledged is lost or doubled.

tests/faults/shim.c brings the first two into a process; tests/chaos/oracle.py judges what is in the
run directory then.
"""
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from conftest import SANITIZED, SLOW, wait_for
from peer import checkpoints, done, events, greeted, kill, opened, rss
from peer import service, tcp_service  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "chaos"))
import oracle  # noqa: E402

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
CLIENTS = 2
DAY_S = 24 * 3600
MIB = 1 << 20
# What the oracle needs to have it all.
KEEP = ("--optimizer", "sgd", "--set", "lr=0.01", "--journal", "keep",
        "--checkpoints-kept", "1000")
shimmed = pytest.mark.skipif(SANITIZED, reason="the shim would stand in front of the sanitizer")


@pytest.fixture(params=["ipc", "tcp"])
def either(request):
    return request.getfixturevalue("service" if request.param == "ipc" else "tcp_service")


class Faults:
    """The shim's orders for one process, and what it noted."""

    def __init__(self, service, path: str, **orders):
        self.log = service.directory / "faults.log"
        self.env = {"LD_PRELOAD": str(service.build / "tests/faults_shim.so"), "FAULTS_PATH": path,
                    "FAULTS_LOG": str(self.log),
                    **{f"FAULTS_{key.upper()}": str(each) for key, each in orders.items()}}

    def calls(self) -> list:
        """(call, result, path) of each call, in their order."""
        return [line.split(" ", 2) for line in self.log.read_text().splitlines()]


class Clients:
    """tests/chaos/client.c: each writes down what it was promised and what it saw."""

    def __init__(self, service):
        print(f"SEED={SEED}")
        self.service = service
        self.logs = [service.directory / f"client{i}" for i in range(CLIENTS)]
        self.running = [service.start(service.build / "tests/chaos_client", service.address, i,
                                      SEED, log) for i, log in enumerate(self.logs)]
        self.get_on()

    def promised(self, i: int) -> int:
        path = Path(f"{self.logs[i]}.ack")
        return path.read_text().count("\n") if path.exists() else 0

    def get_on(self, more: int = 50):
        """Wait until each has had that many more gradients acknowledged."""
        for i, before in enumerate([self.promised(i) for i in range(CLIENTS)]):
            assert self.running[i].running(), self.running[i].report()
            wait_for(lambda i=i, n=before + more: self.promised(i) >= n, 40,
                     f"client {i} to get {more} more acknowledged")

    def examined(self) -> dict:
        """End them and the optimizer; the oracle's findings, when nothing was wrong."""
        for client in self.running:
            client.signal(signal.SIGTERM)
        for client in self.running:
            assert client.wait() == 0, client.report()
        assert self.service.optimizer.stop() == 0, self.service.optimizer.report()
        found = oracle.examine(self.service.run, self.service.build, SEED, self.logs)
        assert found["promised"] >= 100 and found["looks"] > 0, found
        return found


# ---- a file system that does things by halves ----

@shimmed
def test_short_and_interrupted_calls_on_the_run_directory_change_nothing(service):
    # Every second call: each is interrupted once, and then done.
    faults = Faults(service, str(service.run), short=7, eintr=2)
    words = (*KEEP, "--fsync", "always", "--checkpoint-interval-s", "0.2")
    service.start_broker()
    service.start_optimizer(*words, env=faults.env)
    clients = Clients(service)
    wait_for(lambda: len(checkpoints(service.run)) >= 3, 20, "checkpoints")
    kill(service.optimizer)
    service.start_optimizer("--resume", *words, env=faults.env)
    clients.get_on()
    found = clients.examined()
    assert found["terms"] == 2 and found["checkpoints"] >= 3, found
    calls = faults.calls()
    for folder in ("/journal/", "/checkpoints/", "/identity.json"):
        writes = [result for call, result, path in calls if call == "write" and folder in path]
        assert writes.count("7") > 10 and set(writes) <= {"EINTR", *"1234567"}, folder
    interrupted = {call for call, result, _ in calls if result == "EINTR"}
    assert interrupted == {"open", "write", "ftruncate", "fsync", "fdatasync"}


# ---- a disk that fails ----

@shimmed
@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_journal_that_cannot_be_written_ends_the_optimizer_and_nothing_acknowledged_is_lost(
        service, call):
    # A record is three writes and its padding: any part of one may be the last.
    number = 600 + SEED % 4
    faults = Faults(service, "/journal", eio=f"{call}:{number}")
    words = (*KEEP, "--fsync", "always", "--checkpoint-interval-s", "0")
    service.start_broker()
    service.start_optimizer(*words, env=faults.env)
    clients = Clients(service)
    assert service.optimizer.wait(60) == 1
    assert "the journal cannot be written: the disk failed" in service.optimizer.stderr
    assert "start with --resume" in service.optimizer.stderr
    # One that failed is asked for nothing more: a second answer might be a lie.
    calls = faults.calls()
    assert calls[-1][:2] == [call, "EIO"], calls[-3:]
    assert sum(each[0] == call for each in calls) == number
    service.start_optimizer("--resume", *words)
    clients.get_on()
    assert clients.examined()["terms"] == 2


@shimmed
@pytest.mark.parametrize("call", ["write", "fdatasync", "fsync"])
def test_a_disk_that_fails_at_the_start_ends_it_with_a_sentence(service, call):
    faults = Faults(service, "/journal", eio=f"{call}:1")
    service.start_broker()
    process = service.start("gradq-optimizer", "--address", service.address, "--run", service.run,
                            "--fsync", "always", env=faults.env)
    assert process.wait() == 1, process.report()
    assert "cannot write the journal" in process.stderr
    assert faults.calls()[-1][:2] == [call, "EIO"]
    service.start_optimizer(*KEEP)
    Clients(service).examined()


@shimmed
@pytest.mark.parametrize("order", ["write:8", "fsync:3"])
def test_a_checkpoint_that_fails_is_logged_and_training_goes_on(service, order):
    # One checkpoint is five writes (head, tensors, slots) and two syncs (file, directory).
    faults = Faults(service, "/checkpoints", eio=order)
    service.start_broker()
    service.start_optimizer(*KEEP, "--checkpoint-interval-s", "0", env=faults.env)
    clients = Clients(service)
    folder = service.run / "checkpoints"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert checkpoints(service.run) == [0]
    service.optimizer.signal(signal.SIGUSR1)
    failed, = wait_for(lambda: events(service.optimizer.stderr, "checkpoint failed"), 20,
                       "the failure to be logged")
    assert failed["level"] == "error" and "the file is as it was" in failed["message"], failed
    clients.get_on()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    service.optimizer.signal(signal.SIGUSR1)
    wait_for(lambda: len(checkpoints(service.run)) == 2, 20, "the next one to be written")
    kill(service.optimizer)
    service.start_optimizer("--resume", *KEEP, "--checkpoint-interval-s", "0")
    clients.get_on()
    assert clients.examined()["terms"] == 2


# ---- a wall clock that is wrong ----

def sent_days_ago(service, actor: int) -> set:
    """How many days before now the frames of an actor, as they stand in the journal, were sent."""
    found, now_ns = set(), time.time_ns()
    run = bytes.fromhex(json.loads((service.run / "identity.json").read_text())["run"])
    for record in oracle.read_journal(sorted((service.run / "journal").iterdir()), run):
        if record.kind == oracle.GRADIENT:
            fields = oracle.FRAME.unpack_from(record.payload)
            if fields[3] == actor:
                found.add(round((now_ns - fields[15]) / (DAY_S * 10**9)))
    return found


@shimmed
def test_wall_clocks_that_are_a_day_off_or_jump_change_nothing(service):
    def off(seconds: int, **more) -> dict:
        return Faults(service, "/no file", clock=seconds, **more).env
    service.start_broker()
    # Lane inline: a killed broker loses gradients; headers beyond it may arrive all the same.
    service.start_optimizer("--checkpoint-interval-s", "0", "--lane", "inline", env=off(DAY_S))
    shown = datetime.fromisoformat(events(service.optimizer.stderr, "ready")[0]["time"][:19])
    ahead_s = shown.replace(tzinfo=timezone.utc).timestamp() - time.time()
    assert ahead_s > DAY_S / 2, "the shim is not at work"
    clocks = [off(-DAY_S), off(DAY_S, clock_jumps=1), {}]

    def push(actor: int, **more):
        return opened(service.client(env=clocks[actor], actor=actor, seed=SEED + actor, window=16,
                                     elements=5000, **more))
    # By the jumping one's clock, two days pass between two looks: time for many time-outs.
    clients = [push(actor, count=300, resend_ms=100_000, timeout_ms=100_000) for actor in range(3)]
    for client in clients:
        count = done(client)
        assert (count["acknowledged"], count["refused"], count["resent"]) == (300, 0, 0), count
    assert [sent_days_ago(service, actor) for actor in range(3)] == [{1}, {-1, 1}, {0}]
    assert all(actor["last_seen_ms"] < 60_000 * SLOW for actor in service.top()["actors"])

    # What a dead broker held is sent again after a second, whatever the clock says.
    clients = [push(actor, count=300, pause=1) for actor in range(3)]
    service.optimizer.signal(signal.SIGSTOP)
    for client in clients:
        client.signal(signal.SIGUSR1)
    service.until(lambda s: s["queue"]["bytes"] >= 4 * 4 * 5000, "a queue to lose")
    kill(service.broker)
    service.start_broker()
    service.optimizer.signal(signal.SIGCONT)
    counts = [done(client) for client in clients]
    assert all(count["acknowledged"] == 300 for count in counts), counts
    assert sum(count["resent"] for count in counts) >= 4, counts
    service.until(lambda s: s["optimizer"]["state"] == "alive", "the optimizer to report")
    service.ends_with(6 * 300)


# ---- descriptors that run out ----

def descriptors(process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def connection(service) -> socket.socket:
    """A bare one to the control endpoint; None: the broker's backlog is full, or it is gone."""
    if service.address.startswith("ipc://"):
        one, where = socket.socket(socket.AF_UNIX), service.address[len("ipc://"):]
    else:
        one, where = socket.socket(), ("127.0.0.1", int(service.address.rsplit(":", 1)[1]))
    one.settimeout(1)
    try:
        one.connect(where)
    except OSError:
        one.close()
        return None
    return one


def test_a_broker_out_of_descriptors_loses_nothing_and_training_goes_on(either):
    """libzmq ends the process at accept with ipc, and tries on with tcp; a broker that ended is
    started again, as the supervisor does."""
    service, limit = either, 64
    service.up(*KEEP)
    clients = Clients(service)
    broker = service.broker
    resource.prlimit(broker.pid, resource.RLIMIT_CORE, (0, 0))
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (limit, limit))
    kept = [connection(service) for _ in range(120)]
    wait_for(lambda: not broker.running() or descriptors(broker) >= limit, 20,
             "the descriptors to be used up")
    # Either it ends at its next accept, or whoever is connected does not feel it.
    before = [clients.promised(i) for i in range(CLIENTS)]
    wait_for(lambda: not broker.running() or all(clients.promised(i) >= before[i] + 50
                                                 for i in range(CLIENTS)), 40, "either")
    for one in kept:
        if one is not None:
            one.close()
    print(f"the broker {'lives' if broker.running() else 'ended'}")
    if not broker.running():
        assert broker.popen.returncode == -signal.SIGABRT, broker.report()
        assert "Too many open files" in broker.stderr
        service.start_broker()
    else:
        wait_for(lambda: descriptors(broker) < limit, 20, "descriptors to be given back")
    clients.get_on()
    service.until(lambda s: s["optimizer"]["state"] == "alive", "new connections to be served")
    clients.examined()


# ---- a reader that stands still ----

def test_a_reader_that_stands_still_holds_up_nobody_and_then_gets_the_newest_version(service):
    elements, versions = 250_000, 100  # 100 MB: far more than any buffer on the way holds
    service.up()
    wire = service.wire(elements, actor=0)
    reader = wire.subscribe(RCVHWM=1)
    assert wire.next_weights(reader)[0].version == 0
    before = rss(service.broker.pid)
    count = done(service.client(actor=1, elements=elements, count=versions, seed=SEED))
    assert (count["acknowledged"], count["torn"], count["fallen"]) == (versions, 0, 0), count
    if not SANITIZED:
        assert rss(service.broker.pid) - before < 32 * MIB
    # What lay in buffers, then the newest: it is repeated every second.
    seen = [0]
    while seen[-1] < versions:
        frame, vector = wire.next_weights(reader)
        assert frame.version >= seen[-1] and (vector == vector[0]).all()
        seen.append(frame.version)
    assert len(seen) < versions / 2, "it was served as if it had been reading"
    service.ends_with(versions)


# ---- a message without an end ----

@pytest.mark.skipif(SANITIZED, reason="a sanitizer's address space is not ours to limit")
@pytest.mark.parametrize("part", [b"\x01\x28" + bytes(40), b"\x03" + struct.pack(">Q", MIB)
                                  + bytes(MIB)], ids=["small parts", "large parts"])
def test_a_message_without_an_end_meets_the_memory_limit_and_loses_nothing(tcp_service, part):
    """libzmq keeps the parts until the last one comes, and hands out none before: the limit of the
    process is the bound.  At it the sender loses its connection, or the broker its life."""
    service, parts = tcp_service, part * (MIB // len(part) or 1)
    service.up(*KEEP)
    clients = Clients(service)
    broker = service.broker
    size = int(Path(f"/proc/{broker.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    one = greeted(int(service.address.rsplit(":", 1)[1]) + 1, b"PUSH")
    for _ in range(16):
        one.sendall(parts)
    clients.get_on()  # nobody else feels it
    resource.prlimit(broker.pid, resource.RLIMIT_CORE, (0, 0))
    resource.prlimit(broker.pid, resource.RLIMIT_AS, (size + 128 * MIB, size + 128 * MIB))
    with pytest.raises(ConnectionError):
        for _ in range(1024):
            one.sendall(parts)
    one.close()
    wait_for(lambda: not broker.running() or service.stats()["ok"], 20, "its end, or its answer")
    print(f"the broker {'lives' if broker.running() else 'ended'}")
    if not broker.running():
        service.start_broker()
    clients.get_on()
    service.until(lambda s: s["optimizer"]["state"] == "alive", "the optimizer to report")
    clients.examined()
