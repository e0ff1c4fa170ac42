"""Is this engine both named in the configuration and known to DeepSpeed?

DeepSpeed ignores keys that it does not know. Without `import ckpt_deepspeed` the key `checkpoint_engine` is
one of those: the job runs, and saves by DeepSpeed's own engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_core.cli.doctor import Finding, Level, note, ok, problem, warning
from ckpt_core.errors import ConfigError
from ckpt_core.units import count_text
from ckpt_deepspeed_tools.doctor.config import KEY, TYPE, ConfigReport
from ckpt_deepspeed_tools.doctor.scripts import Named, Scripts
from ckpt_deepspeed_tools.doctor.settings_code import settings_of

_ADD_KEY = f'add "{KEY}": {{"type": "{TYPE}"}}'
_ADD_IMPORT = "add `import ckpt_deepspeed` before deepspeed.initialize()"


def check_selection(config: ConfigReport | None, scripts: Scripts | None) -> list[Finding]:
    """What the configuration and the scripts say together; None for what was not given."""
    found = [] if scripts is None else [*_unparsed(scripts), *_written(scripts)]
    if config is not None and not config.has_key:
        found += _absent(config, scripts)
    if scripts is not None and (config is not None or scripts.concerned):
        found.append(_imported(config, scripts))
    elif config is not None and config.has_key:
        text = "DeepSpeed ignores the key unless the program imports ckpt_deepspeed"
        found.append(note("import", text, "give --script too, to have that checked"))
    return found


def _unparsed(scripts: Scripts) -> Iterator[Finding]:
    for text in scripts.unparsed:
        yield warning("script", f"not understood: {text}", "look for the import yourself")


def _written(scripts: Scripts) -> Iterator[Finding]:
    """Sections that scripts write out, as the integration would read them."""
    for named in scripts.named:
        if named.key != KEY:
            text = f'{named.place}: "{named.key}" is ignored: the key is "{KEY}"'
            yield problem("script", text, "rename it, or DeepSpeed saves by its own engine")
        elif named.section is not None:
            yield from _refused(named)


def _refused(named: Named) -> Iterator[Finding]:
    try:
        settings_of({KEY: named.section})
    except ConfigError as exc:
        yield problem("script", f"{named.place}: the job would end with: {exc}", "correct it")


def _absent(config: ConfigReport, scripts: Scripts | None) -> Iterator[Finding]:
    """A configuration without the key: its own fault has been told, or something else selects the engine."""
    if any(finding.level is Level.PROBLEM for finding in config.findings):
        return
    text = f'{config.path} has no "{KEY}"'
    named = [named.place for named in scripts.named if named.key == KEY] if scripts else []
    if scripts is not None and scripts.attached:
        yield ok("config", f"{text}; ckpt_deepspeed.attach() needs none")
    elif named:
        yield note("config", f"{text}; {named[0]} names it")
    else:
        yield warning("config", f"{text}: DeepSpeed saves by its own engine", _ADD_KEY)


def _imported(config: ConfigReport | None, scripts: Scripts) -> Finding:
    """Whether ckpt_deepspeed is imported where the key is named, and the other way round."""
    named = [named.place for named in scripts.named]
    if config is not None and config.has_key:
        named.append(str(config.path))
    if scripts.attached:
        return ok("import", f"ckpt_deepspeed.attach() at {scripts.attached[0]}")
    if not scripts.imports:
        return _not_imported(named, scripts)
    if named:
        return _how_imported(scripts)
    text = f"ckpt_deepspeed is imported at {scripts.imports[0].place}, and nothing names the key"
    if config is not None:
        return warning("import", f"{text}: DeepSpeed saves by its own engine", _ADD_KEY)
    return note("import", text, "give --config too, or see that the configuration does")


def _not_imported(named: list[str], scripts: Scripts) -> Finding:
    text = f"ckpt_deepspeed is imported nowhere in {count_text(scripts.files, 'script')}"
    if not named:
        return note("import", text)
    text += f': DeepSpeed ignores the "{KEY}" of {named[0]} and saves by its own engine'
    return problem("import", text, f"{_ADD_IMPORT}, or name the script that has it")


def _how_imported(scripts: Scripts) -> Finding:
    good = [found for found in scripts.imports if not found.late and not found.swallowed]
    if good:
        return ok("import", f"ckpt_deepspeed is imported at {good[0].place}")
    first = scripts.imports[0]
    if all(found.late for found in scripts.imports):
        text = f"{first.place}: ckpt_deepspeed is imported after deepspeed.initialize()"
        return problem(
            "import", f"{text}, which has made DeepSpeed's own engine by then", "move it up"
        )
    text = f"{first.place}: should this import fail, the script goes on with DeepSpeed's own engine"
    return warning("import", text, "let it fail: take it out of the try")
