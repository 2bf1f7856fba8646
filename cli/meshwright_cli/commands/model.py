"""`meshwright model`: prints a published configuration as fields of a job."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.kube_yaml import dump_document
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.reader import (
    architecture_from_json,
    parse_config,
    published_architecture,
    to_model_spec,
)


@click.command()
@click.argument("config", type=click.Path(exists=True, path_type=Path))
def model(config: Path) -> None:
    """Print the fields of a job's model for a Hugging Face config.json.

    CONFIG is a `config.json`, or the directory that contains one. Models that the runtime cannot reproduce exactly are
    rejected, with the reason. Nothing is downloaded.
    """
    path = config / "config.json" if config.is_dir() else config
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from None
    try:
        found = architecture_from_json(text)
    except ConfigError as error:
        raise click.ClickException(f"{path}: {error}{_counted(text)}") from None
    click.echo(f"# {found.parameters:,} parameters")
    fields = to_model_spec(found).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    click.echo(dump_document({"model": fields}), nl=False)


def _counted(text: str) -> str:
    """The parameter count of a model that the runtime does not support, if the planner supports it."""
    try:
        return f" (it has {published_architecture(parse_config(text)).parameters:,} parameters)"
    except ConfigError:
        return ""
