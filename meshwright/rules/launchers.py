"""Programs that start several processes of a script, such as torchrun, in a command that each rank runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

TORCH_LAUNCHERS = frozenset({"torchrun", "hyperpodrun"})
TORCH_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
"""Modules that `python -m` runs as torchrun."""
_PROGRAMS = TORCH_LAUNCHERS | {"mpirun", "mpiexec", "horovodrun", "deepspeed", "composer"}
_SHELLS = frozenset({"sh", "bash", "ash", "dash"})
_WORD = re.compile(r"""(?:[^\s"'\\;|&()]|"(?:[^"\\]|\\.)*"|'[^']*'|\\[^\n])+""")
"""A word of a shell script, with its quotes."""
_COMMAND_END = re.compile(r"[;|&()\n]")
"""What is between two words of different commands, once continued lines are joined."""


def is_shell_script(command: Sequence[str]) -> bool:
    """Whether the third word is a script that a shell runs, as in `bash -c SCRIPT`."""
    if len(command) < 3 or PurePosixPath(command[0]).name not in _SHELLS:
        return False
    return command[1].startswith("-") and command[1].endswith("c")


def words_of(script: str) -> list[tuple[int, int, str]]:
    """The words of a shell script, each with its start and end."""
    return [(match.start(), match.end(), match.group()) for match in _WORD.finditer(script)]


def begins_command(script: str, words: Sequence[tuple[int, int, str]], index: int) -> bool:
    """Whether a word of a script is the first of a command."""
    if index == 0:
        return True
    between = script[words[index - 1][1] : words[index][0]].replace("\\\n", " ")
    return _COMMAND_END.search(between) is not None


def launcher_of(command: Sequence[str]) -> str | None:
    """The program that starts several processes, if the command runs one: by itself, or in a shell's script."""
    if not is_shell_script(command):
        return _launcher_at(command)
    script, found = command[2], words_of(command[2])
    for index, (_, _, word) in enumerate(found):
        after_exec = index > 0 and found[index - 1][2] in ("exec", "env")
        if begins_command(script, found, index) or after_exec or "=" in found[index - 1][2]:
            name = _launcher_at([word, *(following for _, _, following in found[index + 1 : index + 3])])
            if name is not None:
                return name
    return None


def _launcher_at(words: Sequence[str]) -> str | None:
    """The launcher that these words start."""
    if not words:
        return None
    name, second, third = PurePosixPath(words[0]).name, *[*words[1:3], "", ""][:2]
    if name in _PROGRAMS:
        return name
    if (name, second) == ("accelerate", "launch"):
        return "accelerate launch"
    if name.startswith("python") and second == "-m" and third in {*TORCH_MODULES, "accelerate.commands.launch"}:
        return f"python -m {third}"
    return None
