"""`ckpt-core simulate`: its options. Loaded with every command, so nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_SIZE = "SIZE"
_TIME = "TIME"


@dataclass(frozen=True, kw_only=True)
class SimulateRequest:
    """`simulate`: one field for each option, None where nothing was given."""

    iteration_s: Annotated[
        float | None, typer.Option(help="Seconds of an iteration without checkpoints.")
    ] = None
    update_s: Annotated[
        float | None,
        typer.Option(
            help="Part of it that changes the state, and waits for snapshots; default: 0."
        ),
    ] = None
    state_bytes: Annotated[
        str | None, typer.Option(metavar=_SIZE, help="What one writer saves: 10GB.")
    ] = None
    write_bandwidth: Annotated[
        str | None,
        typer.Option(metavar=_SIZE, help="To storage each second, with all writers: 2GB."),
    ] = None
    serial_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar=_SIZE, help="Of one thread that serializes and writes; default: 1/1.9 of that."
        ),
    ] = None
    copy_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar=_SIZE, help="From the device to the host; default: 12GB (PCIe 3 x16)."
        ),
    ] = None
    read_bandwidth: Annotated[
        str | None,
        typer.Option(metavar=_SIZE, help="From storage on recovery; default: --write-bandwidth."),
    ] = None
    network_bandwidth: Annotated[
        str | None,
        typer.Option(metavar=_SIZE, help="To another node's memory; default: 1.875GB (15 Gbps)."),
    ] = None
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Sizes and rates that `ckpt-core bench --json FILE` measured."
        ),
    ] = None
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Of torch.save, checkfreq, gpm, gemini, lightcheck, pccheck, ours, "
            "ideal; default: all.",
        ),
    ] = None
    interval: Annotated[
        str | None,
        typer.Option(
            metavar="N,M",
            help="Iterations between checkpoints; default: 1,10,25,50,100, and longer while that is better.",
        ),
    ] = None
    in_flight: Annotated[
        int, typer.Option(min=1, help="Checkpoints at a time, of pccheck and ours.")
    ] = 2
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="TIME,TIME", help="Mean time between failures of the job: 6h,1d."),
    ] = None
    node_mtbf: Annotated[
        str | None, typer.Option(metavar=_TIME, help="The same of one node; with --nodes.")
    ] = None
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes, each of which stops the job when it fails.")
    ] = None
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B,C=D",
            help="A further level, nearest first: every=100,seconds=30,restore=40,survives=node, with "
            "times from commit to copy and from there to training; every=10/100/1000 tries each. Kept by the "
            "nodes themselves: keeps=copies or keeps=4+1, and refill=2min, until a lost node is made good.",
        ),
    ] = None
    survives: Annotated[
        str | None,
        typer.Option(
            metavar="[process|node|domain|site]",
            help="The worst failure that the first root survives; default: process with --level, else all.",
        ),
    ] = None
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="A=N,B=M",
            help="How failures are shared out: process=6,node=3,domain=1; default: all are node, and of a "
            "trace those that are losses.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of index, time in seconds, GPUs that were there."),
    ] = None
    stops: Annotated[
        str,
        typer.Option(metavar="[any|loss]", help="Changes of the trace that stop the job."),
    ] = "any"
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs that the job waits for; 0: it runs with any number.")
    ] = 0
    restart: Annotated[
        str | None,
        typer.Option(metavar=_TIME, help="From a failure until loading begins; default: 0."),
    ] = None
    duration: Annotated[
        str | None, typer.Option(metavar=_TIME, help="Of the run; default: the trace's, or 7d.")
    ] = None
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Run until so many are done: total training time.")
    ] = None
    runs: Annotated[
        int, typer.Option(min=1, help="Runs with different failures; figures are means.")
    ] = 10
    seed: Annotated[int, typer.Option(help="Of the first run's failures.")] = 0
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Instead: preemptive scheduling of so many jobs; average completion time."
        ),
    ] = None
    machines: Annotated[int, typer.Option(min=1, help="That the jobs share.")] = 3
    round: Annotated[
        str, typer.Option(metavar=_TIME, help="From one scheduling decision to the next.")
    ] = "6min"
    job_time: Annotated[
        str, typer.Option(metavar=_TIME, help="Training that a job needs, on average.")
    ] = "1h"
    job_gap: Annotated[
        str | None, typer.Option(metavar=_TIME, help="Between arrivals; default: all at once.")
    ] = None
    paper: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead: a figure of a paper beside ours: pccheck-5.2.3, pccheck-fig8, "
            "pccheck-fig9, pccheck-eq4, lightcheck-table2, lightcheck-fig9, lightcheck-table3.",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")] = False
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write all rows to this file.")
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw goodput, or total time, into this file."),
    ] = None
