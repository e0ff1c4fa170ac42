"""The commands and their options, and the boundary where an error becomes one line.

A command's options are the fields of a frozen request, `typer` reads them from there. Modules that do
the work are imported when their command runs: `ckpt-core ls` starts without torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from ckpt_core._version import __version__
from ckpt_core.cli.bench import bench
from ckpt_core.cli.local_paths import request_of, signature_of
from ckpt_core.cli.requests import (
    AgentRequest,
    DiffRequest,
    DoctorRequest,
    ExportRequest,
    ImportRequest,
    ListRequest,
    PinRequest,
    PullRequest,
    PushRequest,
    RemoveRequest,
    ReportRequest,
    ScrubRequest,
    ServeRequest,
    ShowRequest,
    VerifyRequest,
    WatchRequest,
)
from ckpt_core.cli.simulate_request import SimulateRequest
from ckpt_core.cli.tune_request import TuneRequest
from ckpt_core.errors import CkptError
from ckpt_core.system.interrupts import Terminated, terminated_as_by_ctrl_c
from ckpt_core.units import clean

FOUND, FAILED, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit codes: a finding (bad chunks, differences, problems); the command could not be carried out; Ctrl-C;
SIGTERM.
"""

_Request = TypeVar("_Request")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def takes(request: type[_Request]) -> Callable[[Callable[[_Request], bool]], Callable[..., None]]:
    """Make a command of a function of one request; its answer False means a finding."""

    def decorate(run: Callable[[_Request], bool]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(**options: Any) -> None:
            if not run(request_of(request, options)):
                raise typer.Exit(FOUND)

        command.__signature__ = signature_of(request)  # type: ignore[attr-defined]
        return interruptible(command)

    return decorate


def interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C and SIGTERM end it, after what it cleans up, with a code of their own."""

    @functools.wraps(command)
    def called(**options: Any) -> None:
        try:
            with terminated_as_by_ctrl_c():
                command(**options)
        except Terminated:
            raise typer.Exit(TERMINATED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return called


def _say_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"ckpt-core {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Say it.")
    ] = False,
) -> None:
    """Look at checkpoints of ckpt-core: list, show, verify, compare, export, import, remove;
    check a setup; measure.

    Ends with 0 when all is well, 1 for a finding (bad chunks, differences, problems), 2 when the command
    could not be carried out.
    """


@app.command("ls")
@takes(ListRequest)
def list_root(request: ListRequest) -> bool:
    """The steps of a root, and what else takes space there."""
    from ckpt_core.cli.listing import list_steps

    return list_steps(request)


@app.command()
@takes(ShowRequest)
def show(request: ShowRequest) -> bool:
    """What a step holds: leaves with their sizes, and plain values."""
    from ckpt_core.cli.showing import show_step

    return show_step(request)


@app.command()
@takes(VerifyRequest)
def verify(request: VerifyRequest) -> bool:
    """Read every byte and compare it with its checksum. Ends with 1 if anything is wrong."""
    from ckpt_core.cli.verifying import verify_path

    return verify_path(request)


@app.command()
@takes(DiffRequest)
def diff(request: DiffRequest) -> bool:
    """Which tensors and values of two steps differ, and by how much. Ends with 1 if any does."""
    from ckpt_core.cli.comparing import compare

    return compare(request)


@app.command()
@takes(ExportRequest)
def export(request: ExportRequest) -> bool:
    """Write a step, a part of it or its weights as one file. For safetensors or torch.load."""
    from ckpt_core.cli.exporting import export_step

    return export_step(request)


@app.command("import")
@takes(ImportRequest)
def import_step(request: ImportRequest) -> bool:
    """Make a step of what another program saved.

    A file of torch.save, a directory of DCP, a .ckpt of Lightning, a tag of DeepSpeed, a checkpoint-N.
    """
    from ckpt_core.cli.importing import import_source

    return import_source(request)


@app.command("rm")
@takes(RemoveRequest)
def remove(request: RemoveRequest) -> bool:
    """Remove steps: --step N, --after N or --keep-last N."""
    from ckpt_core.cli.managing import remove_steps

    return remove_steps(request)


@app.command()
@takes(PinRequest)
def pin(request: PinRequest) -> bool:
    """Keep a step, whatever retention says."""
    from ckpt_core.cli.managing import set_pin

    return set_pin(request, pinned=True)


@app.command()
@takes(PinRequest)
def unpin(request: PinRequest) -> bool:
    """Let retention decide about a step again."""
    from ckpt_core.cli.managing import set_pin

    return set_pin(request, pinned=False)


@app.command("agent")
@takes(AgentRequest)
def be_agent(request: AgentRequest) -> bool:
    """Take committed steps of a root to its further levels. Ends with 1 if some could not be taken."""
    from ckpt_core.cli.agent import run

    return run(request)


@app.command("push")
@takes(PushRequest)
def push_step(request: PushRequest) -> bool:
    """Send one step to another place now, verified. Ends with 1 if it is not whole there."""
    from ckpt_core.cli.pushing import push_save

    return push_save(request)


@app.command("pull")
@takes(PullRequest)
def pull_step(request: PullRequest) -> bool:
    """Bring one step from another place into a root, verified."""
    from ckpt_core.cli.pulling import pull_save

    return pull_save(request)


@app.command()
@takes(ScrubRequest)
def scrub(request: ScrubRequest) -> bool:
    """Read every byte of every step, and repair what is damaged.

    Ends with 1 if anything is left damaged.
    """
    from ckpt_core.cli.scrubbing import scrub_places

    return scrub_places(request)


@app.command()
@takes(ServeRequest)
def serve(request: ServeRequest) -> bool:
    """Keep steps of other nodes in a directory here.

    Their level is peer://ADDRESS:PORT/NAME. Until SIGTERM or Ctrl-C.
    """
    from ckpt_core.cli.serving import serve_directory

    return serve_directory(request)


@app.command()
@takes(DoctorRequest)
def doctor(request: DoctorRequest) -> bool:
    """Check an environment, a root, a configuration of DeepSpeed. Ends with 1 for a problem."""
    from ckpt_core.cli.doctor import diagnose

    return diagnose(request)


@app.command()
@takes(ReportRequest)
def report(request: ReportRequest) -> bool:
    """Write one HTML page of a run from its events.

    A run writes them down with events_file=, or CKPT_CORE_EVENTS_FILE. Of a root: what it alone knows.
    """
    from ckpt_core.cli.reporting import write_report

    return write_report(request)


@app.command()
@takes(WatchRequest)
def watch(request: WatchRequest) -> bool:
    """Show a running job: what is saved now, and what it costs.

    Until Ctrl-C. Without a terminal: a line for each commit.
    """
    from ckpt_core.cli.watching import watch as watch_places

    return watch_places(request)


@app.command()
@takes(TuneRequest)
def tune(request: TuneRequest) -> bool:
    """Find the settings and the interval for this disk.

    Beside a stand-in for training, or your own program.
    Everything is written into a new directory below --root, which is removed at the end. Ends with 1 when
    a limit cannot be met; then it says what the nearest possible is.
    """
    from ckpt_core.cli.tuning import run_tuner

    return run_tuner(request)


app.command()(interruptible(bench))


@app.command()
@takes(SimulateRequest)
def simulate(request: SimulateRequest) -> bool:
    """What each way to checkpoint is worth in runs with failures. Simulated, with recoveries."""
    from ckpt_core.cli.simulating import run_simulation

    return run_simulation(request)


def main() -> None:
    """Run the command of `sys.argv`. Called by the `ckpt-core` script; always ends the process."""
    try:
        _fill_streams()
        for stream in (sys.stdout, sys.stderr):
            # A name may hold what this terminal's encoding lacks.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            _command()(prog_name="ckpt-core")
        finally:
            # Here, not at exit, where a reader that has gone or a full disk would be told of as a crash.
            sys.stdout.flush()
    except BrokenPipeError:
        _leave_unread()
    except SystemExit as exc:
        # Whoever has met it first, typer or rich, ends with 1, which is a finding.
        if isinstance(exc.__context__, BrokenPipeError):
            _leave_unread()
        raise
    except CkptError as exc:
        _fail(str(exc))
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        _fail(f"{where}{exc.strerror or exc}")
    except RecursionError:
        _fail("this checkpoint nests deeper than any that ckpt-core writes")
    except MemoryError:
        _fail("not enough memory for this")


def _leave_unread() -> NoReturn:
    """The reader of our output has gone (`| head`): nothing is left to say, not at exit either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(nowhere, sys.stderr.fileno())
    sys.exit(FAILED)


def _fill_streams() -> None:
    """Where a standard stream is closed (`2>&-`), what goes there is nothing's.

    A file that is opened would have its number else, and take what a library writes to standard error.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


@functools.cache
def _command() -> Callable[..., object]:
    """All commands; made once, since reading the options of all of them takes longer than most commands."""
    return typer.main.get_command(app)


def _fail(text: str) -> NoReturn:
    try:
        sys.stderr.write(f"ckpt-core: {clean(' '.join(text.split()))}\n")
        sys.stderr.flush()
    except OSError:
        _leave_unread()
    sys.exit(FAILED)
