"""`meshwright`: the list of its commands. Each lives in a file of its own and is imported when it is used."""

from __future__ import annotations

import click

from meshwright_cli.lazy_group import LazyCommand, LazyGroup

COMMANDS = {
    "crd": LazyCommand(
        "meshwright_cli.commands.crd:crd", "Print the CustomResourceDefinition to apply to a cluster.", "meshwright-cli"
    ),
    "data": LazyCommand(
        "meshwright_cli.commands.data:data",
        "Tokenize text for training, verify and look at tokens.",
        "meshwright[data]",
    ),
    "demo": LazyCommand(
        "meshwright_cli.demo.command:demo",
        "Train a language model on the embedded cluster, lose a worker midway, finish.",
        "meshwright-operator meshwright-worker meshwright-local",
    ),
    "local": LazyCommand(
        "meshwright_local.commands.local:local",
        "Run the embedded cluster: up, down, status, break it.",
        "meshwright-local",
    ),
    "model": LazyCommand(
        "meshwright_cli.commands.model:model",
        "Print the fields of a job's model for a Hugging Face config.json.",
        "meshwright-cli",
    ),
    "plan": LazyCommand(
        "meshwright_cli.plan.command:plan", "Plan and place a job without a cluster, and say why.", "meshwright-cli"
    ),
    "version": LazyCommand(
        "meshwright_cli.commands.version:version", "Print the versions of Meshwright and Python.", "meshwright-cli"
    ),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Meshwright: parallel training on Kubernetes, planned, placed and kept running."""
