"""Rules on the world size and on tensor parallelism."""

from __future__ import annotations

from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule, divides

MAX_WORLD_SIZE = 65536
MAX_WORKERS = 1024
"""Limited because `status.placement.workers` lists each worker, and an object must stay small."""

RANKS_OF_REPLICA = (
    "(has(self.parallelism.tensor) ? self.parallelism.tensor : 1)"
    " * (has(self.parallelism.pipeline) ? self.parallelism.pipeline : 1) * self.parallelism.context"
)
"""In CEL, the number of ranks of a replica. A degree that is left out counts as 1."""
LEAST_WORLD_SIZE = f"{RANKS_OF_REPLICA} * self.replicas"
"""In CEL, the number of ranks. A degree that is left out counts as 1."""
HAS_PIPELINE = "has(self.parallelism.pipeline) && self.parallelism.pipeline > 1"
"""In CEL, whether the job states a pipeline of several stages."""
PLANNED = "(has(self.runtime.framework) && self.runtime.framework != 'TorchFT')"
"""In CEL, whether the planner chooses the layout for a command."""
_WORLD_SIZE_KNOWN = (
    "(!has(self.gpus)"
    f" && ((has(self.runtime.command) && !{PLANNED})"
    " || (has(self.parallelism.tensor) && has(self.parallelism.pipeline))))"
)


def least_world_size(facts: Facts) -> int:
    """The number of ranks. A degree that is left out counts as 1."""
    return ranks_of_replica(facts) * facts.replicas


def ranks_of_replica(facts: Facts) -> int:
    """The number of ranks of a replica. A degree that is left out counts as 1."""
    p = facts.parallelism
    return (p.tensor or 1) * (p.pipeline or 1) * p.context_or_default


def _world_size(facts: Facts) -> int | None:
    """The number of ranks, or None if the planner determines it."""
    p = facts.parallelism
    own_degrees = facts.runtime.command is not None and not facts.runtime.planned
    known = own_degrees or (p.tensor is not None and p.pipeline is not None)
    return least_world_size(facts) if known and facts.gpus is None else None


def _gpus_per_worker(facts: Facts) -> int | None:
    return None if facts.workers is None else facts.workers.gpus_per_worker


def _whole_workers(facts: Facts) -> bool:
    return divides(_gpus_per_worker(facts), _world_size(facts))


def _worker_limit(facts: Facts) -> bool:
    world, gpus = _world_size(facts), _gpus_per_worker(facts)
    return world is None or gpus is None or world <= MAX_WORKERS * gpus


def _aligned_groups(facts: Facts) -> bool:
    tensor, gpus = facts.parallelism.tensor, _gpus_per_worker(facts)
    return tensor is None or gpus is None or tensor % gpus == 0 or gpus % tensor == 0


def _heads_split(facts: Facts) -> bool:
    return facts.model is None or divides(facts.parallelism.tensor, facts.model.heads)


def _kv_heads_split(facts: Facts) -> bool:
    return facts.model is None or divides(facts.parallelism.tensor, facts.model.kv_heads)


def _feed_forward_splits(facts: Facts) -> bool:
    return facts.model is None or divides(facts.parallelism.tensor, facts.model.intermediate_size)


def _vocabulary_splits(facts: Facts) -> bool:
    return facts.model is None or divides(facts.parallelism.tensor, facts.model.vocab_size)


def _sequence_splits(facts: Facts) -> bool:
    length = facts.training.sequence_length if facts.training is not None else None
    return not facts.parallelism.sequence or divides(facts.parallelism.tensor, length)


def _tensor_overlap_has_collectives(facts: Facts) -> bool:
    p = facts.parallelism
    return not p.tensor_overlap or (p.sequence and p.tensor is not None and p.tensor > 1)


def _tensor_overlap_has_plain_products(facts: Facts) -> bool:
    training = facts.training
    return not facts.parallelism.tensor_overlap or training is None or (training.fp8 is None and training.lora is None)


PARALLELISM_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "replicas",
        "`replicas` times `parallelism.tensor`, `parallelism.pipeline` and `parallelism.context` must be at most "
        f"{MAX_WORLD_SIZE}: lower one of them",
        f"{LEAST_WORLD_SIZE} <= {MAX_WORLD_SIZE}",
        lambda facts: least_world_size(facts) <= MAX_WORLD_SIZE,
    ),
    Rule(
        "workers.gpusPerWorker",
        "must divide the world size (`replicas` times `parallelism.tensor`, `parallelism.pipeline` and "
        "`parallelism.context`), because all workers have the same number of ranks",
        f"!{_WORLD_SIZE_KNOWN} || ({LEAST_WORLD_SIZE}) % self.workers.gpusPerWorker == 0",
        _whole_workers,
    ),
    Rule(
        "workers.gpusPerWorker",
        f"must be at least the world size divided by {MAX_WORKERS}, because a job has at most {MAX_WORKERS} workers",
        f"!{_WORLD_SIZE_KNOWN} || {LEAST_WORLD_SIZE} <= {MAX_WORKERS} * self.workers.gpusPerWorker",
        _worker_limit,
    ),
    Rule(
        "workers.gpusPerWorker",
        "must be a multiple or a divisor of `parallelism.tensor`, because a worker has complete tensor-parallel "
        "groups, or a group has complete workers",
        "!has(self.parallelism.tensor) || self.parallelism.tensor % self.workers.gpusPerWorker == 0"
        " || self.workers.gpusPerWorker % self.parallelism.tensor == 0",
        _aligned_groups,
    ),
    Rule(
        "parallelism.tensor",
        "must divide `model.heads`, because attention is split by heads",
        "!has(self.parallelism.tensor) || !has(self.model) || !has(self.model.heads)"
        " || self.model.heads % self.parallelism.tensor == 0",
        _heads_split,
    ),
    Rule(
        "parallelism.tensor",
        "must divide `model.kvHeads`, because attention is split by heads",
        "!has(self.parallelism.tensor) || !has(self.model) || !has(self.model.kvHeads)"
        " || self.model.kvHeads % self.parallelism.tensor == 0",
        _kv_heads_split,
    ),
    Rule(
        "parallelism.tensor",
        "must divide `model.intermediateSize`, because the feed-forward layer is split by its width",
        "!has(self.parallelism.tensor) || !has(self.model) || !has(self.model.intermediateSize)"
        " || self.model.intermediateSize % self.parallelism.tensor == 0",
        _feed_forward_splits,
    ),
    Rule(
        "parallelism.tensor",
        "must divide `model.vocabSize`, because embedding and logits are split by the vocabulary: raise the "
        "vocabulary size to a multiple",
        "!has(self.parallelism.tensor) || !has(self.model) || !has(self.model.vocabSize)"
        " || self.model.vocabSize % self.parallelism.tensor == 0",
        _vocabulary_splits,
    ),
    Rule(
        "parallelism.tensor",
        "must divide `training.sequenceLength` with `sequence: true`: change one of the three",
        "!has(self.parallelism.tensor) || !has(self.training) || !self.parallelism.sequence"
        " || self.training.sequenceLength % self.parallelism.tensor == 0",
        _sequence_splits,
    ),
    Rule(
        "parallelism.tensorOverlap",
        "needs `tensor` of at least 2 and `sequence: true`, whose collectives it splits: set both, or remove this "
        "field",
        "!self.parallelism.tensorOverlap || (self.parallelism.sequence && has(self.parallelism.tensor)"
        " && self.parallelism.tensor > 1)",
        _tensor_overlap_has_collectives,
    ),
    Rule(
        "parallelism.tensorOverlap",
        "is not supported with `training.fp8`, whose scales cover full tensors, and with `training.lora`, whose "
        "matrix products are too short to overlap with: set it to false",
        "!self.parallelism.tensorOverlap || !has(self.training)"
        " || (!has(self.training.fp8) && !has(self.training.lora))",
        _tensor_overlap_has_plain_products,
    ),
)
