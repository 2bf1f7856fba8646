"""Where the checkpoints of a job and of the run that it begins from are, and which variables their store needs."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.checkpoint import CheckpointSpec
from meshwright.checkpoint_places import ResumeSource, resume_source, store_credentials

AWS = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]


@pytest.mark.parametrize(
    ("resume_from", "source"),
    [
        ("base-0a1b2c3d", ResumeSource("/c/base-0a1b2c3d")),
        ("base-0a1b2c3d/", ResumeSource("/c/base-0a1b2c3d")),
        ("base-0a1b2c3d/step-00004000", ResumeSource("/c/base-0a1b2c3d", 4000)),
        ("archive/base/step-123456789/", ResumeSource("/c/archive/base", 123456789)),
        ("step-00004000", ResumeSource("/c", 4000)),
        ("base-0a1b2c3d/step-4000", ResumeSource("/c/base-0a1b2c3d/step-4000")),
        ("base-0a1b2c3d/step-00004000-g3", ResumeSource("/c/base-0a1b2c3d/step-00004000-g3")),
        ("s3://bucket/runs/base-0a1b2c3d/", ResumeSource("s3://bucket/runs/base-0a1b2c3d")),
        ("s3://bucket/base/step-00004000", ResumeSource("s3://bucket/base", 4000)),
        ("s3://bucket/base/step-00004000-g3", ResumeSource("s3://bucket/base", 4000, "step-00004000-g3")),
    ],
)
def test_a_run_may_be_named_with_one_of_its_checkpoints(resume_from: str, source: ResumeSource) -> None:
    assert resume_source(resume_from, "/c") == source


@pytest.mark.parametrize(
    ("checkpoint", "names"),
    [
        ({"uri": "s3://a/b"}, AWS),
        ({"resumeFrom": "s3://a/b"}, AWS),
        ({"uri": "s3://a/b", "resumeFrom": "s3://c/d"}, AWS),
        ({"uri": "s3://a/b", "resumeFrom": "base-0a1b2c3d"}, AWS),
        ({"claimName": "c", "resumeFrom": "base-0a1b2c3d"}, []),
        ({"uri": "gs://a/b"}, []),
    ],
)
def test_the_secret_has_the_credentials_for_reading_and_writing(checkpoint: dict[str, Any], names: list[str]) -> None:
    spec = CheckpointSpec.model_validate({**checkpoint, "store": {"secretName": "keys"}})
    assert [variable["name"] for variable in store_credentials(spec)] == names
    assert all(variable["valueFrom"]["secretKeyRef"]["name"] == "keys" for variable in store_credentials(spec))
    both = CheckpointSpec(uri="s3://a/b", resume_from="abfs://c@d/e", store=spec.store)
    variables = [variable["name"] for variable in store_credentials(both)]
    assert {*AWS, "AZURE_STORAGE_ACCOUNT_KEY"} < set(variables)
    assert len(set(variables)) == len(variables)
