"""Which part of a state `export` writes, and under which names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_core.cli.tree import Item
from ckpt_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """A choice of places of the state tree, by their dotted paths.

    Attributes:
        only: this place and all below it.
        prefix: every place whose path begins so.
        strip: names lose `only` and its dot, or the prefix.
    """

    only: str | None = None
    prefix: str | None = None
    strip: bool = False

    def __post_init__(self) -> None:
        if self.only is not None and self.prefix is not None:
            raise ConfigError("--only and --prefix: give one of them")
        if self.strip and not (self.only or self.prefix):
            raise ConfigError("--strip needs --only or --prefix: it says what to take off")
        if "" in (self.only, self.prefix):
            raise ConfigError("--only and --prefix: an empty one chooses nothing; leave it out")

    @property
    def shown(self) -> str:
        """The choice in words."""
        if self.only is not None:
            return f"--only {self.only}"
        return "the step" if self.prefix is None else f"--prefix {self.prefix}"

    def keeps(self, path: str) -> bool:
        """Whether this place and all below it are chosen."""
        if self.only is not None:
            return path == self.only or path.startswith(f"{self.only}.")
        return self.prefix is None or path.startswith(self.prefix)

    def enters(self, path: str) -> bool:
        """Whether something below this place may be chosen."""
        return not path or (self.only or self.prefix or "").startswith(f"{path}.")

    def name(self, path: str) -> str:
        """The name of a chosen place in the exported file; "" for what was chosen itself."""
        if not self.strip:
            return path
        if self.only is not None:
            return path[len(self.only) + 1 :]
        return path[len(self.prefix or "") :]


def weights_of(tree: Item, *, only: str | None) -> Part:
    """The part that is a module's state, with its names from the module's root, for `load_state_dict`.

    Raises:
        ConfigError: there is none at or below `only`, or several; says what to name.
    """
    where = "this step" if only is None else only
    found = [path for path in _modules(tree) if only is None or f"{path}.".startswith(f"{only}.")]
    if not found:
        raise ConfigError(
            f"--weights: {where} holds no module or state_dict() of one: name what is to be written "
            f"with --only KEY --strip; `ckpt-core show` lists what is there"
        )
    if len(found) > 1:
        raise ConfigError(
            f"--weights: {where} holds several modules, {', '.join(found)}: name one with --only"
        )
    return Part(found[0], strip=True) if found[0] else Part()


def _modules(item: Item) -> Iterator[str]:
    """Paths of the outermost modules: only their states have the versions of modules beside them."""
    held = next((child for child in item.children if child.key == "__dict__"), None)
    if held and any((one.key, one.kind) == ("_metadata", "versions") for one in held.children):
        yield item.path
        return
    for child in item.children:
        yield from _modules(child)
