"""The group `meshwright explain`. A subject that is not a subcommand is the name of a job."""

from __future__ import annotations

import click

from meshwright_cli.lazy_group import LazyCommand, LazyGroup

SUBJECTS = {
    "job": LazyCommand(
        "meshwright_cli.explain.job:job",
        "Explain where a job runs, or why it waits and what would fit.",
        "meshwright-cli",
    ),
    "schedule": LazyCommand(
        "meshwright_cli.explain.schedule:schedule",
        "Draw the timeline of a pipeline schedule, from the simulator.",
        "meshwright-cli",
    ),
    "memory": LazyCommand(
        "meshwright_cli.explain.memory:memory",
        "Draw the memory of one rank by kind, from the planner's cost model.",
        "meshwright-cli",
    ),
    "allreduce": LazyCommand(
        "meshwright_cli.explain.allreduce:allreduce",
        "Draw a ring all-reduce hop by hop, and estimate its time.",
        "meshwright-cli",
    ),
}
"""Subjects by name. To add one, add its command here; the module is imported when it is used."""
DEFAULT = "job"


class ExplainGroup(LazyGroup):
    """A group whose default subcommand is `job`: `explain NAME` is `explain job NAME`."""

    default = DEFAULT

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default subcommand if the first argument is neither a subject nor an option of the group."""
        if args and args[0] not in SUBJECTS and args[0] not in ctx.help_option_names:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.group(cls=ExplainGroup, lazy=SUBJECTS)
def explain() -> None:
    """Explain a job: `explain JOB` is short for `explain job JOB`.

    To explain a job whose name is that of another subject, use `explain job NAME`.
    """
