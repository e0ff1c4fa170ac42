"""Which leaves lie in still files, and which file of a committed step each of those may be.

A guess, and never more: whether a file is the same is known by its bytes (`still_files`). A leaf whose bytes
at a few places were the same at three saves is likely to stay so, and goes into a still file; one that has
changed there goes back, and waits longer each time.
"""

from __future__ import annotations

import ctypes
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ckpt_core.errors import ConfigError
from ckpt_core.layout import nbytes
from ckpt_core.options import Options
from ckpt_core.save.still_group import Rebase, StillGroup
from ckpt_core.save.still_looks import Looks, lines_of
from ckpt_core.share import Arrangement, Share, StillPart, is_below
from ckpt_core.snapshot import StageItem
from ckpt_core.state import FlatState, is_freed
from ckpt_core.system.devices import Devices
from ckpt_core.system.threads import own_lock
from ckpt_core.units import count_text

_PATIENCE = 2
"""So many times a leaf must look the same as the last time."""

_WORTH = 20
"""Leaves that have become still move once they are one in so many bytes: each move writes them once more."""

_MOST_FILES = 8
_CUT_BYTES = 64 * 2**20
"""Still leaves of more bytes are cut into several files: where one changes, only its file is written."""

_CUTS = 4
_BARRED = 4
"""Saves for which a leaf that changed in a still file may not go there again; twice as many each time."""

_GLANCES = 32
"""Declared leaves of which a little is looked at inside each `save`."""

_LEAST_LEAVES, _BYTES_EACH = 64, 2**20
"""A save looks at one leaf for so many bytes of the file, the next ones in turn: a look takes some
microseconds, in which a hundredth of a megabyte is saved."""


class NoSharing:
    """Every save writes all."""

    def groups(
        self, flat: FlatState, share: Share, others: Collection[str] = ()
    ) -> tuple[StillGroup, ...]:
        """Which leaves lie in still files. Called on the training thread, for each save.

        Args:
            others: leaves of the state that are staged one by one, and lie in no still file.

        Raises:
            ConfigError: a path of `frozen` is not in the state.
        """
        return ()

    def glance(
        self, flat: FlatState, arrangement: Arrangement, groups: Sequence[StillGroup]
    ) -> Sequence[Mapping[str, bytes]]:
        """How some declared leaves of each group look. Called on the training thread inside `save`.

        Raises:
            ConfigError: one looks otherwise than when its file was written.
        """
        return ()

    def offsets(self, arrangement: Arrangement) -> Mapping[int, str]:
        """Where in the first file which leaf is, of those that `look` wants to see."""
        return {}

    def look(self, items: Sequence[StageItem], names: Mapping[int, str]) -> None:
        """Look at leaves that are copied. Called by the stager before they may change.

        Args:
            names: of the leaves, by their offsets.
        """

    def lie_on_devices(self, items: Sequence[StageItem]) -> bool:
        """Whether some of these leaves do."""
        return False

    def looks(self, names: Mapping[int, str]) -> Looks | None:
        """Looks at the same leaves as the writers have them: for those that lie on devices.

        Args:
            names: what `offsets` has said.
        """
        return None

    def changed(self, names: Iterable[str]) -> None:
        """These leaves are not as in the still file. Called by the stager, and by the finisher."""

    def forget(self) -> None:
        """Share no file that is there now."""

    def close(self) -> None:
        """Share no more."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A structure: bytes of the lazy leaves that this rank stores, and which of them lie in still files.

    Attributes:
        replaced: groups that are no longer among them, and may hold files yet.
    """

    share: Share | None
    sizes: Mapping[str, int]
    groups: tuple[StillGroup, ...]
    replaced: tuple[StillGroup, ...] = ()


class Unchanged(NoSharing):
    """Guesses which leaves stay the same."""

    def __init__(self, options: Options, devices: Devices) -> None:
        self._rebase = Rebase.of(options)
        self._frozen = tuple(options.frozen)
        self._devices = devices
        # Swapped as a whole: an interrupt may come between two assignments.
        self._known = _Known(None, {}, ())
        self._order: tuple[Arrangement | None, list[tuple[int, str]], int] = (None, [], 0)
        self._turn = 0
        self._lock = own_lock()
        self._saves = 0
        self._seen: dict[str, tuple[bytes, int]] = {}
        self._ripe: set[str] = set()
        self._changed: set[str] = set()
        self._barred: dict[str, tuple[int, int]] = {}

    def groups(
        self, flat: FlatState, share: Share, others: Collection[str] = ()
    ) -> tuple[StillGroup, ...]:
        """See `NoSharing.groups`. The same object while nothing moves."""
        known = self._known
        self._saves += 1
        made = self._moved(known) if known.share is share else self._first(flat, share, others)
        if made is not known:
            gone = [group for group in known.groups if group not in made.groups]
            # Together: an interrupt must leave none that is replaced and still holds its file.
            self._known = known = replace(made, replaced=(*known.replaced, *gone))
        if known.replaced:
            for group in known.replaced:
                group.forget(closed=True)
            self._known = replace(known, replaced=())
        return known.groups

    def glance(
        self, flat: FlatState, arrangement: Arrangement, groups: Sequence[StillGroup]
    ) -> Sequence[Mapping[str, bytes]]:
        """See `NoSharing.glance`."""
        most = max(_GLANCES // max(len(groups), 1), 1)
        looks = [
            _glance(part, flat, self._devices, most) if group.declared else {}
            for group, part in zip(groups, arrangement.stills, strict=True)
        ]
        changed = [
            name for group, look in zip(groups, looks, strict=True) for name in group.unlike(look)
        ]
        if changed:
            # The next save writes what there is.
            self.forget()
            raise lie(changed)
        return looks

    def offsets(self, arrangement: Arrangement) -> Mapping[int, str]:
        """See `NoSharing.offsets`."""
        known, order, most = self._order
        if known is not arrangement:
            lazy = [place.extent for place in arrangement.placed[arrangement.front_count :]]
            order = [(extent.offset, extent.name) for extent in lazy if extent.nbytes]
            most = max(_LEAST_LEAVES, arrangement.layout.file_bytes // _BYTES_EACH)
            self._order = arrangement, order, most
        if len(order) <= most:
            return dict(order)
        begin = self._turn % len(order)
        self._turn = begin + most
        return dict([*order[begin : begin + most], *order[: max(begin + most - len(order), 0)]])

    def look(self, items: Sequence[StageItem], names: Mapping[int, str]) -> None:
        """See `NoSharing.look`."""
        for tensor, offset, size in items:
            name = names.get(offset)
            if name is None or not size or not self._devices.is_flat(tensor):
                continue
            self._note(name, _sample(tensor, size))

    def lie_on_devices(self, items: Sequence[StageItem]) -> bool:
        """See `NoSharing.lie_on_devices`."""
        return self._devices.any_of(tensor for tensor, _, _ in items)

    def looks(self, names: Mapping[int, str]) -> Looks | None:
        """See `NoSharing.looks`."""
        sizes = self._known.sizes
        return Looks({at: (name, sizes[name]) for at, name in names.items()}, self._note)

    def changed(self, names: Iterable[str]) -> None:
        """See `NoSharing.changed`."""
        with self._lock:
            for name in names:
                self._changed.add(name)
                self._seen.pop(name, None)
                self._ripe.discard(name)
                _, wait = self._barred.get(name, (0, _BARRED))
                self._barred[name] = self._saves + wait, 2 * wait

    def forget(self) -> None:
        """See `NoSharing.forget`."""
        for group in self._known.groups:
            group.forget()

    def close(self) -> None:
        """See `NoSharing.close`."""
        for group in (*self._known.groups, *self._known.replaced):
            group.forget(closed=True)

    # -- inside ----------------------------------------------------------------------------------

    def _note(self, name: str, now: bytes) -> None:
        """How a leaf looks in the next save."""
        with self._lock:
            before, count = self._seen.get(name, (b"", 0))
            count = count + 1 if now == before else 0
            self._seen[name] = now, count
            (self._ripe.add if count >= _PATIENCE else self._ripe.discard)(name)

    def _first(self, flat: FlatState, share: Share, others: Collection[str]) -> _Known:
        """With those leaves in still files that the user has declared."""
        names = [*(spec.name for spec in flat.specs), *others]
        for path in self._frozen:
            if not any(is_below(name, (path,)) for name in names):
                near = difflib.get_close_matches(path, [*names, *_parents(names)], n=5, cutoff=0.5)
                text = (
                    f"did you mean {' or '.join(near)}?" if near else "`ckpt-core show` lists all"
                )
                raise ConfigError(
                    f"frozen: the state has no leaf {path!r}, nor any below it: {text}"
                )
        known, sizes = self._known, _sizes(flat, share)
        with self._lock:
            self._seen = {name: self._seen[name] for name in sizes if name in self._seen}
            self._ripe &= sizes.keys()
        # What comes and goes would take the others of its file along each time.
        self.changed(name for group in known.groups for name in group.names if name not in sizes)
        # Danger: what is shared unread must lie there as it did: the same parts, in the same order.
        kept = [
            group
            for group in known.groups
            if known.share is not None and _lie(group, share) == _lie(group, known.share)
        ]
        held = frozenset[str]().union(*(group.names for group in kept))
        declared = [name for name in sizes if is_below(name, self._frozen) and name not in held]
        return _Known(share, sizes, (*kept, *self._made(declared, sizes, True)))

    def _moved(self, known: _Known) -> _Known:
        """The same object where no leaf moves."""
        groups, sizes = known.groups, known.sizes
        with self._lock:
            changed, self._changed = self._changed, set()
            ripe = {name for name in self._ripe if self._may_move(name)}
        made = [self._without(group, changed) for group in groups]
        made = [group for group in made if group.names]
        if ripe and self._is_worth(ripe, made, sizes):
            made = self._with_more(made, [name for name in sizes if name in ripe], sizes)
            with self._lock:
                self._ripe -= ripe
        return known if made == list(groups) else _Known(known.share, sizes, tuple(made))

    def _is_worth(
        self, ripe: Collection[str], groups: Iterable[StillGroup], sizes: Mapping[str, int]
    ) -> bool:
        moving = sum(sizes.values()) - sum([_sum(group.names, sizes) for group in groups])
        return _WORTH * _sum(ripe, sizes) >= moving

    def _without(self, group: StillGroup, changed: Collection[str]) -> StillGroup:
        if group.declared or group.names.isdisjoint(changed):
            return group
        return StillGroup(group.names.difference(changed), declared=False, rebase=self._rebase)

    def _with_more(
        self, groups: list[StillGroup], ripe: Collection[str], sizes: Mapping[str, int]
    ) -> list[StillGroup]:
        new = self._made(ripe, sizes, False)
        guessed = [group for group in groups if not group.declared]
        if len(groups) + len(new) > _MOST_FILES:
            # All anew: they are written once more, and lie in few files again.
            names = set(ripe).union(*(group.names for group in guessed))
            new = self._made([name for name in sizes if name in names], sizes, False)
            groups = [group for group in groups if group.declared]
        return [*groups, *new]

    def _made(
        self, names: Collection[str], sizes: Mapping[str, int], declared: bool
    ) -> tuple[StillGroup, ...]:
        total = _sum(names, sizes)
        count = min(_CUTS, 1 + total // _CUT_BYTES)
        files: list[list[str]] = [[] for _ in range(count)]
        begin = 0
        for name in names:
            files[min(begin * count // max(total, 1), count - 1)].append(name)
            begin += sizes[name]
        return tuple(
            [StillGroup(file, declared=declared, rebase=self._rebase) for file in files if file]
        )

    def _may_move(self, name: str) -> bool:
        until, _ = self._barred.get(name, (0, 0))
        return self._saves >= until


def sharing_for(options: Options, devices: Devices) -> NoSharing:
    """What the options ask for."""
    return Unchanged(options, devices) if options.share_unchanged else NoSharing()


def _parents(names: Iterable[str]) -> set[str]:
    return {
        ".".join(parts[:count])
        for name in names
        for parts in [name.split(".")]
        for count in range(1, len(parts))
    }


def _sizes(flat: FlatState, share: Share) -> dict[str, int]:
    """Bytes of what this rank stores of lazy leaves, in their order."""
    lazy = [part for part in share.parts if not flat.eager[part.index]]
    sizes = {part.stored.name: nbytes(part.stored) for part in lazy}
    return {name: size for name, size in sizes.items() if size}


def _lie(group: StillGroup, share: Share) -> list[object]:
    """The parts of a still file, in its order."""
    parts = [part for part in share.parts if part.stored.name in group.names]
    return [(part.stored, part.whole, part.slice) for part in parts]


def _sum(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum([sizes[name] for name in names])


def _sample(tensor: Tensor, length: int) -> bytes:
    if is_freed(tensor):
        return b""
    address = tensor.data_ptr()
    return b"".join([ctypes.string_at(address + at, size) for at, size in lines_of(length)])


def _glance(part: StillPart, flat: FlatState, devices: Devices, most: int) -> dict[str, bytes]:
    placed = part.placed[:: -(-len(part.placed) // most)]
    tensors = [(place.extent.name, flat.tensors[place.part.index]) for place in placed]
    return {
        name: _sample(tensor, tensor.nbytes)
        for name, tensor in tensors
        if devices.is_flat(tensor) and tensor.nbytes
    }


def lie(changed: Sequence[str]) -> ConfigError:
    """The error about leaves that were said never to change."""
    names = ", ".join(changed[:10]) + (" ..." if len(changed) > 10 else "")
    return ConfigError(
        f"frozen: {count_text(len(changed), 'leaf')} changed since an earlier save: {names}. "
        f"This step was not saved; steps since the last look at them have the older bytes. Take what "
        f"changes out of frozen=; without it, share_unchanged finds by itself what stays"
    )
