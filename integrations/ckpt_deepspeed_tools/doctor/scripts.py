"""What training scripts say of DeepSpeed's engine: parsed, never run."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_deepspeed_tools.doctor.config import KEY, TYPE

_PACKAGE = "ckpt_deepspeed"
_SWALLOWING = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_NOT_OURS = frozenset({"site-packages", "node_modules", "__pycache__"})

Scope = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Import:
    """An import of `ckpt_deepspeed`.

    Attributes:
        place: file and line.
        late: it comes behind `deepspeed.initialize` in the same piece of code.
        swallowed: should it fail, the script goes on without.
    """

    place: str
    late: bool
    swallowed: bool


@dataclass(frozen=True, slots=True)
class Named:
    """A place where a script writes the key, or another one for a section of this engine.

    Attributes:
        section: what is written there, where it is all literal; None: not known.
    """

    place: str
    key: str
    section: object


@dataclass(slots=True)
class Scripts:
    """What was found, in all files together.

    Attributes:
        files: how many were parsed.
        unparsed: files that are no Python of this version, with the reason.
        attached: places that call `ckpt_deepspeed.attach`.
        deepspeed: whether one imports DeepSpeed.
    """

    files: int = 0
    unparsed: list[str] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    deepspeed: bool = False

    @property
    def concerned(self) -> bool:
        """Whether any of them has to do with DeepSpeed."""
        return bool(self.deepspeed or self.imports or self.named)


def read_scripts(paths: Sequence[Path]) -> Scripts:
    """Parse scripts, and those in directories.

    Raises:
        ConfigError: a directory has none.
        OSError: one cannot be read.
    """
    found = Scripts()
    for path in paths:
        for file in _files(path):
            found.files += 1
            try:
                tree = ast.parse(file.read_bytes(), filename=str(file))
            except (SyntaxError, ValueError) as exc:
                found.unparsed.append(f"{file}: {exc.msg if isinstance(exc, SyntaxError) else exc}")
                continue
            reader = _Reader(str(file), found)
            reader.visit(tree)
            reader.finish()
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(_below(path))
    if not files:
        raise ConfigError(f"--script {path}: no Python file is in that directory")
    return files


def _below(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _is_source(Path(path, name))]
        yield from (Path(path, name) for name in names if name.endswith(".py"))


def _is_source(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in _NOT_OURS
    return not hidden and not (folder / "pyvenv.cfg").exists()


@dataclass(frozen=True, slots=True)
class _Seen:
    line: int
    scope: Scope
    swallowed: bool = False


class _Reader(ast.NodeVisitor):
    """Goes through one file, and notes what it finds."""

    def __init__(self, file: str, found: Scripts) -> None:
        self._file = file
        self._found = found
        self._scope: Scope = ()
        self._swallowed = False
        self._imports: list[_Seen] = []
        self._started: list[_Seen] = []
        self._aliases = {_PACKAGE}
        self._attach: set[str] = set()

    def finish(self) -> None:
        """The imports, now that it is known what else the file does."""
        for seen in self._imports:
            late = any(
                other.scope == seen.scope and other.line < seen.line for other in self._started
            )
            self._found.imports.append(Import(self._place(seen.line), late, seen.swallowed))

    # -- where we are -----------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside, self._scope = self._scope, (*self._scope, f"{node.name}:{node.lineno}")
        self.generic_visit(node)
        self._scope = outside

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        # What is imported for type checkers is not imported when the script runs.
        self._visit_all([] if _name(node.test) == "TYPE_CHECKING" else [node.test, *node.body])
        self._visit_all(node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        with self._swallowing(any(_swallows(handler.type) for handler in node.handlers)):
            self._visit_all(node.body)
        self._visit_all([*node.handlers, *node.orelse, *node.finalbody])

    def visit_With(self, node: ast.With) -> None:
        calls = [item.context_expr for item in node.items]
        names = [arg for call in calls if isinstance(call, ast.Call) for arg in call.args]
        suppressed = any(_name(call) == "suppress" for call in calls)
        self._visit_all(node.items)
        with self._swallowing(suppressed and any(_swallows(name) for name in names)):
            self._visit_all(node.body)

    @contextmanager
    def _swallowing(self, here: bool) -> Iterator[None]:
        outside, self._swallowed = self._swallowed, self._swallowed or here
        yield
        self._swallowed = outside

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # -- what is there ----------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._note_deepspeed(alias.name)
            if _is_package(alias.name):
                self._aliases.add(alias.asname or _PACKAGE)
                self._note_import(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0:
            self._note_deepspeed(node.module or "")
        if node.level == 0 and _is_package(node.module or ""):
            names = [alias.asname or alias.name for alias in node.names if alias.name == "attach"]
            self._attach.update(names)
            self._note_import(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node)
        if name in ("import_module", "__import__") and _is_package(_text(node.args[:1])):
            self._note_import(node)
        elif name == "initialize" and _owner(node) == "deepspeed":
            self._started.append(_Seen(node.lineno, self._scope))
        elif name in self._attach or (name == "attach" and _owner(node) in self._aliases):
            self._found.attached.append(self._place(node.lineno))
        elif name == "dict":
            for keyword in node.keywords:
                self._note_key(keyword.arg, keyword.value)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self._note_key(_text([key]), value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self._note_key(_text([target.slice]), node.value)
        self.generic_visit(node)

    def _note_deepspeed(self, module: str) -> None:
        self._found.deepspeed |= module.split(".")[0] == "deepspeed"

    def _note_import(self, node: ast.stmt | ast.expr) -> None:
        self._imports.append(_Seen(node.lineno, self._scope, self._swallowed))

    def _note_key(self, key: str | None, value: ast.expr) -> None:
        section = _literal(value)
        ours = isinstance(section, dict) and section.get("type") == TYPE
        if key is not None and (key == KEY or ours):
            self._found.named.append(Named(self._place(value.lineno), key, section))

    def _place(self, line: int) -> str:
        return f"{self._file}:{line}"


def _is_package(name: str) -> bool:
    return name.split(".")[0] == _PACKAGE


def _name(node: ast.expr) -> str:
    """The last name of a name, an attribute or a call of one."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _owner(node: ast.Call) -> str:
    return _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""


def _swallows(caught: ast.expr | None) -> bool:
    """Whether a handler of this type catches a failed import; none means that it catches all."""
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or _name(kind) in _SWALLOWING for kind in kinds)


def _text(nodes: Sequence[ast.expr | None]) -> str:
    node = nodes[0] if nodes else None
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
