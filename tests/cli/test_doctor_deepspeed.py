"""`doctor --config --script`: would DeepSpeed save by this engine, or silently by its own?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_core.system import plugins
from tests.cli.doctoring import Cli, Diagnosis, diagnosis

KEY = '{"checkpoint_engine": {"type": "ckpt_core"}}'
NVME = """{"checkpoint_engine": {"type": "ckpt_core"},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}"""
PER_NODE = """{"checkpoint_engine": {"type": "ckpt_core", "levels": ["/far"]},
 "checkpoint": {"use_node_local_storage": true}}"""

CONFIGS: dict[str, tuple[str, str, str]] = {
    "right": (KEY, "ok", 'wait="staged"'),
    "persisted": (
        '{"checkpoint_engine": {"type": "ckpt_core", "wait": "persisted", "verify": false}}',
        "ok",
        'wait="persisted", and loads without comparing checksums',
    ),
    "without": ('{"zero_optimization": {"stage": 2}}', "warning", "saves by its own engine"),
    "null": ('{"checkpoint_engine": null}', "warning", "saves by its own engine"),
    "beside checkpoint": ('{"checkpoint": {"tag_validation": "Warn"}}', "warning", "has no"),
    "hyphen": ('{"checkpoint-engine": {}}', "problem", '"checkpoint-engine" is ignored'),
    "typo": ('{"checkpoint_engin": {"in_flight": 2}}', "problem", 'the key is "checkpoint_engine"'),
    "capitals": ('{"Checkpoint_Engine": {}}', "problem", "is ignored"),
    "short": ('{"ckpt_engine": {}}', "problem", "is ignored"),
    "another name": ('{"saving": {"type": "ckpt_core"}}', "problem", '"saving" is ignored'),
    "too deep": ('{"checkpoint": {"checkpoint_engine": {}}}', "problem", "inside checkpoint"),
    "an unknown setting": (
        '{"checkpoint_engine": {"type": "ckpt_core", "inflight": 2}}',
        "problem",
        "checkpoint_engine.inflight is not a setting",
    ),
    "another type": ('{"checkpoint_engine": {"type": "fast"}}', "problem", "type='fast'"),
    "no object": ('{"checkpoint_engine": "ckpt_core"}', "problem", "must be an object"),
    "a writer": (
        KEY[:-1] + ', "checkpoint": {"writer": {"type": "fast"}}}',
        "problem",
        "checkpoint.writer both select",
    ),
    "datastates": (KEY[:-1] + ', "datastates_ckpt": {"a": 1}}', "problem", "datastates_ckpt"),
    "a wrong section": (KEY[:-1] + ', "checkpoint": "x"}', "problem", "checkpoint is no object"),
    "twice": ('{"a": 1, "a": 2}', "problem", "keys that occur twice: a"),
    "no JSON": ("{", "problem", "is no configuration"),
    "a list": ("[1]", "problem", "one object"),
}


@pytest.fixture
def look(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Diagnose a configuration and scripts, given as texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))

    def run(config: str | None, *scripts: str) -> Diagnosis:
        arguments: list[object] = ["--quick"]
        if config is not None:
            Path("ds.json").write_text(config)
            arguments += ["--config", "ds.json"]
        for number, text in enumerate(scripts):
            Path(f"s{number}.py").write_text(text)
            arguments += ["--script", f"s{number}.py"]
        return diagnosis(cli, *arguments)

    return run


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_judged_as_the_integration_reads_it(look: Cli, name: str) -> None:
    text, level, said = CONFIGS[name]
    found = look(text).one("config")
    assert found[0] == level
    assert said in found[1]


def test_a_lock_that_a_killed_build_left_is_told_and_one_of_a_build_under_way_is_not(
    look: Cli, tmp_path: Path
) -> None:
    old, new = (tmp_path / "extensions" / name / "lock" for name in ("cpu_adam", "py/fused_adam"))
    for lock in (old, new):
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(old, (0.0, 0.0))
    found = look(KEY).one("extensions")
    assert found[0] == "warning" and str(old) in found[1]


def test_comments_are_allowed_where_deepspeed_allows_them(look: Cli) -> None:
    pytest.importorskip("hjson")
    assert look('{\n# ours\ncheckpoint_engine: {type: "ckpt_core"}\n}').one("config")[0] == "ok"


def test_what_initialize_would_refuse_is_refused_here(look: Cli) -> None:
    assert "initialize would refuse" in look(NVME).of("config")[1][1]
    assert look(NVME).bad == ["config"]
    assert look(NVME.replace("nvme", "cpu")).bad == []
    assert "storage with levels" in look(PER_NODE).of("config")[1][1]
    assert look(PER_NODE.replace("true", "false")).bad == []


def test_settings_without_effect_are_told(look: Cli) -> None:
    made = look('{"checkpoint_engine": {"type": "ckpt_core", "keep_last": 3}}')
    assert made.of("config")[1][0] == "note"
    assert "keep_last of checkpoint_engine have no effect" in made.of("config")[1][1]


def test_the_key_alone_always_brings_up_the_import(look: Cli) -> None:
    level, text = look(KEY).one("import")
    assert level == "note"
    assert "ignores the key unless the program imports ckpt_deepspeed" in text


# -- scripts -----------------------------------------------------------------------------------

START = "import deepspeed\nengine, *_ = deepspeed.initialize(config='ds.json')\n"
IN_DICT = "config = {'train_batch_size': 1, 'checkpoint_engine': {'type': 'ckpt_core'}}\n"

IMPORTS: dict[str, tuple[str, str]] = {
    "plain": ("import ckpt_deepspeed\n" + START, "ok"),
    "renamed": ("import ckpt_deepspeed as cd\n" + START, "ok"),
    "from": ("from ckpt_deepspeed import wait\n" + START, "ok"),
    "a module of it": ("import ckpt_deepspeed.settings\n" + START, "ok"),
    "by name": ("import importlib\nimportlib.import_module('ckpt_deepspeed')\n" + START, "ok"),
    "in a function": ("def main():\n    import ckpt_deepspeed\n" + START, "ok"),
    "none": (START, "problem"),
    "another one": ("import ckpt_deepspeed_tools\nimport ckpt_core\n" + START, "problem"),
    "relative": ("from .ckpt_deepspeed import wait\n" + START, "problem"),
    "in a comment": ("# import ckpt_deepspeed\n'import ckpt_deepspeed'\n" + START, "problem"),
    "for types": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ckpt_deepspeed\n" + START,
        "problem",
    ),
    "too late": (START + "import ckpt_deepspeed\n", "problem"),
    "late in another function": (
        START + "def later():\n    import ckpt_deepspeed\n",
        "ok",
    ),
    "optional": (
        "try:\n    import ckpt_deepspeed\nexcept ImportError:\n    pass\n" + START,
        "warning",
    ),
    "suppressed": (
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import ckpt_deepspeed\n",
        "warning",
    ),
    "another error": (
        "try:\n    import ckpt_deepspeed\nexcept KeyError:\n    pass\n" + START,
        "ok",
    ),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_the_import_is_looked_for_as_python_would_find_it(look: Cli, name: str) -> None:
    text, level = IMPORTS[name]
    assert look(KEY, text).one("import")[0] == level


def test_a_key_without_the_import_says_what_happens_then(look: Cli) -> None:
    level, text = look(KEY, START).one("import")
    assert level == "problem"
    assert 'ignores the "checkpoint_engine" of ds.json and saves by its own engine' in text
    assert "add `import ckpt_deepspeed`" in text


def test_one_script_of_several_that_imports_it_is_enough(look: Cli) -> None:
    assert look(KEY, START, "import ckpt_deepspeed\n").one("import")[0] == "ok"


@pytest.mark.parametrize(
    "text",
    [
        IN_DICT,
        "config = dict(checkpoint_engine={'type': 'ckpt_core'})\n",
        "config = {}\nconfig['checkpoint_engine'] = {'type': 'ckpt_core'}\n",
        "config = {'checkpoint_engine': make()}\n",
    ],
)
def test_a_key_that_a_script_writes_counts_as_that_of_a_configuration(look: Cli, text: str) -> None:
    assert look(None, text).bad == ["import"]
    assert "s0.py:" in look(None, text).one("import")[1]
    assert look(None, "import ckpt_deepspeed\n" + text).code == 0
    made = look("{}", "import ckpt_deepspeed\n" + text)
    assert made.one("config")[0] == "note"
    assert made.code == 0


def test_a_section_in_a_script_is_checked_too(look: Cli) -> None:
    wrong = IN_DICT.replace("'ckpt_core'}", "'ckpt_core', 'writers': 0}")
    made = look(None, "import ckpt_deepspeed\n" + wrong)
    assert made.bad == ["script"]
    assert "s0.py:2: the job would end with: checkpoint_engine.writers=0" in made.one("script")[1]
    made = look(None, "import ckpt_deepspeed\n" + IN_DICT.replace("_engine", "-engine"))
    assert made.bad == ["script"]
    assert '"checkpoint-engine" is ignored' in made.one("script")[1]


def test_attach_needs_no_key(look: Cli) -> None:
    for text in (
        "import ckpt_deepspeed as cd\ncd.attach(engine, in_flight=2)\n",
        "from ckpt_deepspeed import attach\nattach(engine)\n",
    ):
        made = look("{}", START + text)
        assert made.one("config")[0] == "ok"
        assert made.one("import")[0] == "ok"


def test_an_import_that_nothing_needs_is_told(look: Cli) -> None:
    made = look("{}", "import ckpt_deepspeed\n" + START)
    assert [made.one("config")[0], made.one("import")[0]] == ["warning", "warning"]
    assert look(None, "import ckpt_deepspeed\n").one("import")[0] == "note"
    assert look(None, START).one("import")[0] == "note"


@pytest.mark.parametrize("text", ["import torch\n", "from .deepspeed import x\n"])
def test_scripts_without_deepspeed_need_no_import(look: Cli, text: str) -> None:
    assert look(None, text).of("import") == []


def test_a_script_that_is_no_python_is_told(look: Cli) -> None:
    level, text = look(KEY, "print 'x'\n", "import ckpt_deepspeed\n").one("script")
    assert level == "warning"
    assert "s0.py" in text


def test_a_directory_is_searched_but_for_what_is_not_its_own(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(KEY)
    for folder in ("code/inner", "code/.hidden", "code/env/lib", "code/x/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "code" / "env" / "pyvenv.cfg").touch()
    (tmp_path / "code" / "inner" / "start.py").write_text(START)
    for foreign in (".hidden", "env/lib", "x/site-packages"):
        (tmp_path / "code" / foreign / "it.py").write_text("import ckpt_deepspeed\n")
    arguments = ["--quick", "--config", tmp_path / "ds.json", "--script", tmp_path / "code"]
    assert "nowhere in 1 script:" in diagnosis(cli, *arguments).one("import")[1]
    (tmp_path / "code" / "main.py").write_text("import ckpt_deepspeed\n")
    assert "main.py:1" in diagnosis(cli, *arguments).one("import")[1]


def test_our_own_example_is_found_to_be_right(cli: Cli) -> None:
    example = Path(__file__).parents[2] / "examples" / "deepspeed_gpt.py"
    made = diagnosis(cli, "--quick", "--script", example)
    assert made.one("import")[0] == "ok"
    assert made.bad == []


def test_a_job_is_not_called_right_where_nobody_can_read_its_files(
    look: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "names", lambda group: [])
    made = look(KEY, START)
    assert made.bad == ["config"]
    assert "no integration is installed" in made.one("config")[1]
