"""Storage as a server: what is persisted together shares it, oldest first or equally."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ckpt_core.simulate.costs import Sharing


@dataclass(slots=True)
class Storage:
    """Checkpoints that all need `persist_s` of storage, in the order in which they entered.

    They need the same and entered in order, so they end in order under both ways to share.
    """

    persist_s: float
    sharing: Sharing
    now_s: float = 0.0
    left_s: deque[float] = field(default_factory=deque)

    def enter(self, at_s: float) -> list[float]:
        """One more from `at_s` on, which is no earlier than any time before; who ended until then."""
        ended = self.advance(at_s)
        self.left_s.append(self.persist_s)
        return ended

    def advance(self, until_s: float) -> list[float]:
        """Let time pass; the times at which checkpoints ended, ascending."""
        ended = []
        while self.left_s and self.next_end_s <= until_s:
            ended.append(self.next_end_s)
            self._pass(self.next_end_s)
            self.left_s.popleft()
        self._pass(max(until_s, self.now_s))
        return ended

    @property
    def next_end_s(self) -> float:
        """When the oldest one ends if none enters; only while there is one."""
        share = len(self.left_s) if self.sharing is Sharing.EQUAL else 1
        return self.now_s + self.left_s[0] * share

    def _pass(self, until_s: float) -> None:
        passed_s, self.now_s = until_s - self.now_s, until_s
        if not self.left_s:
            return
        if self.sharing is Sharing.OLDEST_FIRST:
            self.left_s[0] = max(0.0, self.left_s[0] - passed_s)
        else:
            each_s = passed_s / len(self.left_s)
            self.left_s = deque(max(0.0, left - each_s) for left in self.left_s)
