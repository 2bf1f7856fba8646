"""Sharding over replicas, layer by layer: ZeRO stages 2 and 3 (arXiv 1910.02054) by FSDP2, with HSDP and hpZ.

Gradients are reduced once per step, after the stage's last action, or with `dataParallel.reduceEveryMicroBatch` in
every micro-batch: then only shards accumulate. A full backward pass reduces layer by layer through FSDP's hooks. Weight
gradients that are computed separately, after the hooks ran, are reduced by calling what the hooks call;
torch.distributed.pipelining does the same. Only this module uses FSDP's private attributes.

FSDP1's strategies correspond to these: FULL_SHARD is stage 3, SHARD_GRAD_OP is stage 2. In their HYBRID forms a set of
shards has `shardSize` replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.api.data_parallel import DataParallelEngine
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.precision import Precision
from meshwright.protocol.run_config import Run
from meshwright_worker.dtypes import sharding_policy
from meshwright_worker.models.decoder import DecoderStage

_WITHOUT_FSDP = "use `zeroStage: 0`"


def apply_fsdp(
    stage: DecoderStage,
    replicas: DeviceMesh,
    parallelism: ParallelismSpec,
    precision: Precision,
    offload: OffloadPolicy,
) -> None:
    """Shard every parameter of a stage, layer by layer, in place.

    Stage 2 keeps a layer's gathered parameters from a step's first forward to its last backward pass. Stage 3 frees
    them after every pass and gathers twice in a micro-batch, the second time only from `reshard_size` neighbors if that
    is set.

    Args:
        stage: built on the meta device.
        replicas: one dimension, or two: the copies of a set of shards, and the ranks that share one (HSDP).
        parallelism: the ZeRO stage and its options.
        precision: determines FSDP's casts.
        offload: where shards are stored.
    """
    policy = sharding_policy(precision)
    free: bool | int = parallelism.zero_stage_or_default == 3 and (parallelism.data_parallel.reshard_size or True)
    for module in [*stage.layers.values(), stage]:
        unit = fully_shard(module, mesh=replicas, reshard_after_forward=free, mp_policy=policy, offload_policy=offload)
        sum_gradients(unit)


def sum_gradients(unit: FSDPModule) -> None:
    """Make FSDP sum gradients over replicas instead of averaging them.

    Losses are already divided by the tokens of all replicas, and gloo only supports plain sums.
    """
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def preallocate_fsdp_storage(stage: nn.Module) -> None:
    """Make FSDP allocate its final storage, before other code keeps references to the local shards.

    When FSDP first gathers a parameter that does not divide evenly, it moves the shard into a padded one. Parameters
    without memory stay where they are.
    """
    if any(parameter.is_meta for parameter in stage.parameters()):
        return
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def disable_gradient_sync(module: nn.Module) -> None:
    """Make backward passes accumulate full gradients without reducing them."""
    _set(module, reduce=False)
    _free_after_backward(module, last=False)


def enable_gradient_sync(module: nn.Module, *, last: bool = True) -> None:
    """Make the next backward pass reduce the accumulated gradients to shards, which add up.

    Copies of a set of shards (HSDP) add theirs in a step's last pass.
    """
    _set(module, reduce=True)
    _free_after_backward(module, last=last)
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)


def reduce_gradients(module: nn.Module) -> None:
    """Reduce the accumulated gradients; does nothing for a module that FSDP does not shard.

    Raises:
        RuntimeError: this version of torch stores FSDP's parameters elsewhere.
    """
    if not isinstance(module, FSDPModule):
        return
    _set(module, reduce=True)
    _free_after_backward(module, last=True)
    root: Any = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state, _WITHOUT_FSDP):
            group.post_backward()
    root._root_post_backward_final_callback()


class GatherExtension(Protocol):
    """Changes what FSDP gathers of one parameter. FSDP counts and passes these arguments by position."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the tensors to gather, each with as many rows as the padded shard, and anything for the other hook."""

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the parameter, and the tensors whose memory FSDP frees and allocates. With `out`, which the first call
        returned, update that and return nothing.
        """


class UnitReduction:
    """Reduces one micro-batch's separately computed weight gradients: each FSDP unit as soon as it has all of its own.

    Between two reductions, gradients accumulate that backward passes compute at once, such as those of vectors.

    Args:
        module: a stage; nothing is reduced if FSDP does not shard it.
        weights: whose gradients will be added, each as often as that happens.
        last: whether this is the step's last reduction, in which copies of a set of shards (HSDP) add theirs.
    """

    def __init__(self, module: nn.Module, weights: Iterable[nn.Parameter], *, last: bool) -> None:
        self._module = module if isinstance(module, FSDPModule) else None
        self._units: dict[int, Any] = {}
        if self._module is None:
            return
        self._root: Any = self._module._get_fsdp_state()
        self._groups = [
            group for state in self._root._state_ctx.all_states for group in _parameter_groups(state, _WITHOUT_FSDP)
        ]
        for group in self._groups:
            self._units.update((id(parameter._unsharded_param), group) for parameter in group.fsdp_params)
        self._reduced: set[int] = set()
        self._missing = Counter(id(self._units[id(weight)]) for weight in weights)
        enable_gradient_sync(module, last=last)
        # Another micro-batch may be between its passes, and would have to gather parameters again.
        self._module.set_reshard_after_backward(last)

    def added(self, weight: nn.Parameter) -> None:
        """Tell that a gradient of this weight was added."""
        if self._module is None:
            return
        group = self._units[id(weight)]
        _upcast(group)
        self._missing[id(group)] -= 1
        if not self._missing[id(group)]:
            self._reduce(group)

    def finish(self) -> None:
        """Reduce the units without such weights, and wait for all reductions."""
        if self._module is None:
            return
        for group in self._groups:
            if id(group) not in self._reduced:
                _upcast(group)
                self._reduce(group)
        self._root._root_post_backward_final_callback()
        self._module.set_reshard_after_backward(True)
        disable_gradient_sync(self._module)

    def _reduce(self, group: Any) -> None:
        self._reduced.add(id(group))
        if group._is_hsdp:
            # Sums that wait for the copies are flat, so they need the same parameters every time.
            for parameter in group.fsdp_params:
                if _lacks_gradient(parameter):
                    _set_zero_gradient(parameter)
        group.post_backward()


class UsedParameters:
    """Records the parameters that backward passes compute gradients of, and makes FSDP reduce zeros for the others.

    FSDP leaves the others out. Replicas whose batches use different parameters of a unit, such as different experts,
    would then reduce buffers of different sizes.

    Args:
        module: sharded by FSDP, with storage allocated (see `preallocate_fsdp_storage`).
    """

    def __init__(self, module: nn.Module) -> None:
        self._used: set[int] = set()
        for part in module.modules():
            if isinstance(part, FSDPModule):
                state: Any = part._get_fsdp_state()
                for group in _parameter_groups(state, "use `zero_stage` 0 or 1"):
                    # FSDP calls it by this name after the unit's backward pass.
                    group.post_backward = partial(self._post_backward, group, group.post_backward)

    def pop(self) -> set[int]:
        """Ids of the parameters, as `named_parameters` has them, with a gradient since the last call."""
        used, self._used = self._used, set()
        return used

    def _post_backward(self, group: Any, reduce: Callable[..., None], *unused: Any) -> None:
        for parameter in group.fsdp_params:
            if not _lacks_gradient(parameter):
                self._used.add(id(parameter.sharded_param))
            elif group.reduce_grads:
                _set_zero_gradient(parameter)
        reduce(*unused)


def _lacks_gradient(parameter: Any) -> bool:
    unsharded = parameter._unsharded_param
    return unsharded.requires_grad and parameter.unsharded_accumulated_grad is None and unsharded.grad is None


def _set_zero_gradient(parameter: Any) -> None:
    unsharded = parameter._unsharded_param
    dtype = parameter.reduce_dtype or unsharded.dtype
    parameter.unsharded_accumulated_grad = torch.zeros_like(unsharded, dtype=dtype)


def reshard(module: nn.Module) -> None:
    """Free the parameters that a pass without a backward pass gathered; does nothing without FSDP."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def upcast_gradients(module: nn.Module) -> None:
    """Move gradients that were added in the compute format, past FSDP's hooks, to its wide accumulators."""
    if not isinstance(module, FSDPModule):
        return
    root: Any = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state, _WITHOUT_FSDP):
            _upcast(group)


def _upcast(group: Any) -> None:
    for parameter in group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def _set(module: nn.Module, *, reduce: bool) -> None:
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(reduce)
        module.set_is_last_backward(reduce)


def _free_after_backward(module: nn.Module, *, last: bool) -> None:
    """Say whether the next backward passes free the parameters. With stage 2 only a step's last one does: no gather
    would find others before the update.
    """
    if not isinstance(module, FSDPModule):
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in _parameter_groups(part._get_fsdp_state(), _WITHOUT_FSDP):
                group.reshard_after_backward = last or group._reshard_after_forward


def sharded_parameters(module: nn.Module, workaround: str) -> Iterator[Any]:
    """Yield FSDP's own object for each parameter that it shards in a module and the modules inside it.

    Raises:
        RuntimeError: this version of torch stores FSDP's parameters elsewhere; the message names the workaround.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in _parameter_groups(part._get_fsdp_state(), workaround):
                yield from group.fsdp_params


class PaddedShard:
    """This rank's rows of a parameter, as FSDP gathers them: padded to the most rows of a rank.

    `parameter` is FSDP's own object for it, see `sharded_parameters`.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def module(self) -> nn.Module:
        """The module that has the parameter."""
        module: nn.Module = self._parameter._module_info.module
        return module

    @property
    def name(self) -> str:
        """The parameter's name in its module."""
        return str(self._parameter._module_info.param_name)

    def __call__(self) -> torch.Tensor:
        """Return the rows; they share the parameter's memory."""
        rows: torch.Tensor = self._parameter._sharded_param_data.view(self._parameter.padded_sharded_param_size)
        return rows

    def extend_gather(self, extension: GatherExtension) -> None:
        """Let an extension say what is gathered, and what the module gets, from the next gather on."""
        # FSDP looks for its hooks on the shard's tensor. As attributes they leave it a plain tensor for everyone else.
        shard: Any = self._parameter._sharded_local_tensor
        shard.fsdp_pre_all_gather = extension.fsdp_pre_all_gather
        shard.fsdp_post_all_gather = extension.fsdp_post_all_gather
        self._parameter._init_extensions()
        # Gathers so far left their memory and the parameter that shows it.
        self._parameter.all_gather_outputs = []
        vars(self._parameter).pop("_unsharded_param", None)


def padded_shards(module: nn.Module, workaround: str) -> Iterator[PaddedShard]:
    """Yield the shard of each parameter of a module; raises what `sharded_parameters` raises."""
    for parameter in sharded_parameters(module, workaround):
        yield PaddedShard(parameter)


def _parameter_groups(state: Any, workaround: str) -> list[Any]:
    # torch 2.13 has several groups per module, earlier versions one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise RuntimeError(f"FSDP of this version of torch stores its parameters in another attribute: {workaround}")
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def uses_fsdp(run: Run) -> bool:
    """Return whether FSDP shards parameters over replicas; with a single replica it does not."""
    return run.parallelism.data_parallel_engine is DataParallelEngine.FSDP and run.layout.shard_ranks > run.islands


def reduces_every_micro_batch(run: Run) -> bool:
    """Return whether FSDP reduces gradients in each micro-batch."""
    return uses_fsdp(run) and bool(run.parallelism.data_parallel.reduce_every_micro_batch)
