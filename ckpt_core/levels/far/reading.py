"""`look_at`: an object store as a root for everything that reads, without bringing a step here.

    with look_at("s3://bucket/run") as look:
        look.outline()                       every step's manifest and the lengths of its files
        verify(look.path, files=look.files)  what is read of them is fetched as ranges

Idea: a stand-in, a temporary directory that looks like the root to those who read by paths. Its manifests are
real, its other files are holes of the true length, and `FarFiles` fetches what is read of them. Its paths
print as URLs, so that reports and errors name what the user named.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PosixPath
from typing import NoReturn

from ckpt_core.errors import (
    CkptError,
    ConfigError,
    CorruptCheckpoint,
    NotCommitted,
    RestoreError,
)
from ckpt_core.layout import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    is_directory_name,
    is_file_name,
)
from ckpt_core.levels.far.door import Away, Copy, Far
from ckpt_core.levels.far.opening import open_far
from ckpt_core.levels.far.ranges import FarFiles, Origin
from ckpt_core.options import Level, scheme_of
from ckpt_core.restore import Retired
from ckpt_core.types import parse_step_dir, step_dir_name

_AT_ONCE = 16
"""Requests for small things that are made at the same time."""

_SAFE = "Nothing was changed. See that the store can be reached and read from here; then try again."


class Look:
    """A root in an object store, or one of its steps, as it was when the look began.

    Attributes:
        path: stands for what was named: a root, or a step in it.
        files: how its files are read.
        far: the level.
    """

    def __init__(self, far: Far, folder: Path) -> None:
        self.far = far
        self.files = FarFiles(far)
        self.root = _printed_as(far.url, folder)(folder)
        self.path: Path = self.root
        self._known: dict[str, Copy] = {}

    def find(self, target: str | None, steps: Iterable[int]) -> None:
        """Give what is there its names.

        Args:
            target: the one that is looked at; None: the root, and its steps.
        """
        if target is not None:
            self.path = self.root / target
            self._make(target)
            return
        for step in steps:
            (self.root / step_dir_name(step)).mkdir()

    def outline(self, targets: Iterable[Path] | None = None) -> None:
        """Have the manifest of steps here, and the names and lengths of their files.

        Args:
            targets: which; None: all that are there. One that has gone loses its name.
        """
        wanted = self.root.iterdir() if targets is None else targets
        names = [path.name for path in wanted if path.name not in self._known and path.is_dir()]
        _all(self._make, names)

    def ready(self, target: Path) -> Path:
        """Have all manifests of a step here, since readers read them one by one; the same path.

        Raises:
            Retired: it has gone meanwhile.
        """
        self.outline([target])
        if not target.is_dir():
            raise Retired(target)
        with suppress(CkptError, OSError):  # then whoever reads it says what is wrong
            data = (target / MANIFEST_NAME).read_bytes()
            ranks = Manifest.decode(data, path=target).ranks
            fetch: Callable[[str], None] = lambda name: self._bring(target, name)  # noqa: E731
            _all(fetch, [entry.file for entry in ranks])
        return target

    def directories(self) -> None:
        """Give the directories of files of a root their names, too."""
        for name in self.far.directories() if self.path == self.root else ():
            if is_directory_name(name):
                (self.root / name).mkdir(exist_ok=True)

    def pins(self) -> None:
        """Show the pins of a root."""
        (self.root / ".pins").mkdir(exist_ok=True)
        for step in self.far.pins():
            (self.root / ".pins" / f"{step:012d}").touch()

    def check(self, doubted: Path | None = None) -> None:
        """Be sure that nothing that was read was wrong only because the level could not be read.

        Args:
            doubted: a step with which something was wrong, whatever that was.

        Raises:
            Retired: what was read has gone from the level meanwhile, or was replaced. Others are read on.
            RestoreError: the level could not be read.
        """
        name = self.files.away_at if doubted is None else doubted.name
        if (
            name in self._known
            and self.far.manifest(name) != (self.root / name / MANIFEST_NAME).read_bytes()
        ):
            self.files.leave_out(name)
            raise Retired(self.root / name)
        if self.files.away is not None:
            raise self.files.away

    @property
    def known(self) -> list[str]:
        """Names of what has its manifest here."""
        return list(self._known)

    def end(self) -> None:
        """Let go of threads."""
        self.files.end()

    # -- inside ----------------------------------------------------------------------------------

    def _make(self, name: str) -> None:
        folder = self.root / name
        data = self.far.manifest(name)
        if data is None:
            with suppress(FileNotFoundError):
                folder.rmdir()
            return
        folder.mkdir(exist_ok=True)
        (folder / MANIFEST_NAME).write_bytes(data)
        try:
            copy = _copy_of(Manifest.decode(data, path=folder / MANIFEST_NAME))
        except CkptError:
            return  # whoever reads the manifest says what is wrong with it
        files = self.far.files(copy)
        self._known[name] = copy
        for file, nbytes in files.items():
            self._hole(folder, file, Origin(copy, file, nbytes))

    def _hole(self, folder: Path, name: str, origin: Origin) -> None:
        # Whoever can write to the store chooses the names: none may lead out of here.
        if not (is_file_name(name) or _is_rank_manifest(name)):
            return
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.truncate(origin.nbytes)
        self.files.stand_in(path, origin)

    def _bring(self, folder: Path, name: str) -> None:
        path = folder / name
        size = path.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            return
        path.write_bytes(self.far.read(self._known[folder.name], name, size) if size else b"")
        self.files.forget(path)


@contextmanager
def look_at(url: str, *, far: Far | None = None) -> Iterator[Look]:
    """A URL of a root, or of a step or directory of files in it, for as long as the body reads it.

    Args:
        far: the level, if it is open already.

    Raises:
        ConfigError: it is no URL of an object store that is known, or the extra is not installed.
        NotCommitted: there is no such step, or it was retired while the body read it.
        RestoreError: the store cannot be reached or read.
    """
    root, target = split_url(url)
    with ExitStack() as stack:
        given, far = far, far or stack.enter_context(open_far(root))
        try:
            steps = far.steps() if target is None else {}
            if target is None and not steps and given is None:
                far, target = _directory(stack, far)
        except Away as exc:
            raise RestoreError(f"{str(exc).rstrip('.')}. {_SAFE}") from exc
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-core-look-")))
        look = Look(far, folder)
        stack.callback(look.end)
        try:
            look.find(target, steps)
            _check_there(look, url, target)
            yield look
        except (CkptError, OSError) as exc:
            _tell(exc, look, folder)


def split_url(url: str) -> tuple[str, str | None]:
    """The root of a URL, and the step in it that is named, if one is.

    Raises:
        ConfigError: it is no place in an object store.
    """
    place = Level(url).url
    if scheme_of(place) is None:
        raise ConfigError(f"{url} is no place in an object store")
    root, _, name = place.rpartition("/")
    return (place, None) if parse_step_dir(name) is None else (root, name)


def _directory(stack: ExitStack, far: Far) -> tuple[Far, str | None]:
    """What has no steps may be a directory of files: then its root, and its name there."""
    root, _, name = far.url.rpartition("/")
    if not root.endswith("/") and is_directory_name(name):
        above = stack.enter_context(open_far(root))
        with suppress(Away):  # nobody has to be able to read there
            if above.manifest(name) is not None:
                return above, name
    return far, None


def _check_there(look: Look, url: str, target: str | None) -> None:
    if target is not None and not look.path.is_dir():
        steps = ", ".join(map(str, sorted(look.far.steps())[-4:])) or "none"
        text = f"{url} is not there: it was never committed, or has been retired; newest steps: {steps}"
        raise NotCommitted(text, step=parse_step_dir(target))


def _tell(error: CkptError | OSError, look: Look, folder: Path) -> NoReturn:
    """Raise what is true of an error that a reader met."""
    try:
        look.check()
        # One that went before the names of its files were listed lacks them all, which is no damage.
        for name in look.known if isinstance(error, CorruptCheckpoint) else ():
            look.check(look.root / name)
    except Away as away:
        raise RestoreError(f"{str(away).rstrip('.')}. {_SAFE}") from error
    if isinstance(error, Away):
        raise RestoreError(f"{str(error).rstrip('.')}. {_SAFE}") from error
    if isinstance(error, CkptError):
        error.args = (str(error).replace(str(folder), look.far.url), *error.args[1:])
    raise error


def _all(function: Callable[[str], None], names: list[str]) -> None:
    """Call it for each, several at once; raises what one of them raised."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ckpt-look") as pool:
        for future in [pool.submit(function, name) for name in names]:
            future.result()


def _copy_of(manifest: Manifest) -> Copy:
    return Copy(manifest.step, manifest.attempt, manifest.directory)


def _is_rank_manifest(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".json") and "/" not in name


def _printed_as(url: str, folder: Path) -> type[Path]:
    """A kind of path that is a real one to the system, and prints as what it stands for."""
    home = str(folder)

    class FarPath(PosixPath):
        __slots__ = ()

        def __fspath__(self) -> str:
            return super().__str__()

        def __str__(self) -> str:
            real = super().__str__()
            inside = real == home or real.startswith(f"{home}/")
            return f"{url}{real[len(home) :]}" if inside else real

        def iterdir(self) -> Generator[FarPath]:
            # From Python 3.12 on, pathlib's own goes by how a path prints.
            return (self / name for name in os.listdir(self))

    return FarPath
