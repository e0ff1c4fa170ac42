"""Record kill.svg: a training run that is killed, and the same command again, in a real terminal.

    python docs/img/kill.py docs/img/kill.svg

Runs examples/train_gpt.py three times under bash, which takes a minute: once as a whole, once until kill -9
ends it, and once more. What bash and the example print becomes an animated picture, with waits shortened
and nothing else changed. Needs the packages that examples/ need, and no network.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMMANDS = (
    'train="python examples/train_gpt.py --steps 60 --every 20"',
    "until_step() { until [ -d killed/step-*$1 ]; do sleep 0.05; done; }",
    "$train --root whole --result whole.txt",
    "$train --root killed --result killed.txt & until_step 40; kill -9 $!; wait",
    "$train --root killed --result killed.txt  # the same command",
    "sha256sum whole.txt killed.txt",
)
FOLDER = Path("/tmp/demo")
"""Is made, and removed again; its name is in the picture."""

PROMPT = "$ "
COLUMNS = 100
LONGEST_WAIT_S, TYPED_S, HELD_S = 0.7, 1.0, 6.0
"""Longest wait that is shown, the one before a command, and the one at the end before it starts again."""

_FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>A training run is killed with kill -9; the same command goes on, and ends with the same hash</title>
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style><defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
height="{terminal_height}"/></clipPath>{lines}</defs>{chrome}<g transform="translate({terminal_x},
{terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


@dataclass(frozen=True)
class Line:
    """One line of the terminal, and when it began."""

    text: str
    at_s: float


def record(commands: Sequence[str], folder: Path) -> list[Line]:
    """What bash shows for these commands, each given when the one before has ended."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": PROMPT, "COLUMNS": "200"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = ["bash", "--norc", "--noprofile", "-i"]
    process = subprocess.Popen(
        shell,
        stdin=side,
        stdout=side,
        stderr=side,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    os.close(side)
    _until_prompt(main)
    lines: list[Line] = []
    for command in commands:
        os.write(main, f"{command}\n".encode())
        typed, *shown = _until_prompt(main)
        lines += [Line(PROMPT + typed.text, typed.at_s), *shown]
    os.write(main, b"exit\n")
    process.wait(60)
    os.close(main)
    return lines


def _until_prompt(main: int) -> list[Line]:
    """The lines before the next prompt. A prompt is at the begin of a line, with nothing behind it."""
    lines, rest = [], ""
    while rest != PROMPT:
        rest += os.read(main, 4096).decode().replace("\r", "")
        *whole, rest = rest.split("\n")
        lines += [Line(text, time.monotonic()) for text in whole]
    return lines


def shortened(lines: Sequence[Line]) -> list[Line]:
    """The same lines from 0 s on, folded, without the waits in which nothing is to be seen."""
    found: list[Line] = []
    at_s, before_s = 0.0, lines[0].at_s
    for line in lines:
        typed = line.text.startswith(PROMPT)
        at_s += TYPED_S if typed else min(line.at_s - before_s, LONGEST_WAIT_S)
        # As a terminal does; the picture has a number for each of its lines.
        folded = [line.text[at : at + COLUMNS] for at in range(0, len(line.text), COLUMNS)]
        found += [Line(text, at_s) for text in folded or [""]]
        before_s = line.at_s
    return found


def draw(lines: Sequence[Line]) -> str:
    """An animated SVG; a viewer that shows no motion has all lines at once."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), legacy_windows=False)
    for line in lines:
        typed = line.text.startswith(PROMPT)
        loud = typed or "resumed" in line.text or "Killed" in line.text
        console.print(Text(line.text, style="bold" if loud else ""))
    picture = console.export_svg(
        title="kill -9", theme=MONOKAI, code_format=_FORMAT, unique_id="kill"
    )
    return picture.replace("</style>", f"{_motion(lines)}</style>", 1)


def _motion(lines: Sequence[Line]) -> str:
    whole_s = lines[-1].at_s + HELD_S
    rules = []
    for number, line in enumerate(lines):
        shown = 100 * line.at_s / whole_s
        rules.append(
            f"@keyframes k{number}{{0%,{shown:.2f}%{{opacity:0}}{shown + 0.01:.2f}%,100%{{opacity:1}}}}\n"
            f'[clip-path="url(#kill-line-{number})"]{{animation:k{number} {whole_s:.1f}s infinite}}'
        )
    return "@media (prefers-reduced-motion: no-preference) {\n" + "\n".join(rules) + "\n}"


def main() -> None:
    """Record and draw."""
    FOLDER.mkdir()
    try:
        (FOLDER / "examples").symlink_to(EXAMPLES)
        lines = record(COMMANDS, FOLDER)
    finally:
        shutil.rmtree(FOLDER)
    Path(sys.argv[1]).write_text(draw(shortened(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
