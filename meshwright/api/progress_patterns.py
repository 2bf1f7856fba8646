"""The patterns that find step and loss in the log of a `runtime.command`, and what a pattern may contain."""

from __future__ import annotations

import re

GROUPS = ("step", "loss", "tokens", "learning_rate", "total_steps", "epoch")
"""The named groups of a pattern. With `epoch`, which counts from 0, step and total are those of one epoch."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf"
_LOSS, _RATE = rf"(?P<loss>{_NUMBER})", rf"(?P<learning_rate>{_NUMBER})"

FRAMEWORK_PATTERNS: dict[str, tuple[str, ...]] = {
    # iteration   10/   100 | consumed samples: ... | learning rate: 1.5E-04 | ... | lm loss: 7.1E+00 | ...
    "MegatronLM": (
        r"\biteration\s+(?P<step>\d+)\s*/\s*(?P<total_steps>\d+)\s*\|"
        rf"(?:.{{0,400}}?learning rate:\s*{_RATE})?.{{0,400}}?\b(?:lm )?loss:\s*{_LOSS}",
    ),
    # step: 10  loss:  7.1234  grad_norm:  1.2  memory: ...  tps: ...
    "TorchTitan": (rf"\bstep:\s+(?P<step>\d+)\s+loss:\s+{_LOSS}\s",),
    # steps: 10 loss: 7.1234 iter time (s): 0.5 samples/sec: 3.2 (of the pipeline engine)
    # [Rank 0] step=10, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]
    "DeepSpeed": (
        rf"\bsteps: (?P<step>\d+) loss: {_LOSS} ",
        rf"\bstep=(?P<step>\d+), skipped=\d+, lr=\[?{_RATE}",
    ),
    # iteration: 10 / 100 | consumed_tokens: 1.3M | ... | lm_loss: 7.12 | lr: 0.0003 | ...
    "Nanotron": (
        r"\biteration: (?P<step>\d+) / (?P<total_steps>\d+) \|"
        rf".{{0,400}}?\blm_loss: {_LOSS}(?: \| lr: {_RATE})?",
    ),
    # {'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.5}
    #  12%|#         | 12/100 [00:10<01:20,  1.1it/s]
    "Transformers": (
        rf"\{{'loss': '?{_LOSS}'?(?:.{{0,400}}?'learning_rate': '?{_RATE}'?)?",
        r"^\s*\d{1,3}%\|[^|]{0,200}\|\s*(?P<step>\d+)/(?P<total_steps>\d+) \[",
    ),
    # Epoch 2:  50%|#####     | 4/8 [00:01<00:01,  4.10it/s, v_num=0, train_loss=2.31]
    "Lightning": (
        r"\bEpoch (?P<epoch>\d+):\s+\d{1,3}%\|[^|]{0,200}\|\s*(?P<step>\d+)/(?P<total_steps>\d+) \["
        rf"(?:[^\]]{{0,300}}?loss(?:_step)?={_LOSS})?",
    ),
}
"""The lines of a framework. Accelerate writes none of its own: its scripts mostly use the bar of transformers."""

_EVALUATIONS = ("val", "valid", "validation", "eval", "evaluation", "test", "dev", "held-out", "held out:")
_TRAINED = "".join(f"(?<!{name}[ _/])" for name in _EVALUATIONS)
"""Not after these words: a loss of an evaluation is not that of the step."""

_STEP = r"\b(?:step|iter|iteration)\b[ :=]{0,4}(?P<step>\d+)(?:\s*(?:/|of)\s*(?P<total_steps>\d+))?"

COMMON_PATTERNS = (
    # step 12/100 loss=3.4, Step: 12, Loss: 3.4, iter 12: loss 3.4
    rf"{_STEP}\b.{{0,200}}?\b(?:train_|training |train/|train )?{_TRAINED}loss\b[ :=]{{0,4}}{_LOSS}",
    # step 12: val loss 3.4
    rf"{_STEP}\b.{{0,200}}?\b(?:{'|'.join(_EVALUATIONS)})[ _/]loss\b",
)
DEFAULT_PATTERNS = (*(pattern for some in FRAMEWORK_PATTERNS.values() for pattern in some), *COMMON_PATTERNS)
"""Used if the job sets none and names no framework. The first one that matches a line counts."""


MAX_WIDE_RANGES = 4
_WIDE_RANGE = re.compile(r"-(?:[^\x00-\xff]|\\[uUN])")
_IGNORES_CASE = re.compile(r"\(\?[a-zA-Z]*i")


def _takes_long(pattern: str) -> bool:
    """Whether compiling takes long: without case, `re` looks at each character of a range, of which there are 65,536.

    The operator compiles the patterns of all jobs.
    """
    return _IGNORES_CASE.search(pattern) is not None and len(_WIDE_RANGE.findall(pattern)) > MAX_WIDE_RANGES


def pattern_problem(pattern: str) -> str:
    """Why a pattern cannot be used, or an empty string."""
    if _takes_long(pattern):
        return (
            f"has more than {MAX_WIDE_RANGES} ranges up to a character beyond Latin-1 with `(?i)`, which take long to "
            "compile: list characters, or remove `(?i)`"
        )
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
