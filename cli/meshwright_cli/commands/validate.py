"""`meshwright validate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from meshwright.api.labels import KIND, PLURAL, SHORT_NAME, SINGULAR
from meshwright.api.parsing import parse_spec
from meshwright.crd.manifest_check import check_manifest, check_mistakes
from meshwright.crd.schema_check import ManifestProblem
from meshwright.kube_yaml import load_documents
from meshwright.profiles.document import Profiles
from meshwright_cli.fabric import parse_fabric_file
from meshwright_cli.parameters import STDIO, input_text
from meshwright_cli.plan.pod_additions import parse_profile_file, profile_of

_OURS = {name.lower() for name in (KIND, PLURAL, SINGULAR, SHORT_NAME, "paralleltrainjob", "trainingjob")}


@click.command()
@click.argument("files", metavar="[FILE...]", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "-f",
    "--filename",
    "filenames",
    type=click.Path(path_type=Path, allow_dash=True),
    multiple=True,
    help="The same as FILE, as in kubectl.",
)
@click.option(
    "--fabric", type=click.Path(path_type=Path), help="Also check this document of the site's fabric, or only it."
)
@click.option(
    "--profiles",
    type=click.Path(path_type=Path),
    help="Also check this document of the site's profiles, and that jobs may use theirs.",
)
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def validate(
    files: Sequence[Path], filenames: Sequence[Path], fabric: Path | None, profiles: Path | None, output: str
) -> None:
    """Check manifests of jobs without a cluster.

    Checks all that a cluster checks at admission (schema, names, rules), and the model's preset or configuration. Each
    problem names the field and the nearest value or name. A warning names a valid setting that is probably a mistake.
    `-` reads standard input. Objects of other kinds are listed as not checked. Exits with 1 if a job is invalid or a
    file cannot be read. `meshwright plan` says how a valid job would run.
    """
    files = [*files, *filenames]
    if not files and fabric is None and profiles is None:
        raise click.UsageError(
            "Missing argument 'FILE...': name a manifest, or a document of the site with --fabric or --profiles."
        )
    known, of_site = (None, []) if profiles is None else _check_profiles(profiles)
    results = [result for file in files for result in _check_file(file, known)]
    results += [] if fabric is None else [_check_fabric(fabric)]
    results += of_site
    if output == "json":
        click.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            for line in _lines(result):
                click.echo(line)
    if any(result["problems"] for result in results):
        raise SystemExit(1)


def _check_fabric(file: Path) -> dict[str, Any]:
    """The result for the document of the site's fabric."""
    problems = []
    try:
        parse_fabric_file(file.read_text())
    except OSError as error:
        problems = [ManifestProblem("(file)", str(error.strerror))]
    except ValueError as error:
        problems = [ManifestProblem("(document)", str(error))]
    return _result(str(file), "fabric of the site", "", problems)


def _check_profiles(file: Path) -> tuple[Profiles | None, list[dict[str, Any]]]:
    """The profiles of the site, if they are valid, and the result for their document."""
    problems, known = [], None
    try:
        known = parse_profile_file(file.read_text())
    except OSError as error:
        problems = [ManifestProblem("(file)", str(error.strerror))]
    except ValueError as error:
        problems = [ManifestProblem("(document)", str(error))]
    return known, [_result(str(file), "profiles of the site", "", problems)]


def _check_profile(job: dict[str, Any], profiles: Profiles) -> list[ManifestProblem]:
    """Why a valid job may not use its profile."""
    spec, namespace = parse_spec(job), str(job["metadata"].get("namespace") or "default")
    if spec.workers.profile is None:
        return []
    problem, _ = profile_of(spec, spec.workers.profile, namespace, profiles)
    return [ManifestProblem("spec.workers.profile", problem)] if problem else []


def _check_file(file: Path, profiles: Profiles | None = None) -> list[dict[str, Any]]:
    """A result for each object in the file, or for the file if it cannot be read."""
    name = "(standard input)" if file == STDIO else str(file)
    try:
        text = input_text(file)
        documents = load_documents(text)
    except OSError as error:
        return [_result(name, "", "", [ManifestProblem("(file)", str(error.strerror))])]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return [_result(name, "", "", [ManifestProblem("(file)", f"not valid YAML: {error}")])]
    documents = [item for one in documents for item in _items(one)]
    if not documents:
        return [_result(name, "", "", [ManifestProblem("(file)", "has no object")])]
    return [_check_object(name, document, profiles) for document in documents]


def _items(document: Any) -> list[Any]:
    is_list = isinstance(document, dict) and document.get("kind") == "List"
    return list(document.get("items") or []) if is_list else [document]


def _check_object(file: str, document: Any, profiles: Profiles | None = None) -> dict[str, Any]:
    if not isinstance(document, dict):
        return _result(file, "", "", [ManifestProblem("(root)", "must be a Kubernetes object")])
    kind, metadata = str(document.get("kind") or ""), document.get("metadata")
    name = str(metadata.get("name") or "") if isinstance(metadata, dict) else ""
    if _is_job(document, kind):
        problems = check_manifest(document)
        if not problems and profiles is not None:
            problems = _check_profile(document, profiles)
        return _result(file, kind, name, problems, warnings=[] if problems else check_mistakes(document))
    missing = [field for field in ("apiVersion", "kind") if not document.get(field)]
    problems = [ManifestProblem(field, "is missing") for field in missing]
    return _result(file, kind, name, problems, checked=bool(problems))


def _is_job(document: dict[str, Any], kind: str) -> bool:
    """Whether the object is a job, or is meant to be one."""
    group = str(document.get("apiVersion") or "").partition("/")[0]
    return kind.lower() in _OURS or group.startswith("meshwright")


def _result(
    file: str,
    kind: str,
    name: str,
    problems: Sequence[ManifestProblem],
    *,
    checked: bool = True,
    warnings: Sequence[ManifestProblem] = (),
) -> dict[str, Any]:
    found, mistakes = (
        [{"field": one.field, "message": one.message} for one in listed] for listed in (problems, warnings)
    )
    result = {"file": file, "kind": kind, "name": name, "checked": checked, "valid": not found, "problems": found}
    return result | {"warnings": mistakes}


def _lines(result: dict[str, Any]) -> list[str]:
    what = " ".join(part for part in (result["kind"], result["name"]) if part)
    subject = f"{result['file']}: {what}" if what else result["file"]
    if not result["checked"]:
        return [f"{subject}: not checked"]
    if result["valid"]:
        warnings = [f"{subject}: warning: {one['field']}: {one['message']}" for one in result["warnings"]]
        return [f"{subject}: valid", *warnings]
    return [f"{subject}: {problem['field']}: {problem['message']}" for problem in result["problems"]]
