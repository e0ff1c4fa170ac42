"""Numbers of PCcheck (ASPLOS '25) and of its published artifact, each with its source.

The artifact is public, MIT license: github.com/eth-easl/pccheck, artifact_evaluation/evaluation/throughput.
It holds the trace (gpus_trace.csv) and the CSV files of figures 8 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass

TRACE_S = 13482.0
"""First to last row of the trace (gpus_trace.csv of the artifact)."""

ROLLBACKS = 51
"""What the artifact's run_goodput_model.py counts in that trace: |change| // 4 for each row (4 GPUs in a
VM), summed, where the 56 GPUs at the start count as a change from 0."""

LINK = 12e9
"""Bytes per second of PCIe 3 x16 with pinned memory (section 5.1 names the link, 3.3 the pinning)."""

NETWORK = 15e9 / 8
"""Bytes per second: 15 Gbps between VMs (section 5.2.1)."""

IN_FLIGHT = {"vgg16": 4, "opt-1.3b": 2, "opt-2.7b": 2}
"""N (N_pccheck in run_goodput_model.py)."""


@dataclass(frozen=True, slots=True)
class OptSmall:
    """OPT-1.3B on one A100 with a pd-ssd."""

    state_bytes: float = 16.2e9  # table 3
    serial_s: float = 37.0  # section 1: torch.save and flush, "as CheckFreq proposes"
    faster: float = 1.9  # section 5.3: PCcheck over CheckFreq and GPM, at most
    load_s: float = 12.6  # load_times in run_goodput_model.py
    interval: int = 10  # section 5.2.3
    pccheck_per_s: float = 0.5  # section 5.2.3
    checkfreq_per_s: float = 0.256  # section 5.2.3
    pccheck_total: int = 6137  # section 5.2.3
    pccheck_redone: int = 550  # section 5.2.3
    checkfreq_total: int = 3404  # section 5.2.3
    checkfreq_redone: int = 257  # section 5.2.3
    goodput_ratio: float = 1.77  # section 5.2.3
    slowdown_50: tuple[tuple[str, float], ...] = (  # section 5.2.1, an interval of 50
        ("pccheck", 1.02),
        ("gpm", 1.9),
        ("checkfreq", 1.17),
    )
    checkfreq_100: float = 1.05  # section 5.2.2, an interval of 100


OPT_1_3B = OptSmall()

OPT_2_7B_ITERATION_S = 1 / 0.4068526078938128
"""Artifact, fig8_opt27.csv, PCcheck without checkpoints."""

OPT_2_7B_BYTES = 45e9 / 2
"""Table 3, over 2 VMs (section 5.1)."""

OPT_2_7B_GEMINI = ((10, 1.62), (100, 1.06))
"""Interval and slowdown, section 5.2.1."""

VGG16_LOAD_S = 0.881171464920044
"""Artifact, loading_log_vgg16.txt."""

VGG16_INTERVALS = (10, 25, 50)

VGG16_PLAIN = {
    "checkfreq": 15.742874314174914,
    "gpm": 15.756049145422713,
    "pccheck": 15.769409833983385,
}
"""Artifact, fig8_vgg16.csv: iterations per second without checkpoints."""

VGG16_THROUGHPUT = {
    "checkfreq": (2.938627628113705, 7.042363043171207, 12.18658951925483),
    "gpm": (6.651017406282624, 10.387977578704326, 12.998492611136836),
    "pccheck": (6.3503108341382175, 14.2728865888275, 15.52581113138962),
}
"""Artifact, fig8_vgg16.csv: iterations per second at these intervals, without failures."""

VGG16_GOODPUT = {
    "checkfreq": (2.9218082347356775, 6.976672784383198, 11.999707338861933),
    "gpm": (6.620947425543189, 10.322307257580645, 12.877309632420706),
    "pccheck": (6.29114014126634, 14.090085346725347, 15.320044894926651),
    "ideal": (15.698130637465306, 15.669759475916575, 15.622474206668688),
}
"""Artifact, fig9_vgg16.csv: the same with the failures of the trace."""

VGG16_EVERY_1 = 57.0
"""Section 5.2.1: slowdown of CheckFreq with a checkpoint in each iteration, at most."""

THREADS_GAIN = {1: 1.36, 2: 1.16, 3: 1.13}
"""Section 5.4.2: N -> slowdown with 1 thread for each checkpoint over that with 3; OPT-350M, every 10."""

LESS_DRAM = 1.07
"""Section 5.4.3: overhead of a DRAM buffer of m over one of 2m, at most."""
