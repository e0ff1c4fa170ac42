"""What is measured of each way, for each stage of ZeRO."""

from __future__ import annotations

from ckpt_core.bench.results import Figure, Unit


def call(stage: int) -> Figure:
    """Time in `save_checkpoint` on the slower rank."""
    return _figure(stage, "call", "Time in save_checkpoint", Unit.SECONDS)


def extra(stage: int) -> Figure:
    """What the steps after it take more than as many without a save, until it is durable or complete."""
    return _figure(stage, "extra", "Extra time of the following steps", Unit.SECONDS)


def stall(stage: int) -> Figure:
    """Both together: what one save costs training."""
    return _figure(stage, "stall", "Stall: save_checkpoint and extra of the steps", Unit.SECONDS)


def latest(stage: int) -> Figure:
    """From the call until the file `latest` names the tag, durable or not."""
    return _figure(stage, "until_latest", "Call until `latest` names the tag", Unit.SECONDS)


def durable(stage: int) -> Figure:
    """From the call until all bytes and `latest` are durable; by an fsync afterwards where a way has none."""
    return _figure(stage, "until_durable", "Call until all is durable", Unit.SECONDS)


def fsync(stage: int) -> Figure:
    """That fsync, of the ways that do not make it themselves; it is no part of their stall."""
    return _figure(stage, "fsync_afterwards", "fsync that the way leaves out", Unit.SECONDS)


def memory(stage: int) -> Figure:
    """Of the rank that takes most, with its child processes: peak over what training takes."""
    return _figure(stage, "peak_memory", "Peak extra memory of a rank", Unit.BYTES)


def amplification(stage: int) -> Figure:
    """Bytes that storage sees of both ranks for one save over those of the tensors in its files."""
    return _figure(stage, "write_amplification", "Bytes written / state bytes", Unit.TIMES)


def written(stage: int, rank: int) -> Figure:
    """The share of one rank in that."""
    title = f"Bytes that rank {rank} writes for a save / state bytes"
    return _figure(stage, f"written_by_rank_{rank}", title, Unit.TIMES)


def step(stage: int, interval: int) -> Figure:
    """Time of one training step on the slower rank."""
    return _figure(stage, f"step_every_{interval}", f"Step, a save every {interval}", Unit.SECONDS)


def slowdown(stage: int, interval: int) -> Figure:
    """That time over the one without saves of the same round."""
    title = f"Training slowdown, a save every {interval} steps"
    return _figure(stage, f"slowdown_every_{interval}", title, Unit.TIMES)


def _figure(stage: int, key: str, title: str, unit: Unit) -> Figure:
    return Figure(f"zero_{stage}_{key}", f"ZeRO {stage}: {title}", unit)
