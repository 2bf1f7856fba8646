"""`meshwright`: the list of its commands. Each lives in a file of its own and is imported when it is used."""

from __future__ import annotations

import click

from meshwright.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "crd": LazyCommand("meshwright.cli.crd:crd", "Print the CustomResourceDefinition to apply to a cluster.", "cli"),
    "data": LazyCommand(
        "meshwright.cli.data:data", "Tokenize text for training, verify and look at tokens.", "cli,data"
    ),
    "demo": LazyCommand(
        "meshwright.cli.demo.command:demo",
        "Train a language model on the embedded cluster, lose a worker midway, finish.",
        "operator,worker,local",
    ),
    "local": LazyCommand(
        "meshwright.local.commands:local", "Run the embedded cluster: up, down, status, break it.", "local"
    ),
    "model": LazyCommand(
        "meshwright.cli.model:model", "Print the fields of a job's model for a Hugging Face config.json.", "cli"
    ),
    "plan": LazyCommand(
        "meshwright.cli.plan.command:plan", "Plan and place a job without a cluster, and say why.", "cli"
    ),
    "version": LazyCommand("meshwright.cli.version:version", "Print the versions of Meshwright and Python.", "cli"),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Meshwright: parallel training on Kubernetes, planned, placed and kept running."""
