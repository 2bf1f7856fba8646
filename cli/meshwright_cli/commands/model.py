"""`meshwright model`: a published configuration as the explicit fields of a job."""

from __future__ import annotations

from pathlib import Path

import click
import yaml

from meshwright.models.counts import parameters
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
    """Print the `model:` fields of a job for a Hugging Face CONFIG: a `config.json`, or the folder that holds one.

    What the runtime would build inexactly is refused, with the reason. Nothing is downloaded.
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
    click.echo(f"# {parameters(found):,} parameters")
    fields = to_model_spec(found).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    click.echo(yaml.safe_dump({"model": fields}, sort_keys=False), nl=False)


def _counted(text: str) -> str:
    """What is known of a model that is described but not built."""
    try:
        return f" (it has {parameters(published_architecture(parse_config(text))):,} parameters)"
    except ConfigError:
        return ""
