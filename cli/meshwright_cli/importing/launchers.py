"""Takes torchrun, mpirun and similar launchers out of a command: Meshwright starts one process for each rank itself."""

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

MPI_LAUNCHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"})
"""Launchers of Open MPI, MPICH and Intel MPI, which have the same options under different names."""
_MPI_SWITCHES = frozenset({
    "allow-run-as-root", "bind-to-core", "bind-to-none", "bynode", "byslot", "debug-daemons", "display-allocation",
    "display-map", "do-not-launch", "enable-recovery", "genvall", "genvnone", "l", "merge-stderr-to-stdout",
    "no-oversubscribe", "nolocal", "nooversubscribe", "novm", "oversubscribe", "pernode", "prepend-rank",
    "print-rank-map", "q", "quiet", "report-bindings", "tag-output", "timestamp-output", "use-hwthread-cpus", "v",
    "verbose",
})  # fmt: skip
"""Options without a value. All others have one, or two."""
_MPI_PAIRS = frozenset({"mca", "gmca", "omca", "prtemca", "pmixmca"})
"""Options with two values."""
_QUOTED = re.compile(r"^(\w+=)?([\"'])(.*)\2$")
"""A word of a script in quotes, or a variable with a value in quotes."""
_MPI_PROCESSES = {"n": "np", "c": "np", **dict.fromkeys(("N", "npernode", "ppn", "perhost"), "--nproc-per-node")}
"""What options of another name mean."""


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
    variables: dict[str, str | None] = field(default_factory=dict)
    """Variables that the launcher sets for each rank. None: the value is that of its own environment."""

    @property
    def is_mpi(self) -> bool:
        """Whether the launcher that was taken out is one of MPI."""
        return self.removed in MPI_LAUNCHERS


@dataclass(slots=True)
class _Launch:
    """A launcher among words: where it starts, where its script is, and what replaces the words before that."""

    start: int
    script: int
    interpreter: list[str]
    name: str
    options: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)


def without_launcher(words: Sequence[str]) -> Command:
    """The command that each rank runs, for one that a pod runs.

    torchrun, `python -m torch.distributed.run` and hyperpodrun set variables that Meshwright sets too, so the script
    that they start is the command. mpirun and its like start the program of each rank, too. Other launchers, such as
    `accelerate launch`, set further variables: they stay.
    """
    if is_shell_script(words):
        return _in_script(list(words))
    launch = _first_launch(words, lambda _: False)
    if launch is None:
        return Command(list(words), left=launcher_of(words))
    rest = [*words[: launch.start], *launch.interpreter, *words[launch.script :]]
    return Command(rest, launch.name, launcher_of(rest), launch.options, launch.variables)


def _in_script(words: list[str]) -> Command:
    """The same for the script of a shell. What is around the launcher stays as it is."""
    text, found = words[2], words_of(words[2])
    launch = _first_launch([word for _, _, word in found], lambda index: begins_command(text, found, index))
    if launch is None:
        return Command(words, left=launcher_of(words))
    before, after = text[: found[launch.start][0]], text[found[launch.script][0] :]
    words[2] = f"{before}{' '.join([*launch.interpreter, ''])}{after}"
    return Command(words, launch.name, launcher_of(words), launch.options, launch.variables)


def _first_launch(words: Sequence[str], begins: Callable[[int], bool]) -> _Launch | None:
    """Find the first launcher that a script follows. `begins`: whether the word of this index begins a command."""
    for start, word in enumerate(words):
        name, following = PurePosixPath(word).name, list(words[start + 1 : start + 3])
        if name in TORCH_LAUNCHERS:
            launch = _read_options(words, start + 1, begins, _Launch(start, 0, ["python"], name))
        elif _PYTHON.fullmatch(name) and following[:1] == ["-m"] and following[1:] and following[1] in TORCH_MODULES:
            launch = _read_options(words, start + 3, begins, _Launch(start, 0, [word], f"python -m {following[1]}"))
        elif name in MPI_LAUNCHERS:
            launch = _read_mpi_options(words, start + 1, begins, _Launch(start, 0, [], name))
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


def _read_mpi_options(words: Sequence[str], at: int, begins: Callable[[int], bool], launch: _Launch) -> _Launch | None:
    """Read the options of mpirun up to the program. None if there is no program."""
    while at < len(words) and words[at].startswith("-") and not begins(at):
        option, at = words[at].lstrip("-"), at + 1
        name, equals, value = option.partition("=")
        needed = 0 if equals or option in _MPI_SWITCHES else 2 if option in _MPI_PAIRS else 1
        values = [_QUOTED.sub(r"\1\3", word) for word in words[at : at + needed]]
        if option in ("genv", "env") and values and "=" not in values[0]:  # `-genv NAME VALUE`
            needed, values = 2, [f"{values[0]}={words[at + 1]}"] if at + 1 < len(words) else values
        if len(words) < at + needed or any(begins(index) for index in range(at, at + needed)):
            return None
        at += needed
        if option in ("x", "genv", "env"):
            variable, given, content = values[0].partition("=")
            launch.variables[variable] = content if given else None
        elif option == "genvlist":
            launch.variables |= dict.fromkeys(values[0].split(","))
        else:
            launch.options[_MPI_PROCESSES.get(name, name)] = value if equals else " ".join(values)
    if at >= len(words) or begins(at):
        return None
    launch.script = at
    return launch
