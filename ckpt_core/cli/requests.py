"""What each command is asked, but for `bench`, `simulate` and `tune`: one field for each option.

Loaded with every command, so nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="Directory that holds the steps, or a URL: s3://...")
]
Step = Annotated[
    str, typer.Argument(metavar="STEP", help="A step, or a root: its newest step. May be a URL.")
]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]
Number = Annotated[int, typer.Argument(metavar="STEP", min=0, help="Number of the step.")]
OfRank = Annotated[
    int | None, typer.Option("--rank", min=0, help="As this rank has it, of several that saved.")
]
NoProgress = Annotated[
    bool, typer.Option("--no-progress", help="Do not tell meanwhile how far it is.")
]
Folder = Annotated[str, typer.Argument(metavar="ROOT", help="Directory that holds the steps.")]
Taken = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP", help="A step's number, or a directory of files; default: the newest step."
    ),
]
Bandwidth = Annotated[
    str | None, typer.Option(metavar="BYTES/S", help="Most bytes for each second: 200MB/s.")
]
AtStep = Annotated[int | None, typer.Option("--step", min=0, help="This step of the root.")]


@dataclass(frozen=True)
class ListRequest:
    """`ls`."""

    root: Root
    ask: Annotated[
        bool,
        typer.Option(
            "--ask", help="Ask the levels, and the nodes that keep copies, what they have."
        ),
    ] = False
    json: Json = False


@dataclass(frozen=True)
class ShowRequest:
    """`show`."""

    path: Step
    step: AtStep = None
    rank: OfRank = None
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree; default: all.")] = (
        None
    )
    offsets: Annotated[bool, typer.Option(help="File and offset of each leaf.")] = False
    json: Json = False


@dataclass(frozen=True)
class VerifyRequest:
    """`verify`."""

    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A root, all its steps; or one step. May be a URL."),
    ]
    step: AtStep = None
    level: Annotated[
        str | None,
        typer.Option(metavar="N|URL", help="What this further level of the root holds."),
    ] = None
    no_progress: NoProgress = False
    json: Json = False


@dataclass(frozen=True)
class DiffRequest:
    """`diff`."""

    a: Annotated[str, typer.Argument(metavar="A", help="A step, or a root. May be a URL.")]
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")]
    no_progress: NoProgress = False
    json: Json = False


@dataclass(frozen=True)
class ExportRequest:
    """`export`."""

    path: Step
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")]
    to: Annotated[
        str | None,
        typer.Option(
            metavar="safetensors|torch|lightning|transformers",
            help="Format; default: by the file's name.",
        ),
    ] = None
    step: AtStep = None
    rank: OfRank = None
    only: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only what is below this key: model")
    ] = None
    prefix: Annotated[
        str | None, typer.Option(help="Only tensors whose names begin so: model.layers.")
    ] = None
    weights: Annotated[
        bool, typer.Option("--weights", help="Only the model's, as its load_state_dict takes them.")
    ] = False
    strip: Annotated[
        bool, typer.Option("--strip", help="Take KEY or the prefix off the names.")
    ] = False
    trusted: Annotated[
        bool, typer.Option("--trusted", help="lightning: build objects, which may run code.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False
    no_progress: NoProgress = False
    json: Json = False


@dataclass(frozen=True)
class ImportRequest:
    """`import`."""

    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A file or directory that another program saved."),
    ]
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The root that is to hold it.")]
    format: Annotated[
        str,
        typer.Option(
            metavar="auto|torch|dcp|lightning|deepspeed|transformers",
            help="What it is; auto: what it looks like.",
        ),
    ] = "auto"
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Its step, where SOURCE does not say it.")
    ] = None
    key: Annotated[
        str | None,
        typer.Option("--as", metavar="KEY", help="Put all that it holds under this key: model"),
    ] = None
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Build its objects, which may run code.")
    ] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace the step; take an older one, and a tag that may lack layers."
        ),
    ] = False
    no_progress: NoProgress = False
    json: Json = False


@dataclass(frozen=True)
class RemoveRequest:
    """`rm`."""

    root: Folder
    step: Annotated[
        list[int] | None, typer.Option("--step", min=0, help="This step; repeatable.")
    ] = None
    after: Annotated[int | None, typer.Option(min=0, help="Every step after this one.")] = None
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="All but the newest N; pinned ones stay.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = (
        False
    )
    no_levels: Annotated[
        bool,
        typer.Option("--no-levels", help="With --after: leave the further levels as they are."),
    ] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
    json: Json = False


@dataclass(frozen=True)
class PinRequest:
    """`pin` and `unpin`."""

    root: Root
    step: Number
    json: Json = False


@dataclass(frozen=True)
class AgentRequest:
    """`agent`."""

    root: Folder
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="A further level; repeatable. Default: the plan of the root."
        ),
    ] = None
    every: Annotated[int, typer.Option(min=1, help="Multiples of N go there.")] = 1
    keep_last: Annotated[int, typer.Option(min=0, help="Newest steps to keep there; 0: all.")] = 2
    bandwidth: Bandwidth = None
    once: Annotated[
        bool, typer.Option("--once", help="End when all that is committed is where it is to be.")
    ] = False
    json: Json = False


@dataclass(frozen=True)
class ServeRequest:
    """`serve`."""

    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where the steps are kept.")]
    bind: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS:PORT",
            help="Listen at this address of the network between the nodes. all:PORT: at each.",
        ),
    ] = ""
    token_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="The token that the nodes share; its owner's alone."),
    ] = ""


Force = Annotated[
    bool, typer.Option("--force", help="Replace another save of the step that is there.")
]


@dataclass(frozen=True)
class PushRequest:
    """`push`."""

    root: Folder
    step: Taken = None
    to: Annotated[
        str, typer.Option(metavar="URL", help="Where to: s3://bucket/run, a directory.")
    ] = ""
    force: Force = False
    bandwidth: Bandwidth = None
    no_progress: NoProgress = False
    json: Json = False


@dataclass(frozen=True)
class PullRequest:
    """`pull`."""

    url: Annotated[
        str, typer.Argument(metavar="URL", help="A root elsewhere: s3://bucket/run, a directory.")
    ]
    step: Taken = None
    to: Annotated[str, typer.Option(metavar="ROOT", help="The root that is to hold the step.")] = ""
    force: Annotated[bool, typer.Option("--force", help="Replace what is there of the step.")] = (
        False
    )
    no_progress: NoProgress = False
    json: Json = False


@dataclass(frozen=True)
class ScrubRequest:
    """`scrub`."""

    places: Annotated[
        list[str],
        typer.Argument(metavar="ROOT|URL...", help="Roots of one run, the nearest first."),
    ]
    levels: Annotated[
        bool,
        typer.Option("--levels", help="Also the further levels of ROOT, and its copy at a peer."),
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only read.")] = False
    bandwidth: Bandwidth = None
    no_progress: NoProgress = False
    json: Json = False


@dataclass(frozen=True)
class DoctorRequest:
    """`doctor`."""

    place: Annotated[
        str | None, typer.Argument(metavar="ROOT", help="As --root.", show_default=False)
    ] = None
    root: Annotated[
        str | None,
        typer.Option(metavar="ROOT", help="Where checkpoints go; it need not exist. May be a URL."),
    ] = None
    level: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A further level; repeatable. Those of ROOT are known."),
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A configuration of DeepSpeed.")
    ] = None
    script: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A script for DeepSpeed, or a directory; repeatable."),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Import no framework: look at versions only.")
    ] = False
    json: Json = False


@dataclass(frozen=True)
class ReportRequest:
    """`report`."""

    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="EVENTS|ROOT",
            help="What events_file= named; several: one page. Or a root alone; may be a URL.",
        ),
    ]
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page; replaced if it is there.")]


@dataclass(frozen=True)
class WatchRequest:
    """`watch`."""

    places: Annotated[
        list[str],
        typer.Argument(
            metavar="ROOT|EVENTS...", help="A root, or what events_file= named; one or several."
        ),
    ]
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often to look.")] = (
        1.0
    )
    json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False
