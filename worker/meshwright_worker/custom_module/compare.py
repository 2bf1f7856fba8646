"""Compares a split module with the original, numerically: finds errors in a plan that no rule on names can detect.

Examples are a residual connection inside a region, heads counted from a setting instead of the tensors, or a norm after
a `row` layer. Each gives the same loss on every rank, but the loss of another module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshwright_worker.custom_module.plan import ParallelPlan
from meshwright_worker.custom_module.plan_resolution import Role, resolve
from meshwright_worker.custom_module.tensor_parallel import apply_tensor_parallel
from meshwright_worker.distributed.mesh import TENSOR, Mesh

LOSS = "loss"
_SHARE = 1e-3


def differences(
    module: nn.Module,
    plan: ParallelPlan,
    loss: Callable[[nn.Module, Any], tuple[torch.Tensor, int]],
    batch: Any,
    mesh: Mesh,
) -> dict[str, float]:
    """Return the differences between split and original module, on one batch that every rank has. Collective.

    Both are copies in fp64 and in `eval` mode. Every rank stores the full module, so use a small one of the same kind.

    Returns:
        The relative difference of the `loss`. For each parameter's gradient, the largest difference, relative to its
        largest element, or to a thousandth of the largest element of all gradients if that is more, since some
        gradients are only rounding errors. About 1e-13 if the plan is correct.

    Raises:
        PlanError: the plan does not fit the module.
    """
    whole = copy.deepcopy(module).to(mesh.device).double().eval()
    split_module = copy.deepcopy(whole)
    parts = resolve(split_module, plan)
    if mesh.layout.tensor > 1:
        apply_tensor_parallel(split_module, parts, mesh.device_mesh[TENSOR])
    wide = tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
    wanted, got = (loss(one, wide)[0] for one in (whole, split_module))
    for one in (wanted, got):
        one.backward()  # type: ignore[no-untyped-call]
    relative_differences = {LOSS: _relative(got.detach(), wanted.detach(), 0.0)}
    expected = dict(whole.named_parameters())
    smallest_scale = _SHARE * max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for name, parameter in split_module.named_parameters():
        gradient, reference = parameter.grad, expected[name].grad
        if gradient is None or reference is None:
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif mesh.layout.tensor > 1 and parts.roles[name] is Role.PARTIAL:
            dist.all_reduce(gradient, group=mesh.group(TENSOR))
        relative_differences[name] = _relative(gradient, reference, smallest_scale)
    return relative_differences


def _relative(got: torch.Tensor, wanted: torch.Tensor, smallest_scale: float) -> float:
    largest = max(smallest_scale, float(wanted.abs().max()))
    difference = float((got - wanted).abs().max())
    return difference / largest if largest else difference
