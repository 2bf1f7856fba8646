"""Explains each degree of the chosen layout, and what bounds its step.

This is for a search over all degrees: the reason is the fraction of a step that a degree takes. `explain_plan.py` has
the reasons for the plan of a job.
"""

from __future__ import annotations

from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.figures import counted
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.memory import Memory
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.alternatives import recompute_text
from meshwright.planner.search.best_first import SearchResult
from meshwright.planner.search.candidate import OFFLOAD_MEMORY, Candidate
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.units import GIB


def reasons(result: SearchResult) -> tuple[str, ...]:
    """Return the reason for each degree of the best layout, with numbers, and what bounds its step."""
    request, best = result.request, result.best
    used, estimate = best.strategy, best.estimate
    sentences = [
        _tensor(request, used, estimate),
        _pipeline(request, used, estimate),
        _data(request, used, estimate),
        _context(request, used) or _sequence(used),
        _expert(request, used, estimate),
        _memory_saving(best),
        limits(result),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def limits(result: SearchResult) -> str:
    """Return what bounds the step: its largest part apart from compute, and the fullest stage."""
    best = result.best
    memory, byte_limit = best.estimate.memory, result.request.memory_limit(best.estimate.gpus)
    return (
        f"{step_text(best.estimate)}; stage {memory.stage} is fullest, {memory.total / GIB:.1f} of "
        f"{byte_limit / GIB:.1f} GiB, most of it {_fullest(memory)}"
    )


def step_text(estimate: Estimate) -> str:
    """Return the largest parts of a step's time as text."""
    time = estimate.time
    parts = {
        "recomputation": time.recompute,
        "tensor-parallel collectives": time.tensor,
        "context-parallel exchange": time.context,
        "the experts' all-to-all": time.expert,
        "sends between stages": time.pipeline,
        "the pipeline's bubble": time.bubble,
        "reducing gradients over replicas": time.data,
        "the optimizer": time.optimizer,
        "offloading": time.offload,
        "the host": time.host,
    }
    name, seconds = max(parts.items(), key=lambda part: part[1])
    return (
        f"a step spends {time.compute / time.total:.0%} in matrix products and most of the rest "
        f"in {name} ({seconds / time.total:.0%})"
    )


def set_by(degree: str, field: str) -> str:
    """Return the reason for a degree that the job states."""
    return f"{degree}: set by `{field}`"


def expert_parts(request: SearchRequest, expert: int) -> str:
    """Return how many experts a rank has, as text. Empty without a mixture."""
    mixture = request.work.model.mixture
    return f"{mixture.experts // expert} of {mixture.experts} experts a rank" if mixture is not None else ""


def _tensor(request: SearchRequest, used: Strategy, estimate: Estimate) -> str:
    if request.pins.tensor is not None:
        return set_by(f"TP {used.tensor}", "parallelism.tensor")
    if used.tensor == 1:
        return "TP 1: nothing is gained by splitting layers, a rank holds its part and every collective is saved"
    domain = request.domain
    inside = "fills the NVLink domain" if used.tensor == domain else f"stays inside the NVLink domain of {domain} GPUs"
    return (
        f"TP {used.tensor}: {inside}, where its collectives take {_part(estimate.time.tensor, estimate):.0%} of a step"
    )


def _pipeline(request: SearchRequest, used: Strategy, estimate: Estimate) -> str:
    pipeline = used.pipeline
    if request.pins.pipeline is not None:
        why = set_by(f"PP {pipeline}", "parallelism.pipeline")
    elif pipeline == 1:
        return "PP 1: the model fits without a pipeline, which would idle at the ends of each step"
    else:
        why = f"PP {pipeline}: spreads the layers' states with little traffic"
    if pipeline == 1:
        return why
    return (
        f"{why}; {used.micro_batches} micro-batches of {used.micro_batch_size} on the "
        f"{used.schedule_kind.short_name} schedule leave a bubble of {estimate.bubble:.1%}"
    )


def _data(request: SearchRequest, used: Strategy, estimate: Estimate) -> str:
    degree = f"DP {used.data}"
    why = "takes the rest of the GPUs" if used.data > 1 else "the replica takes all GPUs"
    if request.gpus - used.world_size >= used.layout.replica_size:
        batch = request.work.global_batch
        why = f"no larger number of replicas that divides {batch} sequences makes a step shorter"
    if used.data == 1:
        return f"{degree}: {why}"
    return f"{degree}: {why}; reducing gradients takes {_part(estimate.time.data, estimate):.1%} of a step"


def _context(request: SearchRequest, used: Strategy) -> str:
    if used.context == 1:
        return ""
    name = f"CP {used.context} ({used.context_method.value})"
    if request.pins.context is not None:
        return set_by(name, "parallelism.context")
    length = request.work.sequence_length
    each = length // used.context
    return f"{name}: activations of {length} tokens do not fit otherwise or cost more elsewhere; each rank keeps {each}"


def _expert(request: SearchRequest, used: Strategy, estimate: Estimate) -> str:
    expert, experts = used.expert, expert_parts(request, used.expert)
    # In a free search `parallelism.expert` has no effect, so it is not named for a degree of 1.
    if not experts or (request.pins.expert is not None and expert > 1):
        return set_by(f"EP {expert}", "parallelism.expert") if experts else ""
    if expert == 1:
        return f"EP 1: every replica has all experts, so no token is sent to another rank ({experts})"
    return f"EP {expert}: {experts}; the all-to-all takes {_part(estimate.time.expert, estimate):.0%} of a step"


def _sequence(used: Strategy) -> str:
    if used.tensor > 1 and used.sequence_parallel:
        return "sequence parallelism with TP: norms and residuals are split too, at no further traffic"
    return ""


def _memory_saving(best: Candidate) -> str:
    used = best.strategy
    sentences = []
    if used.zero_stage:
        sentences.append(f"ZeRO-{used.zero_stage} over {counted(used.shard_ranks, 'replica')}")
    if used.checkpointing is not ActivationCheckpointing.NONE:
        sentences.append(recompute_text(used.checkpointing))
    if used.optimizer_offload is not OptimizerOffload.NONE:
        sentences.append(f"optimizer state in {OFFLOAD_MEMORY[used.optimizer_offload]} memory")
    return f"{' and '.join(sentences)}: the least saving that fits" if sentences else "no memory has to be saved"


def _part(seconds: float, estimate: Estimate) -> float:
    """The fraction of a step."""
    return seconds / estimate.seconds


def _fullest(memory: Memory) -> str:
    kinds = {
        "parameters, gradients and optimizer state": memory.states,
        "activations": memory.activations,
        "logits": memory.logits,
        "gathered parameters": memory.gathered,
        "buffers": memory.buffers,
    }
    return max(kinds, key=lambda kind: kinds[kind])
