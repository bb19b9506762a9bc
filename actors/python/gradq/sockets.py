"""The four sockets of an actor, with the options of docs/PROTOCOL.md, "Sockets".

Nothing here waits, and a message of several parts is dropped.
"""
import zmq

from .frame import ACK, HEADER_BYTES, ACK_PAYLOAD, WEIGHTS, topic

CONTROL_BYTES_MAX = 1 << 20
# Room for the weights that come between two looks: 8 MiB of them, but 4 to 1,024 frames.
WEIGHTS_BYTES, WEIGHTS_FRAMES_MIN, WEIGHTS_FRAMES_MAX = 8 << 20, 4, 1024
ACKS_FRAMES = 1024
# A turn takes no more than this from one socket, so that a flood cannot keep it for ever.
TAKEN_MAX = 2048

# How a dead link shows, and how soon the next try comes: src/socket.c has the reasons.
COMMON = {"LINGER": 0, "SNDHWM": 1, "RCVHWM": 1, "RECONNECT_IVL": 100, "RECONNECT_IVL_MAX": 1000,
          "TCP_KEEPALIVE": 1, "TCP_KEEPALIVE_IDLE": 1, "TCP_KEEPALIVE_INTVL": 1,
          "TCP_KEEPALIVE_CNT": 2, "CONNECT_TIMEOUT": 1000, "HANDSHAKE_IVL": 3000}
DEAD_MS = 3000


class Sockets:
    """Of one context.  `control` is there from the start, the others after open_data."""

    def __init__(self, address: str):
        self.address = address
        self.context = zmq.Context()
        self.control = self.gradients = self.weights = self.acks = None
        self.subscribed = False  # to weights
        try:
            self.open_control()
        except BaseException:
            self.close()
            raise

    def _connect(self, kind: int, endpoint: str, **options) -> zmq.Socket:
        socket = self.context.socket(kind)
        try:
            for name, value in {**COMMON, **options}.items():
                socket.setsockopt(getattr(zmq, name), value)
            if kind != zmq.PUSH:  # a full queue looks to TCP like a dead peer
                socket.setsockopt(zmq.TCP_MAXRT, DEAD_MS)
            socket.connect(endpoint)
        except BaseException:
            socket.close(0)
            raise
        return socket

    def open_control(self):
        """Also anew: libzmq gives a connection up for good after a protocol error."""
        before = self.control
        self.control = self._connect(zmq.DEALER, self.address, IMMEDIATE=1, LINGER=200, SNDHWM=16,
                                     RCVHWM=16, MAXMSGSIZE=CONTROL_BYTES_MAX)
        if before is not None:
            before.close()

    def open_data(self, endpoints: dict, actor: int, count: int, weights: bool):
        """Also anew.  weights: subscribe to them.  Failing leaves the ones before."""
        frame_bytes = HEADER_BYTES + 4 * count
        frames = min(max(WEIGHTS_BYTES // frame_bytes, WEIGHTS_FRAMES_MIN), WEIGHTS_FRAMES_MAX)
        opened = []
        try:
            # Small buffers: what the queue has not taken stays here, and its depth is the true one.
            opened.append(self._connect(
                zmq.PUSH, endpoints["gradients"], IMMEDIATE=1, LINGER=1000,
                MAXMSGSIZE=CONTROL_BYTES_MAX))
            opened.append(self._connect(zmq.SUB, endpoints["weights"], RCVHWM=frames,
                                        MAXMSGSIZE=frame_bytes))
            opened.append(self._connect(zmq.SUB, endpoints["acks"], RCVHWM=ACKS_FRAMES,
                                        MAXMSGSIZE=HEADER_BYTES + ACK_PAYLOAD.size))
        except BaseException:
            for socket in opened:
                socket.close(0)
            raise
        before = self.gradients, self.weights, self.acks
        self.gradients, self.weights, self.acks = opened
        for socket in before:
            if socket is not None:
                socket.close()
        self.acks.subscribe(topic(ACK, actor))
        self.subscribed = False
        if weights:
            self.subscribe()

    def subscribe(self):
        """Have weights sent to us."""
        if not self.subscribed:
            self.weights.subscribe(topic(WEIGHTS))
        self.subscribed = True

    def unsubscribe(self):
        if self.subscribed:
            self.weights.unsubscribe(topic(WEIGHTS))
        self.subscribed = False

    def close(self):
        """The lingers let a last gradient and the bye out; not longer than a second."""
        for socket in (self.control, self.gradients, self.weights, self.acks):
            if socket is not None and not socket.closed:
                socket.close()
        self.context.term()


def messages(socket: zmq.Socket):
    """Whole messages that are here, as frames whose bytes are not copied."""
    for _ in range(TAKEN_MAX):
        try:
            message = socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        whole = not message.more
        more = message.more
        while more:
            try:
                more = socket.recv(zmq.NOBLOCK, copy=False).more
            except zmq.Again:
                break
        if whole:
            yield message


def send(socket: zmq.Socket, data) -> bool:
    """False: no room, or nobody is there."""
    try:
        socket.send(data, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def poll(sockets: list, wait_s: float) -> list:
    """Those of [(socket, events)] that are ready."""
    return [socket for socket, _ in zmq.zmq_poll(sockets, max(0, int(1000 * wait_s)))]
