"""`meshwright crd`."""

from __future__ import annotations

import click

from meshwright.crd.__main__ import CRD_FILE, generated_files


@click.command()
def crd() -> None:
    """Print the CustomResourceDefinition.

    To install it, run `meshwright crd | kubectl apply --server-side -f -`.
    """
    click.echo(generated_files()[CRD_FILE], nl=False)
