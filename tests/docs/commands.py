"""The commands of shell text: taken apart, and checked without running them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

from tests.docs import programs

_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_CHECKED_SPANS = ("make ", "meshwright ")
_FENCED = re.compile(r"^[ >]*(```|~~~).*?^[ >]*\1\s*$", re.MULTILINE | re.DOTALL)


def simple_commands(script: str) -> Iterator[list[str]]:
    """The words of each command of a script, without variables, redirections and comments.

    Raises:
        ValueError: a quotation does not end.
    """
    for line in script.replace("\\\n", " ").splitlines():
        for inner in _SUBSTITUTION.findall(line):
            yield from simple_commands(inner)
        lexer = shlex.shlex(_SUBSTITUTION.sub("X", line), posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split = True
        words: list[str] = []
        tokens = [*lexer, ";"]
        for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
            if set(token) <= set("|&;()"):
                if words:
                    yield words
                words = []
            elif not _in_redirection(before, token, after) and (words or not _ASSIGNMENT.match(token)):
                words.append(token)


def problems(script: str) -> list[str]:
    """What is wrong with a script, as far as can be known without running it."""
    syntax = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    if syntax.returncode:
        return [syntax.stderr.strip()]
    return [problem for words in simple_commands(script) for problem in programs.problems(words)]


def looks_like_command(line: str) -> bool:
    """Whether a line of a figure is really a command."""
    try:
        first = next(simple_commands(line.strip().removeprefix("$ ")), [""])[0]
    except ValueError:
        return False
    return line.strip().startswith("$ ") or first.rpartition("/")[2] in programs.known()


def problems_in_prose(text: str) -> list[str]:
    """Commands of ours that a page's prose names in backquotes and that do not exist."""
    spans = [" ".join(span.split()) for span in _SPAN.findall(_FENCED.sub("", text))]
    commands = [span for span in spans if span.startswith(_CHECKED_SPANS)]
    return [f"`{command}`: {problem}" for command in commands for problem in problems(command)]


def _in_redirection(before: str, token: str, after: str) -> bool:
    """Whether a token is `>`, the file after it or the descriptor before it."""
    redirects = [set(each) <= set("<>&") and bool(set(each) & set("<>")) for each in (before, token, after)]
    return redirects[0] or redirects[1] or redirects[2] and token.isdigit()
