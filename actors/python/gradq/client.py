"""gradq.Client: push gradients, take whole versions of the weights.

    with gradq.Client(address, initial={"weight": w0, "bias": b0}) as client:
        while training:
            weights = client.pull()                    # newest whole version, {name: array}
            client.push(gradients(weights), samples)   # waits for the window only
                                                       # leaving waits for acknowledgements

Threads.  Every method may be called from any thread; they take turns.  A gradient is taken as
computed from the weights that pull() gave last, so threads that compute at the same time need a
client each.  One thread of the client's own looks at the sockets every 10 ms while the caller
computes: without it the newest weights would be lost behind older ones that fill the socket, lost
gradients would not be sent again, and gradq-top would call the actor silent.  It takes a hundredth
of a core.  After a fork the child must not use the client (Closed), nor closes it.
"""
import numbers
import os
import threading
import time
import weakref
from collections.abc import Mapping

import numpy
import zmq

from .errors import Closed, LayoutMismatch, Timeout
from .frame import ACTORS_MAX, ENCODINGS
from .layout import Layout
from .link import HEARD_S, SLICE_S, Link
from .window import WINDOW_MAX

KEEP_S = 0.01
CLOSE_S_MAX = 30.0  # also for who waits for ever: a step of --aggregate may never be complete
METRICS_MAX, METRIC_BYTES_MAX = 16, 31
ADDRESSES = ("tcp://", "ipc://")
LANES = ("auto", "inline", "shm")


class Weights(dict):
    """{name: float32 array}, whole, of one version.  The arrays are read-only views of `vector`,
    f32[parameters], and stay as they are whatever comes after."""

    def __init__(self, layout: Layout, base: numpy.ndarray, age: tuple):
        self.base = base  # the same bytes, writable: nobody else has them
        self.vector = base.view()
        self.vector.flags.writeable = False
        self.term, self.version = age
        super().__init__(layout.split(self.vector))


def _keep(link: Link, lock, stop):
    """Look at the sockets while nobody else does."""
    while not stop.wait(KEEP_S):
        if lock.acquire(blocking=False):
            try:
                link.service(0)
            except zmq.ZMQError:
                return  # closed under us
            finally:
                lock.release()


def _end(link: Link, stop, keeper, pid: int):
    """For close, for a client that is dropped, and at the interpreter's exit."""
    if os.getpid() != pid:
        return
    stop.set()
    if keeper is not threading.current_thread():
        keeper.join()
    link.close()


def _first_weights(layout, initial) -> tuple:
    """(Layout or None, f32[count] or None) of what the caller brings."""
    if layout is None and isinstance(initial, Mapping):
        layout = {name: numpy.shape(array) for name, array in initial.items()}
    if layout is None:
        if initial is not None:
            raise LayoutMismatch("flat `initial` weights need a `layout`: give {name: array}, or "
                                 "layout={name: shape} as well")
        return None, None
    layout = Layout(dict(layout))
    if initial is None:
        return layout, None
    vector = numpy.empty(layout.count, "<f4")
    layout.join(initial, vector)
    if not numpy.isfinite(vector).all():
        odd = [name for name, array in layout.split(vector).items()
               if not numpy.isfinite(array).all()]
        raise ValueError(f"`initial` is not finite as float32 in {', '.join(odd[:5])}: a run "
                         "begins with numbers")
    return layout, vector


def _seconds(timeout) -> float:
    """A time-out that ends, or that is meant not to."""
    if not isinstance(timeout, numbers.Real) or not timeout >= 0:  # NaN is neither
        raise ValueError(f"timeout {timeout!r}: seconds, 0 or more, are needed; math.inf waits for "
                         "ever")
    return float(timeout)


class Client:
    """An actor's client, open: hello was granted, and the first weights are here.

    address   the broker's control endpoint, tcp://HOST:PORT or ipc://PATH
    layout    {name: shape}, in order: must be the run's, or becomes it; None takes the run's
    initial   first weights for a run that has none, {name: array} (brings the layout, too) or flat
    actor     wanted id, 0 to 4095; None: be given one
    window    gradients on the way at most, 1 to 64
    timeout   seconds that a call may wait, unless it is told otherwise; math.inf: for ever
    resend    seconds after which an unanswered gradient is sent again; then after twice that, ...
    encoding  of gradients on lane inline: "f32", or "bf16", half the bytes, rounded to 8
              significant bits
    lane      how gradients and weights travel: "inline", through sockets; "shm", through memory
              shared with an optimizer on this host (Linux on x86-64), or not at all; "auto": shm
              where it can be had

    Raises Unreachable, Timeout, LayoutMismatch, Refused, ValueError.
    """

    def __init__(self, address: str, layout=None, initial=None, *, actor: int = None,
                 window: int = 2, timeout: float = 30.0, resend: float = 1.0,
                 encoding: str = "f32", lane: str = "auto"):
        if not isinstance(address, str) or not address.startswith(ADDRESSES):
            raise ValueError(f"address {address!r}: tcp://HOST:PORT or ipc://PATH is needed")
        if not 1 <= window <= WINDOW_MAX:
            raise ValueError(f"window {window}: 1 to {WINDOW_MAX} gradients are allowed")
        if actor is not None and not 0 <= actor < ACTORS_MAX:
            raise ValueError(f"actor {actor}: ids go from 0 to {ACTORS_MAX - 1}")
        timeout = _seconds(timeout)
        if not resend > 0:
            raise ValueError(f"resend {resend}: more than 0 seconds are needed")
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding {encoding!r}: f32 or bf16 is needed")
        if lane not in LANES:
            raise ValueError(f"lane {lane!r}: auto, inline or shm is needed")
        proposed, vector = _first_weights(layout, initial)
        self.timeout, self._pid = timeout, os.getpid()
        self._lock, self._weights, self._last_age = threading.RLock(), None, None
        try:
            self._link = Link(address, proposed, vector, actor, window, resend,
                              ENCODINGS[encoding], lane)
        except zmq.ZMQError as error:
            raise ValueError(f"address {address!r} cannot be used: {error}") from None
        try:
            self._link.open(time.monotonic() + timeout)
        except BaseException:
            self._link.close()
            raise
        self._link.initial = None
        self.pull()
        stop = threading.Event()
        keeper = threading.Thread(target=_keep, args=(self._link, self._lock, stop), daemon=True,
                                  name="gradq-client")
        keeper.start()
        self._end = weakref.finalize(self, _end, self._link, stop, keeper, self._pid)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind, *_):
        if os.getpid() == self._pid:
            self.close(self.timeout if kind is None else 0)

    def __getstate__(self):
        raise TypeError("a client has sockets: it cannot be pickled or copied; open another one")

    def _usable(self) -> Link:
        if os.getpid() != self._pid:
            raise Closed("this client was opened by another process: open one after the fork")
        if not self._end.alive:
            raise Closed("this client is closed")
        return self._link

    # What was agreed

    @property
    def layout(self) -> dict:
        """{name: shape} of the run's model, in order."""
        return dict(self._link.terms.layout.shapes)

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return self._link.terms.layout.count

    @property
    def actor(self) -> int:
        return self._link.grant.actor

    @property
    def epoch(self) -> int:
        return self._link.grant.epoch

    @property
    def run(self) -> str:
        """The run's id, 32 hexadecimal digits."""
        return self._link.grant.run.hex()

    @property
    def max_staleness(self):
        """The run's --max-staleness; None: no limit.  0 asks for wait() after each push."""
        return self._link.terms.max_staleness

    @property
    def aggregate(self) -> int:
        """Gradients per step."""
        return self._link.terms.aggregate

    @property
    def lane(self) -> str:
        """In use, "inline" or "shm"; a later optimizer may end the latter."""
        return self._link.lane.name

    @property
    def lane_reason(self) -> str:
        """Why it is inline; "" when it is not."""
        return self._link.lane_reason

    # How far it is

    @property
    def version(self) -> int:
        """Of the weights that pull() gave last."""
        return self._weights.version

    @property
    def term(self) -> int:
        """Life of the optimizer that made them; (term, version) never falls."""
        return self._weights.term

    @property
    def staleness(self):
        """Of the gradient that was settled last: steps that others made since the weights it was
        computed from.  At most so many: its acknowledgement may tell of later ones, too.  None at
        first."""
        return self._link.staleness

    def _count(self, name: str) -> int:
        with self._lock:
            return self._link.before[name] + self._link.counts.get(name, 0)

    @property
    def pushed(self) -> int:
        """Gradients sent."""
        return self._count("pushed")

    @property
    def acknowledged(self) -> int:
        """Gradients settled: applied or refused, and never again."""
        return self._count("acknowledged")

    @property
    def refused(self) -> int:
        """Of those, refused."""
        return self._count("refused")

    @property
    def refused_by(self) -> dict:
        """{reason: gradients refused}, "stale" and "nonfinite" above all.  Several that one
        acknowledgement tells of count for the last one's reason."""
        with self._lock:
            return dict(self._link.refused_by)

    @property
    def resent(self) -> int:
        """Sendings that repeated an earlier one."""
        return self._count("resent")

    @property
    def dropped(self) -> int:
        """Gradients that were on the way when the optimizer lost what it knew of this actor
        (--journal off, a loss of power): applied or not, nobody knows."""
        return self._count("dropped")

    # Weights and gradients

    def pull(self) -> Weights:
        """The newest whole version that has arrived.  Never waits, never goes back."""
        with self._lock:
            link = self._usable() if hasattr(self, "_end") else self._link
            link.service(0)
            link.take_weights()
            if self._weights is None or self._last_age != link.age:
                self._weights = Weights(link.terms.layout, link.vector, link.age)
                self._last_age = link.age
            link.given = link.age
            return self._weights

    def reserve(self) -> numpy.ndarray:
        """f32[parameters] to build the next gradient in, without a copy: the same one until
        commit(), not to be written after it."""
        with self._lock:
            return self._usable().reserve()

    def commit(self, samples: int = 1, timeout: float = None) -> int:
        """Send what was built in reserve(): the gradient of the loss at the weights that pull()
        gave last, from `samples` steps or examples.  Waits while the window or the queue is full.

        The gradient's number, for wait().  Timeout: not sent, and may be committed again.
        Fenced, RunReplaced, Closed: this client can send no more.
        """
        if not isinstance(samples, numbers.Integral) or not 1 <= samples < 1 << 32:
            raise ValueError(f"samples {samples!r}: a whole number from 1 to {(1 << 32) - 1} is "
                             "needed")
        with self._lock:
            link = self._usable()
            if link.building is None:
                raise ValueError("nothing was built: call reserve(), and fill it, first")
            number, full = 0, False  # full: the socket was, when we tried

            def sent() -> bool:
                nonlocal number, full
                if link.window.room and not link.asking and not link.fenced:
                    number = link.try_send(samples)
                    full = number == 0
                else:
                    full = False
                return number > 0
            self._until(sent, timeout, "room for a gradient", lambda: full)
            return link.before["pushed"] + number

    def push(self, gradients, samples: int = 1, timeout: float = None) -> int:
        """reserve(), fill, commit().  gradients: {name: array of its shape}, of every tensor, or a
        flat array of all elements in the layout's order; LayoutMismatch otherwise."""
        with self._lock:
            link = self._usable()
            link.terms.layout.join(gradients, link.reserve())
            return self.commit(samples, timeout)

    def wait(self, number: int = None, timeout: float = None):
        """Wait until every gradient up to `number` (of push; None: all) is settled, or dropped, and
        the weights that they led to are here.  Timeout, Fenced, RunReplaced, Closed."""
        with self._lock:
            link = self._usable()
            if number is not None and not (isinstance(number, numbers.Integral) and number >= 1):
                raise ValueError(f"gradient {number!r}: numbers are those that push() gave")
            if number is not None and number > self.pushed:
                raise ValueError(f"gradient {number} was not sent yet: {self.pushed} were")

            def arrived() -> bool:
                last = number if number is None else number - link.before["pushed"]
                if any(last is None or each <= last for each in link.window.on_the_way):
                    return False
                if link.age < link.settled_age <= link.newest_age:
                    link.take_weights()
                return link.age >= link.settled_age
            self._until(arrived, timeout, "acknowledgements")

    def metric(self, name: str, value: float):
        """A number to show beside this actor in gradq-top ("return_mean"); sent once a second."""
        with self._lock:
            metrics = self._usable().metrics
            if name not in metrics and len(metrics) == METRICS_MAX:
                raise ValueError(f"metric {name}: no more than {METRICS_MAX} are sent")
            if len(name.encode()) > METRIC_BYTES_MAX:
                raise ValueError(f"metric {name}: a name has up to {METRIC_BYTES_MAX} bytes")
            metrics[name] = float(value)

    def close(self, timeout: float = None):
        """Wait until all is settled, as long as the optimizer is heard and at most the time-out
        (30 s when that is "for ever"); say bye, and end.  Timeout: some gradients were not settled;
        they may be applied or not.  Closing again does nothing."""
        with self._lock:
            if not self._end.alive or os.getpid() != self._pid:
                return
            link = self._link
            wait_s = self.timeout if timeout is None else _seconds(timeout)
            deadline = time.monotonic() + min(wait_s, CLOSE_S_MAX)
            try:
                while (len(link.window) and time.monotonic() < deadline and not link.asking
                       and link.ended() is None and link.silence < HEARD_S):
                    link.service(min(SLICE_S, max(0.0, deadline - time.monotonic())))
                left, error = len(link.window), link.ended()
                link.tell("bye")
            finally:
                self._end()
        if error is not None and wait_s > 0:
            raise error
        if left and wait_s > 0:
            raise Timeout(f"closed with {left} gradients unacknowledged, which may be applied or "
                          f"not; {self._situation()}")

    # Waiting

    def _until(self, condition, timeout, what: str, for_room=lambda: False):
        """Serve until condition(); the lock is held."""
        link, wait_s = self._link, self.timeout if timeout is None else _seconds(timeout)
        deadline = time.monotonic() + wait_s
        link.service(0)
        while not condition():
            link.raise_if_ended()
            left = deadline - time.monotonic()
            if left <= 0:
                raise Timeout(f"waited {wait_s:g} s for {what}: {len(link.window)} of "
                              f"{link.window.size} gradients are unacknowledged; "
                              f"{self._situation()}")
            link.service(min(SLICE_S, max(0.001, left)), for_room())

    def _situation(self) -> str:
        """What may be wrong, and what to do."""
        link = self._link
        if link.asking:
            return ("the optimizer may have forgotten this actor, and has not answered its new "
                    "hello: see whether broker and optimizer run (tools/gradq status)")
        if link.silence > HEARD_S:
            return (f"the optimizer was last heard {link.silence:.1f} s ago: see whether broker "
                    "and optimizer run (tools/gradq status); what is on the way is kept, and sent "
                    "again when they are back")
        if self.aggregate > 1:
            return (f"a step takes {self.aggregate} gradients (--aggregate): start more actors, "
                    "lower it, or raise `window`")
        return ("the optimizer lives: it is slower than the actors, or starts no step; raise "
                "`timeout`, or see depth and apply_us in gradq-top")

    def __repr__(self) -> str:
        state = "open" if self._end.alive else "closed"
        return (f"<gradq.Client of {self._link.address}, actor {self.actor}, {state}, version "
                f"{self.version}>")
