"""`meshwright explain job`: why a job runs where it runs, or why it waits and what would fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import click

from meshwright.api import conditions
from meshwright.printable import printable
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.objects import Job, WorkerPod
from meshwright_cli.completion import complete_jobs
from meshwright_cli.explain.cluster import ClusterView, read_cluster
from meshwright_cli.explain.pending import pending_facts, waits_for_nodes
from meshwright_cli.explain.placed import placed_facts
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.output import colored, next_command, output_option, width, wrapped
from meshwright_cli.jobs.placement_tree import placement_tree
from meshwright_cli.jobs.status_view import growth_wait, last_failure
from meshwright_cli.jobs.visible import visible

LABEL = 12


@click.command(epilog="Next: meshwright plan MANIFEST to try a change, or meshwright scale JOB N.")
@click.argument("job", shell_complete=complete_jobs)
@output_option("json")
@cluster_options
def job(job: str, output: str | None, access: Access) -> None:
    """Explain where a job runs, or why it waits and what would fit.

    For a job that runs: the cost of its placement against the bound, what crosses links, and the reasons of its layout.
    For a job that waits: what it needs, what is free, what would fit now, and who uses the nodes to free.
    The cluster is read with your rights; what you may not see is left out.
    """

    async def read(client: AsyncClient) -> tuple[Job, Sequence[WorkerPod] | None, ClusterView]:
        found = await client.get(job)
        pods = await visible(client.pods(job), [], "list pods")
        return found, pods, await read_cluster(client) if waits_for_nodes(found) else ClusterView()

    found, pods, cluster = access.run(read)
    if output == "json":
        click.echo(json.dumps(document(found, cluster), indent=2))
        return
    for line in explanation(found, pods, cluster, width()):
        click.echo(line)
    next_command("status", found.name)


def explanation(job: Job, pods: Sequence[WorkerPod] | None, cluster: ClusterView, columns: int) -> list[str]:
    """The explanation as lines. Pure."""
    lines = [f"{job.namespace}/{job.name}  {colored(job.state)}"]
    texts = dict.fromkeys(text for _, text in _messages(job))
    for text in texts:
        lines += wrapped(text, columns)
    lines.append("")
    for name, value in facts(job, cluster):
        if value in texts:
            continue
        first, *rest = wrapped(value, columns - LABEL)
        lines += [f"{name:<{LABEL}}{first}", *(" " * LABEL + line for line in rest)]
    if not waits_for_nodes(job):
        tree = placement_tree(job.status, pods, every_worker=False)
        lines += ["", *tree] if tree else []
    if job.status.plan is not None:
        lines += ["", f"Layout {job.status.plan.summary}{_of_full_size(job)}"]
        for reason in job.status.plan.reasons:
            lines += wrapped(f"- {reason}", columns, indent="  ")
    return [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if line or after]


def _of_full_size(job: Job) -> str:
    """For an elastic job that is smaller than wanted: that the reasons of its layout are those of its full size."""
    elastic, now = job.status.elastic, job.status.replicas
    if elastic is None or not now or not elastic.wanted_replicas or now == elastic.wanted_replicas:
        return ""
    return f", {now} of {elastic.wanted_replicas} replicas. Reasons at full size:"


def facts(job: Job, cluster: ClusterView) -> list[tuple[str, str]]:
    """What explains the job's state, as names and values."""
    failure = last_failure(job)
    failures = [("Failure", failure)] if failure else []
    if not waits_for_nodes(job):
        growth = growth_wait(job, datetime.now(UTC))
        return [*placed_facts(job), *([("Growth", growth)] if growth else []), *failures]
    found = [*pending_facts(job, cluster), *failures]
    if cluster.hidden:
        found.append(("Hidden", f"you may not {', or '.join(cluster.hidden)}: the rest is from the job's conditions"))
    return found


def _messages(job: Job) -> list[tuple[str, str]]:
    """The messages of the conditions that explain the state."""
    found = []
    for name in (conditions.READY, conditions.PLACED):
        condition = conditions.find(job.status.conditions, name)
        if condition is not None and condition.message and (name == conditions.READY or condition.status != "True"):
            found.append((name, printable(condition.message)))
    return found if job.status.conditions else [(conditions.READY, job.message)]


def document(job: Job, cluster: ClusterView) -> dict[str, object]:
    """The explanation as JSON."""
    return {
        "name": job.name,
        "namespace": job.namespace,
        "state": job.state,
        "messages": dict(_messages(job)),
        "facts": dict(facts(job, cluster)),
        "reasons": list(job.status.plan.reasons) if job.status.plan is not None else [],
    }
