"""No name that a user may give gets in the way of the operator's: whatever the manifest uses, a job may not set."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import WorkerPlacement
from meshwright.rules.validation import check_spec
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from tests.rules.specs import COMMAND, GOOD, changed

EVERYTHING = {
    "data": {"source": "Files", "claimName": "texts"},
    "checkpoint": {"claimName": "saved"},
}
SCRIPTS = {**COMMAND, "runtime": {**COMMAND["runtime"], "scripts": "my-scripts"}, "checkpoint": {"claimName": "saved"}}


def manifest(spec: dict[str, Any]) -> dict[str, Any]:
    parsed = ParallelTrainingJobSpec.model_validate(spec)
    context = PodContext("train", "team", "0f1e2d3c-0000", parsed, "0123456789", "http://c:9470", "secret")
    return worker_pod(context, WorkerPlacement(worker=1, incarnation=3, pod="train-w1-3", node="n", ranks="2-3"))


def last_values(pod: dict[str, Any]) -> dict[str, Any]:
    """The last value of a repeated name is used."""
    return {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}


def used() -> list[tuple[str, Any]]:
    """Every name of the operator's in pods that have all there may be, as a change to a spec which uses it too."""
    pods = [manifest({**GOOD, **EVERYTHING}), manifest(SCRIPTS)]
    containers = [pod["spec"]["containers"][0] for pod in pods]
    claim = {"name": "extra", "mountPath": "/extra", "claimName": "c"}
    mounts = {mount["mountPath"] for container in containers for mount in container["volumeMounts"]}
    paths = [form for path in mounts for form in (path, f"{path}/below", f"/{path}", f"/.{path}", f"/a/..{path}")]
    return [
        *[("workers.labels", {key: "mine"}) for key in _all(pod["metadata"]["labels"] for pod in pods)],
        *[("workers.annotations", {key: "mine"}) for key in _all(pod["metadata"]["annotations"] for pod in pods)],
        *[("workers.env", [{"name": name, "value": "mine"}]) for name in _all(last_values(pod) for pod in pods)],
        *[("workers.volumes", [{**claim, "name": v["name"]}]) for pod in pods for v in pod["spec"]["volumes"]],
        *[("workers.volumes", [{**claim, "mountPath": path}]) for path in sorted(paths)],
    ]


def _all(names: Iterable[Iterable[str]]) -> list[str]:
    return sorted({name for group in names for name in group})


def identity(case: tuple[str, Any]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.mark.parametrize("case", used(), ids=identity)
def test_a_name_of_the_operator_is_refused(case: tuple[str, Any]) -> None:
    field, value = case
    spec = ParallelTrainingJobSpec.model_validate(changed(GOOD, {field: value}))
    assert field in {problem.field for problem in check_spec(spec)}


@pytest.mark.parametrize("case", used(), ids=identity)
def test_a_name_that_got_past_admission_does_not_replace_the_operators(case: tuple[str, Any]) -> None:
    field, value = case
    plain = manifest({**GOOD, **EVERYTHING})
    pod = manifest(changed({**GOOD, **EVERYTHING}, {field: value}))
    for kind in ("labels", "annotations"):
        assert pod["metadata"][kind] == plain["metadata"][kind]
    before, after = last_values(plain), last_values(pod)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    "key",
    [
        "container.apparmor.security.beta.kubernetes.io/worker",
        "container.seccomp.security.alpha.kubernetes.io/worker",
        "seccomp.security.alpha.kubernetes.io/pod",
    ],
)
def test_annotations_that_weaken_the_isolation_of_pods_are_refused(key: str) -> None:
    spec = ParallelTrainingJobSpec.model_validate(changed(GOOD, {"workers.annotations": {key: "unconfined"}}))
    assert [problem.field for problem in check_spec(spec)] == ["workers.annotations"]


def test_the_examples_of_this_module_are_valid() -> None:
    for spec in ({**GOOD, **EVERYTHING}, SCRIPTS):
        assert check_spec(ParallelTrainingJobSpec.model_validate(copy.deepcopy(spec))) == []
