"""Takes torchrun and similar launchers out of a command: Meshwright itself starts one process for each rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from meshwright.rules.launchers import (
    TORCH_LAUNCHERS,
    TORCH_MODULES,
    begins_command,
    is_shell_script,
    launcher_of,
    words_of,
)

_SWITCHES = {"--standalone", "--no-python", "--run-path", "--module", "-m", "--use-env", "--virtual-local-rank"}
"""Options of torchrun without a value. All others have one."""
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


@dataclass(slots=True)
class Command:
    """A command for each rank."""

    words: list[str]
    removed: str | None = None
    """The launcher that was taken out."""
    left: str | None = None
    """A launcher that is still there."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the launcher that was taken out, with `-` in their names."""


@dataclass(slots=True)
class _Launch:
    """A launcher among words: where it starts, where its script is, and what replaces the words before that."""

    start: int
    script: int
    interpreter: list[str]
    name: str
    options: dict[str, str]


def without_launcher(words: Sequence[str]) -> Command:
    """The command that each rank runs, for one that a pod runs.

    torchrun, `python -m torch.distributed.run` and hyperpodrun set variables that Meshwright sets too, so the script
    that they start is the command. Other launchers, such as `accelerate launch`, set further variables: they stay.
    """
    if is_shell_script(words):
        return _in_script(list(words))
    launch = _first_launch(words, lambda _: False)
    if launch is None:
        return Command(list(words), left=launcher_of(words))
    rest = [*words[: launch.start], *launch.interpreter, *words[launch.script :]]
    return Command(rest, launch.name, launcher_of(rest), launch.options)


def _in_script(words: list[str]) -> Command:
    """The same for the script of a shell. What is around the launcher stays as it is."""
    text, found = words[2], words_of(words[2])
    launch = _first_launch([word for _, _, word in found], lambda index: begins_command(text, found, index))
    if launch is None:
        return Command(words, left=launcher_of(words))
    before, after = text[: found[launch.start][0]], text[found[launch.script][0] :]
    words[2] = f"{before}{' '.join([*launch.interpreter, ''])}{after}"
    return Command(words, launch.name, launcher_of(words), launch.options)


def _first_launch(words: Sequence[str], begins: Callable[[int], bool]) -> _Launch | None:
    """Find the first launcher that a script follows. `begins`: whether the word of this index begins a command."""
    for start, word in enumerate(words):
        name, following = PurePosixPath(word).name, list(words[start + 1 : start + 3])
        if name in TORCH_LAUNCHERS:
            launch = _read_options(words, start + 1, begins, _Launch(start, 0, ["python"], name, {}))
        elif _PYTHON.fullmatch(name) and following[:1] == ["-m"] and following[1:] and following[1] in TORCH_MODULES:
            launch = _read_options(words, start + 3, begins, _Launch(start, 0, [word], f"python -m {following[1]}", {}))
        else:
            continue
        if launch is not None:
            return launch
    return None


def _read_options(words: Sequence[str], at: int, begins: Callable[[int], bool], launch: _Launch) -> _Launch | None:
    """Read the options of a launcher up to its script. None if there is no script."""
    while at < len(words) and words[at].startswith("-") and not begins(at):
        option, equals, value = words[at].partition("=")
        option, at = option.replace("_", "-"), at + 1
        if not equals and option not in _SWITCHES:
            if at >= len(words) or begins(at):
                return None
            value, at = words[at], at + 1
        launch.options[option] = value.strip("\"'")
    if at >= len(words) or begins(at):
        return None
    launch.script = at
    if "--no-python" in launch.options:
        launch.interpreter = []
    elif "-m" in launch.options or "--module" in launch.options:
        launch.interpreter.append("-m")
    return launch
