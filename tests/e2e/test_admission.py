"""Bad input is refused at `kubectl apply --dry-run=server`, with the field named; every example is accepted."""

import json
from http import HTTPStatus

import pytest

from meshwright.api import conditions
from meshwright.api.labels import API_VERSION, KIND
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import WorkerPlacement
from meshwright_cli import manifest
from meshwright_cli.manifest import ManifestError
from meshwright_local.kube.client import APPLY_PATCH, MERGE_PATCH, ApiError
from meshwright_local.kube.resources import JOBS, NAMESPACES, PODS
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from tests.e2e.local_stack import EXAMPLES, NAMESPACE, holds, tiny
from tests.rules.broken_specs import CASES
from tests.rules.specs import COMMAND, GOOD, changed
from tests.rules.test_edits import FINE_EDITS, REFUSED_EDITS

CLAIM = {"name": "v", "mountPath": "/v", "claimName": "c"}
# What the schema alone refuses: (the field named in the error, changes to a good spec).
MALFORMED = [
    ("spec.training.stepz", {"training.stepz": 3}),
    ("spec.workerz", {"workerz": {}}),
    ("spec.training.steps", {"training.steps": "many"}),
    ("spec.training.steps", {"training.steps": 1.5}),
    ("spec.replicas", {"replicas": [1]}),
    ("spec.workers", {"workers": "eight"}),
    ("spec.training.steps", {"training.steps": 0}),
    ("spec.training.steps", {"training.steps": -1}),
    ("spec.replicas", {"replicas": 0}),
    ("spec.replicas", {"replicas": 65537}),
    ("spec.model.huggingFace", {"model": {"huggingFace": {"model_type": "llama"}}}),
    ("spec.model.huggingFace", {"model": {"huggingFace": '{"model_type": "llama"' + " " * 32768 + "}"}}),
    ("spec.parallelism.tensor", {"parallelism.tensor": -2}),
    ("spec.training.optimizer.learningRate", {"training.optimizer": {"learningRate": 0}}),
    ("spec.training.optimizer.beta1", {"training.optimizer": {"beta1": 1}}),
    ("spec.training.precision", {"training.precision": "fp7"}),
    ("spec.parallelism.schedule", {"parallelism.schedule": "best"}),
    ("spec.parallelism.zeroStage", {"parallelism.zeroStage": 4}),
    ("spec.data.source", {"data.source": "s3://bucket/text"}),
    ("spec.workers.image", {"workers.image": None}),
    ("spec.workers.image", {"workers.image": "x" * 1025}),
    ("spec.workers.gpuResource", {"workers.gpuResource": "gpu"}),
    ("spec.workers.resources.memory", {"workers.resources": {"memory": "lots"}}),
    ("spec.workers.resources.cpu", {"workers.resources": {"cpu": "-1"}}),
    ("spec.workers.env[0].name", {"workers.env": [{"name": "A-B"}]}),
    ("spec.workers.env[1]", {"workers.env": [{"name": "A"}, {"name": "A"}]}),
    ("spec.workers.imagePullPolicy", {"workers.imagePullPolicy": "Sometimes"}),
    ("spec.workers.imagePullSecrets[0].name", {"workers.imagePullSecrets": [{}]}),
    ("spec.workers.tolerations[0].operator", {"workers.tolerations": [{"operator": "Like"}]}),
    ("spec.workers.volumes[0].mountPath", {"workers.volumes": [{**CLAIM, "mountPath": "relative"}]}),
    ("spec.workers.volumes[0].hostPath", {"workers.volumes": [{**CLAIM, "hostPath": "/etc"}]}),
    ("spec.checkpoint.claimName", {"checkpoint": {"everySteps": 5}}),
    ("spec.checkpoint.location", {"checkpoint": {"claimName": "c", "location": "file:///etc"}}),
    ("spec.recovery.maxRestarts", {"recovery": {"maxRestarts": -1}}),
    ("spec.recovery.restartWindowSeconds", {"recovery": {"restartWindowSeconds": 1}}),
    ("spec.recovery.exitCodes[0].values[0]", {"recovery": {"exitCodes": [{"values": [0], "action": "FailJob"}]}}),
    ("spec.recovery.exitCodes[0].action", {"recovery": {"exitCodes": [{"values": [1], "action": "Panic"}]}}),
    ("spec.successPolicy", {"successPolicy": "Any"}),
    ("spec.activeDeadlineSeconds", {"activeDeadlineSeconds": 0}),
    ("spec.ttlSecondsAfterFinished", {"ttlSecondsAfterFinished": 2**31}),
    ("spec.managedBy", {"managedBy": "kueue"}),
    ("spec.suspend", {"suspend": "yes"}),
]
NAMES = ["n" * 44, "1st", "a.b"]


async def dry_run(client, spec, name="bad"):
    """Applies a job as `kubectl apply --server-side --dry-run=server` does."""
    item = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    params = {"fieldManager": "test", "fieldValidation": "Strict", "dryRun": "All"}
    path = JOBS.path(NAMESPACE, name)
    return await client.request("PATCH", path, params=params, body=item, content_type=APPLY_PATCH)


@pytest.mark.parametrize(("field", "changes"), MALFORMED, ids=[f"{n}-{f}" for n, (f, _) in enumerate(MALFORMED)])
async def test_what_the_schema_forbids_is_rejected_with_its_field(stage, field, changes):
    with pytest.raises(ApiError) as refusal:
        await dry_run(stage.client, changed(GOOD, changes))
    assert refusal.value.status in (400, 422, 500), refusal.value
    # A server names the field with or without the spec in front, and list items by index or by key.
    assert field.rpartition(".")[2].partition("[")[0] in str(refusal.value)


@pytest.mark.parametrize(
    ("base", "changes", "field"), CASES, ids=[f"{n}-{field}" for n, (_, _, field) in enumerate(CASES)]
)
async def test_what_contradicts_itself_is_rejected_with_field_and_fix(stage, base, changes, field):
    with pytest.raises(ApiError) as refusal:
        await dry_run(stage.client, changed(base, changes))
    assert refusal.value.status == 422, refusal.value
    assert f"spec.{field}" in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_that_pods_cannot_have_is_rejected(stage, name):
    with pytest.raises(ApiError, match="metadata.name"):
        await dry_run(stage.client, GOOD, name)


async def test_a_valid_job_passes_and_the_table_is_long(stage):
    await dry_run(stage.client, GOOD)
    await dry_run(stage.client, COMMAND)
    assert len(MALFORMED) + len(CASES) + len(NAMES) + len(REFUSED_EDITS) >= 120


async def test_edits_are_judged_by_whether_a_step_is_finished(stage):
    """Each edit against a job of another manager, whose status says by hand how far it has come."""
    manager = "example.com/test"
    for number, (field, before, edit) in enumerate([*REFUSED_EDITS, *(("", *fine) for fine in FINE_EDITS)]):
        spec = {"managedBy": manager, **changed(GOOD, before)}
        name = f"edit-{number}"
        item = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": {**spec, "suspend": True}}
        await stage.client.create(JOBS, item, NAMESPACE)
        wanted = {"managedBy": manager, **changed(changed(GOOD, before), edit)}
        if "managedBy" in edit and edit["managedBy"] is None:
            del wanted["managedBy"]
        before_start = await objection(stage.client, name, wanted)
        assert ("cannot be changed" in before_start) == (field == "managedBy"), before_start
        started = {"startTime": "2026-01-02T03:04:05Z"}
        path = f"{JOBS.path(NAMESPACE, name)}/status"
        await stage.client.request("PATCH", path, body={"status": started}, content_type=MERGE_PATCH)
        before_step = await objection(stage.client, name, wanted)
        assert ("cannot be changed" in before_step) == (field == "managedBy"), before_step
        trained = {"status": {**started, "step": 1}}
        await stage.client.request("PATCH", path, body=trained, content_type=MERGE_PATCH)
        text = await objection(stage.client, name, wanted)
        assert (text.startswith("422") and f"spec.{field}: Forbidden" in text) if field else not text, text
        await stage.client.delete(JOBS, name, NAMESPACE)


async def objection(client, name, spec):
    """What the server has against another spec, as told by `kubectl replace --dry-run=server`; empty for nothing."""
    path = JOBS.path(NAMESPACE, name)
    while True:
        job = await client.get(JOBS, name, NAMESPACE)
        try:
            await client.request("PUT", path, params={"dryRun": "All"}, body={**job, "spec": spec})
        except ApiError as error:
            # The operator writes the status of its own jobs meanwhile.
            if error.status == HTTPStatus.CONFLICT:
                continue
            return str(error)
        return ""


async def test_the_command_line_says_it_too(stage):
    with pytest.raises(ManifestError, match="stepz"):
        await stage.apply(tiny("bad", training={"stepz": 3})[1:])
    with pytest.raises(ManifestError, match="model.heads"):
        await stage.apply(tiny("bad", parallelism={"tensor": 4}, workers={"gpusPerWorker": 4})[1:])


async def test_worker_pods_with_every_option_are_taken_by_a_restricted_namespace(stage):
    """Pod Security's `restricted` level is enforced by the real server; the embedded one checks the pod's schema."""
    namespace = {"metadata": {"name": "guarded", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await stage.client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", **namespace})
    workers = {
        "image": "worker",
        "gpusPerWorker": 2,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "registry"}],
        "resources": {"cpu": "4", "memory": "8Gi"},
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [
            {"name": "a", "mountPath": "/a", "claimName": "c", "readOnly": True},
            {"name": "b", "mountPath": "/b", "configMapName": "m"},
            {"name": "c", "mountPath": "/c", "secretName": "s"},
            {"name": "d", "mountPath": "/d", "scratch": "10Gi"},
        ],
    }
    spec = changed(GOOD, {"workers": workers, "checkpoint": {"claimName": "c"}})
    context = PodContext("job", "guarded", "uid", ParallelTrainingJobSpec.model_validate(spec), "r", "http://c:1", "s")
    pod = worker_pod(context, WorkerPlacement(worker=0, incarnation=0, pod="job-w0-0", node="n", ranks="0-1"))
    del pod["metadata"]["ownerReferences"]
    path = PODS.path("guarded")
    await stage.client.request("POST", path, params={"dryRun": "All", "fieldValidation": "Strict"}, body=pod)


async def test_jobs_can_be_selected_by_their_fields(stage):
    manager = {"managedBy": "example.com/test"}
    for name, suspend in (("up", False), ("down", True)):
        spec = {**GOOD, **manager, "suspend": suspend}
        item = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
        await stage.client.create(JOBS, item, NAMESPACE)
    path = JOBS.path(NAMESPACE)
    answer = await stage.client.request("GET", path, params={"fieldSelector": "spec.suspend=true"})
    assert [item["metadata"]["name"] for item in answer["items"]] == ["down"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
async def test_every_example_is_accepted(stage, path):
    for item in manifest.read(path):
        resource = await manifest.resource_of(stage.client, item)
        url = resource.path(NAMESPACE, item["metadata"]["name"])
        params = {"fieldManager": "test", "fieldValidation": "Strict", "dryRun": "All"}
        answer = await stage.client.request("PATCH", url, params=params, body=item, content_type=APPLY_PATCH)
        if item["kind"] == KIND:
            assert json.dumps(answer["status"]) == '{"observedGeneration": -1}'


async def test_a_configuration_that_is_not_built_starts_no_pod_and_says_why(stage):
    """Admission cannot read JSON; the operator does, with the planner's own reader."""
    described = tiny("mamba")
    described[-1]["spec"]["model"] = {"huggingFace": '{"model_type": "mamba", "hidden_size": 64}'}
    await stage.apply(described)
    status = await stage.until("mamba", holds(conditions.STALLED), "Stalled")
    (stalled,) = [each for each in status.conditions if each.type == conditions.STALLED]
    assert stalled.reason == "InvalidSpec"
    assert "`model.huggingFace`: `model_type` 'mamba' is not supported: use one of gpt2" in stalled.message
    assert await stage.pods("mamba") == []
    await stage.delete("mamba")
