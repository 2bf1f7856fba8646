"""Reads a batch script of Slurm: its directives, its variables and the commands that it runs. Nothing is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from meshwright_cli.importing.settings import ImportFileError

_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_ASSIGNMENT = re.compile(
    r"^(?:(export|declare|typeset|local|readonly)\s+)?((?:-\w+\s+)*)([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL
)
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=([^}]*)\}")
"""A variable that gets a value if it has none, as in `: "${NAME:=VALUE}"`."""
_ARGUMENT = re.compile(r"\$\{\d+:?-([^}]*)\}|\"?\$[@*]\"?|\"?\$\{[@*]\}\"?")
"""An argument of the script with a default, or all of them."""
_VARIABLE = re.compile(
    r"\"(?<!\\)\$\{(?P<quoted>[A-Za-z_]\w*)\[@\]\}\"|(?<!\\)\$(?:\{(?P<array>[A-Za-z_]\w*)\[[@*]\]\}"
    r"|\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*))"
)
_OUTPUT_ALONE = re.compile(r"\"?(\$\(.*\)|`.*`)\"?", re.DOTALL)
"""A value that only a shell can tell: the output of a command, or arithmetic."""
_CONTROL = frozenset({
    "break", "case", "continue", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "return", "then",
    "until", "while", "{", "}", "[", "[[",
})  # fmt: skip
_WORD = re.compile(r"(?:\$\([^()]*\)|[^\s\"']|\"[^\"]*\"|'[^']*')+")
_HEAD_NODE = re.compile(r"\$\(hostname[^)]*\)|`hostname[^`]*`")
_HERE_DOCUMENT = re.compile(r"<<-?\s*[\"']?([A-Za-z_]\w*)")
_FUNCTION = re.compile(r"function\s+([\w-]+)|([\w-]+)\s*\(\)")
_CASE = re.compile(r"""[\w*|"' -]+\)|;;""")
"""A label of `case`, or the end of what belongs to one."""
_SILENT = frozenset({
    "cat", "date", "df", "echo", "env", "exit", "free", "hostname", "ls", "mkdir", "nvidia-smi", "printenv", "printf",
    "pwd", "scontrol", "set", "shopt", "sleep", "squeue", "touch", "trap", "ulimit", "umask", "unset", "wait", "which",
})  # fmt: skip
"""Commands that only print, wait, or are about the node."""
_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input",
    "J": "job-name", "K": "kill-on-bad-exit", "k": "no-kill", "L": "licenses", "l": "label", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet",
    "q": "qos", "s": "oversubscribe", "S": "core-spec", "t": "time", "u": "unbuffered", "v": "verbose",
    "W": "wait", "w": "nodelist", "X": "disable-status", "x": "exclude",
}  # fmt: skip
"""Short options of sbatch and srun, which are the same where both have them."""
_SWITCHES = frozenset({
    "container-mount-home", "container-readonly", "container-remap-root", "container-writable", "contiguous",
    "container-entrypoint", "disable-status", "exact", "exclusive", "external-launcher", "hold", "kill-on-bad-exit",
    "label", "mem-bind", "no-container-entrypoint", "no-container-mount-home", "no-container-remap-root", "no-kill",
    "no-requeue", "overcommit", "overlap", "oversubscribe", "parsable", "preserve-env", "pty", "quiet", "requeue",
    "reboot", "resv-ports", "spread-job", "test-only", "unbuffered", "use-min-nodes", "verbose", "wait-all-nodes",
})  # fmt: skip
"""Options without a value, or with one only after `=`."""


@dataclass(slots=True)
class Line:
    """A command of the script, with the options of `srun` if that starts it."""

    text: str
    """What runs, with the script's variables replaced as far as they are known. Without `srun`."""
    options: dict[str, str] | None = None
    """None: it runs on the first node only."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that are set for this command alone."""

    @property
    def program(self) -> str:
        """Name of the program, without its directory."""
        words = self.text.split(maxsplit=1)
        return PurePosixPath(words[0]).name if words else ""

    def command(self) -> list[str]:
        """The words of the command; a shell's script, if only a shell can complete them."""
        if words := plain_words(self.text):
            return words
        try:
            words = shlex.split(self.text)
        except ValueError:
            words = []
        if len(words) >= 3 and PurePosixPath(words[0]).name in ("bash", "sh") and words[1] in ("-c", "-lc", "-ec"):
            return [*words[:2], words[2].replace("\\$", "$").strip(), *words[3:]]
        return ["bash", "-c", self.text]


@dataclass(slots=True)
class BatchScript:
    """What a batch script says."""

    options: dict[str, str]
    """Options of sbatch by their long names."""
    exports: dict[str, str]
    """Variables that the script exports, with values that it states."""
    unknown: list[str]
    """Variables that it exports with a value that only the machine knows."""
    lines: list[Line]
    """Commands in their order."""
    controlled: bool = False
    """Whether it has loops or conditions."""
    variables: dict[str, str] = field(default_factory=dict)
    """Values of variables, Slurm's among them. They may have parts that only a shell can replace."""


def is_batch_script(text: str) -> bool:
    """Whether the text is a batch script of Slurm."""
    return _DIRECTIVE.search(text) is not None and "```" not in text


def read_script(text: str, known: Mapping[str, str]) -> BatchScript:
    """Read a script.

    Args:
        text: the script.
        known: values of variables that Slurm sets.

    Raises:
        ImportFileError: quotes do not match.
    """
    script = BatchScript(directives(text), {}, [], [], variables=dict(known))
    variables = script.variables
    functions: set[str] = set()
    for line in _logical_lines(text):
        first = line.split(maxsplit=1)[0]
        if function := _FUNCTION.match(line):
            functions.add(function[1] or function[2])
        if function or first in _CONTROL or _CASE.fullmatch(line):
            script.controlled = True
            continue
        if first in functions:
            continue
        if first == ":":
            for name, value in _DEFAULT.findall(line):
                variables.setdefault(name, replaced(value, variables))
            continue
        assignments, rest = _assignments(line)
        if assignments and not rest:
            for name, value, exported in assignments:
                _assign(script, variables, name, value, exported=exported)
            continue
        own = {name: replaced(value, variables) for name, value, _ in assignments}
        command = replaced(rest, variables | {name: _unquoted(value) for name, value in own.items()})
        script.lines.append(_line(command, own))
    return script


def directives(text: str) -> dict[str, str]:
    """The options of `#SBATCH` lines, by their long names.

    Raises:
        ImportFileError: the script has several parts, each with resources of its own.
    """
    found: dict[str, str] = {}
    for match in _DIRECTIVE.finditer(text):
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError:
            raise ImportFileError(f"quotes do not match: #SBATCH {match[1]:.80}") from None
        if words[:1] in (["hetjob"], ["packjob"]):
            raise ImportFileError("has several components (`#SBATCH hetjob`): import each as a script of its own")
        options, _ = read_options(words)
        found |= options
    return found


def read_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options by their long names, and the words after them."""
    found: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word, at = words[at], at + 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = _SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
        if not equals and name not in _SWITCHES and at < len(words):
            value, at = words[at], at + 1
        found[name] = value
    return found, words[at:]


def replaced(text: str, variables: Mapping[str, str]) -> str:
    """The text with the variables that are known. Text in single quotes stays as it is."""

    def value(match: re.Match[str]) -> str:
        name = match["quoted"] or match["array"] or match["braced"] or match["plain"]
        if name in variables:
            return variables[name]
        return match["default"] if match["default"] is not None else match[0]

    parts = re.split(r"('[^']*')", _ARGUMENT.sub(lambda match: match[1] or "", text))
    return "".join(part if part.startswith("'") else _VARIABLE.sub(value, part) for part in parts)


def _line(command: str, own: dict[str, str]) -> Line:
    """A command, without a leading `srun` or `exec`."""
    variables = {name: _unquoted(value) for name, value in own.items() if "$" not in value}
    text = command.removeprefix("exec ").strip().removesuffix("&").strip()
    # The script runs on the first node, on which Meshwright's rank 0 is.
    text = _HEAD_NODE.sub("$MASTER_ADDR", text)
    words = [(match.start(), match.group()) for match in _WORD.finditer(text)]
    if not words or PurePosixPath(words[0][1]).name != "srun":
        return Line(text, None, variables)
    options, rest = read_options([_unquoted(word) for _, word in words[1:]])
    if not rest:
        return Line("", options, variables)
    program = words[len(words) - len(rest)][0]
    return Line(text[program:], options, variables)


def _assign(script: BatchScript, variables: dict[str, str], name: str, value: str, *, exported: bool) -> None:
    """Remember the value of a variable. `name` ends with `+` if the value is added to the one that it has."""
    name, adds = name.removesuffix("+"), name.endswith("+")
    is_array = value.startswith("(") and value.endswith(")")
    known = replaced(value[1:-1] if is_array else value, variables)
    if _OUTPUT_ALONE.fullmatch(known.strip()) and not is_array:
        variables.pop(name, None)
    else:
        new = " ".join(known.split()) if is_array else _unquoted(known)
        variables[name] = f"{variables.get(name, '')} {new}".strip() if adds else new
    if not exported:
        return
    if name not in variables or "$" in known or "`" in known:
        script.unknown.append(name)
        script.exports.pop(name, None)
    else:
        script.exports[name] = variables[name]


def _assignments(line: str) -> tuple[list[tuple[str, str, bool]], str]:
    """The variables that a line sets at its beginning, whether they are exported, and the command after them."""
    found: list[tuple[str, str, bool]] = []
    exported = False
    rest = line
    while rest:
        match = _ASSIGNMENT.match(rest)
        if match is None:
            break
        exported = exported or match[1] == "export" or "x" in match[2]
        end = _value_end(match[5]) or 0
        value, rest = match[5][:end], match[5][end:].strip().removeprefix(";").strip()
        found.append((match[3] + match[4], value, exported))
    if exported and rest and all(re.fullmatch(r"\w+", word) for word in rest.split()):
        rest = ""  # `export A=1 B`
    if not found and (words := line.split()) and words[0] == "export":
        return [(word, f"${word}", True) for word in words[1:] if re.fullmatch(r"\w+", word)], ""
    return found, rest


def _value_end(text: str) -> int | None:
    """Where the value of an assignment ends: at a space or semicolon outside quotes and parentheses. None if one of
    these is not closed.
    """
    quote, depth = "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'`":
            quote = char
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth -= 1
        elif depth == 0 and (char.isspace() or char == ";"):
            return index
    return None if quote or depth > 0 else len(text)


def _unquoted(text: str) -> str:
    """A value without its quotes."""
    try:
        return " ".join(shlex.split(text))
    except ValueError:
        return text


def _logical_lines(text: str) -> Iterator[str]:
    """The script's commands, each in one line, without comments and without those that only print.

    Raises:
        ImportFileError: quotes or parentheses do not match.
    """
    begun = document_end = ""
    for part in re.sub(r"\\\n\s*", " ", text).splitlines():
        if document_end:
            document_end = "" if part.strip() == document_end else document_end
            continue
        line = f"{begun}\n{part}" if _is_quoted(begun) else f"{begun} {_without_comment(part).strip()}".strip()
        begun = ""
        if _is_quoted(line) or _is_open_array(line):
            begun = line
        elif line:
            if document := _HERE_DOCUMENT.search(line):
                document_end = document[1]
            if line.split(maxsplit=1)[0] not in _SILENT:
                yield line
    if begun:
        raise ImportFileError(f"quotes or parentheses do not match: {begun.strip():.80}")


def _is_quoted(line: str) -> bool:
    """Whether a quote of the line goes on in the next one."""
    try:
        shlex.split(line, comments=False)
    except ValueError:
        return True
    return False


def _is_open_array(line: str) -> bool:
    """Whether an array of the line goes on in the next one."""
    match = _ASSIGNMENT.match(line)
    return match is not None and match[5].startswith("(") and _value_end(match[5]) is None


def _without_comment(line: str) -> str:
    """The line without a comment at its end."""
    match = re.match(r"(?:[^\"'#]|(?<=\S)#|\"(?:[^\"\\]|\\.)*\"|'[^']*')*", line)
    return line if match is None or line[match.end() : match.end() + 1] != "#" else match[0]


def plain_words(text: str) -> list[str]:
    """The words of a command that needs no shell. Empty if it needs one."""
    if re.search(r"[$`|;&<>\n]", text):
        return []
    try:
        return shlex.split(text)
    except ValueError:
        return []


def quoted(words: Iterable[str]) -> str:
    """Words for a message, shortened."""
    text = " ".join(" ".join(words).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
