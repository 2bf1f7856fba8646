"""What this repository's worker runs of what a search could propose; anything else its API or the worker would refuse.

The rules themselves stand in `meshwright/api/rules` and `meshwright/runs`; a property test holds
the proposals of many searches to both.
"""

from __future__ import annotations

from meshwright.planner.cost.strategy import Strategy, Workload

MAX_MICRO_BATCHES = 65536
MAX_CONTEXT = 1024
MAX_STAGES = 1024
MAX_LAYERS_PER_STAGE = 1024


def runs(work: Workload, choices: Strategy) -> bool:
    """Whether the worker runs a layout that divides model and batch."""
    model, count = work.model, choices.micro_batches
    moe = model.mixture
    if choices.pipeline > 1 and count < choices.pipeline:
        return False
    if count > MAX_MICRO_BATCHES or choices.context > MAX_CONTEXT:
        return False
    if moe is not None and moe.shared_intermediate_size % choices.tensor:
        return False
    if moe is not None and choices.tensor > 1 and not (choices.expert_tensor or choices.sequence_parallel):
        return False
    if choices.layer_split is not None:
        split = choices.layer_split
        if min(split) < 1 or len(split) > MAX_STAGES or max(split) > MAX_LAYERS_PER_STAGE:
            return False
    return _flat_shards_allow(work, choices) if choices.zero_stage == 1 and choices.shard_ranks > 1 else True


def _flat_shards_allow(work: Workload, choices: Strategy) -> bool:
    """Flat shards do not know experts that are split, tables that two stages share, or stages on two ranks."""
    split_experts = work.model.mixture is not None and (choices.expert > 1 or choices.tensor > 1)
    shared_table = work.model.tie_embeddings and choices.pipeline > 1
    return not (split_experts or shared_table or choices.schedule_kind.bidirectional)
