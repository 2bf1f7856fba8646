"""Shards a custom module over replicas with FSDP2, block by block, in the module's formats."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright_worker.custom_module.plan import PlanError
from meshwright_worker.custom_module.plan_resolution import ResolvedPlan
from meshwright_worker.parallel.data.fsdp import sum_gradients

ROOT = ""


def apply_fsdp(module: nn.Module, parts: ResolvedPlan, replicas: DeviceMesh, *, zero_stage: int) -> None:
    """Shard every parameter, in place.

    Args:
        module: with its weights, after it was split over a tensor group.
        parts: of its plan.
        replicas: one dimension, or two: the copies of a set of shards, and the ranks that share one (HSDP).
        zero_stage: 2 or 3.

    Raises:
        PlanError: FSDP would make copies of a parameter that is used in two blocks, or cannot shard one.
    """
    check_fsdp_units(module, parts)
    # From the inside out, as FSDP requires for nested blocks.
    blocks = sorted(parts.blocks.items(), key=lambda block: -block[0].count("."))
    for part in [*(block for _, block in blocks), module]:
        unit = fully_shard(
            part,
            mesh=replicas,
            reshard_after_forward=zero_stage == 3,
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        )
        sum_gradients(unit)


def check_fsdp_units(module: nn.Module, parts: ResolvedPlan) -> None:
    """Raise `PlanError` for a parameter that two FSDP units would contain, or that has no dimension."""
    blocks = {id(block): name for name, block in parts.blocks.items()}
    modules = dict(module.named_modules(remove_duplicate=False))
    first: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        check_shardable(name, parameter)
        path = name
        unit = ROOT
        while path and not unit:
            path = path.rpartition(".")[0]
            unit = blocks.get(id(modules[path]), ROOT)
        other, other_unit = first.setdefault(id(parameter), (name, unit))
        if other_unit != unit:
            raise PlanError(
                f"`blocks`: `{other}` and `{name}` are one parameter, in {_describe_unit(other_unit)} and in "
                f"{_describe_unit(unit)}; ZeRO stages 2 and 3 would make it two: remove these blocks from `blocks`, "
                "name one block that contains both, or use ZeRO stage 0 or 1"
            )


def check_shardable(name: str, parameter: nn.Parameter) -> None:
    """Raise `PlanError` for a parameter that cannot be sharded."""
    if not parameter.ndim or not parameter.shape[0]:
        raise PlanError(
            f"`{name}` has the shape {list(parameter.shape)}, which ZeRO cannot shard: give it at least one "
            "dimension, of at least one element"
        )


def _describe_unit(unit: str) -> str:
    return f"the block `{unit}`" if unit else "no block"
