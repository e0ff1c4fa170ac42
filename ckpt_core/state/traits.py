"""What tensors are like, and whether those of the next save are like them: asked of every leaf at each save.

torch guards its compiled functions by asking many tensors at once, in C++, what this has to know. Those
guards are used where they are seen to notice all that matters here, and only to say that nothing has changed:
what they deny is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter, lt
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from ckpt_core.state.memory import first_freed

_storage_id, _alias = attrgetter("_cdata"), attrgetter("data")
_AT_A_TIME = 256
"""Tensors that are looked at in one go: what torch knows of them stays in the processor's cache."""

_Trait = Callable[[Tensor], Any]
_Check = Callable[..., bool]

_PLAIN: tuple[tuple[_Trait, Any], ...] = (
    (attrgetter("is_nested"), False),
    (attrgetter("layout"), torch.strided),
)
"""Of all tensors that are remembered. Asked first: others have no strides, and torch's guards end the process
when they ask for those of a nested one."""

_ALWAYS: tuple[tuple[_Trait, Any], ...] = (
    (attrgetter("is_meta"), False),
    (Tensor.is_neg, False),
)

_TRAITS: tuple[_Trait, ...] = (
    type,
    attrgetter("dtype"),
    attrgetter("shape"),
    Tensor.stride,
    attrgetter("requires_grad"),
    attrgetter("is_cpu"),
)


class _Memory(NamedTuple):
    """Where tensors were.

    Attributes:
        pointers: the address of each.
        storages: of each.
        places: where those that were not alone lay in theirs.
        sizes: bytes of each storage.
    """

    pointers: list[int]
    storages: list[int]
    places: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], pointers: list[int], shared: list[int]) -> _Memory:
        found = list(map(Tensor.untyped_storage, tensors))
        places = [int(tensors[index].storage_offset()) for index in shared]
        sizes = list(map(UntypedStorage.nbytes, found))
        return cls(pointers, list(map(_storage_id, found)), places, sizes)


class Traits:
    """What tensors were like. One owner, one thread.

    Args:
        tensors: plain ones; see `of`.
        columns: each of the traits, of each tensor.
        shared: tensors that were not alone in their storage, or not contiguous.
    """

    def __init__(
        self, tensors: Sequence[Tensor], columns: tuple[list[Any], ...], shared: list[int]
    ) -> None:
        self._columns = columns
        self._shared = shared
        # Swapped as a whole: an interrupt may come between two assignments.
        self._memory = _Memory.of(tensors, list(map(Tensor.data_ptr, tensors)), shared)
        self._empty = [index for index, at in enumerate(self._memory.pointers) if not at]
        # Made when tensors are seen again: a state of which there is one save needs none.
        self._checks: list[_Check] = [_not_yet] * -(-len(tensors) // _AT_A_TIME)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], shared: list[int]) -> Traits | None:
        """None where they are of kinds that are looked at each time.

        Args:
            tensors: in which `find_special` has found nothing: they are as `_PLAIN` and `_ALWAYS` say.
            shared: of them, those that were not alone in their storage, or not contiguous.
        """
        columns = tuple([list(map(trait, tensors)) for trait in _TRAITS])
        kinds, dtypes, _, _, grads, _ = columns
        if any(dtype.is_complex for dtype in set(dtypes)):
            return None
        if any(grad and kind is Tensor for kind, grad in zip(kinds, grads, strict=True)):
            return None  # Some of these are leaves of a graph, and some are not.
        return cls(tensors, columns, shared)

    @property
    def pointers(self) -> list[int]:
        """The address of each, as they were seen last; not to be changed."""
        return self._memory.pointers

    def look(
        self, tensors: list[Tensor], aliased: Sequence[bool]
    ) -> tuple[list[int], list[Tensor]] | None:
        """The address and an alias of each tensor, of as many as there were; None if they are not alike.

        Also None if they are not there. While none has moved it is the same list of addresses as before.

        Args:
            aliased: of each tensor, whether an alias is wanted; in place of others is the tensor.
        """
        found: list[int] = []
        aliases: list[Tensor] = []
        all_aliased, any_aliased = all(aliased), any(aliased)
        for number, start in enumerate(range(0, len(tensors), _AT_A_TIME)):
            some = tensors[start : start + _AT_A_TIME]
            if not _all_are(some, _PLAIN):
                return None
            if not self._checks[number](*some) and not self._looked_at(some, number):
                return None
            found += map(Tensor.data_ptr, some)
            if all_aliased:
                # Takes two thirds of the time of `detach`, and a tenth of it in another pass.
                aliases += map(_alias, some)
            elif any_aliased:
                wanted = aliased[start : start + _AT_A_TIME]
                aliases += [
                    _alias(tensor) if want else tensor
                    for tensor, want in zip(some, wanted, strict=True)
                ]
        last = self._memory
        # What lies at the same addresses in the same way shares what it shared; empty ones have no address.
        if found == last.pointers and self._empty_ones_are(tensors, last.storages):
            return last.pointers, aliases or tensors
        if first_freed(tensors, found) is not None:
            return None
        memory = _Memory.of(tensors, found, self._shared)
        if memory.places != last.places or not _same_sharing(memory.storages, last.storages):
            return None
        if any(map(lt, memory.sizes, last.sizes)):
            return None  # It may have been made too short.
        self._memory = memory
        return found, aliases or tensors

    def _empty_ones_are(self, tensors: Sequence[Tensor], storages: Sequence[int]) -> bool:
        """Whether tensors without elements are in the storages in which they were."""
        return all(
            _storage_id(tensors[index].untyped_storage()) == storages[index]
            for index in self._empty
        )

    def _looked_at(self, some: Sequence[Tensor], number: int) -> bool:
        """Whether tensors are alike that the guard does not know."""
        start = number * _AT_A_TIME
        stop = start + len(some)
        if not _all_are(some, _ALWAYS) or any(
            list(map(trait, some)) != column[start:stop]
            for trait, column in zip(_TRAITS, self._columns, strict=True)
        ):
            return False
        if self._checks[number] is not _never:
            # There is none yet, or it has noticed a mode, such as that of inference.
            self._checks[number] = _check_of(some)
        return True


def _same_sharing(storages: list[int], before: list[int]) -> bool:
    """Whether tensors share their storages with the same others: these are the old ones, or all are apart."""
    if storages == before:
        return True
    return all(len(set(column)) == len(column) for column in (storages, before))


def _all_are(tensors: Sequence[Tensor], expected: Iterable[tuple[_Trait, Any]]) -> bool:
    return all(set(map(trait, tensors)) <= {value} for trait, value in expected)


def _not_yet(*tensors: Tensor) -> bool:
    return False


def _never(*tensors: Tensor) -> bool:
    return False


def _check_of(tensors: Sequence[Tensor]) -> _Check:
    """Says of as many tensors whether they are like these; may deny it when they are."""
    guards = _guards()
    if guards is None:
        return _never
    check: _Check = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    # One that is there twice is denied.
    return check if check(*tensors) else _never


@cache
def _guards() -> Any:
    """The class of torch's guards, or None where it is not there or does not notice all that it must.

    It is not documented, so that no release has to keep it: where it is another one, all is only slower.
    """
    try:
        found = torch._C._dynamo.guards.TensorGuards
        return found if _notices(found) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def _notices(guards: Any) -> bool:
    plain = torch.zeros(2, 2, dtype=torch.float32, device="cpu")
    pair = torch.zeros(2, dtype=torch.complex64, device="cpu")
    others = (
        plain.view(4),
        plain.view(1, 4),
        plain.t(),
        plain.as_strided((2, 2), (1, 1)),
        plain.int(),
        plain.to("meta"),
        Parameter(plain, requires_grad=False),
        plain.clone().requires_grad_(),
    )
    cases = [(plain, plain.clone(), others), (pair.imag, pair.clone().imag, (pair.conj().imag,))]
    for like, same, changed in cases:
        guard = guards(like, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if not guard.check(same) or any(guard.check(other) for other in changed):
            return False
    return True
