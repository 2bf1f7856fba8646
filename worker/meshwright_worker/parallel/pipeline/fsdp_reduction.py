"""Controls when FSDP reduces a stage's gradients: once per step, after the stage's last action.

A full backward pass reduces layer by layer through FSDP's hooks. Weight gradients that are computed separately, after
the hooks ran, are reduced by calling what the hooks call; torch.distributed.pipelining does the same.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def disable_gradient_sync(module: nn.Module) -> None:
    """Make backward passes accumulate full gradients without reducing them."""
    _set(module, reduce=False)


def enable_gradient_sync(module: nn.Module) -> None:
    """Make the next backward pass, the last one, reduce the accumulated gradients."""
    _set(module, reduce=True)


def reduce_gradients(module: nn.Module) -> None:
    """Reduce the accumulated gradients; does nothing for a module that FSDP does not shard.

    Raises:
        RuntimeError: this version of torch stores FSDP's parameters elsewhere.
    """
    if not isinstance(module, FSDPModule):
        return
    _set(module, reduce=True)
    root: Any = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state):
            group.post_backward()
    root._root_post_backward_final_callback()


def reshard(module: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def upcast_gradients(module: nn.Module) -> None:
    """Move gradients that were added in the compute format, past FSDP's hooks, to its wide accumulators."""
    if not isinstance(module, FSDPModule):
        return
    root: Any = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def _set(module: nn.Module, *, reduce: bool) -> None:
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(reduce)
        module.set_is_last_backward(reduce)


def _parameter_groups(state: Any) -> list[Any]:
    # torch 2.13 has several groups per module, earlier versions one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise RuntimeError("FSDP of this version of torch keeps its parameters elsewhere: use `zeroStage: 0`")
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
