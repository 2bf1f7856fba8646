"""`meshwright doctor`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import click

from meshwright_cli.doctor import capacity, installation
from meshwright_cli.doctor.facts import Facts, read_facts
from meshwright_cli.doctor.findings import Finding, Level
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.jobs.output import next_command, output_option, width, wrapped
from meshwright_cli.text import plural

CHECKS: Sequence[Callable[[Facts], Iterable[Finding]]] = (
    installation.check_version,
    installation.check_definition,
    installation.check_operator,
    installation.check_lease,
    installation.check_coordinator,
    installation.check_operator_rights,
    installation.check_user_rights,
    capacity.check_gpu_resource,
    capacity.check_gpu_nodes,
    capacity.check_fabric,
    capacity.check_storage,
    capacity.check_images,
)
"""All checks, in the order of the report."""
MARKS = {
    Level.OK: ("ok", "green"),
    Level.SKIPPED: ("--", "white"),
    Level.WARNING: ("!!", "yellow"),
    Level.ERROR: ("XX", "red"),
}
LABEL = 20


@click.command(epilog="Next: meshwright submit MANIFEST, or meshwright explain JOB for a job that waits.")
@output_option("json")
@cluster_options
def doctor(output: str | None, access: Access) -> None:
    """Check that the cluster can run jobs, and name the fix of each problem.

    Reads the cluster with your rights and changes nothing. Exits with 1 if jobs cannot run. Warnings do not change the
    exit code.
    """
    findings = diagnose(access.run(read_facts))
    if output == "json":
        click.echo(json.dumps([{**_fields(one)} for one in findings], indent=2))
    else:
        for line in report_lines(findings, width()):
            click.echo(line)
    if any(one.level is Level.ERROR for one in findings):
        raise SystemExit(1)
    if output is None:
        next_command("submit", "MANIFEST")


def diagnose(facts: Facts) -> list[Finding]:
    """The findings of all checks. Pure."""
    return [finding for check in CHECKS for finding in check(facts)]


def report_lines(findings: Sequence[Finding], columns: int) -> Iterator[str]:
    """The findings as text. Pure."""
    for one in findings:
        mark, color = MARKS[one.level]
        first, *rest = wrapped(one.message, columns - LABEL)
        yield f"{click.style(mark, fg=color, bold=True)}  {one.check:<{LABEL - 4}}{first}"
        fix = wrapped(f"Fix: {one.fix}", columns - LABEL) if one.fix else []
        yield from (" " * LABEL + line for line in (*rest, *fix))
    counts = Counter(one.level for one in findings)
    names = {Level.ERROR: "error", Level.WARNING: "warning", Level.SKIPPED: "not checked", Level.OK: "ok"}
    yield ""
    counted = (Level.ERROR, Level.WARNING)
    yield ", ".join(
        plural(counts[level], name) if level in counted else f"{counts[level]} {name}"
        for level, name in names.items()
        if counts[level]
    )


def _fields(one: Finding) -> dict[str, str]:
    return {"check": one.check, "level": one.level.value, "message": one.message, "fix": one.fix}
