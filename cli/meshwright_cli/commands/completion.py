"""`meshwright completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(epilog='Next: put `eval "$(meshwright completion bash)"` into ~/.bashrc.')
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, and names of jobs in a shell."""
    from meshwright_cli.main import main

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"no completion for `{shell}`: use one of {', '.join(SHELLS)}")
    click.echo(found(main, {}, "meshwright", "_MESHWRIGHT_COMPLETE").source())
