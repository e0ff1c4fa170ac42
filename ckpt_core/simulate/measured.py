"""What `ckpt-core bench` measured on a machine, as rates for the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core.errors import ConfigError

_OURS = "ckpt_core"
_SERIAL = ("torch_save_fsync", "torch_save")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Numbers of one machine; None where the run did not measure them.

    Attributes:
        state_bytes: of the state that was saved.
        iteration_s: of a training step without saves.
        write: bytes per second that this engine persists.
        serial: bytes per second of `torch.save` with fsync, or without if that did not run.
        copy: bytes per second from the state into staging.
        read: bytes per second of a restore, from storage if that was measured.
        stall_s: of this engine's `save()`.
    """

    state_bytes: float
    iteration_s: float | None = None
    write: float | None = None
    serial: float | None = None
    copy: float | None = None
    read: float | None = None
    stall_s: float | None = None


def read_bench(report: Mapping[str, Any], *, name: str = "bench") -> Measured:
    """The medians of a run of `ckpt-core bench --json`, suite core.

    Args:
        report: the content of the JSON file.
        name: of the file, for messages.

    Raises:
        ConfigError: it is no such file, or of another suite.
    """
    if report.get("suite") != "core" or not isinstance(report.get("results"), Mapping):
        raise ConfigError(f"{name} is not what `ckpt-core bench --json` writes for the suite core")
    try:
        return _measured(report["results"], float(report["settings"]["state_bytes"]))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
        raise ConfigError(f"{name} is damaged: {type(exc).__name__} at {exc}") from exc


def _measured(results: Mapping[str, Any], state_bytes: float) -> Measured:
    staged_s = _median(results, ("stall_barrier",), (_OURS,))
    return Measured(
        state_bytes=state_bytes,
        iteration_s=_median(results, ("train_step",), (_OURS,)),
        write=_median(results, ("persist",), (_OURS,)),
        serial=_median(results, ("persist",), _SERIAL),
        copy=state_bytes / staged_s if staged_s else None,
        read=_median(results, ("restore_cold", "restore_warm"), (_OURS,)),
        stall_s=_median(results, ("stall_call",), (_OURS,)),
    )


def _median(
    results: Mapping[str, Any], figures: tuple[str, ...], contenders: tuple[str, ...]
) -> float | None:
    """Of the first figure that was measured for the first of these contenders."""
    for figure in figures:
        found = results.get(figure, {}).get("contenders", {})
        for contender in contenders:
            if contender in found:
                return float(found[contender]["median"])
    return None
