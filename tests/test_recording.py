"""The recording in the README: what docs/img/kill.py has drawn, and how it draws."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

IMAGES = Path(__file__).parents[1] / "docs" / "img"


@pytest.fixture(scope="module")
def kill() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kill_recording", IMAGES / "kill.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its data classes look
    spec.loader.exec_module(module)
    return module


def _texts(picture: str) -> list[str]:
    ElementTree.fromstring(picture)
    found = re.findall(r'kill-line-\d+\)">([^<]*)</text>', picture)
    # rich ends each line by a text that is a line feed alone.
    return [html.unescape(text).replace("\xa0", " ").rstrip() for text in found if text != "\n"]


def test_the_recording_ends_with_the_same_hash_twice_and_asks_no_other_place() -> None:
    picture = (IMAGES / "kill.svg").read_text()
    lines = _texts(picture)
    whole, killed = (line.split() for line in lines[-2:])
    assert whole[0] == killed[0]
    assert (whole[1], killed[1]) == ("whole.txt", "killed.txt")
    assert any("Killed" in line for line in lines)
    assert "resumed from step 40" in lines
    assert re.findall(r"https?://[^\"' )]+", picture) == ["http://www.w3.org/2000/svg"]


def test_what_bash_shows_is_recorded_and_each_line_appears_in_its_turn(
    kill: ModuleType, tmp_path: Path
) -> None:
    commands = ["echo one", "sleep 60 & kill -9 $!; wait", f"echo {'x' * 150}"]
    lines = kill.shortened(kill.record(commands, tmp_path))
    texts = [line.text for line in lines]
    assert texts[:2] == ["$ echo one", "one"]
    assert any("Killed" in text for text in texts)
    assert all(len(text) <= kill.COLUMNS for text in texts)
    assert [line.at_s for line in lines] == sorted(line.at_s for line in lines)
    picture = kill.draw(lines)
    assert _texts(picture) == [text.rstrip() for text in texts]
    assert picture.count("@keyframes") == len(lines)
