"""The part of a Link that chooses its lane, listens to shared memory, and goes back to lane inline:
what src/client_lane.c does.
"""
import time

from . import hello
from .errors import Refused
from .frame import ACK, WEIGHTS
from .lane import Inline
from .lane_shm import Shm

BOARDLESS_S = 3.0  # longer than a starting optimizer takes from its term to its board
# On lane shm sockets only confirm what memory said before: look at them this often, and sleep no
# longer than this without looking.
SOCKET_S, SLEEP_S = 0.005, 0.02


class LinkLane:
    """Fields are Link's."""

    def _open_lane(self, words: dict):
        """The one that the answer offers and the caller wants; inline, where that fails."""
        offer, count = hello.read_offer(words), self.terms.layout.count
        before, self.lane = self.lane, None
        if before is not None:
            before.close()
        if self.host is None:
            self.lane_reason = "lane inline was asked for, or this is not Linux on x86-64"
        elif offer is None:
            self.lane_reason = ("the optimizer offers no shared memory: it runs on another host, "
                                "or with --lane inline, or has no room for it")
        else:
            try:
                self.lane = Shm(offer, self.grant, self.terms.digest, count, self.window.size)
                self.lane_reason, self.said, self.boardless = "", None, None
            except (OSError, ValueError) as problem:
                self.lane_reason = str(problem)
        if self.lane is None:
            if self.insists and before is None:
                raise Refused(f"lane shm: {self.lane_reason}", "lane")
            self.lane = Inline(count, self.encoding)

    def _leave_shm(self, reason: str):
        """Go on by lane inline, with what is on the way."""
        self.take_weights()
        lane, self.lane = self.lane, Inline(self.lane.count, self.encoding)
        for sent in self.window.on_the_way.values():
            sent.frame = lane.to_inline(sent.frame)
        lane.close()
        self.lane_reason = reason
        self.sockets.subscribe()

    def _lane_news(self, now: float) -> bool:
        """What the lane file tells; False: nothing new."""
        said = self.lane.said
        if said == self.said and self.boardless is None:
            return False
        if self.said is None or said[1] != self.said[1]:
            self.heard = {WEIGHTS: now, ACK: now}
            self.sockets.unsubscribe()
        self.said = said
        if self.lane.fenced:
            self.higher_epoch = max(self.higher_epoch, self.grant.epoch + 1)
        ack = self.lane.ack()
        if ack is not None:
            self._take_ack(*ack, now)
        if self.lane.follow_board():
            self.boardless = None
        elif self.boardless is None:
            self.boardless = now
        elif now - self.boardless > BOARDLESS_S:
            self._leave_shm("the optimizer's board cannot be opened")
        return True

    def _serve_lane(self, wait_s: float, for_room: bool):
        """Look at the words, and sleep on them when they say nothing new.  Seconds to wait for
        sockets then; None: no need to look at them now."""
        news = self._lane_news(time.monotonic())
        if self.lane.name == "inline":
            return 0.0
        if for_room:
            return 0.0 if news else min(wait_s, SOCKET_S)
        if not news and wait_s > 0:
            self.lane.sleep(self.said[0], min(wait_s, SLEEP_S))
            self._lane_news(time.monotonic())
        now = time.monotonic()
        if self.lane.name == "shm" and now - self.looked < SOCKET_S:
            return None
        self.looked = now
        return 0.0
