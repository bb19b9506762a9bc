"""One life of an actor on the wire: what src/client_service.c and src/client_hello.c do.

Takes in weights and acknowledgements, sends again what is due, says hello anew when the optimizer
has forgotten this actor, opens sockets anew when they are deaf.  A Link knows no threads and waits
only where it is told to; client.py has both.  Nothing here trusts a peer's bytes, or raises for
them.
"""
import time

import numpy
import zmq

from . import hello
from .errors import Fenced, LayoutMismatch, Refused, RunReplaced, Timeout, Unreachable
from .frame import (ACK, F32, GRADIENT, HEADER_BYTES, INIT, REASONS, WEIGHTS, decode_ack,
                    decode_header, payload_is_whole)
from .lane import frame_of
from .lane_shm import host
from .link_lane import LinkLane
from .sockets import Sockets, messages, poll, send
from .window import Sent, Window

SLICE_S = 0.1
REPEAT_S = 1.0  # a hello without an answer, an INIT, a report
RETRY_S = 0.1  # a hello that was refused for now
HEARD_S = 2.5  # the optimizer speaks once a second; unheard for longer, it is away
SILENT_S = 3.0  # nothing heard: the connections may be dead beyond ZeroMQ's repair
DEAF_S, DEAF_S_PER_BYTE = 10.0, 1e-7  # one way alone; longer, for a large vector may be on its way
DOUBLINGS_MAX = 2  # of these pauses
NONE = (-1, -1)  # older than any weights
UNKNOWN_S = 4.0  # a later life of the optimizer, and no acknowledgement: does it know this epoch?


class Link(LinkLane):
    """As Client's parameters, checked; `layout` a Layout or None, `initial` f32[count] or None."""

    def __init__(self, address: str, layout, initial, actor, window: int, resend_s: float,
                 encoding: int, lane: str):
        self.address, self.proposed, self.initial = address, layout, initial
        self.host, self.insists = None if lane == "inline" else host(), lane == "shm"
        self.wanted, self.encoding = actor, encoding
        self.window = Window(window, resend_s)
        self.metrics = {}
        self.nonce, self.challenge = hello.new_nonce(), None
        self.grant = self.terms = self.lane = None
        self.building = None  # the lane in which the caller builds a vector
        self.lane_reason, self.said, self.boardless, self.looked = "", None, None, 0.0
        self.asking = self.forgotten = False  # for another epoch; nothing is sent meanwhile
        self.asked = 0.0
        self.age = None  # (term, version) of `vector`
        self.vector = None  # f32[count], newest that was looked through
        self.arrived = None  # (Header, message) that is newer
        self.given = None  # age of the weights that the caller took last
        self.settled_age = (0, 0)  # highest of the acknowledgements
        self.higher_epoch = 0  # highest that an acknowledgement for this actor named
        self.refused, self.refused_by, self.staleness = 0, {}, None
        self.before = dict.fromkeys(("pushed", "acknowledged", "refused", "resent", "dropped",
                                     "rolled_back"), 0)
        self.known_term, self.unknown = 0, None
        self.heads = {}  # last header of each kind, and when that was
        self.foreign = float("-inf")  # last weights of another run
        self.blocked, self.reopened_in_vain, self.reported = False, 0, 0.0
        self.sockets = Sockets(address)

    # Opening

    def open(self, deadline: float):
        """Say hello until granted, and wait for the first weights."""
        self._hello(deadline)
        offered = float("-inf")
        while self.age is None:
            now = time.monotonic()
            if now >= deadline:
                raise Timeout(f"no weights from {self.address} in time: " + (
                    "the run has none yet; start the optimizer with --init, or an actor that "
                    "brings them" if self.terms.need_weights and self.initial is None
                    else "is the optimizer alive?  `tools/gradq status` says"))
            if self.terms.need_weights and self.initial is not None and now - offered >= REPEAT_S:
                head, payload = frame_of(self.initial, F32, kind=INIT, **self._identity())
                if send(self.sockets.gradients, head + payload.tobytes()):
                    offered = now
            self.service(min(SLICE_S, deadline - now))
            self.raise_if_ended()
            self.take_weights()

    def _request(self, actor, layout) -> bytes:
        return hello.request(self.nonce, self.window.size, host=self.host, actor=actor,
                             layout=layout, initial=self.initial is not None,
                             challenge=self.challenge)

    def _hello(self, deadline: float):
        """The nonce stays: however often asked, it is one request."""
        error = Unreachable(f"no broker answers at {self.address}: start it, or correct the "
                            "address")
        due, reopen = 0.0, time.monotonic() + SILENT_S
        while self.grant is None:
            now = time.monotonic()
            if now >= deadline:
                raise error
            if now >= reopen:
                reopen = now + SILENT_S
                self.sockets.open_control()
                due = 0.0
            if now >= due:
                sent = send(self.sockets.control, self._request(self.wanted, self.proposed))
                due = now + (REPEAT_S if sent else 0.01)
            if not poll([(self.sockets.control, zmq.POLLIN)],
                        min(SLICE_S, max(0.001, min(due, deadline) - now))):
                continue
            for data in messages(self.sockets.control):
                if isinstance(error, Unreachable):
                    error = Timeout(f"{self.address} answers, but not to a hello; is it the "
                                    "address of a gradq broker?")
                words = hello.answer(data.bytes, self.nonce)
                if words is not None and self.grant is None:
                    reopen = time.monotonic() + SILENT_S
                    error, due = self._take_answer(words, error)

    def _take_answer(self, words: dict, error) -> tuple:
        """(what to raise when nothing better comes, when to ask again)"""
        word = hello.challenge(words)
        if word is not None:  # who is alive repeats it, at once
            self.challenge = word
            return error, 0.0
        if words.get("ok") is True:
            try:
                self._begin(words)
            except (ValueError, zmq.ZMQError) as problem:
                if isinstance(problem, LayoutMismatch):
                    raise
                raise Refused(f"{self.address} grants a hello that makes no sense ({problem}); is "
                              "it a gradq broker of this version?", "malformed") from None
            return error, 0.0
        refused, again = hello.refusal(words)
        if not again:
            raise refused
        return Timeout(str(refused)), time.monotonic() + RETRY_S

    def _begin(self, words: dict):
        grant, terms = hello.read_grant(words), hello.read_terms(words, self.address)
        if self.proposed is not None and self.proposed != terms.layout:
            raise LayoutMismatch("this run trains another model: choose another run, or take its "
                                 "model by giving none")
        now = time.monotonic()
        self.known_term = grant.term
        self.progress = self.reopened = now
        self.heard = {WEIGHTS: now, ACK: now}
        self.grant, self.terms = grant, terms
        self._open_lane(words)
        self._open_data()

    def _open_data(self):
        self.sockets.open_data(self.terms.endpoints, self.grant.actor, self.terms.layout.count,
                               weights=self.lane.name == "inline")

    def _identity(self) -> dict:
        return {"actor": self.grant.actor, "epoch": self.grant.epoch, "run": self.grant.run,
                "digest": self.terms.digest}

    # What may end it

    def ended(self):
        """The exception that says why this link can do no more; None."""
        if self.fenced:
            return Fenced(f"another process runs under actor id {self.grant.actor}: this one has "
                          "to end; give each process an id of its own")
        if self.foreign > max(self.heard.values()) + HEARD_S:
            return RunReplaced(f"another run has taken {self.address} over: open a new client")
        return None

    def raise_if_ended(self):
        error = self.ended()
        if error is not None:
            raise error

    @property
    def fenced(self) -> bool:
        """While it asks for another epoch, a higher one may be its own."""
        return self.higher_epoch > self.grant.epoch and not self.asking

    @property
    def silence(self) -> float:
        """Seconds since the optimizer was heard."""
        return time.monotonic() - max(self.heard.values())

    @property
    def newest_age(self):
        """(term, version) of the newest weights that are here; None."""
        ages = [self.age, self.lane.newest() if self.lane.name == "shm" else None,
                self.arrived and (self.arrived[0].term, self.arrived[0].version)]
        return max((age for age in ages if age), default=None)

    @property
    def counts(self) -> dict:
        """Of this epoch."""
        return {"pushed": self.window.sequence,
                "acknowledged": self.window.sequence - len(self.window),
                "refused": self.refused, "resent": self.window.resent}

    # Weights and acknowledgements

    def _ours(self, head, now: float) -> bool:
        """The same header again is what the broker remembers, and says nothing of the optimizer."""
        if head.run != self.grant.run:
            if head.kind == WEIGHTS:
                self.foreign = now
            return False
        if self.heads.get(head.kind) != head:
            self.heads[head.kind], self.heard[head.kind] = head, now
        return head.digest == self.terms.digest

    def _drain_weights(self, now: float):
        """Take all that are here and keep the newest."""
        for message in messages(self.sockets.weights):
            head = decode_header(message.buffer)
            if (head is not None and head.kind == WEIGHTS and self._ours(head, now)
                    and head.count == self.terms.layout.count
                    and (self.newest_age is None or (head.term, head.version) > self.newest_age)):
                self.arrived = head, message

    def take_weights(self):
        """Have the newest that are here in `vector`; those that arrived if they are whole."""
        if self.lane.name == "shm" and (self.lane.newest() or NONE) > (self.age or NONE):
            newest = self.lane.weights()
            if newest is not None and newest[0] > (self.age or NONE):
                self.age, self.vector = newest
        if self.arrived is None:
            return
        head, message = self.arrived
        self.arrived = None
        if (head.term, head.version) > (self.age or NONE) and payload_is_whole(
                head, message.buffer):
            # A copy, for where ZeroMQ received it need not be aligned.
            vector = numpy.empty(self.terms.layout.count, numpy.float32)
            vector[:] = numpy.frombuffer(message.buffer, "<f4", offset=HEADER_BYTES)
            self.age, self.vector = (head.term, head.version), vector

    def _receive_acks(self, now: float):
        for message in messages(self.sockets.acks):
            data = message.bytes
            head = decode_header(data)
            if (head is None or head.kind != ACK or not payload_is_whole(head, data)
                    or not self._ours(head, now) or head.actor != self.grant.actor):
                continue
            # Who serves our lane file says so there before he says anything here.
            if self.lane.name == "shm" and head.term > self.lane.term:
                self._leave_shm("a later optimizer offers no shared memory")
            if head.epoch == self.grant.epoch:
                self._take_ack((head.term, head.version), decode_ack(data), now)
            self.higher_epoch = max(self.higher_epoch, head.epoch)

    def _take_ack(self, age: tuple, ack, now: float):
        term = age[0]
        if term < self.known_term:
            return  # of a life that is over: the one after it says more, or has lost it
        if term > self.known_term and self.window.lacks(ack.cumulative, ack.beyond):
            self._ask(forgotten=True)
            return
        self.known_term = term
        self.settled_age = max(self.settled_age, age)
        settled = self.window.settle(ack.cumulative, ack.beyond, ack.held)
        for sent in settled:
            self.lane.settled(sent.frame)
        refused = max(0, ack.refused - self.refused)
        if refused:
            self.refused = ack.refused
            reason = REASONS.get(ack.refused_reason, str(ack.refused_reason))
            self.refused_by[reason] = self.refused_by.get(reason, 0) + refused
        if settled:
            self.progress = now
            if settled[-1].age[0] == term:  # its own step is not counted
                self.staleness = max(0, age[1] - settled[-1].age[1] - (not refused))

    # Gradients

    def reserve(self) -> numpy.ndarray:
        """f32[count] to build the next gradient in; the same one until it is sent."""
        self.building = self.building or self.lane
        return self.building.reserve()

    def try_send(self, samples: int) -> int:
        """Send what was built, computed from the weights given last, if there is room; its number
        in this epoch, or 0."""
        term, version = self.given
        if self.building is not self.lane:  # which has changed under the caller's hands
            self.lane.reserve()[:] = self.building.reserve()
            self.building = self.lane
        frame = self.lane.seal(kind=GRADIENT, term=term, version=version, samples=samples,
                               sequence=self.window.sequence + 1, **self._identity())
        if not send(self.sockets.gradients, frame):
            return 0
        self.lane.note_sent()
        self.building = None
        now = time.monotonic()
        if not len(self.window):
            self.progress = now
        return self.window.add(Sent(frame, self.given), now)

    def _resend_due(self, now: float):
        """The same bytes under the same number: the optimizer knows what it has.  Not while it is
        away, or its return would meet a flood."""
        if self.ended() is not None or self.asking or now - max(self.heard.values()) > HEARD_S:
            return
        sent = self.window.due(now)
        while sent is not None and send(self.sockets.gradients, sent.frame):
            self.window.note_resent(sent, now)
            sent = self.window.due(now)

    # Lives

    def _ask(self, forgotten: bool):
        """For the epoch that this actor has.  From who knows it the nonce that we have gets just
        that; who has lost some of what came in it must be asked with another one."""
        if self.asking and (self.forgotten or not forgotten):
            return
        if forgotten:
            self.nonce = hello.new_nonce()
        self.asking, self.forgotten, self.asked = True, forgotten, float("-inf")

    def _ask_if_unknown(self, now: float):
        """A later life of the optimizer speaks: does it know us?"""
        newest = self.newest_age
        if newest is None or newest[0] <= self.known_term or self.fenced or self.asking:
            self.unknown = None
        elif self.unknown is None:
            self.unknown = now
        elif now - self.unknown >= UNKNOWN_S and now - max(self.heard.values()) < HEARD_S:
            self._ask(forgotten=False)

    def _ask_again(self, now: float):
        if self.asking and now - self.asked >= REPEAT_S:
            send(self.sockets.control, self._request(self.grant.actor, self.terms.layout))
            self.asked = now

    def _read_control(self):
        for message in messages(self.sockets.control):
            words = hello.answer(message.bytes, self.nonce)
            if words is None or not self.asking:
                continue
            word = hello.challenge(words)
            if word is not None:
                self.challenge, self.asked = word, float("-inf")
            elif words.get("ok") is True:
                self._take_new_grant(words)

    def _take_new_grant(self, words: dict):
        """The same epoch: the optimizer knows us after all."""
        try:
            grant = hello.read_grant(words)
        except ValueError:
            return
        if ((grant.run, grant.actor) != (self.grant.run, self.grant.actor)
                or grant.epoch < self.grant.epoch):
            return  # of another run: its weights will tell
        self.asking = False
        self.known_term = max(self.known_term, grant.term)
        if grant.epoch != self.grant.epoch:
            self._begin_life(grant, words)

    def _begin_life(self, grant, words: dict):
        """What was on the way is dropped, numbers start anew."""
        for name, count in self.counts.items():
            self.before[name] += count
        self.before["dropped"] += len(self.window)
        self.before["rolled_back"] += 1
        self.window = Window(self.window.size, self.window.resend_s, self.window.uniform)
        self.grant, self.refused, self.settled_age, self.unknown = grant, 0, (0, 0), None
        self._open_lane(words)
        self._reopen(self._open_data)  # what is still in the old ones is of the life before

    # Sockets

    def _reopen(self, *openers):
        """No memory or descriptors for new ones: the old ones stay."""
        for opener in openers:
            try:
                opener()
            except zmq.ZMQError:
                pass

    def _reopen_if_deaf(self, now: float):
        """Weights and acknowledgements come each second; gradients show by being settled, or taken,
        that they get through.  What the window keeps is not lost by this."""
        way = DEAF_S + 4 * self.terms.layout.count * DEAF_S_PER_BYTE
        waiting = self.blocked or len(self.window) > 0
        silent = now - max(self.heard.values()) > SILENT_S
        if not (silent or now - min(self.heard.values()) > way
                or (waiting and now - self.progress > way)):
            self.reopened_in_vain = 0
            return
        pause = (SILENT_S if silent else way) * 2 ** self.reopened_in_vain
        if now - self.reopened < pause:
            return
        self.reopened = now
        self.reopened_in_vain = min(self.reopened_in_vain + 1, DOUBLINGS_MAX)
        self._reopen(self._open_data, self.sockets.open_control)
        if silent:
            self.sockets.subscribe()  # on lane shm, too: the run may have been replaced by another

    def tell(self, op: str):
        send(self.sockets.control, hello.report(op, self.grant, self.counts, self.metrics))

    def service(self, wait_s: float, for_room: bool = False):
        """Take in what is here, waiting up to wait_s for something, or for room for a gradient; do
        what is due."""
        if self.lane.name == "shm":
            wait_s = self._serve_lane(wait_s, for_room)
            if wait_s is None:
                return
        wanted = [(self.sockets.weights, zmq.POLLIN), (self.sockets.acks, zmq.POLLIN),
                  (self.sockets.control, zmq.POLLIN)]
        if for_room:
            wanted.append((self.sockets.gradients, zmq.POLLOUT))
        ready = poll(wanted, wait_s)
        now = time.monotonic()
        if self.sockets.weights in ready:
            self._drain_weights(now)
        if self.sockets.acks in ready:
            self._receive_acks(now)
        if for_room:
            sendable = self.sockets.gradients in ready
            if self.blocked == sendable:
                self.progress = now
            self.blocked = not sendable
        if self.sockets.control in ready:
            self._read_control()  # last of the sockets: it may open the others anew
        self._ask_if_unknown(now)
        self._ask_again(now)
        self._resend_due(now)
        self._reopen_if_deaf(now)
        if now - self.reported >= REPEAT_S:
            self.reported = now
            self.tell("report")
            if self.lane.name == "shm" and self.lane.removed():
                self._leave_shm("the optimizer has removed this actor's lane file")

    def close(self):
        if self.lane is not None:
            self.lane.close()
        self.sockets.close()
