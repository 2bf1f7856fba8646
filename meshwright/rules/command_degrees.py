"""Degrees of parallelism in the options of a command, such as Megatron-LM's `--tensor-model-parallel-size 8`.

Ranks are placed by the degrees of the job. With a degree that only the command knows, a group that should be inside an
NVLink domain may get nodes that are far apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from meshwright.rules.launchers import is_shell_script, words_of

_OPTIONS = {
    "tensor": ("tensor-model-parallel-size", "tensor-parallel-size", "tensor-parallel-degree", "tp-size", "tp-degree"),
    "pipeline": (
        *("pipeline-model-parallel-size", "pipeline-parallel-size", "pipeline-parallel-degree"),
        *("pp-size", "pp-degree"),
    ),
    "context": ("context-parallel-size", "context-parallel-degree", "cp-size", "cp-degree"),
}
_OF_INFERENCE = re.compile("rollout|infer|vllm|sglang|generat")
"""Parts of an option's path, as in `rollout.tensor_model_parallel_size` of a run that also samples."""
_DEGREES = {option: degree for degree, options in _OPTIONS.items() for option in options}
MEGATRON_PIPELINE = "--pipeline-model-parallel-size"
MEGATRON_ORDER = "--use-tp-pp-dp-mapping"
"""Puts the stages of a replica next to each other. By default Megatron-LM numbers ranks by stage first."""


def stated_degrees(command: Sequence[str]) -> dict[str, int]:
    """Field of `spec.parallelism` -> the degree that the command states, if it is more than 1.

    Options may be those of a command line (`--tp_size 8`, `--parallelism.tensor_parallel_degree=8`) or of Hydra
    (`model.tensor_model_parallel_size=8`). A value that is no number, such as a variable of the shell, counts as none.
    """
    found: dict[str, int] = {}
    for name, value in _options(option_words(command)):
        path, _, option = name.lstrip("-").rpartition(".")
        degree = _DEGREES.get(option.replace("_", "-")) if _OF_INFERENCE.search(path) is None else None
        if degree is not None and re.fullmatch("[0-9]{1,5}", value) and int(value) > 1:
            found[degree] = int(value)
    return found


def option_words(command: Sequence[str]) -> list[str]:
    """The words of a command, those of a shell's script without quotes."""
    if not is_shell_script(command):
        return list(command)
    return [word.strip("\"'") for _, _, word in words_of(command[2])]


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if equals:
            yield name, value.strip("\"'")
        elif word.startswith("--"):
            yield word, following
