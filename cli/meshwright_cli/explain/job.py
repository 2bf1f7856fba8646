"""`meshwright explain job`: why a job runs where it runs, or why it waits."""

from __future__ import annotations

import click

from meshwright.api import conditions
from meshwright_cli.client.objects import Job
from meshwright_cli.completion import complete_jobs
from meshwright_cli.jobs.access import Access, cluster_options


@click.command()
@click.argument("job", shell_complete=complete_jobs)
@cluster_options
def job(job: str, access: Access) -> None:
    """Explain where a job runs, or why it waits and what would fit."""
    found = access.run(lambda client: client.get(job))
    for line in explanation(found):
        click.echo(line)


def explanation(job: Job) -> list[str]:
    """Why the job is in its state, and the reasons of its plan."""
    lines = [f"{job.namespace}/{job.name}: {job.state}"]
    placed = conditions.find(job.status.conditions, conditions.PLACED)
    for condition in (placed, conditions.find(job.status.conditions, conditions.READY)):
        if condition is not None and condition.message:
            lines.append(f"{condition.type} is {condition.status} ({condition.reason}): {condition.message}")
    if job.status.plan is not None:
        lines += ["", f"Layout: {job.status.plan.summary}", *(f"- {reason}" for reason in job.status.plan.reasons)]
    return lines
