"""The text of `meshwright status`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from meshwright.api import conditions
from meshwright.api.goodput import TimeCause
from meshwright.api.status import LimitKind
from meshwright.printable import printable
from meshwright_cli.client.objects import Job, JobEvent, WorkerPod, parse_time
from meshwright_cli.jobs.goodput import Ledger
from meshwright_cli.jobs.output import colored, wrapped
from meshwright_cli.jobs.placement_tree import placement_tree
from meshwright_cli.jobs.visible import hidden_note
from meshwright_cli.text import age, duration, plural

LABEL = 12
BAR = 20
SILENCE = timedelta(minutes=1)
"""Time without a step that is worth a word. Progress is written every 10 s, less often if hundreds of jobs train."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A job with what is shown about it."""

    job: Job
    pods: Sequence[WorkerPod] | None
    """None if the user may not list them."""
    warnings: Sequence[JobEvent] = ()
    """Its latest warnings."""
    hidden: Sequence[str] = ()
    """What the user may not see, such as `list pods`."""


def status_lines(view: JobView, now: datetime, columns: int, *, every_worker: bool = False) -> list[str]:
    """The state of a job, what it does, and where its ranks run."""
    job = view.job
    title = f"{job.namespace}/{job.name}  {colored(job.state)}"
    lines = [f"{title}  {_headline(job)}".rstrip()]
    lines += wrapped(job.message, columns) if job.message and not _is_plain_running(job) else []
    facts = [(name, value) for name, value in [*_facts(job, now), ("Hidden", hidden_note(view.hidden))] if value]
    if facts:
        lines.append("")
    for name, value in facts:
        first, *rest = wrapped(value, columns - LABEL)
        lines += [f"{name:<{LABEL}}{first}", *(" " * LABEL + line for line in rest)]
    tree = placement_tree(job.status, view.pods, every_worker=every_worker)
    lines += ["", *tree] if tree else []
    if view.warnings:
        lines += ["", "Latest warnings"]
        for event in view.warnings:
            text = f"{age(event.time, now):>6}  {event.reason}: {event.message}"
            lines += wrapped(text, columns, indent=" " * 8)
    return lines


def next_step(job: Job) -> tuple[str, ...]:
    """The command that helps most in this state."""
    if job.failed or job.is_true(conditions.STALLED):
        return ("logs", job.name, "--failed-first") if job.status.placement else ("explain", job.name)
    if job.is_true(conditions.SUSPENDED):
        return ("resume", job.name)
    if job.complete:
        return ("logs", job.name, "--tail", "20")
    return ("top", job.name) if job.state == "Running" else ("explain", job.name)


def _headline(job: Job) -> str:
    status = job.status
    if not status.total_steps:
        return f"step {status.step:,}" if status.step else ""
    share = (status.step or 0) / status.total_steps
    filled = round(BAR * min(1.0, share))
    text = f"{'█' * filled}{'░' * (BAR - filled)} step {status.step or 0:,} of {status.total_steps:,} ({share:.0%})"
    eta = status.eta_seconds
    return f"{text}, {duration(eta)} left" if eta is not None and not job.finished and job.state == "Running" else text


def _is_plain_running(job: Job) -> bool:
    return job.state == "Running" and job.is_true(conditions.READY)


def _facts(job: Job, now: datetime) -> list[tuple[str, str]]:
    status = job.status
    ledger = Ledger.of(status.goodput, now)
    return [
        ("Layout", _layout(job)),
        ("Ranks", _ranks(job)),
        ("Growth", growth_wait(job, now)),
        ("Training", _training(job, now)),
        ("Checkpoint", _checkpoint(job, now)),
        ("Best", _best(job)),
        ("Resumed", _resumed(job)),
        ("Interval", _interval(job)),
        ("Saving", _saving(job)),
        ("Restarts", _restarts(job)),
        ("Failure", last_failure(job, now)),
        ("Limit", step_limit(job)),
        ("Slow", slow_rank(job, now)),
        ("Avoids", avoided_nodes(job, now)),
        ("Goodput", str(ledger) if ledger is not None else ""),
        ("Edit", f"waits for {status.waiting_edit.waits_for}" if status.waiting_edit is not None else ""),
        ("Age", _age(job, now)),
    ]


def last_failure(job: Job, now: datetime | None = None) -> str:
    """The latest failure of the job's own processes, and where to read more. Empty without one."""
    failure = job.status.last_failure
    if failure is None:
        return ""
    who = ""
    if failure.rank is not None or failure.worker is not None:
        who = f" of rank {failure.rank}" if failure.rank is not None else f" of worker {failure.worker}"
    when = f" {age(parse_time(failure.time), now)} ago" if now is not None and not job.finished else ""
    text = f"{failure.cause}{who}{when}, in mesh generation {failure.generation}"
    return f"{text}: meshwright logs {job.name} --failed-first"


def step_limit(job: Job) -> str:
    """What limits the time of its steps, while the job trains; otherwise empty."""
    limit = job.status.limit
    if limit is None or not _is_plain_running(job):
        return ""
    names = {
        LimitKind.COMPUTE: "computation",
        LimitKind.DATA: f"data: rank {limit.rank} waits for samples",
        LimitKind.RANK: f"rank {limit.rank}, which computes longer than the other ranks of its stage",
        LimitKind.COMMUNICATION: f"communication of the dimension `{limit.dimension}`",
        LimitKind.PIPELINE: f"the pipeline: ranks wait for stage {limit.stage}",
    }
    return f"{names[limit.kind]}, {limit.percent}% of a step"


def slow_rank(job: Job, now: datetime) -> str:
    """The rank that all others wait for, if it has been slow for a while. Empty without one."""
    slow = job.status.slow_rank
    if slow is None or not slow.confirmed or job.finished:
        return ""
    where = f"worker {slow.worker} on {slow.node}"
    return f"rank {slow.rank} ({where}) for {age(parse_time(slow.since), now)}: meshwright top {job.name}"


def avoided_nodes(job: Job, now: datetime) -> str:
    """The suspect nodes that the job avoids, and for how long. Empty if there are none."""
    found = [(entry, parse_time(entry.avoided_until)) for entry in job.status.suspect_nodes or ()]
    avoided = [
        f"{entry.node} for {duration((until - now).total_seconds())} after {plural(entry.failures, 'failure')} "
        f"({entry.cause})"
        for entry, until in found
        if until is not None and until > now
    ]
    return "; ".join(avoided)


def _layout(job: Job) -> str:
    plan = job.status.plan
    if plan is None:
        return ""
    parts = [plan.summary, plural(plan.world_size, "rank"), plural(plan.workers, "worker")]
    if plan.estimated_step_milliseconds:
        parts.append(f"estimated {plan.estimated_step_milliseconds:,} ms per step")
    return ", ".join(parts)


def _ranks(job: Job) -> str:
    status = job.status
    generation = f", mesh generation {status.mesh.generation}" if status.mesh and status.mesh.generation else ""
    if job.finished:
        return f"ended{generation.replace(',', ' in', 1)}" if generation else ""
    elastic = status.elastic
    wanted = elastic.wanted_replicas if elastic else None
    replicas = f", {status.replicas} of {plural(wanted, 'replica')}" if wanted else ""
    return f"{status.ready_ranks} ready{replicas}{generation}" if status.ready_ranks else ""


def growth_wait(job: Job, now: datetime) -> str:
    """Why an elastic job that is smaller than wanted does not grow yet. Empty if it does not wait for a time."""
    elastic, wished = job.status.elastic, job.spec.elastic
    if elastic is None or wished is None or job.is_true(conditions.RESCALING) or not job.is_true(conditions.READY):
        return ""
    if not job.status.replicas or not elastic.wanted_replicas or job.status.replicas >= elastic.wanted_replicas:
        return ""
    resized, retry = parse_time(elastic.resized_time), parse_time(elastic.retry_time)
    pause, after = timedelta(seconds=wished.pause_seconds), "`elastic.pauseSeconds` after the last resize"
    ends = [] if resized is None else [(resized + pause, after)]
    ends += [] if retry is None else [(retry, "an attempt to grow has failed")]
    end, why = max(ends, default=(now, ""))
    return f"in {duration((end - now).total_seconds())} at the earliest: {why}" if end > now else ""


def _training(job: Job, now: datetime) -> str:
    status = job.status
    parts = [f"loss {status.loss}"] if status.loss else []
    parts += [f"{status.tokens_per_second:,} tokens/s"] if status.tokens_per_second else []
    if status.evaluation is not None:
        parts.append(f"evaluation loss {status.evaluation.loss} at step {status.evaluation.step:,}")
    parts += _silence(job, now)
    return ", ".join(parts)


def _silence(job: Job, now: datetime) -> list[str]:
    """Since when a job whose ranks run has completed no step: until that is long enough for a hang, it is `Running`."""
    goodput = job.status.goodput
    steps = goodput is not None and goodput.cause in (TimeCause.TRAINING, TimeCause.REDONE_STEPS)
    since = parse_time(goodput.since) if goodput is not None and steps and goodput.step is not None else None
    if since is None or now - since < SILENCE:
        return []
    return [f"the last step was reported {age(since, now)} ago"]


def _checkpoint(job: Job, now: datetime) -> str:
    saved = job.status.checkpoint
    if saved is None:
        if not job.raw.get("spec", {}).get("checkpoint"):
            return "none: `spec.checkpoint` is not set"
        return "none was reported" if job.finished else "none yet"
    return f"step {saved.step:,}, {age(parse_time(saved.time), now)} ago, {printable(saved.path)}"


def _best(job: Job) -> str:
    """The checkpoint with the lowest evaluation loss, of all places. Empty if none is retained for that."""
    found = [
        (float(tier.best_loss), tier.best_step)
        for tier in job.status.checkpoint_tiers or ()
        if tier.best_loss and tier.best_step is not None
    ]
    if not found:
        return ""
    loss, step = min(found)
    return f"step {step:,}, evaluation loss {loss:.6g}"


def _resumed(job: Job) -> str:
    """The checkpoint of another run that training began from. Empty if it began at step 0."""
    source = job.status.resumed_from
    return f"from step {source.step:,}, {printable(source.path)}" if source is not None else ""


def _interval(job: Job) -> str:
    """How often checkpoints are saved, and why. Empty before ranks have said so."""
    intervals = []
    tiers = job.status.checkpoint_tiers or ()
    for tier in tiers if not job.finished else ():
        seconds = duration(tier.interval_seconds) if tier.interval_seconds is not None else "not known yet"
        every = f"every {plural(tier.every_steps, 'step')}" if tier.every_steps else f"every {seconds}"
        where = f"{tier.place.partition('://')[0] if '://' in tier.place else 'volume'}: " if len(tiers) > 1 else ""
        intervals.append(f"{where}{every}{f' ({tier.reason})' if tier.reason else ''}")
    return "; ".join(intervals)


def _saving(job: Job) -> str:
    """Why checkpoints are not saved. Empty if they are."""
    condition = conditions.find(job.status.conditions, conditions.CHECKPOINT_HEALTHY)
    return printable(condition.message) if condition is not None and condition.status == "False" else ""


def _restarts(job: Job) -> str:
    causes = ", ".join(f"{restart.cause} {restart.count}" for restart in job.status.restarts)
    return f"{job.status.restart_count} ({causes})" if causes else ""


def _age(job: Job, now: datetime) -> str:
    ended = parse_time(job.status.completion_time) if job.status.completion_time else None
    text = age(job.created, now)
    return f"{text}, finished {age(ended, now)} ago" if ended is not None else text
