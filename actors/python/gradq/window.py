"""Gradients that are sent but not settled, and when to send them again: src/window.c.

Pure arithmetic: no sockets, no clock.  Time-outs carry jitter, so that actors whose gradients were
lost together do not send them again together.
"""
import random

WINDOW_MAX = 64  # bits in the ledger's map: no number is given out beyond it
DOUBLINGS_MAX = 2


class Sent:
    """One gradient on the way: its bytes, the (term, version) it was computed from, its time."""

    def __init__(self, frame, age: tuple):
        self.frame, self.age = frame, age
        self.sends, self.due = 0, float("inf")


class Window:
    """size: gradients on the way at most; resend_s: the first time-out."""

    def __init__(self, size: int, resend_s: float, uniform=random.uniform):
        self.size, self.resend_s, self.uniform = size, resend_s, uniform
        self.sequence = 0  # last one given out
        self.cumulative = 0  # all up to here are settled
        self.received = 0  # all up to here have come; those not settled wait for their step
        self.resent = 0
        self.on_the_way = {}  # {sequence: Sent}, rising

    def __len__(self) -> int:
        return len(self.on_the_way)

    @property
    def room(self) -> bool:
        return (len(self.on_the_way) < self.size
                and self.sequence - self.received < WINDOW_MAX)

    def _note_sent(self, sent: Sent, now: float):
        """Twice as long each time, up to four times; within a quarter either way."""
        patience = self.resend_s * 2 ** min(sent.sends, DOUBLINGS_MAX)
        sent.sends += 1
        sent.due = now + patience * self.uniform(0.75, 1.25)

    def add(self, sent: Sent, now: float) -> int:
        """It went out under the number sequence + 1, which is returned.  There is room."""
        assert self.room
        self.sequence += 1
        self.on_the_way[self.sequence] = sent
        self._note_sent(sent, now)
        return self.sequence

    def note_resent(self, sent: Sent, now: float):
        self._note_sent(sent, now)
        self.resent += 1

    def settle(self, cumulative: int, beyond: int, held: int = 0) -> list:
        """Take an acknowledgement: [Sent] that it settles.  Older ones, and those that name numbers
        never given out, change nothing."""
        if cumulative + max(beyond.bit_length(), held) > self.sequence:
            return []
        settled = [number for number in self.on_the_way if number <= cumulative
                   or beyond >> number - cumulative - 1 & 1]
        self.cumulative = max(self.cumulative, cumulative)
        self.received = max(self.received, cumulative + held)
        return [self.on_the_way.pop(number) for number in settled]

    def lacks(self, cumulative: int, beyond: int) -> bool:
        """Does an acknowledgement of a later life of the optimizer leave out a settled number?"""
        if cumulative < self.cumulative:
            return True
        return any(number not in self.on_the_way and not beyond >> number - cumulative - 1 & 1
                   for number in range(cumulative + 1, self.sequence + 1))

    def due(self, now: float):
        """The oldest Sent whose time has come, or None."""
        return next((sent for sent in self.on_the_way.values() if sent.due <= now), None)
