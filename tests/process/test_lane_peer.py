"""An actor on lane shm that is not sound: what it says of its gradients, and what it does to its
own file, costs nobody else a gradient, and the run begins again."""
import fcntl
import mmap
import os
import signal
import struct
import subprocess
from pathlib import Path

import numpy
import pytest

from conftest import wait_for
from peer import checkpoint, checkpoints, encode, events, kill
from peer import service  # noqa: F401

HOST = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
ELEMENTS, SLOTS = 10_000, 5
WORDS = ("--optimizer", "adam", "--lane", "auto", "--checkpoint-interval-s", "0")
# Offsets in a lane file; docs/PROTOCOL.md.
SLOT_BYTES, CUMULATIVE, ATTACHED, HOLDS, READY, HEADERS, SLOT = 48, 88, 192, 208, 728, 1248, 12288

# A sanitizer would make a report of a SIGBUS that is meant.
UNHANDLED = {name: os.environ.get(name, "") + ":handle_sigbus=0"
             for name in ("ASAN_OPTIONS", "TSAN_OPTIONS")}


class Peer:
    """One life on lane shm, with its file in hand."""

    def __init__(self, service, elements: int = ELEMENTS, unsent: list = None):
        """unsent: takes the first weights, instead of the queue."""
        self.elements = elements
        self.wire = service.wire(elements, hello=False)
        send = self.wire.send
        if unsent is not None:
            self.wire.send = unsent.append
        grant = self.wire.hello(lanes=["inline", "shm"], host=HOST, window=SLOTS - 1)
        self.wire.send = send
        assert grant["lane"] == "shm", grant
        self.file = open(grant["shm"]["slots"], "r+b")  # pylint: disable=consider-using-with
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.map = mmap.mmap(self.file.fileno(), 0)
        self.slot_bytes, = struct.unpack_from("<Q", self.map, SLOT_BYTES)
        struct.pack_into("<I", self.map, ATTACHED, 1)

    def build(self, sequence: int, values) -> bytes:
        """A gradient that lies ready, called finite; its descriptor."""
        slot = sequence % SLOTS
        numpy.frombuffer(self.map, "<f4", self.elements, SLOT + slot * self.slot_bytes)[:] = values
        frame = self.wire.frame(b"", lane=1, count=self.elements,
                                payload_bytes=4 * self.elements, sequence=sequence, reserved_a=slot,
                                reserved_b=1)
        head = encode(frame, payload_crc=0)
        self.map[HEADERS + 128 * slot:HEADERS + 128 * (slot + 1)] = head
        struct.pack_into("<Q", self.map, HOLDS + 8 * slot, sequence)
        struct.pack_into("<Q", self.map, READY + 8 * slot, sequence)
        return head

    def push(self, sequence: int, values=1.0):
        self.wire.send(self.build(sequence, values))
        wait_for(lambda: struct.unpack_from("<Q", self.map, CUMULATIVE)[0] >= sequence, 20,
                 f"{sequence} to be settled")


def test_a_gradient_that_lies_ready_waits_for_the_first_weights(service):
    service.up(*WORDS)
    first, other = [], service.wire(ELEMENTS, hello=False)
    actor = Peer(service, unsent=first)
    head = actor.build(1, 1.0)
    # The optimizer is awake for each of these, and looks what there is to take.
    for _ in range(20):
        assert other.ask(other.hello_request(initial=False))["ok"]
    stats = service.stats()["optimizer"]
    assert (stats["taken_early"], stats["rejected"], stats["version"]) == (0, 0, 0)
    for each in (*first, head):
        actor.wire.send(each)
    service.until(lambda s: s["optimizer"]["version"] == 1 and s["optimizer"]["rejected"] == 0,
                  "its step")


@pytest.mark.parametrize("journal", ["keep", "recycle"])
def test_what_is_called_finite_and_is_not_does_not_harm_the_journal(service, journal):
    words = (*WORDS, "--journal", journal)
    service.up(*words)
    actor = Peer(service)
    odd = numpy.ones(ELEMENTS, "f4")
    odd[5] = numpy.nan
    for sequence, values in enumerate((1, odd, 1), 1):
        actor.push(sequence, values)
    # A copy is looked through: only where there is none, what is not finite counts as 0.
    refused = {"nonfinite": 1} if journal == "keep" else {}
    version = 3 - len(refused)
    service.until(lambda s: s["optimizer"]["version"] == version
                  and s["optimizer"]["rejected_by"] == refused, f"version {version}")
    kill(service.optimizer)
    service.start_optimizer("--resume", *words)
    assert service.stats()["optimizer"]["version"] == version
    service.optimizer.stop()
    tensors, _ = checkpoint(service.run, checkpoints(service.run)[-1])
    assert all(numpy.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize("left", [0, SLOT, SLOT + 4096 * 3],
                         ids=["all of it", "its slots", "half a slot"])
def test_an_actor_that_cuts_its_file_short_costs_nobody_what_was_acknowledged(service, left):
    service.start_broker()
    service.start_optimizer(*WORDS, env=UNHANDLED)
    other, actor = Peer(service), Peer(service)
    for peer in (other, actor):
        for sequence in range(1, 2 * SLOTS):
            peer.push(sequence)
    acknowledged = 2 * (2 * SLOTS - 1)
    # It sleeps while the gradient comes to lie ready, and does not wake before that is gone.
    service.optimizer.signal(signal.SIGSTOP)
    head = actor.build(2 * SLOTS, 1.0)
    os.ftruncate(actor.file.fileno(), left)
    actor.wire.send(head)
    service.optimizer.signal(signal.SIGCONT)
    assert service.optimizer.wait() == -signal.SIGBUS
    service.start_optimizer("--resume", *WORDS)
    # Of one that was half made, the rest counts as 0: that can be neither undone nor finished.
    assert service.stats()["optimizer"]["version"] == acknowledged + (left > SLOT)
    other.push(2 * SLOTS)
    service.optimizer.stop()
    assert "only named" in service.replay("--verify")


def test_a_board_takes_the_place_of_the_one_before_where_there_is_no_room_for_both(service):
    service.run.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "gradq-test", service.run],
                             capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system to fill: {mounted.stderr.strip()}")
    try:
        words = ("--lane", "auto", "--checkpoint-interval-s", "0")  # sgd: a board of 5 MB
        service.up(*words)
        actor = Peer(service, 100_000)
        actor.push(1)
        kill(service.optimizer)
        actor.map.close()
        actor.file.close()
        optimizer = service.start_optimizer("--resume", *words)
        assert not events(optimizer.stderr, "no shared memory: actors of this host take lane "
                          "inline, too"), optimizer.stderr
        Peer(service, 100_000).push(1)
        optimizer.stop()
    finally:
        subprocess.run(["umount", "-l", service.run], check=False)
