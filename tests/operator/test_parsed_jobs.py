"""A job's object is parsed once per version, and what was parsed goes with the job."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.kube import parsed_jobs
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from tests.operator.support import job
from tests.operator.world import World

KEY = JobKey("default", "one")


def count_parsing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes that are parsed from now on."""
    parsed: list[str] = []
    for model in (ParallelTrainingJobSpec, ParallelTrainingJobStatus):
        validate = model.model_validate

        def counting(obj: Any, validate: Any = validate, name: str = model.__name__) -> Any:
            parsed.append(name)
            return validate(obj)

        monkeypatch.setattr(model, "model_validate", counting)
    return parsed


async def test_a_reconcile_because_of_a_report_parses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, nodes=4, work=1000.0)
    operator = world.operators[0]
    operator.cache.parsed = ParsedJobs()  # Without the checks of the simulated cluster, which parse.
    world.submit(job("one", replicas=2))
    await world.run(30)
    assert world.true("one", "Ready")
    await operator.reconciler(KEY)
    version = operator.cache.jobs[KEY]["metadata"]["resourceVersion"]
    parsed = count_parsing(monkeypatch)
    for agent in world.agents.values():
        agent.train(1.0, world.work)
        agent.talk(operator)
    await operator.reconciler(KEY)
    assert operator.cache.jobs[KEY]["metadata"]["resourceVersion"] == version, "progress alone is not written yet"
    assert parsed == []
    world.crash(world.pods("one")[0].name)
    await world.run(3)
    assert operator.cache.jobs[KEY]["metadata"]["resourceVersion"] != version
    assert "ParallelTrainingJobStatus" in parsed, "a new version is parsed"


def stored(version: int, uid: str = "u1", **fields: Any) -> KubeObject:
    body = job("one", **fields)
    body["metadata"] |= {"uid": uid, "resourceVersion": str(version)}
    body["status"] = {}
    return body


def test_each_version_of_each_object_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, parsed = ParsedJobs(), count_parsing(monkeypatch)
    for _ in range(3):
        assert jobs.spec(stored(1, replicas=2)).replicas == 2
        assert jobs.status(stored(1)) == ParallelTrainingJobStatus()
        assert jobs.readable_status(stored(1)) == ParallelTrainingJobStatus().wire()
    assert parsed == ["ParallelTrainingJobSpec", "ParallelTrainingJobStatus"]
    assert jobs.spec(stored(2, replicas=3)).replicas == 3
    assert jobs.spec(stored(2, "u2", replicas=4)).replicas == 4
    assert jobs.spec({**job("one", replicas=5)}).replicas == 5, "an object without a version is not known again"


@pytest.mark.parametrize("replicas", [2, "many"])
def test_a_spec_is_parsed_once_until_it_changes(monkeypatch: pytest.MonkeyPatch, replicas: object) -> None:
    jobs, parsed = ParsedJobs(), count_parsing(monkeypatch)

    def replicas_of(version: int, generation: int, replicas: object) -> object:
        body = stored(version, replicas=replicas)
        body["metadata"]["generation"] = generation
        with contextlib.suppress(InvalidSpecError):
            return jobs.spec(body).replicas
        return "many"

    assert [replicas_of(version, 1, replicas) for version in (1, 2, 3)] == [replicas] * 3
    assert parsed == ["ParallelTrainingJobSpec"], "only the status changed"
    assert replicas_of(4, 2, 3) == 3, "an edit is a new generation"
    assert replicas_of(3, 1, replicas) == replicas, "an older version is not taken for the newer one"
    assert replicas_of(5, 1, 4) == 4, "defaults of a new CRD are no new generation"


def test_an_invalid_spec_is_parsed_once_and_rejected_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, parsed = ParsedJobs(), count_parsing(monkeypatch)
    for _ in range(3):
        with pytest.raises(InvalidSpecError, match=r"spec\.replicas"):
            jobs.spec(stored(1, replicas="many"))
    assert parsed == ["ParallelTrainingJobSpec"]


def test_what_was_parsed_goes_with_the_job_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    for number, name in enumerate(("one", "two", "three")):
        body = stored(number + 1, f"u{number}")
        body["metadata"]["name"] = name
        cache.put_job(body)
        cache.parsed.spec(body)
    assert len(cache.parsed) == 3
    cache.remove_job(cache.jobs[JobKey("", "one")])
    assert len(cache.parsed) == 2
    listing = cache.begin_jobs_listing(None)
    listing.start_page("9")
    cache.finish_jobs_listing(listing)
    assert len(cache.parsed) == 0
    monkeypatch.setattr(parsed_jobs, "MAX_JOBS", 4)
    for number in range(9):
        cache.parsed.spec(stored(1, f"u{number}"))
    assert len(cache.parsed) == 4
