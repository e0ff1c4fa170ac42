"""What import-linter cannot say: folders are entered by their doors, no circles, and the map is whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
PACKAGE = TOP / "ckpt_core"
INTEGRATIONS = sorted(path.name for path in (PACKAGE.parent / "integrations").glob("ckpt_*"))
DOORS = "system"
"""Each of its files is a door of its own: only one of them needs torch."""
MODULES = sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            assert node.module is not None
            yield node.module


@dataclass(frozen=True)
class Facts:
    """What the tests ask of a module, which is parsed once for all of them; no tree is kept."""

    docstring: str | None
    imports: tuple[str, ...]
    running: tuple[tuple[str, str], ...]
    """`_imported` of those that are carried out."""
    cuda: tuple[int, ...]
    """Lines that name devices of one maker."""
    integrations: tuple[str, ...]
    """Texts that name one."""


@cache
def _facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text())
    texts = _docstrings(tree)
    nodes = [*ast.walk(tree)]
    constants = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    return Facts(
        ast.get_docstring(tree),
        tuple(_imports(nodes)),
        tuple(pair for node in _running(tree) for pair in _imported(node)),
        tuple(
            getattr(node, "lineno", 0) for node in nodes if id(node) not in texts and _is_cuda(node)
        ),
        tuple(text for text in constants if text.split(".")[0] in INTEGRATIONS),
    )


def _passes_a_door(home: str, name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "ckpt_core" or len(parts) < 3 or parts[1] in (DOORS, home):
        return False
    return (PACKAGE / parts[1]).is_dir()


def test_another_folder_is_entered_by_its_door() -> None:
    wrong = [
        f"{_name(module)}: enter by the door, not by {name}"
        for module in MODULES
        for name in _facts(module).imports
        if _passes_a_door(module.relative_to(PACKAGE).parts[0], name)
    ]
    assert not wrong


def test_every_folder_has_a_door_that_says_what_is_behind_it() -> None:
    for folder in sorted({path.parent for path in MODULES}):
        door = folder / "__init__.py"
        assert door.exists(), f"{_name(folder)} has no __init__.py"
        assert _facts(door).docstring, f"{_name(door)} has no docstring"


DEVICE_DOOR = PACKAGE / "system" / "devices.py"
ASKERS = sorted(
    path
    for top in (PACKAGE, PACKAGE.parent / "integrations")
    for path in top.rglob("*.py")
    if path != DEVICE_DOOR
)


def _is_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "cuda")
    if isinstance(node, ast.Import | ast.ImportFrom):
        of_torch = isinstance(node, ast.ImportFrom) and node.module == "torch"
        named = of_torch and any(alias.name == "cuda" for alias in node.names)
        return named or any(name.startswith("torch.cuda") for name in _imports([node]))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return bool(re.fullmatch(r"cuda(:\d*)?", node.value)) or "torch.cuda" in node.value
    return False


def _docstrings(tree: ast.AST) -> set[int]:
    lone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(value) for value in lone if isinstance(value, ast.Constant)}


def test_devices_of_one_maker_are_named_behind_their_door_alone() -> None:
    lines = [f"{path.relative_to(TOP)}:{line}" for path in ASKERS for line in _facts(path).cuda]
    assert not lines, "ask ckpt_core.system.devices, of any kind of device"


def test_a_use_of_one_makers_devices_is_found() -> None:
    uses = ("torch.cuda.sync()", "t.is_cuda", "import torch.cuda", "x = 'cuda:0'")
    for text in (*uses, "x.cuda()", "from torch import cuda", "from torch.cuda import Stream"):
        assert any(map(_is_cuda, ast.walk(ast.parse(text)))), text


LIFECYCLE = (PACKAGE.parent / "docs" / "lifecycle.md").read_text()
MAP = [
    (room, module)
    for room, modules in re.findall(
        r"\| `ckpt_core/([\w/]+)/` \| ([`\w ]+) \|$", LIFECYCLE, re.MULTILINE
    )
    for module in re.findall(r"`(\w+)`", modules)
]


@pytest.mark.parametrize("room", sorted({room for room, _ in MAP}))
def test_the_map_of_a_checkpoints_life_has_each_module_of_a_room_once(room: str) -> None:
    modules = sorted(path.stem for path in (PACKAGE / room).glob("*.py"))
    assert sorted(["__init__", *(name for home, name in MAP if home == room)]) == modules
    nested = {str(path.parent.relative_to(PACKAGE)) for path in (PACKAGE / room).rglob("*.py")}
    assert nested <= {home for home, _ in MAP}


def test_no_module_lies_outside_of_a_room() -> None:
    loose = {path.stem for path in PACKAGE.glob("*.py")}
    face = {"__init__", "__main__", "_version"}
    assert loose == face | {"anywhere", "checkpointer", "engine", "errors", "types", "units"}


def test_no_integration_is_imported_or_started_by_name() -> None:
    named = [
        f"{_name(module)}: {name}"
        for module in MODULES
        for name in (*_facts(module).imports, *_facts(module).integrations)
        if name.split(".")[0] in INTEGRATIONS
    ]
    assert not named, f"{named}: found by entry points alone (ckpt_core/system/plugins.py)"


def _modules(root: Path) -> dict[str, Path]:
    """All modules below a folder of packages, by their names."""
    paths = {path.relative_to(root).with_suffix(""): path for path in root.glob("ckpt_*/**/*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def _running(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that are carried out, in functions too; not those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from _running(child)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """What an import names, and what it is otherwise a name of."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield alias.name, alias.name
        elif node.module is not None:
            yield f"{node.module}.{alias.name}", node.module


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = _modules(TOP) | _modules(TOP / "integrations")
    assert {"ckpt_core.layout", "ckpt_core.cli.app", "ckpt_deepspeed.engine"} <= set(modules)
    needs: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = {full if full in modules else package for full, package in _facts(path).running}
        needs[name] = found.intersection(modules) - {name}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as exc:
        pytest.fail(" <- ".join(exc.args[1]))


NO_OWN_LOCKS = (
    "bench",
    "cli",
    *(f"levels/{name}" for name in ("agent", "by_hand", "parity", "serving")),
)
"""Folders of other processes than the one that trains."""
APART = (
    *("observe/progress.py", "save/flights.py", "save/in_flight.py", "system/threads.py"),
    "restore/shard_reader.py",
)
"""Here a lock is given back by another thread than took it, or only tried, or no other call comes to it."""


def test_a_lock_that_training_may_hold_knows_who_has_it() -> None:
    names = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = [
        name
        for name, path in names.items()
        if not name.startswith(NO_OWN_LOCKS) and re.search(r"\bR?Lock\(\)", path.read_text())
    ]
    assert set(found) == set(APART), "use ckpt_core.system.threads.own_lock"
