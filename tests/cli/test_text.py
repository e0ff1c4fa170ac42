"""What every command says: tables on terminals of any width."""

from __future__ import annotations

import pytest

from ckpt_core.cli.text import say_rich, table

HEADINGS = ("step", "tensor", "of", "max abs", "state")
ROWS = [
    ["123456789012", "model.layers.0.weight", "2,000,000", "0.000495", "committed"],
    ["7", "b", "256", "0.00195", "corrupt"],
]
NUMBERS = (0, 2, 3)


@pytest.mark.parametrize("width", range(10, 81))
def test_numbers_are_whole_and_no_column_goes_however_narrow_the_terminal_is(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    say_rich(table(HEADINGS, ROWS, right=("step", "of", "max abs")))
    out = capsys.readouterr().out
    assert all(row[number] in out.split() for row in ROWS for number in NUMBERS)
    # Names may be folded into several lines of their column.
    begins = [line for line in out.splitlines() if line.split()[:1] in (["123456789012"], ["7"])]
    texts = [line.split() for line in begins]
    assert [len(text) for text in texts] == [5, 5]
    assert all(
        row[number].startswith(text[number])
        for row, text in zip(ROWS, texts, strict=True)
        for number in (1, 4)
    )


def test_a_table_fits_where_its_names_can_be_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "61")
    say_rich(table(HEADINGS, ROWS, right=("step", "of", "max abs")))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 61
