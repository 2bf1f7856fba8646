"""Argo CD's Lua, Flux's expressions and kstatus agree about a job at every stage of its life."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cel
import pytest
import yaml
from lupa.lua51 import LuaError, LuaRuntime

from meshwright.api.labels import ANNOTATION_CHECKPOINT, GROUP, KIND, VERSION
from tests.conflicts import ROOT
from tests.gitops.stages import DEGRADED, HEALTHY, PROGRESSING, SUSPENDED, Stage, stages
from tests.operator.kstatus import CURRENT, FAILED, IN_PROGRESS, TERMINATING, kstatus

EXAMPLES = ROOT / "examples" / "gitops"
CUSTOMIZATIONS = f"resource.customizations.{{}}.{GROUP}_{KIND}"
KSTATUS_OF = {HEALTHY: {CURRENT}, SUSPENDED: {CURRENT}, DEGRADED: {FAILED}, PROGRESSING: {IN_PROGRESS, TERMINATING}}


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def customization(kind: str) -> str:
    """What Argo CD's ConfigMap says under a key of ours."""
    (config,) = documents(EXAMPLES / "argocd" / "argocd-cm.yaml")
    text: str = config["data"][CUSTOMIZATIONS.format(kind)]
    return text


def lua(script: str, obj: Mapping[str, Any], **variables: Any) -> Any:
    """Runs a script as Argo CD does: Lua 5.1, without libraries, with the object as `obj`."""
    runtime = LuaRuntime(unpack_returned_tuples=True, register_eval=False)
    state = runtime.globals()
    # Argo CD has only these functions of `os`.
    state["os"] = runtime.execute("return {date = os.date, time = os.time}")
    for library in ("io", "string", "math", "table", "package", "debug", "require", "python"):
        state[library] = None
    state["obj"] = runtime.table_from(obj, recursive=True)
    for name, value in variables.items():
        state[name] = runtime.table_from(value, recursive=True)
    return plain(runtime.execute(script))


def plain(value: Any) -> Any:
    """A table as a dict or a list."""
    if not hasattr(value, "items"):
        return value
    found = {key: plain(item) for key, item in value.items()}
    return list(found.values()) if found and set(found) == set(range(1, len(found) + 1)) else found


@pytest.fixture(scope="module")
def life() -> list[Stage]:
    return asyncio.run(stages())


def test_there_are_twelve_stages_and_all_kinds_of_health(life: list[Stage]) -> None:
    names = [stage.name for stage in life]
    assert len(set(names)) == len(names) >= 12
    assert {stage.argocd for stage in life} == {HEALTHY, PROGRESSING, DEGRADED, SUSPENDED}
    assert "rescales" in names


def test_argo_cd_sees_each_stage_as_kstatus_does(life: list[Stage]) -> None:
    script = customization("health")
    for stage in life:
        health = lua(script, stage.job)
        assert health["status"] == stage.argocd, (stage.name, health, stage.job["status"])
        assert isinstance(health["message"], str), stage.name
        assert kstatus(stage.job) in KSTATUS_OF[stage.argocd], stage.name


def test_a_degraded_job_says_why(life: list[Stage]) -> None:
    script = customization("health")
    for stage in life:
        if stage.argocd == DEGRADED:
            assert len(lua(script, stage.job)["message"]) > 20, stage.name


def test_flux_waits_for_completion_and_notices_failure(life: list[Stage]) -> None:
    kustomizations = [one for one in documents(EXAMPLES / "flux" / "jobs.yaml") if one["kind"] == "Kustomization"]
    (expressions,) = (check for one in kustomizations for check in one["spec"].get("healthCheckExprs", ()))
    assert (expressions["apiVersion"], expressions["kind"]) == (f"{GROUP}/{VERSION}", KIND)
    for stage in life:
        holds = {name: cel.evaluate(expressions[name], dict(stage.job)) for name in ("failed", "current", "inProgress")}
        ended = {True: "current", False: "failed", None: "inProgress"}[stage.ended]
        stale = stage.job["status"]["observedGeneration"] != stage.job["metadata"]["generation"]
        if not stale:
            assert holds[ended], (stage.name, holds)
            assert sum(holds.values()) == 1, (stage.name, holds)


ACTIONS = yaml.safe_load(customization("actions"))


def action(name: str, obj: Mapping[str, Any], **variables: Any) -> Any:
    (script,) = (one["action.lua"] for one in ACTIONS["definitions"] if one["name"] == name)
    return lua(script, obj, **variables)


def test_actions_are_offered_when_they_do_something(life: list[Stage]) -> None:
    offered = {}
    for stage in life:
        found = lua(ACTIONS["discovery.lua"], stage.job)
        assert set(found) == {one["name"] for one in ACTIONS["definitions"]}
        offered[stage.name] = {name for name, properties in found.items() if not properties["disabled"]}
    assert offered["trains"] == {"suspend", "scale"}
    assert offered["suspended"] == {"resume", "scale"}
    assert offered["complete"] == offered["failed"] == set()


def test_a_checkpoint_is_offered_to_a_job_that_trains_and_can_save(life: list[Stage]) -> None:
    def offered(stage: Stage, **spec: Any) -> bool:
        job = {**stage.job, "spec": {**stage.job["spec"], **spec}}
        return not lua(ACTIONS["discovery.lua"], job)["checkpoint"]["disabled"]

    saves = {"checkpoint": {"claimName": "volume"}}
    healthy = {stage.name for stage in life if stage.argocd == HEALTHY}
    expected = healthy - {"complete"} | {"edit not read yet"}
    assert {stage.name for stage in life if offered(stage, **saves)} == expected
    trains = next(stage for stage in life if stage.name == "trains")
    assert not offered(trains)
    assert not offered(trains, **saves, runtime={"command": ["python", "train.py"]})


def test_a_checkpoint_is_asked_for_by_the_time(life: list[Stage]) -> None:
    job = next(stage.job for stage in life if stage.name == "trains")
    asked = action("checkpoint", job)
    assert asked["spec"] == plain_spec(job)
    value = asked["metadata"]["annotations"][ANNOTATION_CHECKPOINT]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(value)) < timedelta(hours=1)
    annotated = {**job, "metadata": {**job["metadata"], "annotations": {"team": "a", ANNOTATION_CHECKPOINT: "old"}}}
    again = action("checkpoint", annotated)["metadata"]["annotations"]
    assert datetime.fromisoformat(again.pop(ANNOTATION_CHECKPOINT)) >= datetime.fromisoformat(value)
    assert again == {"team": "a"}


def test_actions_edit_what_they_say_and_nothing_else(life: list[Stage]) -> None:
    job = next(stage.job for stage in life if stage.name == "trains")
    for name, variables, change in (
        ("suspend", {}, {"suspend": True}),
        ("resume", {}, {"suspend": False}),
        ("scale", {"actionParams": {"replicas": "4"}}, {"replicas": 4}),
    ):
        assert action(name, job, **variables)["spec"] == {**plain_spec(job), **change}, name


def plain_spec(job: Mapping[str, Any]) -> Any:
    return lua("return obj", job)["spec"]


@pytest.mark.parametrize("replicas", ["0", "-1", "1.5", "many", ""])
def test_a_wrong_number_of_replicas_is_refused_with_its_value(life: list[Stage], replicas: str) -> None:
    with pytest.raises(LuaError, match="replicas must be a whole number of at least 1"):
        action("scale", life[0].job, actionParams={"replicas": replicas})
