"""What each way to checkpoint costs, from the job and from the rates of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ckpt_core.simulate.costs import Costs, Job, Rates, Sharing


class Strategy(StrEnum):
    """The ways to checkpoint that are known."""

    TORCH_SAVE = "torch.save"
    CHECKFREQ = "checkfreq"
    GPM = "gpm"
    GEMINI = "gemini"
    LIGHTCHECK = "lightcheck"
    PCCHECK = "pccheck"
    OURS = "ours"
    IDEAL = "ideal"
    """Checkpoints that cost nothing; failures and recoveries are as for the others."""

    @property
    def label(self) -> str:
        """What people call it."""
        return _TITLES.get(self, self.value)


_TITLES = {
    Strategy.CHECKFREQ: "CheckFreq",
    Strategy.GPM: "GPM",
    Strategy.GEMINI: "Gemini",
    Strategy.LIGHTCHECK: "LightCheck",
    Strategy.PCCHECK: "PCcheck",
    Strategy.OURS: "ckpt-core",
    Strategy.IDEAL: "saves that cost nothing",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Job and machine together, and how many checkpoints PCcheck and this engine keep in flight."""

    job: Job
    rates: Rates
    in_flight: int = 2

    @property
    def copy_s(self) -> float:
        """Seconds to copy the state into host memory."""
        return self.job.state_bytes / self.rates.copy

    @property
    def write_s(self) -> float:
        """Seconds to persist the state with parallel writers."""
        return self.job.state_bytes / self.rates.write

    @property
    def serial_s(self) -> float:
        """Seconds to persist the state with one thread."""
        return self.job.state_bytes / self.rates.serial

    @property
    def read_s(self) -> float:
        """Seconds to load the state."""
        return self.job.state_bytes / self.rates.read

    @property
    def before_update_s(self) -> float:
        """Part of an iteration that a snapshot may take without being noticed."""
        return self.job.iteration_s - self.job.update_s


def _torch_save(at: Setting) -> Costs:
    """Copy, then serialize and write, with training standing still (PCcheck figure 3)."""
    return Costs(stall_s=at.copy_s + at.serial_s, load_s=at.read_s)


def _checkfreq(at: Setting) -> Costs:
    """A snapshot behind the next iteration, then one thread that persists it; one at a time
    (PCcheck figure 4)."""
    return Costs(
        snapshot_s=at.copy_s,
        window_s=at.before_update_s,
        persist_s=at.serial_s,
        pipelined=False,
        load_s=at.read_s,
    )


def _gpm(at: Setting) -> Costs:
    """Straight to storage, without a copy in host memory, with training standing still (PCcheck 2.2)."""
    return Costs(stall_s=at.serial_s, load_s=at.read_s)


def _gemini(at: Setting) -> Costs:
    """To the memory of another node through a small buffer, so that the next update waits for the
    network; loaded from there (PCcheck 2.2, 3.2)."""
    network_s = at.job.state_bytes / at.rates.network
    return Costs(snapshot_s=network_s, window_s=at.before_update_s, load_s=network_s)


def _lightcheck(at: Setting) -> Costs:
    """Layer by layer straight to storage: the update of a layer waits for that layer alone, so a
    whole iteration hides the write (LightCheck III-B, strategy D)."""
    return Costs(snapshot_s=at.write_s, window_s=at.job.iteration_s, load_s=at.read_s)


def _pccheck(at: Setting) -> Costs:
    """N checkpoints in flight, pipelined through host memory, that share storage equally
    (PCcheck figures 6 and 7)."""
    return Costs(
        snapshot_s=at.copy_s,
        window_s=at.before_update_s,
        persist_s=at.write_s,
        in_flight=at.in_flight,
        sharing=Sharing.EQUAL,
        load_s=at.read_s,
    )


def _ours(at: Setting) -> Costs:
    """As PCcheck; of the checkpoints in flight the oldest one's chunks are written first."""
    return Costs(
        snapshot_s=at.copy_s,
        window_s=at.before_update_s,
        persist_s=at.write_s,
        in_flight=at.in_flight,
        load_s=at.read_s,
    )


def _ideal(at: Setting) -> Costs:
    """Nothing but the load after a failure (PCcheck 5.1)."""
    return Costs(load_s=at.read_s)


_COSTS: dict[Strategy, Callable[[Setting], Costs]] = {
    Strategy.TORCH_SAVE: _torch_save,
    Strategy.CHECKFREQ: _checkfreq,
    Strategy.GPM: _gpm,
    Strategy.GEMINI: _gemini,
    Strategy.LIGHTCHECK: _lightcheck,
    Strategy.PCCHECK: _pccheck,
    Strategy.OURS: _ours,
    Strategy.IDEAL: _ideal,
}


def costs_of(strategy: Strategy, setting: Setting) -> Costs:
    """What a checkpoint of `strategy` costs there.

    Assumes host memory for as many snapshots as are in flight, and all writers equal: one of them
    stands for all, since all wait for the slowest.
    """
    return _COSTS[strategy](setting)
