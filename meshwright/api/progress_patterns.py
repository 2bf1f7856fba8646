"""The patterns that find step and loss in the log of a `runtime.command`, and what a pattern may contain."""

from __future__ import annotations

import re

GROUPS = ("step", "loss", "tokens", "learning_rate", "total_steps")
"""The named groups of a pattern."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf"

DEFAULT_PATTERNS = (
    # Megatron: iteration   10/   100 | consumed samples: ... | learning rate: 1.5E-04 | ... | lm loss: 7.1E+00 | ...
    r"\biteration\s+(?P<step>\d+)\s*/\s*(?P<total_steps>\d+)\s*\|"
    rf"(?:.{{0,400}}?learning rate:\s*(?P<learning_rate>{_NUMBER}))?.{{0,400}}?\b(?:lm )?loss:\s*(?P<loss>{_NUMBER})",
    # transformers: {'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.5}
    rf"\{{'loss': '?(?P<loss>{_NUMBER})'?(?:.{{0,400}}?'learning_rate': '?(?P<learning_rate>{_NUMBER})'?)?",
    # The progress bar of transformers:  12%|#         | 12/100 [00:10<01:20,  1.1it/s]
    r"^\s*\d{1,3}%\|[^|]{0,200}\|\s*(?P<step>\d+)/(?P<total_steps>\d+) \[",
    # step 12/100 loss=3.4, Step: 12, Loss: 3.4, iter 12: loss 3.4
    r"\b(?:step|iter|iteration)\b[ :=]{0,4}(?P<step>\d+)(?:\s*(?:/|of)\s*(?P<total_steps>\d+))?"
    rf"\b.{{0,200}}?\b(?:train_|training |train/|train )?loss\b[ :=]{{0,4}}(?P<loss>{_NUMBER})",
)
"""Used if the job sets none. The first one that matches a line counts."""


def pattern_problem(pattern: str) -> str:
    """Why a pattern cannot be used, or an empty string."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    unknown = sorted(set(compiled.groupindex) - set(GROUPS))
    if unknown:
        return f"has the unknown group `{unknown[0]}`: use {', '.join(GROUPS[:-1])} or {GROUPS[-1]}"
    if not set(compiled.groupindex) & {"step", "loss"}:
        return "has neither the group `step` nor `loss`: write, for example, `(?P<step>[0-9]+)`"
    return ""
