"""How each shape is run on one GPU: the fastest setting that should fit, then more frugal ones.

Every step has the tokens of the published run that is compared with (8 rows of 4,096 for 8B). One run of 1B has four
times as many: with few tokens, the optimizer takes more of a step than in most jobs. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.api.precision import Fp8Scaling
from meshwright.planner.cost.accelerators import ACCELERATORS, accelerator

LENGTH = 4096
H100, H200 = 78, 139
"""Memory in GiB that a process has on a GPU of 80 or 141 GB."""


@dataclass(frozen=True)
class Setting:
    """What is not the model's."""

    rows: int
    """Sequences of a micro-batch."""
    micro_batches: int
    checkpointing: str = "None"
    """`training.activationCheckpointing`."""
    master_weights: bool = True
    """fp32 parameters and moments; bf16 ones, rounded stochastically, without."""
    loss_chunk: int | None = 16384
    """`training.lossChunkTokens`."""
    fp8: str | None = None
    """`training.fp8.scaling`."""
    compile: bool = True
    deterministic: bool = False
    """`training.deterministic`: published figures are of kernels whose sums come in any order."""
    early: bool = False
    """`training.optimizer.earlyLaunch`."""
    gpu_memory: int = H100
    """GiB of the smallest GPU on which it may fit: others do not try it."""

    def training(self) -> dict[str, object]:
        """The fields of `training` that it sets."""
        return {
            "globalBatchSize": self.rows * self.micro_batches,
            "sequenceLength": LENGTH,
            "precision": "bf16",
            "masterWeights": self.master_weights,
            "activationCheckpointing": self.checkpointing,
            "lossChunkTokens": self.loss_chunk,
            "fp8": {"scaling": self.fp8} if self.fp8 else None,
            "compile": self.compile,
            "deterministic": self.deterministic,
            "optimizer": {"earlyLaunch": self.early or None},
        }

    def numbers(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """A row of the table: settings to try in order until one fits into memory."""

    model: str
    label: str
    settings: tuple[Setting, ...]
    plain: bool = False
    """Whether the bare loop runs it instead of the worker."""
    profiled: bool = False
    """Whether its kernels are profiled, too, after the measured steps."""

    def settings_for(self, gibibytes: float | None) -> tuple[Setting, ...]:
        """The settings to try on a GPU with this memory; all of them if it is not known."""
        return tuple(one for one in self.settings if gibibytes is None or one.gpu_memory <= gibibytes + 1)


GOALS = {"llama-3.2-1b": 66_000, "llama-3.2-3b": 25_500, "llama-3-8b": 12_000}
"""Tokens a second in bf16 on one H200 that the worker aims at. The best public figure of 8B on one GPU is 10,471."""
_GOALS_GPU = ACCELERATORS["H200-SXM5-141GB"]
_LIMITED_BY_PRODUCTS = 0.86
"""Of a step of 1B on that GPU, the part that its products and attention take: the rest waits for memory."""


def goal_on(product: str, model: str, recomputed: float = 1.0) -> float | None:
    """The goal on another GPU, tokens a second; None if the GPU is not known.

    It is in proportion to the GPU's sustained rate of products, its memory's bandwidth, and `recomputed`: the
    operations of a step over those without activation checkpointing.
    """
    gpu = accelerator(product)
    if gpu is None:
        return None
    products = _GOALS_GPU.half * _GOALS_GPU.sustained / (gpu.half * gpu.sustained)
    memory = _GOALS_GPU.bandwidth / gpu.bandwidth
    time = _LIMITED_BY_PRODUCTS * products + (1 - _LIMITED_BY_PRODUCTS) * memory
    # On the GPU that the goals are for, they are what is aimed at, whatever the setting recomputes.
    return GOALS[model] / time / (1.0 if gpu is _GOALS_GPU else recomputed)


_TENSORWISE = Fp8Scaling.TENSORWISE.value


def _both(model: str, label: str, *settings: Setting, profiled: bool = False) -> list[Entry]:
    """In bf16 and in fp8."""
    in_fp8 = tuple(Setting(**{**asdict(setting), "fp8": _TENSORWISE}) for setting in settings)
    kinds = {"bf16": settings, "fp8": in_fp8}
    return [Entry(model, f"{kind}{label}", found, profiled=profiled) for kind, found in kinds.items()]


def _bare(model: str, *settings: Setting) -> Entry:
    return Entry(model, "bf16, bare loop", settings, plain=True)


ENTRIES: tuple[Entry, ...] = (
    _bare("llama-3.2-1b", Setting(4, 2, loss_chunk=None), Setting(2, 4, loss_chunk=None)),
    *_both("llama-3.2-1b", "", Setting(8, 1), Setting(4, 2), Setting(4, 2, "Selective"), profiled=True),
    Entry("llama-3.2-1b", "bf16, 131,072 tokens", (Setting(8, 4), Setting(4, 8))),
    Entry(
        "llama-3.2-1b", "bf16, deterministic", (Setting(8, 1, deterministic=True), Setting(4, 2, deterministic=True))
    ),
    _bare("llama-3.2-3b", Setting(2, 4, loss_chunk=None, gpu_memory=H200), Setting(1, 8, loss_chunk=None)),
    Entry(
        "llama-3.2-3b",
        "bf16",
        (
            Setting(4, 2, gpu_memory=H200),
            Setting(2, 4, gpu_memory=H200),
            Setting(2, 4, "Selective"),
            Setting(1, 8, "Selective"),
            Setting(2, 4, "Full"),
        ),
    ),
    Entry(
        "llama-3.2-3b",
        "fp8",
        (
            Setting(4, 2, fp8=_TENSORWISE, gpu_memory=H200),
            Setting(2, 4, fp8=_TENSORWISE),
            Setting(1, 8, fp8=_TENSORWISE),
            Setting(2, 4, "Full", fp8=_TENSORWISE),
        ),
    ),
    *_both(
        "llama-3-8b",
        ", all bf16",
        Setting(2, 4, master_weights=False, gpu_memory=H200),
        Setting(1, 8, master_weights=False, gpu_memory=H200),
        Setting(2, 4, "Selective", master_weights=False, gpu_memory=H200),
        Setting(1, 8, "Selective", master_weights=False, loss_chunk=4096),
        Setting(4, 2, "Full", master_weights=False, loss_chunk=1024),
        Setting(1, 8, "Full", master_weights=False, loss_chunk=1024),
    ),
    Entry(
        "llama-3-8b",
        "bf16",
        (
            Setting(1, 8, "Selective", loss_chunk=2048, gpu_memory=H200),
            Setting(1, 8, "Full", loss_chunk=1024, gpu_memory=H200),
        ),
    ),
)
"""A bare loop keeps fp32 parameters under autocast; of 8B that leaves no room for its logits."""

LABELS = tuple(dict.fromkeys(entry.label for entry in ENTRIES))
"""Names of runs, of any model."""
