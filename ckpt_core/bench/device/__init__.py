"""The suite `device`: the engine on the device of this machine, beside raw copies over the same link.

Bits come first: a way that commits others than training had gets no figures. Ratios to the raw copies are
taken turn by turn, so that both see the same link; a training is compared with itself without saves.

    suite -> worker (one for all copies, one for each training) -> figures

`accelerator` is all that touches the device besides the engine.
"""

from __future__ import annotations

from ckpt_core.bench.device.settings import DeviceMeasure, DeviceSettings
from ckpt_core.bench.device.suite import SUITE

__all__ = ["SUITE", "DeviceMeasure", "DeviceSettings"]
