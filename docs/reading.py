"""Reads public names and their docstrings from the source, for the reference: nothing is imported or needed.

pages of the reference <- `entry(package, name)` <- `_found`: the class or function, wherever it is made
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring

TOP = Path(__file__).parents[1]
_NAPOLEON = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Found:
    """A class, a function or an assignment, and the module that it is in."""

    module: str
    node: ast.ClassDef | _Function | ast.Assign


@functools.cache
def _tree(module: str) -> ast.Module | None:
    for folder in (TOP, TOP / "integrations"):
        path = folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return ast.parse(file.read_text())
    return None


def names_of(module: str) -> list[str]:
    """What its `__all__` lists; of a module without one its public classes."""
    tree = _tree(module)
    assert tree is not None, module
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name[0] != "_"]
    return [
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    ]


def _found(module: str, name: str) -> Found | None:
    tree = _tree(module)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.ClassDef | _Function) and node.name == name:
            return Found(module, node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return Found(module, node)
        if isinstance(node, ast.ImportFrom) and any(item.name == name for item in node.names):
            return _found(node.module or "", name)
    return None


def _bases(found: Found) -> Iterator[Found]:
    """The class itself, then those of ours that it comes from."""
    yield found
    for base in found.node.bases if isinstance(found.node, ast.ClassDef) else ():
        of_base = _found(found.module, ast.unparse(base))
        if of_base is not None:
            yield from _bases(of_base)


def is_error(module: str, name: str) -> bool:
    """Whether it is an exception of the engine."""
    found = _found(module, name)
    names = [getattr(item.node, "name", "") for item in _bases(found)] if found else []
    return "CkptError" in names


# -- signatures ------------------------------------------------------------------------------------


def _arguments(node: _Function, *, bound: bool) -> str:
    text = ast.unparse(node.args)
    if bound:
        text = re.sub(r"^(self|cls)(, /)?(, |$)", "", text)
    returns = ast.unparse(node.returns) if node.returns else "None"
    return f"({text})" + (f" -> {returns}" if returns != "None" else "")


def _decorators(node: ast.ClassDef | _Function) -> set[str]:
    return {ast.unparse(item).partition("(")[0] for item in node.decorator_list}


def _fields(node: ast.ClassDef) -> str:
    fields = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and ast.unparse(item.target)[0] != "_":
            made = f"{ast.unparse(item.target)}: {ast.unparse(item.annotation)}"
            fields.append(made + (f" = {ast.unparse(item.value)}" if item.value else ""))
    return f"({', '.join(fields)})"


def _made_by(found: Found) -> str:
    assert isinstance(found.node, ast.ClassDef)
    if "dataclass" in _decorators(found.node):
        return _fields(found.node)
    methods = (item for item in found.node.body if isinstance(item, _Function))
    made = next((item for item in methods if item.name == "__init__"), None)
    return _arguments(made, bound=True) if made else ""


# -- text ------------------------------------------------------------------------------------------


def _literal_blocks(text: str) -> str:
    """What is indented below a sentence is shown as it is written."""
    lines: list[str] = []
    section = False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            section = line.endswith(":") and " " not in line
        if line.startswith("    ") and not section and lines and not lines[-1]:
            lines += ["::", ""]
            section = True
        lines.append(line)
    return "\n".join(lines)


def _text(node: ast.ClassDef | _Function, depth: int) -> str:
    # A word may go on behind a name there: `Level`s.
    text = re.sub(r"(?<!\w)(`[^`\s][^`\n]*`)(?=\w)", r"\1\\ ", ast.get_docstring(node) or "")
    text = _literal_blocks(text)
    return textwrap.indent(str(GoogleDocstring(text, _NAPOLEON)), "   " * depth)


def _methods(found: Found) -> Iterator[_Function]:
    seen: set[str] = set()
    for item in _bases(found):
        for node in getattr(item.node, "body", []):
            if isinstance(node, _Function) and node.name[0] != "_" and node.name not in seen:
                seen.add(node.name)
                if ast.get_docstring(node):
                    yield node


def _method(node: _Function) -> str:
    decorators = _decorators(node)
    if decorators & {"property", "functools.cached_property", "cached_property"}:
        head = f"   .. py:property:: {node.name}\n"
    else:
        head = f"   .. py:method:: {node.name}{_arguments(node, bound='staticmethod' not in decorators)}\n"
        for kind in decorators & {"classmethod", "staticmethod"}:
            head += f"      :{kind}:\n"
    return f"{head}\n{_text(node, 2)}\n\n"


def entry(module: str, name: str) -> str:
    """The reStructuredText of one public name."""
    found = _found(module, name)
    assert found is not None, f"{module}.{name} is nowhere"
    if isinstance(found.node, ast.Assign):
        return f".. py:data:: {name}\n   :module: {module}\n\n"
    if isinstance(found.node, _Function):
        arguments = _arguments(found.node, bound=False)
        head = f".. py:function:: {name}{arguments}\n   :module: {module}\n\n"
        return f"{head}{_text(found.node, 1)}\n\n"
    kind = "exception" if is_error(module, name) else "class"
    made = "" if kind == "exception" else _made_by(found)
    head = f".. py:{kind}:: {name}{made}\n   :module: {module}\n\n{_text(found.node, 1)}\n\n"
    return head + "".join(map(_method, _methods(found)))
