"""Transcripts: commands and their output, compared with what really came out and written again.

`...` stands for any text within a line, and on a line of its own for any number of lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

ANY = "..."
PROMPT, CONTINUED = "$ ", "> "
_NUMBER = re.compile(r"(?<![\w.-])(?<!P )[\d.,:]*\d(?:[smh](?:\d+s)?)?(?![\w-])")
"""A number or an age, but not part of a name (`rack0-node1`) nor a degree (`TP 2`)."""
_BARS = re.compile("[▁▂▃▄▅▆▇█]+")


class TranscriptError(ValueError):
    """A text that does not begin with a command."""


@dataclass
class Exchange:
    """One command and the output that follows it."""

    command: str
    output: list[str] = field(default_factory=list)


def exchanges(text: str) -> list[Exchange]:
    """The commands of a transcript with their output.

    Raises:
        TranscriptError: the first line is no command.
    """
    found: list[Exchange] = []
    for line in text.splitlines():
        if line.startswith(PROMPT):
            found.append(Exchange(line.removeprefix(PROMPT)))
        elif not found:
            raise TranscriptError(f"a transcript begins with `{PROMPT}COMMAND`, not with `{line}`")
        elif line.startswith(CONTINUED) and found[-1].command.endswith("\\") and not found[-1].output:
            found[-1].command += "\n" + line.removeprefix(CONTINUED)
        else:
            found[-1].output.append(line)
    return found


def written(found: Sequence[Exchange]) -> str:
    """The text of a transcript: `exchanges` backwards."""
    lines: list[str] = []
    for each in found:
        first, *more = each.command.split("\n")
        lines += [PROMPT + first, *(CONTINUED + line for line in more), *each.output]
    return "\n".join(lines)


def matches(expected: Sequence[str], actual: Sequence[str], *, measured: bool = False) -> bool:
    """Whether output is what the page shows. With `measured` every number may be another one."""
    wanted, got = _trimmed(expected), _trimmed(actual)
    at, line, resume = 0, 0, (-1, 0)
    # The last `...` takes as few lines as it can; where the rest does not fit, it takes one more.
    while line < len(got):
        if at < len(wanted) and wanted[at].strip() == ANY:
            resume, at = (at, line), at + 1
        elif at < len(wanted) and _same(wanted[at], got[line], measured):
            at, line = at + 1, line + 1
        elif resume[0] >= 0:
            resume = (resume[0], resume[1] + 1)
            at, line = resume[0] + 1, resume[1]
        else:
            return False
    return all(rest.strip() == ANY for rest in wanted[at:])


def difference(expected: Sequence[str], actual: Sequence[str]) -> str:
    """What a page shows beside what came out."""
    return "\n".join(difflib.unified_diff(_trimmed(expected), _trimmed(actual), "the page", "the output", lineterm=""))


def updated(expected: Sequence[str], actual: Sequence[str], *, measured: bool = False) -> list[str]:
    """The output that a page should show: what it shows where that is right, else `actual`, as much as it showed."""
    wanted, got = _trimmed(expected), _trimmed(actual)
    if matches(wanted, got, measured=measured):
        return wanted
    kept = [number for number, line in enumerate(wanted) if line.strip() != ANY]
    pairs = [(kept[mine], its) for mine, its in _alignment([wanted[number] for number in kept], got)]
    pairs = list(_with_followers(pairs, wanted, len(got)))
    out: list[str] = []
    before = (-1, -1)
    for mine, its in [*pairs, (len(wanted), len(got))]:
        left_out = [line for line in wanted[before[0] + 1 : mine] if line.strip() == ANY]
        between = got[before[1] + 1 : its]
        out += left_out[:1] or between
        if its < len(got):
            out.append(wanted[mine] if _same(wanted[mine], got[its], measured) else got[its])
        before = (mine, its)
    return out


def _alignment(wanted: list[str], got: list[str]) -> list[tuple[int, int]]:
    """Pairs of lines that are the same but for numbers, in order."""
    theirs = [_loose(line) for line in got]
    mine = [
        next((its for its, line in zip(theirs, got, strict=True) if _same(each, line, True)), each)
        if ANY in each
        else _loose(each)
        for each in wanted
    ]
    return _longest_common(mine, theirs)


def _longest_common(first: list[str], second: list[str]) -> list[tuple[int, int]]:
    """Places of the longest list of lines that both have in the same order."""
    length = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for a in reversed(range(len(first))):
        for b in reversed(range(len(second))):
            same = first[a] == second[b]
            length[a][b] = length[a + 1][b + 1] + 1 if same else max(length[a + 1][b], length[a][b + 1])
    pairs, a, b = [], 0, 0
    while a < len(first) and b < len(second):
        if first[a] == second[b]:
            pairs.append((a, b))
            a, b = a + 1, b + 1
        elif length[a + 1][b] >= length[a][b + 1]:
            a += 1
        else:
            b += 1
    return pairs


def _with_followers(pairs: list[tuple[int, int]], wanted: list[str], got: int) -> Iterator[tuple[int, int]]:
    """Where a page shows the line after one that it still has, it goes on to show what now stands there."""
    for (mine, its), (next_mine, next_its) in pairwise([*pairs, (len(wanted), got)]):
        yield mine, its
        for step in range(1, min(next_mine - mine, next_its - its)):
            if wanted[mine + step].strip() == ANY:
                break
            yield mine + step, its + step


def _same(wanted: str, got: str, measured: bool) -> bool:
    if measured:
        wanted, got = _loose(wanted), _loose(got)
    return re.fullmatch(".*".join(map(re.escape, wanted.split(ANY))), got) is not None


def _loose(line: str) -> str:
    return _BARS.sub("█", _NUMBER.sub("0", line)).replace(" ", "")


def _trimmed(lines: Sequence[str]) -> list[str]:
    out = [line.rstrip() for line in lines]
    while out and not out[-1]:
        out.pop()
    return out
