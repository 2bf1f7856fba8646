"""Checks a manifest of a job without a cluster: all that the API server checks at admission, and the model.

The schema of the CRD is applied as the API server applies it, so a string where a number is meant is an error here too.
Each problem names the field and, for a name that is unknown, the most similar one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from meshwright.api.labels import API_VERSION, KIND
from meshwright.api.objects import MAX_JOB_NAME
from meshwright.api.parsing import InvalidSpecError, parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.schema_check import ManifestProblem, check_value, kind_of, unknown_field, yaml_text
from meshwright.crd.structural_schema import Schema
from meshwright.models.presets import UnknownModelError, resolve
from meshwright.rules.likely_mistakes import likely_mistakes_of_spec
from meshwright.rules.validation import explained_problems, with_model_numbers

_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def check_manifest(job: Mapping[str, Any]) -> list[ManifestProblem]:
    """Why a cluster would reject this job. Empty if it would accept it."""
    problems = [*_check_kind(job), *_check_metadata(job.get("metadata"))]
    spec = job.get("spec")
    if spec is None:
        return [
            *problems,
            ManifestProblem("spec", "is missing: a job needs at least `workers`, and a model or a command"),
        ]
    found = list(check_value(spec, spec_schema(), "spec"))
    unknown = [name for name in job if name not in ("apiVersion", "kind", "metadata", "spec", "status")]
    problems += [ManifestProblem(name, unknown_field(name, ("spec", "metadata"))) for name in unknown]
    if found:
        return problems + found
    try:
        parsed = parse_spec(job)
    except InvalidSpecError as error:
        return problems + [ManifestProblem(field, message) for field, message in error.problems]
    return problems + _check_rules(parsed)


def _check_rules(spec: ParallelTrainingJobSpec) -> list[ManifestProblem]:
    broken = explained_problems(spec)
    if not broken and spec.model is not None:
        try:
            broken = explained_problems(with_model_numbers(spec, resolve(spec.model)))
        except UnknownModelError as error:
            return [ManifestProblem("spec.model", str(error))]
    return [ManifestProblem(f"spec.{problem.field}", problem.message) for problem in broken]


def check_mistakes(job: Mapping[str, Any]) -> list[ManifestProblem]:
    """What is probably not meant in a job that `check_manifest` accepts. A cluster accepts it."""
    found = likely_mistakes_of_spec(parse_spec(job))
    return [ManifestProblem(f"spec.{mistake.field}", mistake.message) for mistake in found]


@cache
def spec_schema() -> Schema:
    """The schema of `spec` in the CRD."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def _check_kind(job: Mapping[str, Any]) -> Iterator[ManifestProblem]:
    if job.get("apiVersion") != API_VERSION:
        yield ManifestProblem("apiVersion", f"must be `{API_VERSION}`, got `{job.get('apiVersion')}`")
    if job.get("kind") != KIND:
        yield ManifestProblem("kind", f"must be `{KIND}`, got `{job.get('kind')}`")


def _check_metadata(metadata: Any) -> Iterator[ManifestProblem]:
    if not isinstance(metadata, Mapping) or not (metadata.get("name") or metadata.get("generateName")):
        yield ManifestProblem("metadata.name", "is missing")
        return
    name = metadata.get("name")
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_JOB_NAME and _JOB_NAME.fullmatch(name)):
        yield ManifestProblem("metadata.name", _bad_name(str(name)))
    for field in ("labels", "annotations"):
        values = metadata.get(field) or {}
        if not isinstance(values, Mapping):
            yield ManifestProblem(f"metadata.{field}", f"must be an object, got {kind_of(values)}")
            continue
        for key, value in values.items():
            where = f"metadata.{field}[{key}]"
            if not isinstance(value, str):
                yield ManifestProblem(where, f'must be a string, got {kind_of(value)}: write "{yaml_text(value)}"')
            elif field == "labels" and not _LABEL_VALUE.fullmatch(value):
                yield ManifestProblem(where, "must be at most 63 letters, digits, `-`, `_` and `.`")


def _bad_name(name: str) -> str:
    message = (
        f"must be at most {MAX_JOB_NAME} characters, start with a letter and contain only lower-case letters, digits "
        f"and `-`, got `{name}` ({len(name)} characters)"
    )
    nearest = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:MAX_JOB_NAME].strip("-")
    return f"{message}: write `{nearest}`" if nearest else message
