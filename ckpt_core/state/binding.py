"""`bind`: where the bytes of a checkpoint go in a live state, and what remains to do after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_core.errors import RestoreError, StateMismatch
from ckpt_core.state.build import Builder
from ckpt_core.state.generators import is_generator
from ckpt_core.state.homes import Home, fill_home
from ckpt_core.state.leaf import dtype_name, overlaps_itself, view_key
from ckpt_core.state.match import Load, Matcher
from ckpt_core.state.memory import refuse_fake
from ckpt_core.state.optimizers import load_exactly
from ckpt_core.state.overlaps import find_doubtful, first_contradiction
from ckpt_core.state.pickled import Literal, put
from ckpt_core.state.rng import RngState
from ckpt_core.state.selection import Selection, told_of
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.types import Block, LeafSpec
from ckpt_core.units import count_text

_SHOWN = 20
_WANTED = "say what is wanted of it: restore(only=..., rename=...), or partial=True for what fits."
_CALLED = (
    "say what is called otherwise here: rename=... partial=True fills what fits: nothing does."
)


def bind(
    skeleton: Skeleton,
    specs: Mapping[str, LeafSpec],
    live: Any,
    *,
    trusted: bool,
    selection: Selection | None = None,
) -> Binding:
    """Pair a checkpoint with a live state; changes nothing yet. Called by `restore`.

    Args:
        specs: every wanted leaf of the checkpoint, by name, of its whole shape if ranks store it in parts.
        live: the state tree to fill, of the structure that was saved. A plain value in it takes
            whatever was saved, in the tree that `finish` returns. A DTensor or FlatPart takes its local part
            of a leaf of its whole shape, whether the leaf was one when it was saved or not.
        trusted: unpickle any type and import modules.
        selection: what of the checkpoint is wanted; None: all, as it was saved.

    Raises:
        ConfigError: `selection` does not fit, or as `refuse_fake`.
        StateMismatch: names, shapes, dtypes or kinds differ; `.problems` lists all differences.
        CorruptCheckpoint: skeleton and leaves contradict each other.
        UntrustedData: it holds something that only `trusted=True` loads.
    """
    refuse_fake()
    fit = _fit(skeleton, specs, live, trusted=trusted, selection=selection)
    skeleton, matcher = fit.skeleton, fit.matcher
    if selection is not None:
        specs = {name: specs[name] for name in skeleton.leaf_names()}
    doubtful = find_doubtful([*matcher.homes, *matcher.loaded], skeleton.refs, specs)
    unsure = {skeleton.refs.leaf[home.number] for cluster in doubtful for home in cluster}
    direct, rest = _choose(skeleton, specs, matcher.homes, unsure)
    fresh = skeleton.allocate({name: spec for name, spec in specs.items() if name not in direct})
    targets = _Targets(
        {name: direct[name].tensor if name in direct else fresh[name] for name in specs},
        {name: home.block for name, home in direct.items() if home.block is not None},
        {name: home.whole for name, home in direct.items() if home.whole is not None},
        {name: home.begin for name, home in direct.items() if home.begin is not None},
    )
    # What cannot be built must show before anything is filled.
    skeleton.builder(targets.shown, trusted=trusted, rehearsal=True).tree(skeleton.tree)
    plan = _Plan(rest, matcher.literals, matcher.loads, doubtful)
    filled = frozenset(home.path for home in direct.values() if home.is_live)
    return Binding(skeleton, targets, plan, trusted=trusted, fit=fit, filled=filled)


class _Fit(NamedTuple):
    """What of a checkpoint is restored, how it lies in the live state, and what is left out, line by line."""

    skeleton: Skeleton
    matcher: Matcher
    left_out: tuple[str, ...]
    selection: Selection | None


def _fit(
    skeleton: Skeleton,
    specs: Mapping[str, LeafSpec],
    live: Any,
    *,
    trusted: bool,
    selection: Selection | None,
) -> _Fit:
    """Walk through both, again and again with less of them while something differs and may be left out."""
    left_out: list[str] = []
    advice = _CALLED if selection is not None and selection.partial else _WANTED
    while True:
        part = skeleton if selection is None else selection.cut(skeleton, trusted=trusted)
        matcher = Matcher(part, specs, trusted=trusted, selection=selection)
        matcher.check_refs()
        matcher.match(part.tree, live, "")
        if selection is not None:
            selection.check_seen()
        if not matcher.problems:
            break
        units = [problem.unit for problem in matcher.problems]
        if selection is None or not selection.partial or "" in units:
            if selection is not None:
                selection.check_moved(problem.path for problem in matcher.problems)
            raise _mismatch(list(map(str, matcher.problems)), skeleton, advice)
        left_out += told_of(matcher.problems)
        selection = selection.without(units)
    if left_out and not (matcher.homes or matcher.loads or matcher.literals):
        raise _mismatch(left_out, skeleton, advice)
    return _Fit(part, matcher, tuple(left_out), selection)


@dataclass(frozen=True)
class _Targets:
    """Memory to fill, the boxes or runs it takes, the DTensors that it is the local part of; by leaf."""

    tensors: dict[str, Tensor]
    blocks: dict[str, Block]
    wholes: dict[str, Tensor]
    begins: dict[str, int]

    @property
    def shown(self) -> dict[str, Tensor]:
        """What the tree that is returned holds."""
        return self.tensors | self.wholes


@dataclass(frozen=True)
class _Plan:
    """What remains to do once bytes are there: doubtful homes to check, then copies, then loads."""

    copies: list[Home]
    literals: list[Literal]
    loads: list[Load]
    doubtful: list[list[Home]]


class Binding:
    """Destinations to fill, then `finish`; before the others, those that are `doubtful`, then `check`.

    Attributes:
        skeleton: of what is restored.
        left_out: places that differ and stay as they are, and how.
        filled: places of the live tensors among the destinations.
        destinations: leaf name -> tensor of any strides and device; live where there is a live
            tensor of the same dtype and shape, else fresh. Its elements take the leaf's bytes in
            row-major order. No two of them overlap, so they may be filled in parallel.
        blocks: leaf name -> the box of the leaf that its destination takes, where that is the local
            part of a DTensor.
        begins: leaf name -> the first element of the leaf that its destination takes, where that is the
            tensor of a FlatPart. Other destinations take the whole leaf.
        divided: names of leaves that live tensors hold in parts, with other parts on other ranks. The same
            on every rank, also on one whose part is empty or everything.
        doubtful: names of leaves that belong into live tensors which share memory otherwise than
            those that were saved; their destinations are all fresh.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        targets: _Targets,
        plan: _Plan,
        *,
        trusted: bool,
        fit: _Fit,
        filled: frozenset[str],
    ) -> None:
        self.left_out = fit.left_out
        self.filled = filled
        self._selection = fit.selection
        self.destinations = targets.tensors
        self.blocks = targets.blocks
        self.begins = targets.begins
        self._shown = targets.shown
        self.skeleton = skeleton
        self._plan = plan
        self._trusted = trusted
        self._checked = False
        leaf = skeleton.refs.leaf
        self.divided = {leaf[home.number] for home in fit.matcher.homes if home.is_divided}
        self.doubtful = {leaf[home.number] for cluster in plan.doubtful for home in cluster}

    @property
    def copied(self) -> list[Tensor]:
        """Live tensors that `finish` copies into."""
        return [home.tensor for home in self._plan.copies]

    @property
    def loads(self) -> bool:
        """Whether `finish` calls a `load_state_dict`, which copies wherever it likes."""
        return bool(self._plan.loads)

    @property
    def finished(self) -> frozenset[str]:
        """Places that `finish` fills or loads."""
        homes = [home.path for home in self._plan.copies]
        loads = [load.path for load in self._plan.loads]
        return frozenset([*homes, *loads, *(path for path, *_ in self._plan.literals)])

    def left_of(self, places: Iterable[str]) -> list[str]:
        """Those of some places that are left out, in part or whole."""
        if self._selection is None:
            return []
        return sorted(filter(self._selection.passes_over, places))

    def check(self) -> None:
        """Compare what was read of the `doubtful` leaves, where it would meet in live memory.

        Raises:
            StateMismatch: two places have different values for one piece of memory; nothing was changed.
        """
        builder = self.skeleton.builder(self._shown, trusted=self._trusted)
        problems, self._checked = [], True
        for cluster in self._plan.doubtful:
            values = [builder.ref(home.number) for home in cluster]
            found = first_contradiction(cluster, values)
            if found is not None:
                one, other = (home.path or "the state itself" for home in found)
                what = "its own elements" if one == other else other
                problems.append(
                    f"{one}: shares memory with {what} here, and has another value there"
                )
        if problems:
            # Not known before everything else fits: `partial` cannot choose between them.
            raise _mismatch(problems, self.skeleton, "leave one of them out: restore(only=...).")

    def finish(self) -> Any:
        """Complete the live state and return the tree as loaded; call when all bytes are there.

        Tensors of the tree that were filled in place are the live ones; containers are always new.

        Raises:
            StateMismatch: as `check`, if that was not called.
            RestoreError: a `load_state_dict`, or torch's copy into a tensor, failed; names the object, which
                may be half loaded.
            CorruptCheckpoint: parts of a composite tensor contradict each other.
        """
        if not self._checked:
            self.check()
        builder = self.skeleton.builder(self._shown, trusted=self._trusted)
        for home in self._plan.copies:
            with self._loading(home.path, home.tensor, "copy_"):
                fill_home(home, builder.ref(home.number))
        self._put(literal for literal in self._plan.literals if not is_generator(literal[1]))
        generators = [load for load in self._plan.loads if isinstance(load.live, RngState)]
        for load in self._plan.loads:
            if load not in generators:
                self._load(builder, load)
        tree = builder.tree(self.skeleton.tree)
        # Order matters: whatever loads, or is unpickled, may have drawn random numbers.
        self._put(literal for literal in self._plan.literals if is_generator(literal[1]))
        for load in generators:
            self._load(builder, load)
        return tree

    def _put(self, literals: Iterable[Literal]) -> None:
        for path, live, value in literals:
            with self._loading(path, live):
                put(live, value)

    def _load(self, builder: Builder, load: Load) -> None:
        with self._loading(load.path, load.live):
            load_exactly(load.live, lambda: builder.tree(load.node), partial=load.partial)

    @contextmanager
    def _loading(self, path: str, live: object, how: str = "load_state_dict") -> Iterator[None]:
        try:
            yield
        except RestoreError:
            raise  # the values could not be made: whoever was to load them has not seen them
        except Exception as exc:
            raise RestoreError(
                f"{path or 'the state itself'}: {type(live).__name__}.{how}"
                f" refused the saved state: {type(exc).__name__}: {exc}",
                path=self.skeleton.path,
            ) from exc


def _mismatch(problems: list[str], skeleton: Skeleton, advice: str = _WANTED) -> StateMismatch:
    lines = "\n  ".join(problems[:_SHOWN])
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return StateMismatch(
        f"the checkpoint does not fit the state, in {count_text(len(problems), 'place')}; "
        f"nothing was changed:\n  {lines}{more}\n"
        f"Build the state as it was when it was saved, or {advice}",
        problems=problems,
    )


def _choose(
    skeleton: Skeleton, specs: Mapping[str, LeafSpec], homes: list[Home], unsure: set[str]
) -> tuple[dict[str, Home], list[Home]]:
    """One home for each leaf, where the bytes go directly; the others are filled by copies.

    No two that are filled directly overlap: a leaf that meets another one in memory is `unsure`.
    """
    direct: dict[str, Home] = {}
    undivided = _undivided(skeleton, homes)
    rest: list[Home] = []
    known: dict[str, tuple[object, ...]] = {}
    for home in homes:
        name = skeleton.refs.leaf[home.number]
        place = _place(home.tensor)
        if home.array is None and place is not None and known.get(name) == place:
            continue  # The same live tensor again: tied weights.
        fits = name not in direct and _is_direct(skeleton, specs[name], home)
        fits = fits and not (home.is_part and name in undivided)
        if fits and name not in unsure and home.array is None:
            direct[name] = home
            known[name] = place or ()
        else:
            rest.append(home)
    return direct, rest


def _undivided(skeleton: Skeleton, homes: list[Home]) -> set[str]:
    """Leaves that something else needs whole, or another part of, than a home that is a part."""
    refs = skeleton.refs
    if not any(home.is_part for home in homes):
        return set()
    found = {refs.leaf[number] for number in (*refs.views, *refs.composites)}
    forms: dict[str, tuple[object, ...]] = {}
    for home in homes:
        run = None if home.begin is None else (home.begin, home.tensor.numel())
        name, form = refs.leaf[home.number], (home.whole is None, home.block, run)
        if forms.setdefault(name, form) != form:
            found.add(name)
    return found


def _is_direct(skeleton: Skeleton, spec: LeafSpec, home: Home) -> bool:
    refs, tensor = skeleton.refs, home.tensor
    if home.number in refs.views or home.number in refs.composites:
        return False
    flags = refs.flags.get(home.number, "")
    return (
        not ("c" in flags or "n" in flags or tensor.is_conj() or tensor.is_neg())
        and tensor.layout is torch.strided
        and dtype_name(tensor.dtype) == spec.dtype
        and not overlaps_itself(tensor.shape, tensor.stride())
    )


def _place(tensor: Tensor) -> tuple[object, ...] | None:
    if tensor.layout is not torch.strided:
        return None
    return (*view_key(tensor), tensor.is_conj(), tensor.is_neg())
