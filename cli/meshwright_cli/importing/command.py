"""`meshwright import`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from meshwright.api import labels
from meshwright.crd.manifest_check import check_manifest
from meshwright_cli.importing import deepspeed, megatron, torchtitan
from meshwright_cli.importing.settings import Imported, ImportFileError

FORMATS = "DeepSpeed's JSON, arguments of Megatron-LM or torchtitan's TOML"


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--gpus", type=click.IntRange(1, 65536), help="Number of GPUs of the run, if the file does not have it.")
@click.option("--gpus-per-worker", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs of a worker.")
@click.option("--preset", help="Model of the run, if the file does not have it.")
@click.option("--image", default="meshwright-worker:0.1.0", show_default=True, help="Image of the workers.")
def import_job(file: Path, gpus: int | None, gpus_per_worker: int, preset: str | None, image: str) -> None:
    """Print the job that a configuration of another framework stands for.

    FILE is DeepSpeed's JSON, a command line or script with arguments of Megatron-LM, or torchtitan's TOML. Comments
    name the settings without an equivalent, and what the job still needs.
    """
    try:
        found = imported(file.read_text(encoding="utf-8"), gpus)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.ClickException(f"{file}: not a text file in UTF-8") from None
    except ImportFileError as error:
        raise click.ClickException(f"{file}: {error}") from None
    spec = {**found.spec, "workers": {"image": image, "gpusPerWorker": gpus_per_worker}}
    if preset is not None:
        spec["model"] = {"preset": preset}
    job = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": _name(file)},
        "spec": spec,
    }
    for line in comments(found, job):
        click.echo(f"# {line}")
    click.echo(yaml.safe_dump(job, sort_keys=False), nl=False)


def imported(text: str, gpus: int | None) -> Imported:
    """Read a configuration of any of the formats.

    Raises:
        ImportFileError: it has none of them, or a value is wrong.
    """
    values = _values(text)
    if values is not None and deepspeed.is_deepspeed(values):
        return deepspeed.read(values, gpus)
    if values is not None and torchtitan.is_torchtitan(values):
        return torchtitan.read(values, gpus)
    if values is None and megatron.is_megatron(text):
        return megatron.read(text, gpus)
    raise ImportFileError(f"unknown format: expected {FORMATS}")


def comments(found: Imported, job: dict[str, Any]) -> Iterator[str]:
    """What a reader must know about the job."""
    yield f"From a configuration of {found.framework}."
    for name in found.without_equivalent:
        yield f"no equivalent: {name}"
    yield from found.notes
    for problem in check_manifest(job):
        yield f"to do: {problem}"


def _values(text: str) -> dict[str, Any] | None:
    """The content of a JSON or TOML file. None if it is neither."""
    for parse in (json.loads, tomllib.loads):
        try:
            values = parse(text)
        except (ValueError, RecursionError):
            continue
        return values if isinstance(values, dict) else None
    return None


def _name(file: Path) -> str:
    """A name for the job, from that of the file."""
    allowed = "".join(c if c.isascii() and c.isalnum() else "-" for c in file.stem.lower()).strip("-")
    return allowed[:40].strip("-") or "imported"
