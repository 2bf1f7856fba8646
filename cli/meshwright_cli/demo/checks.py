"""Checks that a demo succeeded, and lists what is missing if it did not. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api import conditions
from meshwright_cli.demo.fault import Fault
from meshwright_cli.demo.lost_node import LostNode
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_cli.demo.story import Story


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """The training state in the manifest of the latest checkpoint."""

    step: int
    samples: int
    digest: str


def failed_checks(
    end: Snapshot, story: Story | None, record: CheckpointRecord | None, samples: int, digest: str
) -> list[str]:
    """Each claim of the demo that the cluster or the checkpoint contradicts. Empty if all are true.

    Args:
        end: the job at the end.
        story: the faults; None when the demo was to have none.
        record: manifest of the latest checkpoint; None when there is none.
        samples: sequences that the whole run must have consumed.
        digest: digest of these sequences, computed from the data; empty for a job whose data are not known.
    """
    problems = []
    if not end.holds(conditions.COMPLETE):
        problems.append(f"the job is not Complete: {end.state} {end.message}".rstrip())
    if end.step != end.total_steps or not end.total_steps:
        problems.append(f"the last step is {end.step} of {end.total_steps}")
    if record is None:
        problems.append("there is no checkpoint")
    elif (record.step, record.samples) != (end.total_steps, samples):
        problems.append(
            f"the latest checkpoint has step {record.step} and {record.samples} samples, "
            f"expected step {end.total_steps} and {samples} samples"
        )
    elif digest and record.digest != digest:
        problems.append(f"the data digest is {record.digest}, but that of the data is {digest}")
    if story is not None:
        problems += failed_recovery_checks(end, story.fault)
        problems += failed_resize_checks(story.node) if story.node is not None else []
    return problems


def failed_recovery_checks(end: Snapshot, fault: Fault) -> list[str]:
    """Evidence of a lost worker and of the recovery that is missing."""
    if fault.deleted_pod is None:
        return ["no worker was deleted: the job finished before a tenth of its steps was observed"]
    problems = []
    if fault.recovered_at is None or fault.replacement is None:
        problems.append(f"no new mesh generation trained after {fault.deleted_pod.name} was deleted")
    if end.generation <= fault.generation:
        problems.append(f"the mesh generation is still {end.generation}")
    if end.status.restart_count < 1:
        problems.append("`status.restarts` counts no restart")
    return problems


def failed_resize_checks(node: LostNode) -> list[str]:
    """Evidence of a lost node and of both resizes that is missing."""
    if not node.name:
        return ["no node was removed: the job finished before it was due"]
    if node.shrunk is None:
        return [f"the job did not train on without {node.name}"]
    if node.grown is None:
        joined = node.joined or "a node"
        return [f"the job did not train with {node.replicas} replicas again after {joined} joined"]
    return []
