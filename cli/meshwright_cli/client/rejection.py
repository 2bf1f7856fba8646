"""Says why the API server rejected an object, for people: with the values of fields and the nearest ones that work."""

from __future__ import annotations

from http import HTTPStatus

from meshwright.api.labels import API_VERSION, KIND
from meshwright.api.objects import KubeObject
from meshwright_cli.client.errors import RejectedError

_INVALID = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)


def explained(item: KubeObject, error: RejectedError) -> RejectedError:
    """The rejection of an object, with its name and, for a job that breaks a rule, the problems as `validate` has them.

    The API server decides. Where this version of the rules has no objection, its own text says why.
    """
    # Imported here, because few commands need the rules of a job.
    from meshwright.crd.manifest_check import check_manifest  # noqa: PLC0415

    subject = f"{item['kind']} {item['metadata']['name']}"
    is_job = item.get("apiVersion") == API_VERSION and item["kind"] == KIND
    problems = check_manifest(item) if is_job and error.status in _INVALID else []
    if len(problems) > 1:
        text = "\n  - ".join([f"{subject} is not valid:", *map(str, problems)])
    else:
        text = f"{subject}: {problems[0] if problems else error}"
    if is_job and not problems and "unknown field" in text:
        text += ". This version of `meshwright` knows it, so the cluster's is another one: see `meshwright doctor`"
    return RejectedError(text, error.status, error.reason)
