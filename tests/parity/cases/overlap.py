"""Asynchronous tensor parallelism: the collectives of sequence parallelism taken apart into rings, beside all else."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

TECHNIQUE = "asynchronous tensor parallelism"
_ON: dict[str, Any] = {"tensor_overlap": True}
_LATENT = {"kv_heads": 4, "latent": {"kv_rank": 12, "rope_size": 4, "query_rank": 20}}
_GPT = {"kv_heads": 4, "biases": True, "norm": "LayerNorm", "positions": 64, "gated": False, "activation": "GELU"}
_TWICE: dict[str, Any] = {"tensor": 2, "pipeline": 2, "micro_batches": 4}


def _case(layout: dict[str, Any], common: dict[str, Any] | None = None, *, smoke: bool = False) -> Case:
    parallelism = {**_ON, **layout.get("parallelism", {})}
    # Keys' biases move no score: see `Case.vanishing`.
    vanishing = "key.bias" if common is _GPT else "-"
    layout = {"tensor": 2, **layout, "parallelism": parallelism}
    return Case(TECHNIQUE, layout, common or {}, smoke=smoke, vanishing=vanishing)


CASES = [
    _case({}, smoke=True),
    _case({"tensor": 4}, {"kv_heads": 4}, smoke=True),
    _case({"data": 2, "zero": 2}),
    _case({"data": 2, "zero": 3}, smoke=True),
    _case({"pipeline": 2}),
    _case({**_TWICE, "parallelism": {"schedule": "ZBH1"}}, smoke=True),
    _case({**_TWICE, "parallelism": {"schedule": "DualPipeV"}}, {"layers": 4}),
    _case({**_TWICE, "parallelism": {"schedule": "GPipe", "rematerialize": True}}),
    _case({"context": 2}, smoke=True),
    _case({"context": 2}, {"packing": "Documents", "length": 22}),
    _case({"data": 2, "zero": 3, "pipeline": 2}),
    _case({"data": 2, "context": 2}),
    _case({}, _GPT, smoke=True),
    _case({}, _LATENT, smoke=True),
    _case({}, {**_LATENT, "latent": {"kv_rank": 12, "rope_size": 4}}),
    _case({"pipeline": 2}, {"tie_embeddings": True}),
    _case({}, {"mixture": "Mixtral"}),
    _case({}, {"mixture": "DeepSeek-V3"}),
    _case({"data": 2, "expert": 2}, {"mixture": "DeepSeek-V3"}, smoke=True),
    _case({"training": {"activation_checkpointing": "Full"}}),
    _case({"training": {"activation_checkpointing": "Selective"}}, smoke=True),
    _case({"training": {"activation_offload": True}}),
    _case({"training": {"loss_chunk_tokens": 24}}),
    _case({}, {"training": {"dropout": 0.1, "attention_dropout": 0.2}}),
]
CASES += [
    Case(TECHNIQUE, {"parallelism": _ON}, refused="needs `tensor` of at least 2"),
    Case(
        TECHNIQUE,
        {"tensor": 2, "sequence": False, "parallelism": _ON},
        refused="`sequence: true`",
    ),
    Case(
        TECHNIQUE,
        {"tensor": 2, "parallelism": _ON, "training": {"fp8": {}}},
        refused="`training.fp8`",
    ),
]
