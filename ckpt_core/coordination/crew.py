"""Who saves together, and under which keys of the store they do."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.coordination.begun import Begun
from ckpt_core.coordination.heartbeat import Liveness
from ckpt_core.types import RankInfo


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks that save together, as one of them sees them.

    Attributes:
        info: this rank.
        leaders: the first rank of each group, ascending; rank 0 is the first.
        prefix: of the keys of this run.
        liveness: who lives.
        begun: attempts that this rank has begun.
    """

    info: RankInfo
    leaders: tuple[int, ...]
    prefix: str
    liveness: Liveness
    begun: Begun


class Keys:
    """The keys of one attempt."""

    def __init__(self, crew: Crew, attempt_id: str) -> None:
        self._base = base = f"{crew.prefix}/attempt/{attempt_id}"
        self.votes = [f"{base}/vote/{rank}" for rank in range(crew.info.world_size)]
        self.details = [f"{base}/detail/{rank}" for rank in range(crew.info.world_size)]
        self.reports = [f"{base}/report/{rank}" for rank in crew.leaders]
        self.count = f"{base}/count"
        self.gate = f"{base}/gate"
        self.decision = f"{base}/decision"
        self.finding = f"{base}/finding"
        self.verdict = f"{base}/verdict"
        self.acks = f"{base}/acks"

    def report(self, leader: int) -> str:
        """Where a leader says whether it has published."""
        return f"{self._base}/report/{leader}"

    def shared(self) -> list[str]:
        """All but what ranks show of themselves; the acknowledgements last."""
        alone = [self.count, self.gate, self.decision, self.finding, self.verdict]
        return [*self.votes, *alone, *self.reports, self.acks]
