"""Lines of event files as facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import ConfigError
from ckpt_core.report import gather
from ckpt_core.report.advice import advice, headline, steps_of
from tests.report.lines import line, save, written


def test_a_save_has_its_phases_its_bytes_and_what_training_waited(tmp_path: Path) -> None:
    opened = line("opened", 10.0, options={"in_flight": 2})
    lines = [opened, *save(5, 11.0), *save(9, 12.0, waited_s=0.02)]
    facts = gather([written(tmp_path / "e", *lines)])
    (rank,) = facts.ranks
    assert facts.in_flight == 2
    assert facts.seconds == pytest.approx(2.4)
    first = rank.saves[0]
    assert (first.step, first.begin_s, first.nbytes) == (5, pytest.approx(1.0), 1000)
    assert (first.staged_s, first.committed_s) == (pytest.approx(1.1), pytest.approx(1.4))
    assert [one.waited_s for one in rank.saves] == [pytest.approx(0.02)] * 2
    assert rank.waited_s == pytest.approx(0.04)
    assert rank.calls == [
        (pytest.approx(1.0), pytest.approx(1.02)),
        (pytest.approx(2.0), pytest.approx(2.02)),
    ]


def test_saves_in_flight_together_have_places_of_their_own(tmp_path: Path) -> None:
    lines = sorted([*save(1, 1.0), *save(2, 1.2), *save(3, 1.45)], key=lambda one: one["time_s"])
    facts = gather([written(tmp_path / "e", *lines)])
    assert [one.place for one in facts.ranks[0].saves] == [0, 1, 0]


@pytest.mark.parametrize("one_file", [True, False])
def test_ranks_of_two_machines_are_put_on_one_clock(tmp_path: Path, one_file: bool) -> None:
    first = [line("opened", 10.0, unix_s=1000.0, host="a"), *save(1, 11.0)]
    second = [line("opened", 90_000.0, 1, unix_s=1000.5, host="b"), *save(1, 90_001.0, 1)]
    if one_file:
        paths = [written(tmp_path / "e", *first, *second)]
    else:
        paths = [written(tmp_path / "e", *first), written(tmp_path / "f", *second)]
    facts = gather(paths)
    assert facts.began_unix_s == 1000.0
    assert [rank.saves[0].begin_s for rank in facts.ranks] == [
        pytest.approx(1.0),
        pytest.approx(1.5),
    ]
    (step,) = steps_of(facts)
    assert (step.seconds, step.nbytes) == (pytest.approx(0.9), 2000)


def test_without_the_time_of_day_all_ranks_are_of_one_machine(tmp_path: Path) -> None:
    lines = [line("opened", 10.0), line("opened", 10.1, 1), *save(1, 11.0), *save(1, 11.5, 1)]
    facts = gather([written(tmp_path / "e", *lines)])
    assert facts.began_unix_s is None
    assert facts.ranks[1].saves[0].begin_s == pytest.approx(1.5)


def test_a_machine_that_was_restarted_goes_on_behind_what_it_did_before(tmp_path: Path) -> None:
    lines = [
        line("opened", 500.0, unix_s=1000.0, host="a"),
        *save(1, 501.0),
        line("begin", 502.0, step=2),
        line("opened", 3.0, unix_s=1060.0, host="a"),
        *save(2, 4.0),
    ]
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert len(rank.runs) == 2
    killed, again = rank.saves[1:]
    assert not killed.over and killed.until_s == pytest.approx(2.0)
    assert again.begin_s == pytest.approx(61.0) and again.over
    assert rank.lasted_s == pytest.approx(2.0 + 1.4)


def test_a_failure_belongs_to_its_save_and_one_without_a_begin_is_kept(tmp_path: Path) -> None:
    lines = [
        line("begin", 1.0, step=4),
        line("failed", 1.2, step=4, detail="No space left"),
        line("failed", 1.3, step=5, detail="refused"),
        line("level_problem", 1.4, detail="unreachable"),
    ]
    facts = gather([written(tmp_path / "e", *lines)])
    (rank,) = facts.ranks
    assert rank.saves[0].failure == "No space left"
    assert [(mark.name, mark.step, mark.detail) for mark in rank.marks] == [
        ("failed", 5, "refused"),
        ("level_problem", None, "unreachable"),
    ]
    assert ("2", "saves failed") in headline(facts, steps_of(facts))


def test_a_step_that_one_of_two_ranks_failed_is_not_counted_as_saved(tmp_path: Path) -> None:
    lines = [*save(1, 1.0), line("begin", 1.0, 1, step=1), line("failed", 1.2, 1, step=1)]
    facts = gather([written(tmp_path / "e", *lines)])
    (step,) = steps_of(facts)
    assert step.seconds is None and step.failures == ["rank 1: no reason given"]
    assert ("0", "steps saved") in headline(facts, [step])


def test_a_cut_last_line_and_lines_that_are_no_events_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "e", *save(1, 1.0), rest='hello\n{"name": "beg')
    facts = gather([path])
    assert (facts.unreadable, facts.cut) == (1, True)
    assert "1 line could not be read; the last line is not whole." in advice(facts)


@pytest.mark.parametrize(
    "text", ["", "hello\n", '{"name": "beg', '{"name":"x","time_s":NaN,"rank":0}\n']
)
def test_a_file_without_an_event_is_an_error_that_says_how_to_get_one(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "e"
    path.write_text(text)
    with pytest.raises(ConfigError, match="events_file="):
        gather([path])
    with pytest.raises(ConfigError, match="does not exist"):
        gather([tmp_path / "nowhere"])


def test_what_iterations_took_longer_beside_saves_is_what_a_save_adds(tmp_path: Path) -> None:
    # An iteration takes 1 s, and 1.2 s where a save was under way: every fourth.
    moments = [number + 0.2 * (number // 4) for number in range(41)]
    lines = [line("opened", 0.0, options={"in_flight": 2})]
    for number, moment in enumerate(moments):
        lines.append(line("barrier", moment + 1.0))
        if number % 4 == 3:
            lines += save(number, moment + 1.01)
    (text,) = [text for text in advice(gather([written(tmp_path / "e", *lines)])) if "adds" in text]
    assert "A save adds 0.2 s to training" in text
    assert "every 20 steps would cost 1.0%, every 4 steps would cost 5.0%" in text


def test_the_longest_phase_is_named(tmp_path: Path) -> None:
    facts = gather([written(tmp_path / "e", *save(1, 1.0))])
    assert "The disk is the limit: of a save, 50%" in advice(facts)[0]


def test_an_old_file_does_not_pretend_to_know_what_save_itself_took(tmp_path: Path) -> None:
    lines = [line("begin", 1.0, step=1), line("waited", 2.0, seconds=0.5)]
    facts = gather([written(tmp_path / "e", *lines)])
    assert facts.ranks[0].waited_s == 0.5
    assert any("does not say how long the calls" in text for text in advice(facts))


def test_a_wait_at_a_barrier_is_not_drawn_as_one_in_save_too(tmp_path: Path) -> None:
    lines = [line("begin", 1.0, step=1, waited_s=0.0)]
    lines.append(line("waited", 2.0, seconds=0.5, waited_s=0.6))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert rank.waits == [(pytest.approx(0.5), pytest.approx(1.0))]
    assert rank.calls == [(pytest.approx(0.0), pytest.approx(0.1))]
    assert rank.waited_s == rank.saves[0].waited_s == pytest.approx(0.6)


def of(opening: str, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    return [one | {"opening": opening} for one in lines]


def test_two_checkpointers_of_a_rank_each_have_a_counter_of_waits(tmp_path: Path) -> None:
    lines = of("a", line("opened", 0.0, waited_s=0.0)) + of("b", line("opened", 0.5, waited_s=0.0))
    for step in range(1, 6):
        at = 2.0 * step
        lines += of("a", *save(step, at, waited_s=at)) + of(
            "b", *save(step, at + 1, waited_s=0.02 * (step - 1))
        )
    facts = gather([written(tmp_path / "e", *lines)])
    (rank,) = facts.ranks
    assert rank.waited_s == pytest.approx(10.02 + 0.1)
    assert [one.waited_s for one in rank.saves[:4]] == [
        *(pytest.approx(2.0), pytest.approx(0.02)),
        *(pytest.approx(2.0), pytest.approx(0.02)),
    ]
    assert rank.lasted_s == pytest.approx(11.4)
    assert ("10.12 s", "training waited, 88.77% of the run") in headline(facts, [])


def test_a_save_ends_in_the_checkpointer_that_began_it(tmp_path: Path) -> None:
    first, second = save(1, 1.0), save(1, 1.05)
    lines = of("a", line("opened", 0.0), *first[:1]) + of("b", line("opened", 1.02), *second)
    lines += of("a", *first[1:]) + of("b", line("failed", 2.0, step=2))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert [one.committed_s for one in rank.saves] == [pytest.approx(1.4), pytest.approx(1.45)]
    assert [mark.step for mark in rank.marks] == [2]


def test_a_clock_that_is_set_back_mixes_no_lines_of_two_runs(tmp_path: Path) -> None:
    opened = line("opened", 100.0, unix_s=1000.0, host="a", waited_s=0.0)
    lines = of("a", opened, *save(1, 101.0), *save(2, 109.0, waited_s=5.0))
    opened = line("opened", 110.0, unix_s=1005.0, host="a", waited_s=0.0)
    lines += of("b", opened, *save(3, 110.5, waited_s=0.0))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert rank.waited_s == pytest.approx(5.02 + 0.02)
    assert rank.runs == [
        (pytest.approx(0.0), pytest.approx(9.4)),
        (pytest.approx(5.0), pytest.approx(5.9)),
    ]
    assert rank.lasted_s == pytest.approx(9.4)


def test_what_a_second_checkpointer_opens_later_moves_no_line_of_the_first(tmp_path: Path) -> None:
    lines = of("a", line("opened", 100.0, unix_s=1000.0, host="a"))
    lines += of("b", line("opened", 101.0, unix_s=996.0, host="a")) + of("a", *save(1, 102.0))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert rank.saves[0].begin_s - rank.saves[0].opened_s == pytest.approx(2.0)


def test_counters_that_an_old_file_does_not_tell_apart_are_no_waits(tmp_path: Path) -> None:
    lines = [line("opened", 0.0, waited_s=0.0), line("opened", 1.0, waited_s=0.0)]
    for step in range(10):
        lines += save(step, 2.0 + step, waited_s=5.0 * (step % 2))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert rank.waited_s == pytest.approx(5.02)


def test_what_was_waited_before_the_first_line_is_not_counted(tmp_path: Path) -> None:
    lines = of("a", *save(1, 1.0, waited_s=500.0))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert rank.waited_s == pytest.approx(0.02)


def test_iterations_that_two_checkpointers_tell_are_counted_once(tmp_path: Path) -> None:
    lines = of("a", line("opened", 0.0)) + of("b", line("opened", 0.1))
    for number in range(1, 11):
        lines += of("a", line("barrier", float(number)))
        lines += of("b", line("barrier", number + 0.1))
    lines += of("a", *save(1, 1.5)) + of("b", *save(1, 1.6))
    lines += of("a", *save(5, 5.5)) + of("b", *save(5, 5.6))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert rank.clean_s == pytest.approx(1.0)
    assert rank.beside_s == [pytest.approx(1.0)]


@pytest.mark.parametrize("old", [False, True])
def test_a_step_that_is_tried_again_is_not_joined_with_what_other_ranks_did_before(
    tmp_path: Path, old: bool
) -> None:
    first = [line("opened", 0.0, rank) for rank in range(2)]
    tries = [save(5, 1.0), save(5, 1.1, 1), [line("begin", 101.0, step=5)], save(5, 201.0)]
    named = [
        [one | ({} if old else {"attempt": f"5-{name}"}) for one in own]
        for name, own in zip("aabc", tries, strict=True)
    ]
    again = [line("opened", at, rank) for at in (100.0, 200.0) for rank in range(2)]
    lines = [*first, *again, *named[0], *named[1], *named[2], *named[3]]
    lines.sort(key=lambda one: one["time_s"])
    steps = steps_of(gather([written(tmp_path / "e", *lines)]))
    assert [(len(step.saves), step.seconds) for step in steps] == [
        *((2, pytest.approx(0.5)), (1, None)),
        (1, pytest.approx(0.4)),
    ]


def test_ranks_that_an_old_file_tells_of_in_two_runs_are_not_one_save(tmp_path: Path) -> None:
    lines = [line("opened", 0.0), line("begin", 1.0, step=5)]
    lines += [line("opened", 100.0), line("opened", 100.0, 1), *save(5, 101.0, 1), *save(5, 101.1)]
    steps = steps_of(gather([written(tmp_path / "e", *lines)]))
    assert [(len(step.saves), step.seconds) for step in steps] == [
        (1, None),
        (2, pytest.approx(0.5)),
    ]


def test_an_end_belongs_to_the_try_that_it_names(tmp_path: Path) -> None:
    lines = [line("begin", 1.0, step=5, attempt="5-a"), line("begin", 1.1, step=5, attempt="5-b")]
    lines.append(line("committed", 1.2, step=5, attempt="5-b"))
    lines.append(line("failed", 1.3, step=5, attempt="5-c"))
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert [one.over for one in rank.saves] == [False, True]
    assert [mark.name for mark in rank.marks] == ["failed"]


def test_the_first_iteration_of_each_run_is_left_out(tmp_path: Path) -> None:
    lines = []
    for begin in (0.0, 1000.0, 2000.0):
        # The first one takes a minute, and a save is under way beside it and beside one of the others.
        moments = [begin + 1, *(begin + 61 + number for number in range(8))]
        lines += [line("opened", begin), *(line("barrier", moment) for moment in moments)]
        lines += [*save(1, begin + 30), *save(3, begin + 62.3)]
    lines.sort(key=lambda one: one["time_s"])
    (rank,) = gather([written(tmp_path / "e", *lines)]).ranks
    assert rank.clean_s == pytest.approx(1.0)
    assert rank.beside_s == [pytest.approx(1.0)] * 3
