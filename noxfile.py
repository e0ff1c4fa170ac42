"""What CI runs: `nox` with no arguments. Each session sets itself up on a fresh machine."""

from __future__ import annotations

import nox

CONSTRAINTS = ".ci/constraints.txt"
OLDEST = ".ci/oldest.txt"

# Three at a time on two cores: many tests wait, for disks, deadlines or ranks.
PARALLEL = ("-n", "3", "--dist", "loadscope", "--max-worker-restart", "0")

# What `nox -s compat` runs of the tests that `--quick` leaves out: ranks and frameworks; devices, servers and
# other processes.
NOT_QUICK = (
    *("tests/multirank/test_save.py", "tests/multirank/test_fsdp2.py"),
    *("tests/integrations/lightning/test_resume.py", "tests/integrations/deepspeed/test_engine.py"),
    *("tests/devices", "tests/data", "tests/levels/serving", "tests/levels/parity"),
    *(
        "tests/levels/test_objects.py",
        "tests/levels/test_agreed.py",
        "tests/levels/test_reading.py",
    ),
    *("tests/levels/test_leftovers.py", "tests/levels/test_receiving.py"),
    *("tests/levels/test_sent_before.py", "tests/engine/test_collector.py"),
    *("tests/engine/test_kept_mappings.py", "tests/engine/test_threads.py"),
    *("tests/engine/test_optimizers.py", "tests/system", "tests/store/test_lock.py"),
    *("tests/store/test_crash.py", "tests/cli/test_app.py", "tests/cli/test_managing.py"),
)

# What old releases warn of, of themselves.
OLD_WARNINGS = (
    *("-W", "ignore:TypedStorage is deprecated:UserWarning"),
    *("-W", "ignore:DTensor random operators may not:UserWarning"),
)

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "docs", "tests"]
nox.options.reuse_venv = "yes"


def install(session: nox.Session, *requirements: str, constraints: str = CONSTRAINTS) -> None:
    # Order matters: torch comes first and alone, so that no other requirement picks another build.
    session.install("-c", constraints, "torch")
    session.install("-c", constraints, *requirements)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, import direction, spelling."""
    install(
        session,
        "-e",
        ".[bench,lightning,remote,transformers]",
        "codespell",
        "import-linter",
        "mypy",
        "ruff",
    )
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("codespell")


@nox.session
def docs(session: nox.Session) -> None:
    """The site, offline: a link that leads nowhere, an anchor too, is an error as any warning is."""
    # The reference is read from the source: no torch, and no framework, is needed to build it.
    project = nox.project.load_toml("pyproject.toml")["project"]
    session.install("-c", CONSTRAINTS, *project["optional-dependencies"]["docs"])
    session.run("sphinx-build", "-W", "--keep-going", "-E", "-b", "html", "docs", ".nox/docs/html")


@nox.session
def tests(session: nox.Session) -> None:
    """Every test, the examples that are killed and resumed among them. Arguments go to pytest."""
    extra = ("huggingface-hub", "peft", "scikit-learn", "torchdata")
    install(session, "-e", ".[test,bench,lightning,deepspeed,parity,remote,transformers]", *extra)
    # Compiled on a machine's first run, which takes minutes: docs/horovod.md says how and why.
    session.run("python", ".ci/horovod_wheel.py")
    session.run("python", ".ci/warm_deepspeed.py")
    # Where a framework is missing its tests are skipped; here they fail.
    session.run("pytest", *PARALLEL, *session.posargs, env={"REQUIRE_INTEGRATIONS": "1"})


@nox.session(default=False)
def quick(session: nox.Session) -> None:
    """The tests that need no framework, ranks, kill or other process: an answer in a minute and a half."""
    install(session, "-e", ".[test,bench,remote]")
    session.run("pytest", "--quick", *PARALLEL, *session.posargs)


@nox.session(default=False, python=["3.11", "3.12", "3.13"])
def compat(session: nox.Session) -> None:
    """A part of the tests: the oldest releases on the oldest Python, the newest on newer ones."""
    is_old = session.python == "3.11"
    constraints = OLDEST if is_old else CONSTRAINTS
    install(session, "-e", ".[test,bench,lightning,deepspeed,remote]", constraints=constraints)
    how = [*PARALLEL, *(OLD_WARNINGS if is_old else ()), *session.posargs]
    session.run("pytest", "--quick", *how)
    session.run("pytest", *NOT_QUICK, *how)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """The source archive and the wheel, into dist/."""
    session.install("build")
    session.run("python", "-m", "build")
