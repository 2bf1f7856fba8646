"""What rules read: a spec, in which degrees may be open, or a run, for which the planner has chosen all of them.

`ParallelTrainingJobSpec` implements `Facts`, and `facts_of_run` creates the facts of a run. A number that is None is
open or unknown, and rules about it hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.data import DataSpec
from meshwright.api.mixture import MixtureSpec
from meshwright.api.model_parts import Activation, LatentSpec, Norm, RopeScalingSpec
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.spec import RuntimeSpec
from meshwright.api.training import TrainingSpec
from meshwright.api.workers import WorkersSpec
from meshwright.protocol.run_config import NativeRun


class ModelFacts(Protocol):
    """A model's sizes: a `ModelSpec`, which has none of them with a preset, or a resolved `Architecture`."""

    @property
    def layers(self) -> int | None:
        """Decoder layers."""

    @property
    def hidden_size(self) -> int | None:
        """Width of the residual stream."""

    @property
    def intermediate_size(self) -> int | None:
        """Width of the feed-forward layer."""

    @property
    def heads(self) -> int | None:
        """Query heads. None if a preset or a configuration names the model: then every size is unknown."""

    @property
    def kv_heads(self) -> int | None:
        """Key and value heads. Defaults to `heads`."""

    @property
    def vocab_size(self) -> int | None:
        """Rows of the token embedding."""

    @property
    def tie_embeddings(self) -> bool | None:
        """Whether the output projection is the token embedding."""

    @property
    def mixture(self) -> MixtureSpec | None:
        """Mixtures of experts that replace feed-forward layers."""

    @property
    def head_size(self) -> int | None:
        """Width of a query's and key's head."""

    @property
    def gated(self) -> bool | None:
        """Whether the feed-forward layer has a gate. Defaults to true."""

    @property
    def activation(self) -> Activation | None:
        """Non-linearity of the feed-forward layer. Defaults to SiLU."""

    @property
    def norm(self) -> Norm | None:
        """Kind of the norms. Defaults to RMSNorm."""

    @property
    def biases(self) -> bool | None:
        """Whether matrices and norms have biases."""

    @property
    def attention_biases(self) -> bool | None:
        """Whether queries, keys and values have a bias."""

    @property
    def query_key_norms(self) -> bool | None:
        """Whether queries and keys are normalized."""

    @property
    def positions(self) -> int | None:
        """Rows of a learned position embedding. Positions are rotary if it is 0 or left out."""

    @property
    def latent(self) -> LatentSpec | None:
        """Multi-head latent attention."""

    @property
    def sliding_window(self) -> int | None:
        """Number of keys that a query attends to. All if it is 0 or left out."""

    @property
    def full_attention_every(self) -> int | None:
        """The last of every so many layers attends to all keys."""

    @property
    def window_rope_theta(self) -> float | None:
        """Rotary base of layers with a sliding window. That of the others if it is 0 or left out."""

    @property
    def rope_scaling(self) -> RopeScalingSpec | None:
        """Rescaling of rotary frequencies."""


class Facts(Protocol):
    """What rules read. `ParallelTrainingJobSpec` implements it."""

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""

    @property
    def gpus(self) -> int | None:
        """The budget of GPUs, with which the number of replicas is open. None if `replicas` determines it."""

    @property
    def parallelism(self) -> ParallelismSpec:
        """Degrees and techniques. A degree that is None is open."""

    @property
    def model(self) -> ModelFacts | None:
        """The model. None with a command."""

    @property
    def data(self) -> DataSpec | None:
        """The training data. None with a command."""

    @property
    def training(self) -> TrainingSpec | None:
        """Length, batch, precision and optimizer. None with a command."""

    @property
    def checkpoint(self) -> CheckpointSpec | None:
        """Checkpoints. None if the job has none."""

    @property
    def runtime(self) -> RuntimeSpec:
        """What the ranks run."""

    @property
    def workers(self) -> WorkersSpec | None:
        """The worker pods. None if they are unknown, as for a run."""


@dataclass(frozen=True, slots=True)
class ResolvedFacts:
    """The facts of a run, or of a candidate of the planner."""

    replicas: int
    parallelism: ParallelismSpec
    model: ModelFacts | None
    data: DataSpec | None
    training: TrainingSpec | None
    checkpoint: CheckpointSpec | None = None
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    workers: WorkersSpec | None = None
    gpus: int | None = None


def facts_of_run(run: NativeRun) -> ResolvedFacts:
    """The facts of what ranks run: no degree is open, and the model's sizes are known."""
    model = run.architecture
    if model.head_size == model.hidden_size // max(1, model.heads):
        # It follows from the two others, so the nearest values of these may differ from it.
        model = model.model_copy(update={"head_size": None})
    return ResolvedFacts(
        replicas=run.data_parallel,
        parallelism=run.parallelism.model_copy(update=run.degrees),
        model=model,
        data=run.data,
        training=run.training,
        checkpoint=run.checkpoint,
    )


def islands(facts: Facts) -> int:
    """Number of islands of replicas. 1 without `training.outer`."""
    outer = facts.training.outer if facts.training is not None else None
    return 1 if outer is None else outer.islands or facts.replicas


def shard_ranks(facts: Facts) -> int:
    """Ranks with the same dense parameters: `replicas` times `context`, which counts as 1 while it is open."""
    return facts.replicas * facts.parallelism.context_or_default


def sequence_unit(parallelism: ParallelismSpec) -> int:
    """Each part of a row is a multiple of this number of tokens: one per tensor-parallel rank with `sequence`."""
    return (parallelism.tensor or 1) if parallelism.sequence else 1


SCALED_BATCH = "(has(self.elastic) && has(self.elastic.scaledBatch))"
"""In CEL, that the batch follows the replicas."""


def scales_batch(facts: Facts) -> bool:
    """Whether the batch follows the replicas. Then `replicas` need not divide it."""
    elastic = getattr(facts, "elastic", None)
    return elastic is not None and elastic.scaled_batch is not None
