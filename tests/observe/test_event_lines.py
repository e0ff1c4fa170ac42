"""Lines of an event file, read back while they are written."""

from __future__ import annotations

from pathlib import Path

from ckpt_core.observe import Event, EventLines, EventLog, EventName, event_file


def test_what_was_written_comes_back_once(tmp_path: Path) -> None:
    path, log, lines = tmp_path / "events.jsonl", EventLog(), EventLines()
    assert lines.read(path) == []
    file = event_file(path, log, rank=3, opened={"world_size": 4}, waited_s=lambda: 0.5)
    opened = lines.read(path)
    assert [line["name"] for line in opened] == ["opened"]
    assert opened[0]["unix_s"] > 1e9 and opened[0]["host"]
    log.emit(Event(EventName.BEGIN, 1.0, 7))
    file.close()
    assert [(line["name"], line["rank"], line["waited_s"]) for line in lines.read(path)] == [
        ("begin", 3, 0.5)
    ]
    assert lines.read(path) == []


def test_a_line_that_is_not_whole_is_read_when_it_is(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.jsonl", EventLines()
    path.write_text('{"name": "barrier", "time_s": 1.0, "ra')
    assert (lines.read(path), lines.cut) == ([], True)
    with path.open("a") as file:
        file.write('nk": 0}\n')
    assert len(lines.read(path)) == 1
    assert not lines.cut


def test_what_is_no_line_of_an_event_file_is_left_out_and_counted(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.jsonl", EventLines()
    path.write_bytes(b'\xff\n[1]\n{"name": "begin"}\n\n' + b"[" * 100_000 + b"\n")
    assert (lines.read(path), lines.unreadable) == ([], 5)


def test_a_file_that_was_cut_off_or_written_anew_is_read_from_its_begin(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.jsonl", EventLines()
    path.write_text('{"name": "a", "time_s": 1.0, "rank": 0}\n' * 2)
    assert len(lines.read(path)) == 2
    path.write_text('{"name": "b", "time_s": 1.0, "rank": 0}\n')
    assert [line["name"] for line in lines.read(path)] == ["b"]
    path.write_text('{"name": "longer", "time_s": 1.0, "rank": 0}\n' * 2)
    assert [line["name"] for line in lines.read(path)] == ["longer"] * 2
    path.write_text("")
    assert lines.read(path) == []


def test_a_file_is_read_in_pieces_and_a_line_that_is_longer_is_left_out(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.jsonl", EventLines()
    path.write_text('{"name": "a", "time_s": 1.0, "rank": 0}\n' * 3 + "x" * 300 + "\n")
    assert [len(lines.read(path, most_bytes=90)) for _ in range(6)] == [2, 1, 0, 0, 0, 0]
    assert lines.unreadable >= 1
    assert not lines.cut
