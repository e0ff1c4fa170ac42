"""What a user may say of a level, and what a level wants."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import (
    Checkpointer,
    ConfigError,
    Level,
    Options,
    bring_directory,
    committed_directories,
    committed_steps,
    load,
    verify,
)
from ckpt_core.levels import LEVELS, wanted
from ckpt_core.levels.mailbox import (
    LevelStatus,
    Plan,
    Serve,
    Status,
    read_plan,
    read_status,
    write_plan,
    write_status,
)
from ckpt_core.levels.wants import lasting
from ckpt_core.options import checked_root, parse_levels


@pytest.mark.parametrize(
    ("given", "level"),
    [
        (["s3://bucket/run/"], Level("s3://bucket/run")),
        ([{"url": "S3://bucket/run", "every": 10}], Level("s3://bucket/run", every=10)),
        ('[{"url": "gs://b", "bandwidth": "200MB/s"}]', Level("gs://b", bandwidth=200_000_000)),
        (["file:///data/run"], Level("/data/run")),
        (["file://localhost/data/localhost/run"], Level("/data/localhost/run")),
        ([Path("/data/run/")], Level("/data/run")),
        (["run"], Level(os.path.abspath("run"))),
        (["PEER://node-b:7070/run/a/"], Level("peer://node-b:7070/run/a")),
        (["peer://[fd00::5]:7070/run"], Level("peer://[fd00::5]:7070/run")),
        (
            [{"peers": 1, "bind": "ib0:7077", "dir": "copies"}],
            Level(peers=1, bind="ib0:7077", dir=os.path.abspath("copies")),
        ),
    ],
)
def test_levels_are_given_as_objects_mappings_urls_or_json(given: Any, level: Level) -> None:
    assert Options(levels=given).levels == (level,)


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        (["http://host/run"], "unknown scheme: known are s3://"),
        *[
            ([f"peer://{place}"], "no place at a peer: write it like peer://node-b:7070/run")
            for place in (
                "h",
                "h/run",
                "h:1",
                "h:0/run",
                "h:99999/run",
                "h:1/.run",
                "h:1/a/../b",
                ":1/r",
            )
        ],
        (["s3://"], "names no bucket"),
        *[
            (
                [f"{scheme}://bucket/{path}"],
                f"has '{wrong}' between its slashes.*{scheme}://bucket/run",
            )
            for scheme in ("s3", "gs", "az")
            for path, wrong in {"/x": "", "a//x": "", "a/./x": "[.]", "a/../x": "[.][.]"}.items()
        ],
        ([{"every": 10}], "number 1: url is missing"),
        (
            ["/a", {"url": "/b", "evrey": 10}],
            r"number 2: 'evrey' is no field of a level: did you mean every\? Known",
        ),
        ([Level("/a"), "/a"], "/a is given twice"),
        ([{"url": "/a", "every": 0}], "every=0 must be an int of at least 1"),
        ([{"url": "/a", "keep_last": True}], "keep_last=True must be"),
        ([{"url": "/a", "bandwidth": "fast"}], "bandwidth='fast' is not a size"),
        ([{"url": "/a", "bandwidth": 0}], "bandwidth=0 lets nothing through"),
        ([{"peers": 2, "bind": "ib0:1", "dir": "/a"}], "peers=2: one copy on one other node"),
        ([{"peers": True, "bind": "ib0:1", "dir": "/a"}], "peers=True: one copy"),
        ([{"peers": 1, "dir": "/a"}], "bind=None is no address: peers=1 has this node listen"),
        ([{"peers": 1, "bind": "ib0:1"}], "dir=None is no directory"),
        ([{"peers": 1, "bind": "ib0:1", "dir": "s3://b/a"}], "dir='s3://b/a' is a URL"),
        ([{"peers": 1, "bind": "ib0:1", "dir": "/a", "domain": 7}], "domain=7 is no name"),
        ([{"peers": 1, "url": "/b"}], "url='/b' and peers=1: give one of them"),
        (
            [{"url": "/a", "bind": "ib0:1"}],
            "bind='ib0:1' goes with peers=1 or parity, not with a url",
        ),
        ([{"parity": "4", "bind": "ib0:1", "dir": "/a"}], "parity='4' is no shape of groups"),
        ([{"parity": "1+1", "bind": "ib0:1", "dir": "/a"}], "parity='1.1' is no shape"),
        ([{"parity": "17+2", "bind": "ib0:1", "dir": "/a"}], "parity='17.2' is no shape"),
        ([{"parity": "4+3", "bind": "ib0:1", "dir": "/a"}], "parity='4.3' is no shape"),
        ([{"parity": 5, "bind": "ib0:1", "dir": "/a"}], "parity=5 is no shape"),
        ([{"parity": "4+1", "dir": "/a"}], "bind=None is no address: parity='4.1' has this"),
        ([{"parity": "4+1", "bind": "ib0:1"}], "dir=None is no directory"),
        ([{"parity": "4+1", "bind": "ib0:1", "dir": "s3://b/a"}], "dir='s3://b/a' is a URL"),
        ([{"parity": "4+1", "url": "/b"}], "parity='4.1' and url='/b': give one of them"),
        (
            [{"parity": "4+1", "peers": 1, "bind": "ib0:1", "dir": "/a"}],
            "parity='4.1' and peers=1: give one of them",
        ),
        (["parity:///run"], "has an unknown scheme"),
        ([7], "number 1: 7 is no level"),
        (7, "levels=7 is no list"),
        ("s3://bucket/run", "is no JSON"),
    ],
)
def test_what_is_no_level_is_refused_by_name(levels: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        Options(levels=levels)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/run",
        "s3://bucket/run?X-Amz-Date=1&X-Amz-Signature=secret",
        "az://container/run?sv=2019&sig=secret",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="holds credentials") as found:
        Level(url)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("gcs://bucket/run", r"'gcs://bucket/run' .* did you mean gs://bucket/run\?"),
        ("S3A://bucket/run", r"did you mean s3://bucket/run\?"),
        ("azure://container/run", r"did you mean az://container/run"),
        ("wasbs://container/run", r"did you mean az://container/run, and AZURE_STORAGE_ACCOUNT"),
        (
            "abfs://box@account.dfs.core.windows.net/run",
            r"'abfs://\.\.\.' .*did you mean az://cont",
        ),
        ("gcs://bucket/run?token=secret", r"'gcs://\.\.\.' .*did you mean gs://"),
    ],
)
def test_a_scheme_of_other_programs_is_told_as_it_is_here(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Level(url)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"every": 0}, "every=0 must be"),
        ({"backlog": "1"}, "backlog='1' must be"),
        ({"keep_every": -1}, "keep_every=-1 must be"),
        ({"bandwidth": "fast"}, "bandwidth='fast' is not a size"),
        ({"bandwidth": 0}, "bandwidth=0 lets nothing through"),
        ({"domain": "a"}, "domain='a' goes with peers=1"),
    ],
)
def test_what_is_wrong_with_one_of_several_levels_names_which(
    wrong: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"number 2: level s3://bucket/run: {text}"):
        Options(levels=["/a", {"url": "s3://bucket/run", **wrong}, "/b"])
    with pytest.raises(ConfigError, match=f"^level s3://bucket/run: {text}"):
        Level("s3://bucket/run/", **wrong)
    if "domain" not in wrong:
        with pytest.raises(ConfigError, match=f"^level peers: {text}"):
            Level(peers=1, bind="lo:1", dir="/kept", **wrong)


def test_a_question_mark_in_a_prefix_is_no_credential() -> None:
    assert Level("s3://bucket/which?/run=1").url == "s3://bucket/which?/run=1"


def test_the_environment_names_levels_as_json() -> None:
    environ = {"CKPT_CORE_LEVELS": '[{"url": "s3://bucket/run", "every": 100}]'}
    assert Options.from_env(environ).levels == (Level("s3://bucket/run", every=100),)


STEPS = st.dictionaries(st.integers(0, 60), st.sampled_from(["a", "b"]), max_size=12)


@given(
    here=STEPS,
    there=STEPS,
    every=st.integers(1, 7),
    backlog=st.integers(1, 4),
    last=st.booleans(),
)
def test_a_level_wants_the_newest_steps_that_it_lacks(
    here: dict[int, str], there: dict[int, str], every: int, backlog: int, last: bool
) -> None:
    level = Level("/far", every=every, backlog=backlog)
    wants = wanted(here, level, there=there, last=last)
    newest = max(here, default=None)
    assert list(wants) == sorted(set(wants))
    assert len(wants) <= backlog
    for step in wants:
        assert here[step] != there.get(step)
        assert step % every == 0 or (last and step == newest)
        assert step in there or step > max(there, default=-1)
    if last and newest is not None and newest > max(there, default=-1):
        assert wants[-1] == newest
    # Sent in this order, they are all that it ever wants of these.
    after = {**there, **{step: here[step] for step in wants}}
    assert wants == () or wanted(here, level, there=after, last=last)[-1:] != wants[-1:]


@given(here=STEPS, there=STEPS, every=st.integers(1, 7))
def test_nodes_agree_on_one_lasting_step_of_those_that_all_have(
    here: dict[int, str], there: dict[int, str], every: int
) -> None:
    level = Level(parity="2+1", bind="lo:1", dir="/kept", every=every)
    found = lasting(here, level, there=there)
    fitting = [step for step in here if step > max(there, default=-1) and step % every == 0]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        # A node that has fewer of them, and this one, takes the same.
        assert lasting([found, *fitting[::2]], level, there=there) == found


def test_plan_and_status_come_back_as_they_were_written(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None and read_status(tmp_path) is None
    plan = Plan("c0ffee", 3, "t", (Level("s3://b/run", every=5), Level("/far")), closed=True)
    plan = dataclasses.replace(plan, own=("/far",), serve=Serve("/copies", "10.0.0.1:7", "/token"))
    write_plan(tmp_path, plan)
    one = LevelStatus("/far", steps={10: "000000000010-0a0b0c0d"}, sending=20, problem="away")
    one.has_reached(10, "000000000010-0a0b0c0d")
    status = Status(7, "host", "t", [one], serving="10.0.0.1:7")
    write_status(tmp_path, status)
    assert read_plan(tmp_path) == plan
    assert read_status(tmp_path) == status


def _killed(*_: object) -> None:
    raise SystemExit


def test_of_what_was_being_written_when_processes_were_killed_no_more_than_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Status(7, "host", "t", [])
    write_status(tmp_path, status)
    for pid in (11, 12, 13):
        with monkeypatch.context() as life:
            life.setattr(os, "getpid", lambda pid=pid: pid)
            life.setattr(Path, "replace", _killed)
            with pytest.raises(SystemExit):
                write_status(tmp_path, status)
    assert len(os.listdir(tmp_path / LEVELS)) == 2
    write_status(tmp_path, status)
    assert os.listdir(tmp_path / LEVELS) == ["status.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"levels": 7}', "{" * 10_000])
def test_a_plan_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".levels").mkdir()
    for name in ("plan.json", "status.json"):
        (tmp_path / ".levels" / name).write_text(text)
    assert read_plan(tmp_path) is None and read_status(tmp_path) is None


@pytest.mark.parametrize("name", ["s3:/bucket/run", Path("s3://bucket/run"), "GS:bucket", "gcs:/b"])
def test_a_url_that_has_become_a_path_is_no_directory(name: str | Path) -> None:
    with pytest.raises(ConfigError, match="looks like"):
        Level(str(name))
    with pytest.raises(ConfigError, match="looks like"):
        checked_root(name)
    assert Level(f"./{name}").scheme is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: checked_root("runs"),
        lambda: Level("far"),
        lambda: Level(peers=1, bind="ib0:7077", dir="copies"),
        lambda: Options(events_file="e.jsonl"),
        lambda: Options(metrics="m.prom"),
    ],
    ids=["root", "level", "dir", "events_file", "metrics"],
)
def test_what_is_relative_to_a_working_directory_that_is_gone_is_told(
    make: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"is relative.* cannot be found.*: give an absolute"):
        make()
    assert checked_root(tmp_path / "runs") == tmp_path / "runs"


@pytest.mark.parametrize(
    ("name", "value"), [("LEVELS", "/x"), ("METRICS", "ftp://x"), ("IN_FLIGHT", "0")]
)
def test_a_variable_that_is_wrong_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"CKPT_CORE_{name}"):
        Options.from_env({f"CKPT_CORE_{name}": value, "CKPT_CORE_KEEP_LAST": "3"}, writers=2)


def test_a_variable_is_not_blamed_for_what_is_wrong_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"^chunk_bytes") as caught:
        Options.from_env({"CKPT_CORE_FROZEN": "a.b"}, share_unchanged=True, chunk_bytes=-1)
    assert "CKPT_CORE" not in str(caught.value)


def test_a_url_of_a_file_that_lacks_slashes_is_no_directory_of_that_name() -> None:
    for text in ("file:/data/run", Path("file:///data/run")):
        with pytest.raises(ConfigError, match="looks like file:///data/run: give that as text"):
            Level(text)
    assert Level("file:data").url.endswith("/file:data")


@pytest.mark.parametrize(
    "give",
    [
        lambda: Options(events_file="a\0b"),
        lambda: Options(metrics="a\0b.prom"),
        lambda: Options(levels=parse_levels(["a\0b"])),
        lambda: Level(Path("a\0b")),
        lambda: Level("file:///a\0b"),
        lambda: Checkpointer("a\0b"),
        lambda: load("a\0b"),
        lambda: verify(Path("a\0b")),
        lambda: committed_steps("a\0b"),
        lambda: committed_directories("a\0b"),
        lambda: bring_directory("a\0b", ["there"], directory="tag"),
        lambda: bring_directory("here", ["a\0b"], directory="tag"),
    ],
)
def test_a_null_character_in_a_path_is_told_by_name(give: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"a.*b.* has a null character"):
        give()
