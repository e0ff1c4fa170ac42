"""Which part of a checkpoint is wanted, and under which names: a skeleton cut to what `only`, `partial` and
`rename` of a restore leave of it."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.state.build import Builder
from ckpt_core.state.kinds import KINDS
from ckpt_core.state.nodes import PLAIN, Array, Map, Member, Node, Obj, Record, Ref, RefTable, Seq
from ckpt_core.state.plain import shown
from ckpt_core.state.skeleton import Skeleton

Rename = Mapping[str, str] | Callable[[str], str]
_OTHERS = 2000
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where checkpoint and live state differ.

    Attributes:
        path: of the place.
        text: how they differ.
        unit: path of what can only be restored as a whole, and has that place in it.
    """

    path: str
    text: str
    unit: str

    def __str__(self) -> str:
        return f"{self.path or 'the state itself'}: {self.text}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What the caller of one restore wants of a step. Paths are those of the live state.

    Attributes:
        only: paths, with all that is below them; () for everything.
        partial: leave out what differs.
        rename: path in the checkpoint -> path in the live state.
        left: units that are left out, for a difference.
    """

    only: tuple[str, ...] = ()
    partial: bool = False
    rename: Rename | None = None
    left: frozenset[str] = frozenset()
    _seen: set[str] = field(default_factory=set)
    _others: list[str] = field(default_factory=list)
    _passed: list[tuple[Node, str, str]] = field(default_factory=list)
    _builder: list[Builder] = field(default_factory=list)

    @classmethod
    def of(
        cls, only: Iterable[str] | None, *, partial: bool = False, rename: Any = None
    ) -> Selection | None:
        """The arguments of a restore; None: everything, as it was saved.

        Raises:
            ConfigError: one of them is of the wrong kind.
        """
        if only is None and not partial and rename is None:
            return None
        listed = tuple(only) if isinstance(only, Iterable) else ()
        paths = (only,) if isinstance(only, str) else listed
        if only is not None and not (paths and all(type(path) is str and path for path in paths)):
            raise ConfigError(f"only={only!r}: name entries of the state, such as ['model']")
        if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
            text = "give a mapping {path in the checkpoint: path here}, or a function of the former"
            raise ConfigError(f"rename={rename!r}: {text}")
        if isinstance(rename, Mapping):
            for path in (*rename, *rename.values()):
                if not isinstance(path, str):
                    raise ConfigError(f"rename={rename!r}: {path!r} is no path: name text by text")
        return cls(paths, partial, rename)

    def without(self, units: Iterable[str]) -> Selection:
        """The same, less more of what differs."""
        return dataclasses.replace(self, left=self.left | set(units))

    def takes(self, path: str) -> bool:
        """Whether a place is wanted, or something below it."""
        if path in self.left:
            return False
        if not self.only:
            return True
        for wanted in self.only:
            if _is_below(path, wanted):
                self._seen.add(wanted)
                return True
        if len(self._others) < _OTHERS:
            self._others.append(path)
        return any(_is_below(wanted, path) for wanted in self.only)

    def passes_over(self, path: str) -> bool:
        """Whether a place, or something below it, is left out for a difference."""
        return any(_is_below(path, unit) or _is_below(unit, path) for unit in self.left)

    def is_whole(self, path: str) -> bool:
        """Whether all below a place that is taken is wanted."""
        return self._asks_for(path) and not any(_is_below(unit, path) for unit in self.left)

    def check_whole(self, path: str, live: object) -> None:
        """Raise ConfigError if `only` names a part of what can only be restored as a whole."""
        if self._asks_for(path):
            return
        for wanted in self.only:
            if _is_below(wanted, path):
                raise ConfigError(
                    f"only={wanted!r}: {path!r} is of type {type(live).__name__}, which is restored as a "
                    f"whole: name {path!r}. Nothing was changed"
                )

    def check_seen(self) -> None:
        """Raise ConfigError if `only` names what is nowhere; once both sides have been walked through."""
        for wanted in self.only:
            if wanted in self._seen:
                continue
            self.check_moved([wanted])
            near = difflib.get_close_matches(wanted, dict.fromkeys(self._others), _SHOWN)
            near = near or list(dict.fromkeys(self._others))[:_SHOWN]
            there = f"; there is {', '.join(near)}" if near else ""
            text = f"only={wanted!r}: nothing of that name is in the checkpoint or in the state"
            raise ConfigError(f"{text}{there}. Nothing was changed")

    def check_moved(self, missing: Iterable[str]) -> None:
        """Raise ConfigError if `rename` would fill one of these places out of what is not wanted.

        Called once something is wrong with them: until then, what is not wanted is not asked about.
        """
        # Few of them: there may be as many as leaves, and each is looked for among all.
        first = list(islice(filter(None, missing), _SHOWN))
        for node, path, saved in self._passed if self.rename is not None else ():
            self._check_inside(node, path, saved, first)

    def cut(self, skeleton: Skeleton, *, trusted: bool) -> Skeleton:
        """The skeleton of what is wanted, under the names of the live state.

        Args:
            trusted: keys may be of any type.

        Raises:
            ConfigError: `rename` gives two entries one name, or takes one out of what it is in.
        """
        self._seen.clear()
        self._others.clear()
        self._passed.clear()
        self._builder[:] = [skeleton.builder({}, trusted=trusted)]
        tree = self._cut(skeleton.tree, "", "")
        names = frozenset(_leaves(tree, skeleton.refs))
        return Skeleton(tree, skeleton.refs, skeleton.leaves, path=skeleton.path, names=names)

    # -- inside ----------------------------------------------------------------------------------

    def _asks_for(self, path: str) -> bool:
        """Whether `only` asks for all that is below a place."""
        return not self.only or any(_is_below(path, wanted) for wanted in self.only)

    def _cut(self, node: Node, path: str, saved: str) -> Node:
        """What is wanted of a node that is called `path` here, and `saved` in the checkpoint."""
        if isinstance(node, Obj):
            return dataclasses.replace(node, state=self._cut(node.state, path, saved))
        if isinstance(node, Map):
            return self._cut_map(node, path, saved)
        if isinstance(node, Record):
            rows = zip(node.fields, node.values, strict=True)
            values = [self._item(name, value, path, saved) for name, value in rows]
            return dataclasses.replace(node, values=values)
        if isinstance(node, Seq) and KINDS[node.kind].homes:
            items = [self._item(at, item, path, saved) for at, item in enumerate(node.items)]
            return dataclasses.replace(node, items=items)
        return node

    def _item(self, key: object, node: Node, path: str, saved: str) -> Node:
        """An item whose place is kept: None where it is not wanted."""
        where, before = _join(path, key), _join(saved, key)
        if self.takes(where):
            return self._cut(node, where, before)
        self._passed.append((node, where, before))
        return None

    def _cut_map(self, node: Map, path: str, saved: str) -> Map:
        rows: list[tuple[Node, Node]] = []
        names: dict[str, str] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            text = self._text(key)
            before = _join(saved, text)
            if type(key) is str:
                key = text = self._renamed(key, path, before)
                if names.setdefault(key, before) != before:
                    raise ConfigError(
                        f"rename: {names[key]!r} and {before!r} of the checkpoint would both be "
                        f"{_join(path, key)!r}. Nothing was changed"
                    )
            where = _join(path, text)
            if type(key) is not str and (found := self._called(before)) not in (before, where):
                raise ConfigError(
                    f"rename: {before!r} cannot become {found!r}: its key {text} is no text, and stays as it "
                    f"is. Nothing was changed"
                )
            if self.takes(where):
                rows.append((key, self._cut(value, where, before)))
            else:
                self._passed.append((value, where, before))
        keys, values = ([row[at] for row in rows] for at in (0, 1))
        return dataclasses.replace(node, keys=keys, values=values)

    def _text(self, key: Node) -> str:
        """What a key is called in paths: as when it was saved, the text of its value."""
        if type(key) in PLAIN:
            return str(key)
        try:
            return str(self._builder[0].tree(key))
        except CkptError:
            # A type that is not here, or not trusted: an error where it is wanted, and none elsewhere.
            return f"{_last(key.type_name)}.{key.name}" if isinstance(key, Member) else shown(key)

    def _renamed(self, key: str, path: str, saved: str) -> str:
        """The key here of what is called `saved` there, in the container that is called `path` here."""
        found = self._called(saved)
        if found == saved:
            return key
        prefix = f"{path}." if path else ""
        if type(found) is not str or not found.startswith(prefix) or found == prefix:
            stays = f": it is in what is {path!r} here, and stays there: rename that too"
            text = f"rename: {saved!r} cannot become {found!r}{stays if path else ''}"
            raise ConfigError(f"{text}. Nothing was changed")
        return found[len(prefix) :]

    def _called(self, saved: str) -> str:
        """What `rename` makes of a path of the checkpoint; a function may answer with anything."""
        if self.rename is None:
            return saved
        if isinstance(self.rename, Mapping):
            return _mapped(saved, self.rename)
        return self.rename(saved)

    def _check_inside(self, node: Node, path: str, saved: str, missing: list[str]) -> None:
        node = node.state if isinstance(node, Obj) else node
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, Map) else ():
            text = self._text(key)
            before, where = _join(saved, text), _join(path, text)
            if type(key) is str and (found := self._called(before)) != before:
                where = str(found)
                if any(_is_below(where, one) or _is_below(one, where) for one in missing):
                    self._renamed(key, path, before)
            self._check_inside(value, where, before, missing)


def told_of(differences: Iterable[Difference]) -> list[str]:
    """A line for each unit that is left as it is."""
    first: dict[str, Difference] = {}
    for difference in differences:
        first.setdefault(difference.unit, difference)
    return [
        str(one) if one.path == unit else f"{unit}: left as a whole, for {one}"
        for unit, one in first.items()
    ]


def _is_below(path: str, above: str) -> bool:
    """Whether a path is another one, or in it."""
    return path == above or path.startswith(f"{above}.") or not above


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _last(type_name: str) -> str:
    """The name of a class, without its module and those that it is in."""
    return re.split("[:.]", type_name)[-1]


def _mapped(saved: str, rename: Mapping[str, str]) -> str:
    """The path with the longest prefix that is named replaced."""
    fits = [old for old in rename if _is_below(saved, old)]
    if not fits:
        return saved
    old = max(fits, key=len)
    new, rest = rename[old], saved[len(old) :].removeprefix(".")
    return ".".join(part for part in (new, rest) if part)


def _leaves(node: Any, refs: RefTable) -> Iterator[str]:
    if isinstance(node, Array):
        node = node.ref
    if isinstance(node, Ref):
        composite = refs.composites.get(node)
        yield refs.leaf[node]
        yield from (refs.leaf[part] for part in (composite.parts.values() if composite else ()))
    elif isinstance(node, Obj):
        yield from _leaves(node.state, refs)
    elif isinstance(node, Seq | Map | Record):
        for value in node.items if isinstance(node, Seq) else node.values:
            yield from _leaves(value, refs)
        if not isinstance(node, Record):
            yield from _leaves(node.extra, refs)
