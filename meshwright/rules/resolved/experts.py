"""Which experts can be spread over which ranks. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.model_parts import Activation
from meshwright.models.architecture import Architecture
from meshwright.models.mixture import mixture_problems
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.nearest import nearest


def expert_problems(run: NativeRun, model: Architecture) -> Iterator[str]:
    """What keeps a mixture's experts from running, in sentences with the nearest values that work."""
    mixture, replicas, expert_degree = model.mixture, run.data_parallel * run.context, run.expert
    experts = mixture.experts if mixture else 1
    if expert_degree > 1 and mixture is None:
        yield f"`parallelism.expert: {expert_degree}` needs a `model.mixture`; without one only 1 fits"
        return
    dividends = {"replicas` x `parallelism.context": replicas, "model.mixture.experts": experts}
    if not_divided := {name: value for name, value in dividends.items() if value % expert_degree}:
        nearest_values = nearest(expert_degree, lambda n: replicas % n == 0 and experts % n == 0, replicas)
        for name, value in not_divided.items():
            yield (
                f"`parallelism.expert: {expert_degree}` must divide `{name}: {value}`; nearest that fit: "
                f"{nearest_values}"
            )
    if mixture is None:
        return
    if not model.gated or model.biases or model.activation is not Activation.SILU:
        yield "`model.mixture` needs `gated: true`, `biases: false` and `activation: SiLU`: experts are SwiGLU"
    yield from (f"`model.mixture.{field}` {must}" for field, must in mixture_problems(mixture, model.layers))
    if _uses_fp8(run) and expert_degree > 1 and expert_degree % run.context and run.context % expert_degree:
        nearest_values = nearest(
            expert_degree, lambda n: replicas % n == 0 and (n % run.context == 0 or run.context % n == 0), replicas
        )
        yield (
            f"`parallelism.expert: {expert_degree}` must divide `parallelism.context: {run.context}`, or be a "
            "multiple of it, "
            f"with `training.fp8`, whose scales are of whole sequences; nearest that fit: {nearest_values}"
        )
    if not run.parallelism.expert_tensor and (not run.parallelism.sequence or _uses_fp8(run)):
        yield (
            "`parallelism.expertTensor: false` needs `parallelism.sequence: true` and no `training.fp8`: GPUs with "
            "whole experts route positions of their own, and fp8 scales are of all"
        )
    splits_experts = run.parallelism.expert_tensor
    widths = {
        **({"model.mixture.intermediateSize": mixture.intermediate_size} if splits_experts else {}),
        "model.mixture.sharedIntermediateSize": mixture.shared_intermediate_size,
    }
    if not_divided := {name: value for name, value in widths.items() if value % run.tensor}:
        nearest_values = nearest(run.tensor, lambda n: not any(value % n for value in widths.values()), model.heads)
        for name, value in not_divided.items():
            yield (
                f"`parallelism.tensor: {run.tensor}` must divide `{name}: {value}`; nearest that fit: {nearest_values}"
            )
    if mixture.capacity_factor is not None and run.context > 1:
        yield (
            "`model.mixture.capacityFactor` needs `parallelism.context: 1`: which tokens come first is not known where "
            "ranks hold parts of a sequence"
        )


def _uses_fp8(run: NativeRun) -> bool:
    return run.training.fp8 is not None
