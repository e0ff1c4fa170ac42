"""The site: Sphinx makes it of these pages, the docstrings and the command's own help (`nox -s docs`).

What a page links to is one place, its Markdown, which code hosts show as well: navigation is read from the
lists of index.md and decisions.md. What Sphinx alone can show is written to `generated/` before it reads.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
TOP = HERE.parent
sys.path[:0] = [str(HERE), str(TOP)]

import reading  # noqa: E402

from ckpt_core import __version__  # noqa: E402

project = "ckpt-core"
release = version = __version__
copyright = "the authors of ckpt-core, Apache-2.0"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"ckpt-core {version}"
html_show_sphinx = html_copy_source = False
html_static_path, html_css_files = ["static"], ["site.css"]
html_theme_options = {"navigation_with_keys": True}

# Anchors as code hosts make them. A link that leads nowhere is a warning, and warnings are errors.
myst_heading_anchors = 4
default_role = "literal"

python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

FIRST = ("Checkpointer", "SaveHandle", "RestoredStep", "Options", "Level", "RngState")
MODULES = {
    "ckpt_core": "The engine",
    "ckpt_core.policy": "When to save",
    "ckpt_core.data": "Data",
    "ckpt_lightning": "PyTorch Lightning",
    "ckpt_transformers": "Hugging Face Transformers",
    "ckpt_deepspeed": "DeepSpeed",
    "ckpt_horovod": "Horovod",
    "ckpt_horovod.elastic": "Horovod, elastic",
}


def _title(text: str, mark: str = "=") -> str:
    return f"{text}\n{mark * len(text)}\n\n"


def _page_of_module(module: str, title: str) -> str:
    names = [*dict.fromkeys([*(FIRST if module == "ckpt_core" else ()), *reading.names_of(module)])]
    errors = [name for name in names if reading.is_error(module, name)]
    parts = [_title(f"{title}: {module}")]
    parts += [reading.entry(module, name) for name in names if name not in errors]
    parts += [_title("Errors", "-")] if errors else []
    return "".join([*parts, *(reading.entry(module, name) for name in errors)])


def _page_of_commands() -> str:
    import typer

    from ckpt_core.cli.app import app

    group: Any = typer.main.get_command(app)
    parts = [_title("Command line: all options"), "As each command's ``--help`` says it.\n\n"]
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=f"ckpt-core {name}", max_content_width=100)
        lines = command.get_help(context).splitlines()
        parts += [_title(name, "-"), ".. code-block:: text\n\n"]
        parts += [f"   {line}\n" for line in lines]
        parts.append("\n")
    return "".join(parts)


def _generate(_app: Sphinx) -> None:
    folder = HERE / "generated"
    folder.mkdir(exist_ok=True)
    pages = {name: _page_of_module(name, title) for name, title in MODULES.items()}
    pages["commands"] = _page_of_commands()
    pages["changelog"] = ".. include:: ../../CHANGELOG.md\n   :parser: myst_parser.sphinx_\n"
    for name, text in pages.items():
        (folder / f"{name}.rst").write_text(text)


# -- navigation ------------------------------------------------------------------------------------

GENERATED = {
    "Reference": [*(f"generated/{name}" for name in MODULES), "generated/commands"],
    "The project": ["generated/changelog"],
}


def _toctree(caption: str, pages: list[str]) -> str:
    head = ["", "```{toctree}", ":hidden:", f":caption: {caption}" if caption else "", ""]
    return "\n".join([*head, *pages, "```", ""])


def _navigate(_app: Sphinx, page: str, source: list[str]) -> None:
    """A hidden tree behind each list of links."""
    if page not in ("index", "decisions"):
        return
    sections = re.split(r"^## (.+)\n", source[0], flags=re.MULTILINE)
    made = [sections[0]]
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        pages = re.findall(r"^[-|0-9. ]* \[[^]]*\]\((\w[^)#:]*)\.md\)", text, re.MULTILINE)
        made += [f"## {title}\n", text, _toctree(title, pages + GENERATED.get(title, []))]
    source[0] = "".join(made)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _generate)
    app.connect("source-read", _navigate)
