"""Compares code that does not run here with the real API: names, attributes, arguments, keywords.

`Excerpt(...).check(source)` follows what each expression is as far as annotations tell, and is silent about
what it cannot know. Only names of our packages are looked at.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from dataclasses import dataclass, field
from typing import Any

import ckpt_core

OURS = ("ckpt_core", "ckpt_deepspeed", "ckpt_horovod", "ckpt_lightning", "ckpt_transformers")


@dataclass(frozen=True, slots=True)
class Instance:
    """Some object of a class."""

    kind: type


UNKNOWN = Instance(object)


@dataclass
class Excerpt(ast.NodeVisitor):
    """What names mean so far, and what is wrong."""

    names: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def check(self, source: str) -> list[str]:
        """Everything that the API does not have, in words."""
        self.visit(ast.parse(source))
        return self.wrong

    # -- statements that name things -------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_ours(alias.name):
                self.names[alias.asname or alias.name] = importlib.import_module(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not _is_ours(node.module or ""):
            return
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            self.names[alias.asname or alias.name] = self._of(module, alias.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.what(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = value

    def visit_withitem(self, node: ast.withitem) -> None:
        value = self.what(node.context_expr)
        if isinstance(node.optional_vars, ast.Name):
            self.names[node.optional_vars.id] = value

    def visit_Call(self, node: ast.Call) -> None:
        self.what(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.what(node)

    # -- what an expression is -------------------------------------------------------------------

    def what(self, node: ast.expr) -> Any:
        """The object itself, an Instance of its class, or UNKNOWN."""
        if isinstance(node, ast.Name):
            if node.id in ckpt_core.__all__ and node.id not in self.names:
                self.wrong.append(f"line {node.lineno}: {node.id} is not imported on this page")
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            return self._of(self.what(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self._called(node)
        self.generic_visit(node)
        return UNKNOWN

    def _of(self, owner: Any, name: str) -> Any:
        if owner is UNKNOWN or not _is_ours(_module_of(owner)):
            return UNKNOWN
        where = owner.kind if isinstance(owner, Instance) else owner
        if not hasattr(where, name) and name not in _fields(where):
            if not _takes_any(where):
                self.wrong.append(f"{where.__name__} has no {name}")
            return UNKNOWN
        found = inspect.getattr_static(where, name, None)
        if isinstance(owner, Instance) and isinstance(found, property):
            return _result(found.fget)
        if isinstance(owner, Instance) and inspect.isfunction(found):
            return found.__get__(object())
        return getattr(where, name, UNKNOWN) if not isinstance(owner, Instance) else UNKNOWN

    def _called(self, node: ast.Call) -> Any:
        called = self.what(node.func)
        for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.what(part)
        if called is UNKNOWN or isinstance(called, Instance) or not _is_ours(_module_of(called)):
            return UNKNOWN
        self._bind(called, node)
        return Instance(called) if inspect.isclass(called) else _result(called)

    def _bind(self, called: Any, node: ast.Call) -> None:
        left_out = any(isinstance(item, ast.Constant) and item.value is ... for item in node.args)
        left_out |= any(isinstance(item, ast.Starred) for item in node.args)
        left_out |= any(keyword.arg is None for keyword in node.keywords)
        given = [item for item in node.args if not isinstance(item, ast.Starred)]
        given = [
            item for item in given if not (isinstance(item, ast.Constant) and item.value is ...)
        ]
        keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
        signature = inspect.signature(called)
        try:
            (signature.bind_partial if left_out else signature.bind)(*given, **keywords)
        except TypeError as exc:
            self.wrong.append(f"line {node.lineno}: {called.__name__}: {exc}")


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def _module_of(item: Any) -> str:
    if isinstance(item, Instance):
        return item.kind.__module__
    return item.__name__ if inspect.ismodule(item) else getattr(item, "__module__", "") or ""


def _takes_any(owner: Any) -> bool:
    """Whether keywords of its making become attributes."""
    made = inspect.signature(owner).parameters.values() if inspect.isclass(owner) else ()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in made)


def _fields(owner: Any) -> set[str]:
    """Attributes that only instances have: annotated ones, and those that `__init__` sets."""
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    found = {name for item in classes for name in getattr(item, "__annotations__", {})}
    for item in classes:
        code = getattr(vars(item).get("__init__"), "__code__", None)
        found |= set(code.co_names) if code else set()
    return found


def _result(function: Any) -> Any:
    try:
        kind = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return UNKNOWN
    return Instance(kind) if inspect.isclass(kind) else UNKNOWN
