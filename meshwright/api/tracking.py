"""`spec.training.tracking` of a ParallelTrainingJob: experiment trackers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel

Name = Annotated[str, Field(min_length=1, max_length=253)]


class WandbSpec(ApiModel):
    """A run of Weights & Biases."""

    project: Name
    """Project of the run."""
    entity: Name | None = None
    """User or team. Defaults to that of the key."""
    offline: bool = False
    """Whether the run is only written to files, for `wandb sync`."""


class MlflowSpec(ApiModel):
    """A run of MLflow."""

    experiment: Name
    """Experiment of the run."""
    uri: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Tracking URI. Defaults to a directory next to the other files."""


class TrackingSpec(ApiModel):
    """Trackers that get loss, rates and throughput of each step from a process next to rank 0. One that fails does not
    stop training. Needs `checkpoint`, in whose directory `tracking` has the files.
    """

    json_lines: bool = True
    """Write `steps.jsonl`: one JSON object per step or restart."""
    tensor_board: bool = False
    """Write event files of TensorBoard."""
    wandb: WandbSpec | None = None
    """Weights & Biases. Set `WANDB_API_KEY` in `workers.env`, with `valueFrom`."""
    mlflow: MlflowSpec | None = None
    """MLflow. Set its credentials in `workers.env`, with `valueFrom`."""
