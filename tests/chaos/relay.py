#!/usr/bin/python3
"""A bad network between clients and a broker: a TCP relay that knows where a ZeroMQ frame ends.

Usage: tests/chaos/relay.py LISTEN_PORT BROKER_PORT SEED COUNTS_FILE

Listens on the six ports from LISTEN_PORT and connects to the broker's behind them; puts its own
ports into the broker's answers to hello, so that a client that knows only the first one comes
through here with everything.  Of gradients (to the broker), weights and acknowledgements (to the
clients) it drops, duplicates, swaps and delays single messages, sends copies again seconds later on
whatever connection is then there, and cuts connections with a RST in the middle of a frame.
Of each life of an actor it drops one gradient for certain, the first time that it comes: only a
resend brings it back.  SIGUSR1 ends the faults (and a second one begins them again), SIGTERM the
relay.  COUNTS_FILE holds what was really done, as JSON.
ZMTP 3.1: https://rfc.zeromq.org/spec/37/
"""
import asyncio
import json
import os
import random
import signal
import socket
import struct
import sys

HOST = "127.0.0.1"
PORTS = 6
CONTROL, GRADIENTS, WEIGHTS_OUT, ACKS_OUT = 0, 1, 4, 5
GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
# Of a frame (docs/PROTOCOL.md): kind, actor, epoch, sequence number.
FRAME = struct.Struct("<6xHII32xQ")
GRADIENT = 1
LOST_SEQUENCE = 3  # of each life
# Per message.  A window of 4 loses one in twenty rounds; a connection lives for some hundreds.
CHANCES = (("drop", 0.02), ("duplicate", 0.02), ("reorder", 0.02), ("delay", 0.005),
           ("late", 0.005), ("reset", 0.002))
HELD_S = 0.2  # a swapped message waits at most this long for the ones that overtake it
WRITE_COUNTS_S = 0.1


class Relay:
    def __init__(self, listen: int, target: int, seed: int, path: str):
        self.listen, self.target, self.path = listen, target, path
        self.random = random.Random(seed)
        self.counts = dict.fromkeys([name for name, _ in CHANCES] + [
            "messages", "connections", "lost", "resent"], 0)
        self.lost, self.passed = set(), set()  # (actor, epoch, sequence)
        self.faulty = True
        self.live = {}  # (port index, to the broker?): writers
        self.rewrites = [(f"tcp://{HOST}:{target + i}\"".encode(),
                          f"tcp://{HOST}:{listen + i}\"".encode())
                         for i in (GRADIENTS, WEIGHTS_OUT, ACKS_OUT)]

    def choose(self, body: bytes):
        """The fault that this message gets, None for none.  Counts gradients of which no copy has
        passed before they are dropped (lost), and those that came again and passed (resent)."""
        name = None
        if len(body) >= FRAME.size:
            kind, *name = FRAME.unpack_from(body)
            name = tuple(name) if kind == GRADIENT else None
        fault = self.chance()
        if self.faulty and name and name[2] == LOST_SEQUENCE and name not in self.lost:
            fault = "drop"
        if name and name not in self.passed:
            if fault == "drop":
                self.counts["lost"] += name not in self.lost
                self.lost.add(name)
            elif fault != "reset":
                self.passed.add(name)
                self.counts["resent"] += name in self.lost
        return fault

    def chance(self):
        if not self.faulty:
            return None
        at = self.random.random()
        for name, chance in CHANCES:
            if at < chance:
                return name
            at -= chance
        return None

    async def serve(self, index: int, reader, writer):
        try:
            up_reader, up_writer = await asyncio.open_connection(HOST, self.target + index)
        except OSError:
            writer.close()
            return
        self.counts["connections"] += 1
        both = (writer, up_writer)
        tasks = [asyncio.ensure_future(self.pump(index, True, reader, up_writer, both)),
                 asyncio.ensure_future(self.pump(index, False, up_reader, writer, both))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in both:
            each.close()

    async def pump(self, index: int, up: bool, reader, writer, both):
        """One direction of one connection, frame by frame."""
        bad = (index == GRADIENTS) if up else (index in (WEIGHTS_OUT, ACKS_OUT))
        line = Line(self, writer, both)
        key = (index, up)
        try:
            # As it comes: each side sends the second part of its greeting when it has the first.
            left = GREETING_BYTES
            while left > 0:
                part = await reader.read(left)
                if not part:
                    return
                left -= len(part)
                writer.write(part)
            while True:
                head = await reader.readexactly(1)
                size_bytes = 8 if head[0] & LONG else 1
                head += await reader.readexactly(size_bytes)
                body = await reader.readexactly(int.from_bytes(head[1:], "big"))
                if index == CONTROL and not up:
                    for ours, theirs in self.rewrites:
                        body = body.replace(ours, theirs)
                if bad and not head[0] & (MORE | COMMAND):
                    # Not before: libzmq never reconnects after a message inside a handshake, and no
                    # network puts one there.
                    self.live.setdefault(key, set()).add(line)
                    await line.message(head + body, len(head), key)
                else:
                    writer.write(head + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.live.get(key, set()).discard(line)

    async def send_late(self, frame: bytes, key: tuple):
        await asyncio.sleep(self.random.uniform(1, 5))
        lines = sorted(self.live.get(key, ()), key=id)
        if lines and self.faulty:
            self.random.choice(lines).writer.write(frame)
            self.counts["late"] += 1

    def write_counts(self):
        with open(self.path + ".tmp", "w", encoding="ascii") as file:
            json.dump(self.counts, file)
        os.replace(self.path + ".tmp", self.path)

    def toggle(self):
        self.faulty = not self.faulty

    async def run(self):
        loop = asyncio.get_running_loop()
        end = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, end.set)
        loop.add_signal_handler(signal.SIGUSR1, self.toggle)
        for index in (CONTROL, GRADIENTS, WEIGHTS_OUT, ACKS_OUT):
            await asyncio.start_server(lambda r, w, i=index: self.serve(i, r, w), HOST,
                                       self.listen + index)
        print("ready", flush=True)
        while not end.is_set():
            self.write_counts()
            try:
                await asyncio.wait_for(end.wait(), WRITE_COUNTS_S)
            except asyncio.TimeoutError:
                pass
        self.write_counts()


class Line:
    """The faulty direction of one connection: what it holds back, and what becomes of a message."""

    def __init__(self, relay: Relay, writer, both: tuple):
        self.relay, self.writer, self.both = relay, writer, both
        self.held = []  # [messages that may still overtake, frame]

    async def message(self, frame: bytes, head_bytes: int, key: tuple):
        relay = self.relay
        relay.counts["messages"] += 1
        fault = relay.choose(frame[head_bytes:])
        if fault == "reset":
            self.reset(frame)
            raise OSError("cut")
        if fault == "late":
            asyncio.ensure_future(relay.send_late(frame, key))
        elif fault is not None:
            relay.counts[fault] += 1
        if fault == "delay":
            await asyncio.sleep(relay.random.uniform(0.01, 0.3))
        if fault == "reorder":
            self.hold(frame)
        elif fault != "drop":
            self.writer.write(frame)
        if fault == "duplicate":
            self.hold(frame)
        self.overtaken()

    def hold(self, frame: bytes):
        entry = [self.relay.random.randint(1, 3) + 1, frame]
        self.held.append(entry)
        asyncio.get_running_loop().call_later(HELD_S, self.release, entry)

    def release(self, entry: list):
        if entry in self.held and not self.writer.is_closing():
            self.held.remove(entry)
            self.writer.write(entry[1])

    def overtaken(self):
        for entry in list(self.held):
            entry[0] -= 1
            if entry[0] <= 0:
                self.release(entry)

    def reset(self, frame: bytes):
        """A part of the frame, and a RST in both directions."""
        self.relay.counts["reset"] += 1
        self.writer.write(frame[:self.relay.random.randrange(len(frame))])
        for writer in self.both:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                                       struct.pack("ii", 1, 0))
            writer.transport.abort()


if __name__ == "__main__":
    asyncio.run(Relay(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]).run())
