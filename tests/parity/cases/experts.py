"""Mixtures of experts: every router, capacity and balancing, in one stage and spread over ranks with all else."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

_TWO: dict[str, dict[str, Any]] = {
    "experts x data": {"data": 2, "expert": 2},
    "replicated experts": {"data": 2},
    "experts x ZeRO-2": {"data": 2, "expert": 2, "zero": 2},
    "experts x ZeRO-3": {"data": 2, "expert": 2, "zero": 3},
    "replicated experts x ZeRO-3": {"data": 2, "zero": 3},
    "split experts": {"tensor": 2, "sequence": False},
    "split experts, sequence parallel": {"tensor": 2},
    "mixtures in stages": {"pipeline": 2},
}
_FOUR: dict[str, dict[str, Any]] = {
    "experts x data": {"data": 4, "expert": 4},
    "experts x replicas": {"data": 4, "expert": 2},
    "experts x ZeRO-2": {"data": 4, "expert": 2, "zero": 2},
    "experts x ZeRO-3": {"data": 4, "expert": 2, "zero": 3},
    "experts x tensor": {"data": 2, "expert": 2, "tensor": 2, "sequence": False},
    "experts x tensor, sequence parallel": {"data": 2, "expert": 2, "tensor": 2},
    "experts x tensor x ZeRO-3": {"data": 2, "expert": 2, "tensor": 2, "zero": 3},
    "replicated experts x tensor x ZeRO-3": {"data": 2, "tensor": 2, "zero": 3},
    "experts x pipeline": {"data": 2, "expert": 2, "pipeline": 2, "micro_batches": 4},
    "experts x pipeline x ZeRO-2": {"data": 2, "expert": 2, "pipeline": 2, "zero": 2},
}
_EIGHT: dict[str, dict[str, Any]] = {
    "experts x replicas x tensor x ZeRO-3": {"data": 4, "expert": 2, "tensor": 2, "zero": 3},
    "experts x tensor x pipeline": {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
    "experts x tensor x pipeline x data": {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2, "sequence": False},
    "experts of one a rank x ZeRO-3": {"data": 8, "expert": 4, "zero": 3, "micro_batches": 1},
}
_SMOKE = {
    ("Mixtral", "experts x data"),
    ("Mixtral", "experts x ZeRO-3"),
    ("Mixtral", "split experts"),
    ("Switch", "experts x data"),
    ("Switch", "experts x tensor, sequence parallel"),
    ("ST-MoE", "split experts, sequence parallel"),
    ("ST-MoE", "experts x tensor, sequence parallel"),
    ("DeepSeek-V2", "experts x data"),
    ("DeepSeek-V3", "experts x data"),
    ("DeepSeek-V3", "experts x ZeRO-3"),
    ("DeepSeek-V3", "experts x tensor, sequence parallel"),
    ("DeepSeek-V3", "mixtures in stages"),
    ("DeepSeek-V3", "experts x pipeline"),
    ("unbalanced", "experts x data"),
}


def _cases() -> list[Case]:
    layouts = [(technique, layout) for group in (_TWO, _FOUR, _EIGHT) for technique, layout in group.items()]
    techniques: dict[str, tuple[str, ...]] = {
        "Mixtral": tuple(_EIGHT),
        "DeepSeek-V3": ("experts x replicas", "experts x tensor x ZeRO-3", "replicated experts x tensor x ZeRO-3"),
    }
    cases, smoke = [], set(_SMOKE)
    for technique, layout in sorted(layouts, key=lambda one: [name for name, _ in layouts].index(one[0])):
        for mixture in dict.fromkeys([*techniques, *sorted(mixture for mixture, _ in _SMOKE)]):
            run = techniques.get(mixture, ())
            if technique in run or (mixture, technique) in smoke:
                cases.append(Case(technique, layout, {"mixture": mixture}, smoke=(mixture, technique) in smoke))
                smoke.discard((mixture, technique))
    return cases


_SCHEDULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("experts x ZB-H1", {"schedule": "ZBH1"}, {}),
    ("experts x ZB-V", {"schedule": "ZBV"}, {"layers": 4}),
    ("experts x interleaved 1F1B", {"schedule": "Interleaved1F1B"}, {"layers": 4}),
    ("experts x DualPipe", {"schedule": "DualPipe"}, {}),
    ("experts x DualPipeV", {"schedule": "DualPipeV"}, {"layers": 4}),
    ("experts x re-materialization", {"schedule": "GPipe", "rematerialize": True}, {}),
]
_LATENT = {"kv_heads": 4, "latent": {"kv_rank": 12, "rope_size": 4, "query_rank": 20}}


def _in_schedules() -> list[Case]:
    """DeepSeek-V3's mixture, which has state beside parameters, in schedules that split or repeat passes."""
    cases = []
    for technique, parallelism, model in _SCHEDULES:
        layout = {"pipeline": 2, "data": 2, "expert": 2, "micro_batches": 4, "parallelism": parallelism}
        common = {"mixture": "DeepSeek-V3", **model}
        smoke = technique in ("experts x ZB-V", "experts x DualPipe", "experts x re-materialization")
        cases.append(Case(technique, layout, common, smoke=smoke))
    return cases


CASES = [
    *_cases(),
    *_in_schedules(),
    Case(
        "experts x activation checkpointing",
        {"data": 2, "expert": 2, "training": {"activation_checkpointing": "Full"}},
        {"mixture": "DeepSeek-V3"},
        smoke=True,
    ),
    # Of frozen experts, spread ones are frozen too.
    Case(
        "experts x LoRA",
        {"data": 2, "expert": 2},
        {"mixture": "Mixtral", "training": {"lora": {"rank": 3}}},
        smoke=True,
    ),
    Case("DeepSeek-V3", {"data": 2, "expert": 2, "tensor": 2}, {"mixture": "DeepSeek-V3", **_LATENT}, smoke=True),
    Case("DeepSeek-V3", {"data": 2, "expert": 2, "pipeline": 2, "zero": 3}, {"mixture": "DeepSeek-V3", **_LATENT}),
    Case(
        "experts that are not SwiGLU",
        {},
        {"mixture": "Mixtral", "gated": False},
        "`model.mixture` is not supported with `gated: false`",
    ),
    Case("indivisible experts", {"data": 3, "expert": 3}, {"mixture": "Mixtral"}, "`model.mixture.experts: 4`"),
    Case("more spread than replicas", {"data": 2, "expert": 4}, {"mixture": "Mixtral"}, "`parallelism.expert: 4`"),
    Case("experts without a mixture", {"data": 2, "expert": 2}, refused="`parallelism.expert: 2` needs"),
    Case(
        "indivisible width of experts",
        {"tensor": 4},
        {"mixture": "odd widths", "kv_heads": 4},
        "`model.mixture.intermediateSize: 10`",
    ),
    Case("capacity x context", {"context": 2}, {"mixture": "Switch"}, "`model.mixture.capacityFactor: 1.0`"),
    Case("more experts a token than there are", {}, {"mixture": "too many"}, "`model.mixture.perToken: 5`"),
]
