"""docs/format.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt_core import layout
from ckpt_core.layout.dtypes import MAX_BYTES, MAX_DIMS, STORAGE
from ckpt_core.layout.names import (
    MAX_FILES,
    MAX_NAMED_FILES,
    MAX_PART_BYTES,
    MAX_PATH_BYTES,
    MAX_RANKS,
    SHARD_VERSION,
)
from ckpt_core.layout.rules import MAX_LEVELS, MAX_STEP, MAX_UNIX_S
from ckpt_core.layout.share import CUT_BYTES, WHOLE_BYTES
from ckpt_core.state import atoms
from tests.layout.manifests import RANK_2, RANK_3, STEP_2, STEP_3, Either, plain

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    found = re.search(r"^\|.*?(?=\n\n)", PAGE[PAGE.index(heading) :], re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = found[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def words(cell: str) -> list[str]:
    spread = re.sub(
        r"`(u?int)(\d)` to `u?int(\d)`",
        lambda m: " ".join(f"`{m[1]}{bits}`" for bits in range(int(m[2]), int(m[3]) + 1)),
        cell,
    )
    return re.findall(r"`([^`]+)`", spread)


def test_the_table_of_dtypes_is_the_one_of_the_code() -> None:
    found = {}
    for names_cell, sizes_cell, codes_cell in rows("### Dtypes"):
        names, codes, sizes = words(names_cell), words(codes_cell), sizes_cell.split()
        sizes = sizes * len(names) if len(sizes) == 1 else sizes
        codes = codes * len(names) if len(codes) == 1 else codes
        last = re.search(r"last dimension (\d|the itemsize)", codes_cell)
        for name, size, code in zip(names, sizes, codes, strict=True):
            trailing = None if last is None else last[1].replace("the itemsize", size)
            found[name] = (int(size), code, trailing and int(trailing))
    assert found == {name: (k.itemsize, k.code, k.trailing) for name, k in STORAGE.items()}


@pytest.mark.parametrize(
    "text",
    [
        f"# The format, versions 1 to {layout.FORMAT_VERSION}\n",
        f'| `format`, `version` | `"{layout.FORMAT_NAME}"`, `1` if `world_size` is 1, ',
        f"else `2`; `{layout.FORMAT_VERSION}` in a directory of files |",
        f"At most {MAX_NAMED_FILES:,}, with names".replace(",", " ", 1),
        f"1 to {MAX_PART_BYTES} bytes of UTF-8",
        f"at most {MAX_PATH_BYTES} bytes, its parts",
        f'`"ckpt_core": "{SHARD_VERSION}"`',
        f"multiples of {CUT_BYTES} bytes",
        f"leaves of up to {WHOLE_BYTES} bytes staying whole",
        f"at most {layout.MAX_HEADER_BYTES:,} (safetensors".replace(",", " "),
        f"at most {layout.MAX_MANIFEST_BYTES:,} bytes".replace(",", " "),
        f"at most {MAX_RANKS:,} ranks".replace(",", " "),
        f"0 to {MAX_FILES - 1}",
        f"at most {MAX_FILES};",
        f"at most {MAX_LEVELS} levels",
        f"at most {MAX_DIMS} dimensions",
        f"at most 2^{MAX_BYTES.bit_length() - 1} ",
        f"0 to {MAX_UNIX_S} ",
        f"`{layout.PAD_PREFIX}<number>`",
    ],
)
def test_the_page_states_each_limit(text: str) -> None:
    assert text in PAGE


@pytest.mark.parametrize(
    ("heading", "manifests", "inner"),
    [
        ("### `manifest.json`", (STEP_2, STEP_3), set()),
        ("### `rank-RRRRR.json`", (RANK_2, RANK_3), {"chunks"}),
    ],
)
def test_every_key_of_a_manifest_has_a_row(
    heading: str, manifests: tuple[Either, ...], inner: set[str]
) -> None:
    found = [name for cells in rows(heading) for name in words(cells[0])]
    assert sorted(found) == sorted(inner.union(*map(plain, manifests)))


def test_rows_of_the_manifests_are_as_long_as_the_page_says() -> None:
    ranks, slices = plain(STEP_2)["ranks"], plain(RANK_2)["slices"]
    leaves, chunks = plain(RANK_2)["leaves"], plain(RANK_2)["files"][0]["chunks"]
    lists = {"ranks": ranks, "slices": slices, "leaves": leaves, "chunks": chunks}
    for heading in ("### `manifest.json`", "### `rank-RRRRR.json`"):
        for key, text in rows(heading):
            found = lists.pop(key.strip("`"), None)
            if found is not None:
                shape = re.search(r"rows `\[(.*?)\]`", text)
                assert shape is not None
                assert {len(row) for row in found} == {len(shape[1].split(", "))}
    assert not lists


def test_steps_have_at_most_eighteen_digits() -> None:
    assert "0 to 10^18 - 1" in PAGE
    assert MAX_STEP == 10**18 - 1


def test_every_atom_of_the_skeleton_has_a_row() -> None:
    found = [name for cells in rows("Atoms are") for name in words(cells[0])]
    assert sorted(found) == sorted(atoms.CODEC)
