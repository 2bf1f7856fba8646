"""`meshwright import`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from math import gcd, prod
from pathlib import Path
from typing import Any

import click
import yaml

from meshwright.api import labels
from meshwright.crd.manifest_check import check_manifest, check_mistakes
from meshwright.kube_yaml import dump_document, load_documents
from meshwright_cli.importing import deepspeed, kubernetes, megatron, slurm, torchtitan
from meshwright_cli.importing.batch_script import is_batch_script
from meshwright_cli.importing.job_kinds import KINDS
from meshwright_cli.importing.settings import Imported, ImportFileError, job_name, without_none
from meshwright_cli.parameters import input_text

GPUS_OF_A_NODE = 8
_DEGREES = ("tensor", "pipeline", "context")
_KINDS = list(KINDS)
FORMATS = (
    "a batch script of Slurm, a script with `torchrun` or another launcher, DeepSpeed's JSON, arguments of "
    "Megatron-LM, torchtitan's TOML, or the manifest of a "
    f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
)


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--gpus", type=click.IntRange(1, 65536), help="Number of GPUs of the run, if the file does not have it.")
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(1, 1024),
    help="GPUs of a worker. Defaults to those of a pod or of a torchrun in the file, else to 8 or fewer.",
)
@click.option("--preset", help="Model of the run, if the file does not have it.")
@click.option(
    "--image",
    help="Image of the workers. Defaults to that of a manifest, to meshwright-worker:0.1.0 for other files.",
)
def import_job(
    file: Path, gpus: int | None, gpus_per_worker: int | None, preset: str | None, image: str | None
) -> None:
    """Print the job that another tool's manifest, script or configuration means.

    FILE is a manifest with a PyTorchJob, MPIJob, HyperPodPyTorchJob, TrainJob, JobSet or Job of Kubernetes or
    Volcano, a batch script of Slurm, a command line or script with `torchrun` or with arguments of Megatron-LM,
    DeepSpeed's JSON, or torchtitan's TOML. `-` reads standard input. Comments name the settings without an
    equivalent, and what the job still needs.
    """
    try:
        found = imported(_text(file), gpus)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.ClickException(f"{file}: not a text file in UTF-8") from None
    except ImportFileError as error:
        raise click.ClickException(f"{file}: {error}") from None
    defaults = {"image": "meshwright-worker:0.1.0", "gpusPerWorker": _default_gpus(found.spec)}
    workers = {**defaults, **found.spec.get("workers", {})}
    chosen = {"image": image, "gpusPerWorker": gpus_per_worker}
    workers |= {name: value for name, value in chosen.items() if value is not None}
    spec = {**found.spec, "workers": workers}
    if preset is not None:
        spec["model"] = {"preset": preset}
    job = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": job_name(file.stem) or "imported", **found.metadata},
        "spec": spec,
    }
    for line in comments(found, job):
        click.echo(f"# {line}")
    click.echo(dump_document(job), nl=False)


def _default_gpus(spec: Mapping[str, Any]) -> int:
    """GPUs of a worker, by which the ranks divide."""
    if spec.get("replicas") is None:
        return GPUS_OF_A_NODE
    degrees = spec.get("parallelism", {})
    return gcd(GPUS_OF_A_NODE, spec["replicas"] * prod(degrees.get(name) or 1 for name in _DEGREES))


def _text(file: Path) -> str:
    """The content of a file or of standard input, without the byte order mark of some editors."""
    text = input_text(file)
    return text.removeprefix("\ufeff")


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
    if objects := _objects(text):
        return kubernetes.read_objects(objects)
    if values is None and is_batch_script(text):
        return _batch_script(text, gpus)
    if values is None and megatron.is_megatron(text):
        return megatron.read(text, gpus)
    if values is None and slurm.starts_ranks(text):
        return slurm.read(text, gpus)
    if re.search(r"\{\{.*\}\}", text) and re.search(r"^kind:", text, re.MULTILINE):
        raise ImportFileError("is a template: render it first, for example with `helm template`")
    raise ImportFileError(f"unknown format: expected {FORMATS}")


def _batch_script(text: str, gpus: int | None) -> Imported:
    """A batch script of Slurm: its command or, if that has the arguments of Megatron-LM, the job that they describe."""
    if not (megatron.is_megatron(text) and re.search(r"pretrain_\w+\.py", text)):
        return slurm.read(text, gpus)
    allocation = slurm.allocation(text)
    found = megatron.read(allocation.script, gpus or allocation.gpus)
    found.spec |= without_none(allocation.spec)
    of_megatron = [flag for flag in found.without_equivalent if not slurm.is_option(flag.removeprefix("--"))]
    found.without_equivalent = of_megatron + allocation.without_equivalent
    found.notes = [note for note in found.notes if not note.startswith("the value of --container")]
    found.metadata = allocation.metadata
    found.framework = "configuration of Megatron-LM in a batch script of Slurm"
    return found


def comments(found: Imported, job: dict[str, Any]) -> Iterator[str]:
    """What a reader must know about the job."""
    article = "an" if found.framework.startswith("MPI") else "a"
    is_named = found.metadata or "script" in found.framework
    yield f"From {article} {found.framework}." if is_named else f"From a configuration of {found.framework}."
    for name in found.without_equivalent:
        yield f"no equivalent: {name}"
    yield from found.notes
    problems = check_manifest(job)
    for problem in problems:
        yield f"to do: {problem}"
    for mistake in [] if problems else check_mistakes(job):
        yield f"warning: {mistake}"


def _objects(text: str) -> list[dict[str, Any]]:
    """The Kubernetes objects of a YAML or JSON file. Empty if it has anything else."""
    try:
        documents = load_documents(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    found = []
    for one in documents:
        if not isinstance(one, dict) or not {"apiVersion", "kind"} <= set(one):
            return []
        items = one.get("items") if str(one["kind"]).endswith("List") else None
        found += [item for item in items if isinstance(item, dict)] if isinstance(items, list) else [one]
    return found


def _values(text: str) -> dict[str, Any] | None:
    """The content of a JSON or TOML file. None if it is neither."""
    for parse in (json.loads, tomllib.loads):
        try:
            values = parse(text)
        except (ValueError, RecursionError):
            continue
        return values if isinstance(values, dict) else None
    return None
