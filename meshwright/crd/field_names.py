"""Where a field belongs that was written in the wrong place, or with the name that it has in other systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.crd.structural_schema import Schema

_MOST_PLACES = 3
_OF_OTHERS = {
    "accumulationsteps": "parallelism.microBatches",
    "contextparallelsize": "parallelism.context",
    "cp": "parallelism.context",
    "decaytype": "training.optimizer.decay",
    "dp": "replicas",
    "ep": "parallelism.expert",
    "epochs": "training.steps",
    "expertparallelsize": "parallelism.expert",
    "fsdp": "parallelism.zeroStage",
    "gradientaccumulationsteps": "parallelism.microBatches",
    "limits": "workers.resources",
    "lr": "training.optimizer.learningRate",
    "lrdecaystyle": "training.optimizer.decay",
    "lrschedulertype": "training.optimizer.decay",
    "lrwarmupiters": "training.optimizer.warmupSteps",
    "lrwsddecayiters": "training.optimizer.decaySteps",
    "maxseqlength": "training.sequenceLength",
    "microbatchsize": "parallelism.microBatches",
    "minlr": "training.optimizer.minLearningRate",
    "nnodes": "replicas",
    "nprocpernode": "workers.gpusPerWorker",
    "numdecaysteps": "training.optimizer.decaySteps",
    "numgpus": "gpus",
    "numnodes": "replicas",
    "numprocpernode": "workers.gpusPerWorker",
    "numwarmupsteps": "training.optimizer.warmupSteps",
    "numworkers": "replicas",
    "pipelineparallelsize": "parallelism.pipeline",
    "pp": "parallelism.pipeline",
    "requests": "workers.resources",
    "resumefromcheckpoint": "checkpoint.resumeFrom",
    "seqlen": "training.sequenceLength",
    "seqlength": "training.sequenceLength",
    "tensorparallelsize": "parallelism.tensor",
    "tp": "parallelism.tensor",
    "zero": "parallelism.zeroStage",
}
"""Names of other systems, as `plain_name` writes them, and the field below `spec` that takes their place."""


def plain_name(name: str) -> str:
    """A name without case, `_` and `-`, in which `learning_rate` and `learningRate` are equal."""
    return name.lower().replace("_", "").replace("-", "")


def same_name(one: str, other: str) -> bool:
    """Whether two names differ at most in case, `_` and `-`."""
    return plain_name(one) == plain_name(other)


def places_of(name: str, path: str, spec: Schema) -> Sequence[str]:
    """The paths of the fields that an unknown field may stand for. Empty if they are too many to help.

    Args:
        name: the unknown field.
        path: the object that has it, such as `spec.training`. Fields below it come before all others.
        spec: the schema of `spec`.
    """
    places = [place for field, place in _fields(spec, "spec") if same_name(field, name)]
    places = [place for place in places if place.startswith(f"{path}.")] or places
    if not places and plain_name(name) in _OF_OTHERS:
        places = [f"spec.{_OF_OTHERS[plain_name(name)]}"]
    return places if len(places) <= _MOST_PLACES else ()


def _fields(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    """Each field with its path. Fields of list items are left out, because their path has an index."""
    for name, part in schema.get("properties", {}).items():
        yield name, f"{path}.{name}"
        yield from _fields(part, f"{path}.{name}")
