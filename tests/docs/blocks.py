"""The blocks of the documentation: where they are, and the tag that says how a test checks each.

A block is fenced, and its fence names a language and a tag. Forges highlight by the first word and show no other:

| fence | a test |
|---|---|
| `console run` | runs each `$ command`, all in one shell, and compares its output |
| `bash run` | runs the commands in one shell; each must succeed |
| `python run` | runs the program; it must succeed |
| `LANGUAGE render WHAT` | builds the block from the code or a file, and compares (see render.py) |
| `bash unshown`, `python unshown` | runs nothing: checks names, options and paths |
| `text figure`, `mermaid figure` | checks that no line is a command |

`unshown` is for what no test can run: images, a cluster with GPUs, commands that never end. A figure is a drawing, a
formula or a format.

A `run` takes options: `long` runs it with the long tests, `measured` lets every number differ, and `scene=NAME` runs it
with something prepared (see scenes.py). `...` in output stands for any text, on a line of its own for any lines.
`make docs-output` writes the output of `console run` and `render` again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_CHECKED = {"CHANGELOG.md"}

RUN, RENDER, UNSHOWN, FIGURE = "run", "render", "unshown", "figure"
SHELLS = ("console", "bash")
LANGUAGES = {RUN: (*SHELLS, "python"), UNSHOWN: ("bash", "python"), FIGURE: ("text", "mermaid")}
"""The languages that a tag goes with. `render` goes with every language but shells."""

LONG, MEASURED, SCENE = "long", "measured", "scene="

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
_ITEM = re.compile(r"^( *)([-*+]|\d+[.)])( +)\S")
_PRE = re.compile(r"[ >]*<pre\b", re.IGNORECASE)
_SECTION = re.compile(r"^ {0,3}(#{1,6} |<)")


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str
    """Relative to the repository's root."""
    line: int
    """Line of the opening fence, the first of the page being 1; without a fence, of the text."""
    text: str
    language: str = ""
    tag: str = ""
    options: tuple[str, ...] = ()
    indent: str = ""
    """What stands before each line."""
    fenced: bool = True

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_long(self) -> bool:
        """Whether it runs with the long tests only."""
        return LONG in self.options

    @property
    def is_measured(self) -> bool:
        """Whether its numbers differ from run to run."""
        return MEASURED in self.options

    @property
    def scene(self) -> str:
        """What must be prepared before it runs; empty when nothing is."""
        return next((word.removeprefix(SCENE) for word in self.options if word.startswith(SCENE)), "")

    @property
    def lines(self) -> list[str]:
        """Its text, line by line."""
        return self.text.splitlines()


def pages() -> list[Path]:
    """Every page whose blocks are checked."""
    here = [path for path in ROOT.glob("*.md") if path.name not in NOT_CHECKED]
    below = (path for directory in ("docs", "examples", "helm") for path in (ROOT / directory).rglob("*.md"))
    return sorted([*here, *below])


def all_blocks() -> list[Block]:
    """Every block of every page."""
    return [block for path in pages() for block in blocks(path.read_text(), str(path.relative_to(ROOT)))]


def blocks(text: str, page: str) -> Iterator[Block]:
    """The blocks of a page: fenced ones, indented ones, and `<pre>`."""
    lines = text.splitlines()
    number, content, starts = 0, 0, True  # `content`: column of the list item's text. `starts`: code may begin here.
    while number < len(lines):
        line = lines[number]
        if fence := _FENCE.match(line):
            end = _closing(lines, number, fence["fence"])
            yield _fenced(page, number, fence, lines[number + 1 : end])
            number, starts = end + 1, True
            continue
        column = len(line) - len(line.lstrip())
        if line.strip() and starts and column >= content + 4:
            end = _indented_end(lines, number, content + 4)
            text = "\n".join(each[content + 4 :] for each in lines[number:end])
            yield Block(page, number + 1, text, indent=" " * (content + 4), fenced=False)
            number = end
            continue
        if _PRE.match(line):
            yield Block(page, number + 1, line, fenced=False)
        if item := _ITEM.match(line):
            content = item.end() - 1
        elif line.strip() and (starts or column >= content):
            content = min(content, column)
        if _SECTION.match(line):
            content = 0
        starts = not line.strip() or bool(_SECTION.match(line))
        number += 1


def problem_of_tag(block: Block) -> str | None:
    """What is wrong with a block's fence; None when a test can check the block."""
    if not block.fenced:
        return "a block without a fence carries no tag: put it between fences, such as ```bash run"
    if block.tag not in (*LANGUAGES, RENDER):
        shown = " ".join(("```" + block.language, block.tag)).strip()
        return f"`{shown}` is not tagged run, render, unshown or figure: see tests/docs/blocks.py"
    if block.tag == RENDER:
        if block.language in SHELLS or len(block.options) != 1:
            return f"`{block.language} render` must be `LANGUAGE render WHAT`, and the language no shell"
        return None
    if block.language not in LANGUAGES[block.tag]:
        return f"`{block.tag}` goes with {' or '.join(LANGUAGES[block.tag])}, not with `{block.language}`"
    known = [word for word in block.options if word in (LONG, MEASURED) or word.startswith(SCENE)]
    wrong = [word for word in block.options if block.tag != RUN or word not in known]
    return f"`{block.tag}` takes no option {' '.join(wrong)}" if wrong else None


def _fenced(page: str, number: int, fence: re.Match[str], content: list[str]) -> Block:
    words = fence["info"].split()
    language, tag, options = (words + ["", ""])[0], (words + ["", ""])[1], tuple(words[2:])
    indent = fence["indent"]
    text = "\n".join(line.removeprefix(indent) if line.startswith(indent) else line.lstrip() for line in content)
    return Block(page, number + 1, text, language, tag, options, indent)


def _closing(lines: list[str], opening: int, fence: str) -> int:
    closing = re.compile(rf"^[ >]*{fence[0]}{{{len(fence)},}}\s*$")
    return next((n for n in range(opening + 1, len(lines)) if closing.match(lines[n])), len(lines))


def _indented_end(lines: list[str], number: int, column: int) -> int:
    while number < len(lines) and (not lines[number].strip() or lines[number].startswith(" " * column)):
        number += 1
    while not lines[number - 1].strip():
        number -= 1
    return number
