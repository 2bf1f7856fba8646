"""What a running generation reports: how many ranks train, which agents are silent, and moves off draining nodes.

No job is Ready whose agents are not heard. In synchronous training, steps that advance show that all ranks are alive;
a user's command reports no steps, so each of its agents must report.
"""

from __future__ import annotations

import sys

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.spec import CordonedNodes
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.protocol.run_config import CommandRun
from meshwright.rules.recovery_times import MIN_TIMEOUT_SECONDS
from meshwright_operator.decide import (
    gang_actions,
    hang_detection,
    lifecycle,
    mesh_generation,
    progress,
    resize,
    sizing,
    slow_ranks,
    start_work,
)
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.hang_detection import Silence
from meshwright_operator.decide.observed import Observed
from meshwright_operator.text import counted, sentences
from meshwright_operator.timestamps import seconds_since

MOVE_AFTER_SECONDS = 30.0
MOVE_RETRY_SECONDS = 60.0
AGENTS_SILENT = "AgentsSilent"
"""Reason of a Ready condition that is Unknown."""


def report_training(decision: Decision) -> bool:
    """Reports how many ranks train, and moves workers off draining nodes if all do. Returns whether all do."""
    _, unknown = progress.count_ranks(decision.observed)
    trains = report_ready_ranks(decision, unsure=unknown > 0) and not unknown
    if trains:
        slow_ranks.report(decision)
        _move_off_draining_nodes(decision)
    return trains


def report_ready_ranks(decision: Decision, *, unsure: bool) -> bool:
    """Writes how many ranks train to status, and returns whether all of them do.

    If the number is `unsure`, a job that was training still counts as training: after a restart of the operator the
    agents' reports arrive one by one, and the cause of a failed rank is determined only after a wait.
    """
    observed, status = decision.observed, decision.status
    world = observed.plan.layout.world_size
    silence = hang_detection.silence(observed)
    decision.requeue_within(silence.next_seconds)
    # Reports of ranks that make no progress are not urgent: look again when the time is over.
    if (left := hang_detection.seconds_until_hung(observed)) is not None and left > 0:
        decision.requeue_within(left)
    silent_before = _is_silent(observed.status)
    # In synchronous training, steps that advance show that all ranks are alive. A user's command reports no steps.
    unknown = silence.complete or bool(silence.silent and isinstance(observed.run, CommandRun))
    if unknown or (unsure and silent_before and not progress.count_ranks(observed)[0]):
        _report_silence(decision, silence)
        return False
    training, _ = progress.count_ranks(observed)
    if unsure and status.ready_ranks == f"{world}/{world}":
        training = world
    status.ready_ranks = f"{training}/{world}"
    if training < world:
        ranks = f"{ranks_that_train(training, world)} in generation {decision.mesh.generation}"
        decision.starting(sentences(ranks, start_work.slowest_work(observed)))
        return False
    text = sentences(
        f"{_are_training(world)} in generation {decision.mesh.generation}",
        _silent_agents(silence),
        _idle_command(observed),
        start_work.slowest_work(observed) if isinstance(observed.run, CommandRun) else "",
    )
    decision.job_state("Running", text, ready=True)
    return True


def ranks_that_train(training: int, world: int) -> str:
    """How many of the ranks train, if not all of them do: `3 of 4 ranks are training`."""
    return f"{training} of {_are_training(world)}"


def _are_training(ranks: int) -> str:
    return f"{counted(ranks, 'rank')} {'is' if ranks == 1 else 'are'} training"


def _is_silent(status: ParallelTrainingJobStatus) -> bool:
    ready = find(status.conditions, names.READY)
    return ready is not None and ready.reason == AGENTS_SILENT


def _report_silence(decision: Decision, silence: Silence) -> None:
    """Reports that it is not known whether the ranks train, because their agents do not report."""
    observed, status = decision.observed, decision.status
    status.tokens_per_second = status.eta_seconds = None
    training, _ = progress.count_ranks(observed, silence.silent)
    status.ready_ranks = f"{training}/{observed.plan.layout.world_size}"
    if not silence.silent:  # the operator has just started: repeat the last message
        ready = find(observed.status.conditions, names.READY)
        decision.job_state(AGENTS_SILENT, ready.message if ready is not None else "", unknown=True)
        return
    fix = "Training may continue: check the nodes, network policies and the coordinator's URL"
    decision.job_state(AGENTS_SILENT, sentences(_silent_agents(silence), fix), unknown=True)


def _idle_command(observed: Observed) -> str:
    """That no rank of a user's command writes output, or which of its processes is stopped. Empty if neither is so."""
    ranks = [r for r in hang_detection.idle_commands(observed) if r.seconds >= MIN_TIMEOUT_SECONDS]
    quiet = len(ranks) == observed.plan.layout.world_size
    text = f"No rank has written output for {MIN_TIMEOUT_SECONDS:.0f} s" if quiet else ""
    return sentences(text, hang_detection.describe_stuck_process(ranks))


def _silent_agents(silence: Silence) -> str:
    """How many agents are silent; empty if none is. Without times, because every change of a message is a write."""
    if not silence.silent:
        return ""
    silent, total, wait = len(silence.silent), silence.agents, f"{silence.limit:.0f} s"
    if silence.complete:
        none = "The agent has not" if total == 1 else f"None of the {total} agents has"
        return f"{none} reported for {wait}"
    return f"{silent} of {total} agents {'has' if silent == 1 else 'have'} not reported for {wait}"


def _move_off_draining_nodes(decision: Decision) -> None:
    """Asks for other nodes for the workers on draining nodes, while they can still save a checkpoint."""
    observed = decision.observed
    draining = tuple(w for w in observed.workers if w.node_drain_reason and not w.node_down)
    spec = observed.spec
    if mesh_generation.uses_external_scheduler(observed):
        return  # only the external scheduler knows whether the workers fit elsewhere
    if not draining or spec.recovery.cordoned_nodes is CordonedNodes.STAY or spec.checkpoint is None:
        return
    if _run_ends(observed):
        return  # workers that have completed the run cannot join another mesh
    beside = observed.elastic is not None and _has_room_beside(observed, len(draining))
    if observed.elastic is not None and (beside or observed.joining):
        resize.move_beside(decision, draining)
        decision.requeue_within(MOVE_RETRY_SECONDS)
        return
    trained = seconds_since(observed.mesh.started_time, observed.now)
    if trained < MOVE_AFTER_SECONDS:
        decision.requeue_within(MOVE_AFTER_SECONDS - trained)
        return
    decision.move = gang_actions.Place(draining, {w.index: w.node for w in observed.workers if w not in draining})
    decision.requeue_within(MOVE_RETRY_SECONDS)


def _has_room_beside(observed: Observed, workers: int) -> bool:
    """Whether policy and queue let an elastic job hold more workers for as long as these start."""
    each, admission = observed.plan.gpus_per_worker, observed.admission
    limits = [observed.max_gpus] if observed.max_gpus is not None else []
    if admission is not None:
        per_replica = observed.plan.layout.world_size // observed.plan.layout.data
        admitted = admission.workers * each if admission.workers is not None else sizing.wanted(observed) * per_replica
        limits.append(admitted)
    return observed.plan.layout.world_size + workers * each <= min(limits, default=sys.maxsize)


def _run_ends(observed: Observed) -> bool:
    """Whether only pods have to exit."""
    return lifecycle.run_ends(observed) or lifecycle.all_completed(observed)
