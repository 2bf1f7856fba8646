"""The `meshwright` command and its subcommands. A subcommand's module is imported when it is used."""

from __future__ import annotations

try:
    import click
except ModuleNotFoundError:
    raise SystemExit("error: `meshwright` needs the Python package `click`: pip install meshwright-cli") from None

from meshwright_cli.lazy_group import LazyCommand, LazyGroup

COMMANDS = {
    "crd": LazyCommand(
        "meshwright_cli.commands.crd:crd", "Print the CustomResourceDefinition to apply to a cluster.", "meshwright-cli"
    ),
    "cost": LazyCommand(
        "meshwright_cli.cost.command:cost",
        "Print the GPU-hours of jobs by cause, and with --price the money.",
        "meshwright-cli",
    ),
    "data": LazyCommand(
        "meshwright_cli.commands.data:data",
        "Tokenize training text, and verify or show tokens.",
        "meshwright[data]",
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
    ),
    "plan": LazyCommand(
        "meshwright_cli.plan.command:plan",
        "Plan and place a job without a cluster, and explain the result.",
        "meshwright-cli",
    ),
    "report": LazyCommand(
        "meshwright_cli.report.command:report",
        "Write one HTML page about a job or a plan.",
        "meshwright-cli",
    ),
    "validate": LazyCommand(
        "meshwright_cli.commands.validate:validate",
        "Check manifests of jobs without a cluster.",
        "meshwright-cli",
    ),
    "version": LazyCommand(
        "meshwright_cli.commands.version:version", "Print the versions of Meshwright and Python.", "meshwright-cli"
    ),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Plan, place and run parallel training on Kubernetes."""
