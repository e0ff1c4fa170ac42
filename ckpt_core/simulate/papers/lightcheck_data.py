"""Numbers of LightCheck (ICCD '23), each with its source."""

from __future__ import annotations

from dataclasses import dataclass

MTBF_S = 3600.0
"""Section IV-B, Total Training Time."""

BOUND = 0.05
"""Overhead that the intervals of table I keep within (section IV-B)."""

LIGHTCHECK_OVERHEAD = 0.04
"""At most, of LightCheck-D (section IV-B: Inception-V3)."""

PM_WRITE = 11.5e9
"""Bytes per second from the GPU to persistent memory, DDIO off (section IV-E)."""

ROUND_S = 360.0
"""Section IV-F."""

JOBS, MACHINES = 25, 3
"""Section IV-F, the physical experiment and its simulation."""


@dataclass(frozen=True, slots=True)
class Model:
    """A row of tables I and II.

    Attributes:
        state_bytes: table I.
        every: interval of LightCheck-D, CheckFreq and torch.save, table I.
        plain_h: hours without failures, table II.
        hours: of LightCheck, CheckFreq and torch.save with failures, table II.
    """

    name: str
    state_bytes: float
    every: tuple[int, int, int]
    plain_h: float
    hours: tuple[float, float, float]


MODELS = (
    Model("ResNet-18", 90e6, (1, 20, 102), 10.7, (10.9, 11.1, 11.2)),
    Model("VGG-16", 1056e6, (6, 146, 904), 67.5, (69.7, 72.3, 73.7)),
    Model("Inception-V3", 183e6, (14, 40, 118), 79.7, (83.0, 84.1, 85.4)),
    Model("AlexNet", 467e6, (8, 164, 1084), 6.0, (6.1, 6.3, 6.5)),
    Model("GPT-2", 1508e6, (6, 100, 682), 161.7, (164.6, 171.1, 179.7)),
    Model("BERT", 4004e6, (10, 200, 1100), 501.3, (514.8, 537.5, 598.6)),
)

DISK_EVERY = {
    "ResNet-18": 7,
    "VGG-16": 64,
    "Inception-V3": 30,
    "AlexNet": 95,
    "GPT-2": 46,
    "BERT": 82,
}
"""Interval of LightCheck-disk, table I."""

SEPARATED = (2.1, 2.8)
"""Section IV-D, figure 11: time of entries stored together over that of separated ones, least and most."""

TABLE_3_H = {
    ("static", "torch.save"): 2.33,
    ("static", "lightcheck"): 2.09,
    ("continuous", "torch.save"): 1.60,
    ("continuous", "lightcheck"): 1.37,
}
"""Average job completion time in hours, column Simulation of table III."""

DISK = 100e6
"""Bytes per second of the HDD. ASSUMED: the paper says only that it is one."""

RESTART_S = 30.0
"""From a failure until loading begins. ASSUMED: the paper does not say."""
