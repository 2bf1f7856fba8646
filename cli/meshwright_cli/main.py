"""The `meshwright` command and its subcommands. A subcommand's module is imported when it is used."""

from __future__ import annotations

import os

try:
    import click
except ModuleNotFoundError:
    raise SystemExit("error: `meshwright` needs the Python package `click`: pip install meshwright-cli") from None

from meshwright_cli.lazy_group import LazyCommand, LazyGroup

JOBS, PLANNING = "Jobs", "Plan and explain"


def _job_command(module: str, attribute: str, summary: str) -> LazyCommand:
    return LazyCommand(f"meshwright_cli.jobs.{module}:{attribute}", summary, "meshwright-cli", JOBS)


COMMANDS = {
    "submit": _job_command("submit", "submit", "Apply a manifest with one job, and the objects that it needs."),
    "list": _job_command("listing", "list_jobs", "List jobs with their state and progress."),
    "status": _job_command("listing", "status", "Show a job: state, progress, goodput, and its ranks on nodes."),
    "events": _job_command("listing", "events", "Show the events about a job, the latest last."),
    "top": _job_command("top", "top", "Show the step times of a job's ranks and its stragglers, live."),
    "profile": _job_command("profile_command", "profile", "Profile steps of a running job with torch's profiler."),
    "logs": _job_command("log_commands", "logs", "Print the logs of a job's ranks."),
    "wait": _job_command("wait", "wait", "Wait until a job reaches a state."),
    "scale": _job_command("change", "scale", "Set the number of data-parallel replicas of a job."),
    "suspend": _job_command("change", "suspend", "Suspend a job: it saves a checkpoint and releases its GPUs."),
    "resume": _job_command("change", "resume", "Resume a suspended job from its latest checkpoint."),
    "checkpoint": LazyCommand(
        "meshwright_cli.checkpoint.group:checkpoint",
        "List, verify and copy checkpoints, or ask a job for one.",
        "meshwright-cli",
        JOBS,
    ),
    "generate": _job_command(
        "model_commands", "generate", "Continue a text with the model of a job's newest checkpoint."
    ),
    "export": _job_command(
        "model_commands", "export", "Export the model of a job's newest checkpoint as a Hugging Face directory."
    ),
    "lineage": LazyCommand(
        "meshwright_cli.checkpoint.lineage:lineage",
        "Show where a checkpoint or an export comes from.",
        "meshwright-cli",
        JOBS,
    ),
    "delete": _job_command("change", "delete", "Delete a job and its pods. Its checkpoints stay."),
    "completion": LazyCommand(
        "meshwright_cli.commands.completion:completion",
        "Print the script that completes commands, options, and names of jobs in a shell.",
        "meshwright-cli",
    ),
    "crd": LazyCommand(
        "meshwright_cli.commands.crd:crd", "Print the CustomResourceDefinition to apply to a cluster.", "meshwright-cli"
    ),
    "cost": LazyCommand(
        "meshwright_cli.cost.command:cost",
        "Print the GPU-hours of jobs by cause, and with --price the money.",
        "meshwright-cli",
        JOBS,
    ),
    "data": LazyCommand(
        "meshwright_cli.commands.data:data",
        "Tokenize training text, and verify or show tokens.",
        "meshwright[data]",
    ),
    "doctor": LazyCommand(
        "meshwright_cli.doctor.command:doctor",
        "Check that the cluster can run jobs, and name the fix of each problem.",
        "meshwright-cli",
        PLANNING,
    ),
    "demo": LazyCommand(
        "meshwright_cli.demo.command:demo",
        "Train a language model on the embedded cluster, with a fault midway.",
        "meshwright-operator meshwright-worker meshwright-local",
    ),
    "explain": LazyCommand(
        "meshwright_cli.explain.group:explain",
        "Explain where a job runs, or why it waits and what would fit.",
        "meshwright-cli",
        PLANNING,
    ),
    "import": LazyCommand(
        "meshwright_cli.importing.command:import_job",
        "Print the job that another tool's manifest or configuration means.",
        "meshwright-cli",
        PLANNING,
    ),
    "local": LazyCommand(
        "meshwright_local.commands.local:local",
        "Run the embedded cluster, and inject faults.",
        "meshwright-local",
    ),
    "model": LazyCommand(
        "meshwright_cli.commands.model:model",
        "Print the fields of a job's model for a Hugging Face config.json.",
        "meshwright-cli",
    ),
    "open": LazyCommand(
        "meshwright_cli.report.open_command:open_report",
        "Serve the report of a job on this machine, and update it.",
        "meshwright-cli",
        JOBS,
    ),
    "plan": LazyCommand(
        "meshwright_cli.plan.command:plan",
        "Plan and place a job without a cluster, and explain the result.",
        "meshwright-cli",
        PLANNING,
    ),
    "report": LazyCommand(
        "meshwright_cli.report.command:report",
        "Write one HTML page about a job or a plan.",
        "meshwright-cli",
        JOBS,
    ),
    "simulate": LazyCommand(
        "meshwright_cli.simulate.command:simulate",
        "Simulate months of a job with failures: goodput, interval, spares.",
        "meshwright-cli",
        PLANNING,
    ),
    "validate": LazyCommand(
        "meshwright_cli.commands.validate:validate",
        "Check manifests of jobs without a cluster.",
        "meshwright-cli",
        PLANNING,
    ),
    "version": LazyCommand(
        "meshwright_cli.commands.version:version", "Print the versions of Meshwright and Python.", "meshwright-cli"
    ),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with `meshwright demo`, which needs no cluster, or on a cluster with `meshwright doctor`.",
)
@click.version_option(package_name="meshwright", prog_name="meshwright")
@click.pass_context
def main(context: click.Context) -> None:
    """Plan, place and run parallel training on Kubernetes."""
    if os.environ.get("NO_COLOR"):
        context.color = False
