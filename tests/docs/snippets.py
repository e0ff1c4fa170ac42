"""The code blocks of the README and of the pages, and what each of them is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]

EXCERPT = "excerpt"
"""Behind ```python: needs ranks, a bucket or what a page leaves out; it is compared with the API instead."""

_FENCED = re.compile(r"^```(\w*)[ ]?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n)+")
_COMMAND = re.compile(r"^ *(?:\$ )?(?:\.venv/bin/)?(ckpt-core (?! ).*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: where it is, from the top of the repository.
        line: the line of its first line of code.
        language: the first word behind the fence, such as "python"; may be empty.
        kind: the second one; empty for code that runs as it stands.
        text: what is between the fences.
    """

    page: str
    line: int
    language: str
    kind: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Those of a page, from top to bottom."""
    text = page.read_text()
    for found in _FENCED.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        yield Block(str(page.relative_to(TOP)), line, *found.groups())


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(page: Path) -> set[str]:
    """The `ckpt-core` commands in the blocks of a page, fenced or indented, each as one line."""
    text = page.read_text()
    blocks = [found[3] for found in _FENCED.finditer(text)]
    blocks += _INDENTED.findall(_FENCED.sub("", text))
    joined = re.sub(r" *\\\n *", " ", "\n".join(blocks))
    return {found[1] for found in _COMMAND.finditer(joined)}


def words_of(command: str) -> list[str]:
    """The arguments of a command, without its comment and what a shell does with its output."""
    words = shlex.split(command, comments=True)[1:]
    ends = (number for number, word in enumerate(words) if word in ("&&", "|", ">", ";"))
    return [word for word in words[: next(ends, len(words))] if word != "..."]
