"""Installs Horovod into the environment whose Python runs this: `python .ci/horovod_wheel.py`.

Horovod is built from source, as docs/horovod.md says. That takes minutes, so the wheel is kept in
`$CKPT_WHEEL_CACHE`, by default `~/.cache/ckpt-core/wheels`. A program of its own, and not part of
noxfile.py, because the wheel depends on the torch and the Python of the environment that it is for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
CONSTRAINTS = TOP / ".ci" / "constraints.txt"
TOOLCHAIN = TOP / "integrations" / "ckpt_horovod" / "cxx17.cmake"
CACHE_VARIABLE = "CKPT_WHEEL_CACHE"

SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Gloo asks for an older one, which CMake 4 refuses
}
# pip's own cache would return a wheel that was built for another torch; in isolation, there is no torch.
PIP_OPTIONS = ("--no-cache-dir", "--no-binary", "horovod", "--no-build-isolation", "--no-deps")
OLDEST_CMAKE = (3, 21)  # the first that heeds the variable CMAKE_TOOLCHAIN_FILE
JOBS = 8  # Horovod's own number, which it starts on fewer cores, too


@dataclass(frozen=True)
class Build:
    """What a wheel depends on; two builds with the same name may share one."""

    horovod: str
    torch: str  # with its local suffix: CPU and CUDA builds are not the same to link with
    python: str
    machine: str
    recipe: str

    @property
    def name(self) -> str:
        """A name for its folder in the cache."""
        return (
            f"horovod-{self.horovod}-torch-{self.torch}-{self.python}-{self.machine}-{self.recipe}"
        )


def pinned(package: str) -> str:
    """The release that the checks run with."""
    found = re.search(rf"^{package}==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"{CONSTRAINTS} pins no {package}")
    return found[1]


def recipe(toolchain: bytes, settings: Mapping[str, str]) -> str:
    """A short hash of how the wheel is built."""
    return hashlib.sha256(toolchain + repr(sorted(settings.items())).encode()).hexdigest()[:12]


def build_for_this_environment() -> Build:
    """Imports torch, whose `__version__` has the local suffix where the one of its wheel may have none."""
    import torch

    return Build(
        horovod=pinned("horovod"),
        torch=str(torch.__version__),
        python=str(sys.implementation.cache_tag),
        machine=platform.machine(),
        recipe=recipe(TOOLCHAIN.read_bytes(), SETTINGS),
    )


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where wheels are kept."""
    if chosen := environment.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    home = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "ckpt-core" / "wheels"


def cached_wheel(folder: Path, make: Callable[[Path], None]) -> Path:
    """The wheel in `folder`; if there is none, `make` is given an empty folder to leave one in.

    What `make` raises is passed on, and nothing of what it left is kept.
    """
    for wheel in sorted(folder.glob("*.whl")):
        return wheel
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        make(Path(scratch))
        (made,) = Path(scratch).glob("*.whl")
        folder.mkdir(exist_ok=True)
        # Invariant: a wheel in `folder` is whole, whoever was killed and however many build at once.
        return made.replace(folder / made.name)


def missing_packages(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Debian's names of what compiling needs and pip cannot bring."""
    compilers = [environment.get("CXX", "").partition(" ")[0], "c++", "g++", "clang++"]
    present = {
        "g++": any(shutil.which(compiler) for compiler in compilers if compiler),
        "make": shutil.which("make") is not None,
        "python3-dev": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    return [package for package, there in present.items() if not there]


def cmake_version(path: str | None = None) -> tuple[int, ...]:
    """Of the one on the path; (0,) if there is none."""
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        return (0,)
    done = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (0,)


def build_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The caller's, with our settings of Horovod and no others, so that a wheel is what its name says."""
    kept = {name: text for name, text in environment.items() if not name.startswith("HOROVOD_")}
    scripts = sysconfig.get_path("scripts")
    kept["PATH"] = os.pathsep.join([scripts, environment.get("PATH", os.defpath)])
    kept.setdefault("MAKEFLAGS", f"-j{min(JOBS, len(os.sched_getaffinity(0)))}")
    return kept | SETTINGS | {"CMAKE_TOOLCHAIN_FILE": str(TOOLCHAIN)}


def pip(*arguments: str, environment: Mapping[str, str] = os.environ) -> None:
    """Runs in this environment, with its output on ours; a failure has been printed and ends the program."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], env=environment, check=False)
    if done.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed: see above.")


def make_wheel(folder: Path) -> None:
    """Compiles the pinned release into `folder`; takes minutes."""
    if missing := " ".join(missing_packages()):
        sys.exit(f"To compile Horovod, this machine needs, on Debian: apt-get install {missing}")
    environment = build_environment()
    tools = ["setuptools", "packaging"]
    if cmake_version(environment["PATH"]) < OLDEST_CMAKE:
        tools.append("cmake")
    pip("install", "-c", str(CONSTRAINTS), *tools)
    horovod = f"horovod=={pinned('horovod')}"
    pip("wheel", *PIP_OPTIONS, "-w", str(folder), horovod, environment=environment)


def install(wheel: Path) -> None:
    """With what it needs at run time."""
    # By force: to pip, a wheel of the same version is the same wheel, though built for another torch.
    pip("install", "--force-reinstall", "--no-deps", str(wheel))
    pip("install", "-c", str(CONSTRAINTS), str(wheel))


def main() -> None:
    build = build_for_this_environment()
    folder = cache_folder() / build.name
    print(f"Horovod for this environment: {folder}", flush=True)
    install(cached_wheel(folder, make_wheel))


if __name__ == "__main__":
    main()
