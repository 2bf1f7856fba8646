"""`meshwright validate` against a real admission: it accepts what the API server accepts, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshwright.crd.manifest_check import check_manifest
from tests.cli.test_validate import GOOD, MISTAKES
from tests.cli.test_validate import changed as with_mistake
from tests.operator.support import JOBS, Api
from tests.rules.broken_specs import CASES
from tests.rules.specs import changed
from tests.rules.valid_specs import FINE

OFFLINE_ONLY = "spec.model"
"""The API server knows neither presets nor Hugging Face configurations."""
DRY_RUN = f"{JOBS}?dryRun=All&fieldValidation=Strict"


def as_job(spec: dict[str, Any]) -> dict[str, Any]:
    job = copy.deepcopy(GOOD)
    job["spec"] = spec
    return job


async def admitted(api: Api, job: dict[str, Any]) -> bool:
    return "spec" in await api.call("POST", DRY_RUN, job, ok=False)


async def test_both_accept_and_reject_the_same_jobs(api: Api) -> None:
    for path, value, field, _ in MISTAKES:
        if field != OFFLINE_ONLY:
            assert not await admitted(api, with_mistake(path, value)), (path, value)
    assert await admitted(api, GOOD)
    for base, changes in FINE:
        job = as_job(changed(base, changes))
        problems = [problem for problem in check_manifest(job) if problem.field != OFFLINE_ONLY]
        assert await admitted(api, job) == (not problems), (changes, problems)


@pytest.mark.slow
async def test_both_apply_the_rules(api: Api) -> None:
    for base, changes, field in CASES[::9]:
        job = as_job(changed(base, changes))
        assert f"spec.{field}" in [problem.field for problem in check_manifest(job)], changes
        assert not await admitted(api, job), changes
