"""The client and the commands on a live API server. Tests write the status that an operator would write."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
import yaml

from meshwright.api.labels import ANNOTATION_CHECKPOINT, LABEL_INCARNATION, LABEL_JOB, LABEL_WORKER
from meshwright.api.parsing import parse_spec
from meshwright_cli.client import (
    AsyncClient,
    Client,
    DefinitionMissingError,
    ForbiddenError,
    JobFailedError,
    ManifestError,
    NotFoundError,
    RejectedError,
    UnauthorizedError,
    UnreachableError,
    WaitTimeoutError,
)
from meshwright_cli.client.objects import WorkerPod
from meshwright_cli.client.profiling import _profiled
from meshwright_cli.client.rejection import explained
from tests.cli.live_server import LiveServer, condition, job, live_server, parsed, running

JOBS = "/apis/meshwright.dev/v1alpha1/namespaces/{}/paralleltrainingjobs"


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("client"), request.config.getoption("--cluster")) as live:
        yield live


@pytest.fixture
def namespace(server: LiveServer, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own."""
    name = f"t-{abs(hash(request.node.nodeid)) % 10**8}"
    server.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def client(server: LiveServer, namespace: str) -> Iterator[Client]:
    with Client(kubeconfig=server.kubeconfig, namespace=namespace) as made:
        yield made


def write_status(server: LiveServer, namespace: str, name: str, status: dict[str, Any]) -> None:
    server.patch(f"{JOBS.format(namespace)}/{name}/status", {"status": status})


def later(seconds: float, action: Any) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def test_submit_get_list_change_and_delete(client, namespace):
    made = client.submit(job("lm"))
    assert (made.name, made.namespace, made.state, made.observed) == ("lm", namespace, "Pending", False)
    assert made.spec.replicas == 2
    assert [one.name for one in client.list()] == ["lm"]
    assert client.scale("lm", 4).spec.replicas == 4
    assert client.suspend("lm").spec.suspend
    assert not client.resume("lm").spec.suspend
    client.delete("lm", wait=True, timeout=60)
    assert client.list() == []
    with pytest.raises(NotFoundError):
        client.delete("lm")


def test_a_requested_checkpoint_is_waited_for_and_a_failed_request_says_why(server, client, namespace):
    client.submit(job("lm"))
    request = client.request_checkpoint("lm")
    assert client.get("lm").raw["metadata"]["annotations"] == {ANNOTATION_CHECKPOINT: request}
    answer = {"request": request, "state": "Saved", "time": "2026-01-01T00:00:00Z", "step": 7}
    older = {**answer, "request": "older", "state": "Failed", "message": "of another request"}
    write_status(server, namespace, "lm", {"checkpointRequest": older})
    timer = later(0.5, lambda: write_status(server, namespace, "lm", {"checkpointRequest": answer}))
    assert client.requested_checkpoint("lm", request, timeout=60).status.checkpoint_request.step == 7
    timer.join()
    failed = {**answer, "request": "mine", "state": "Failed", "message": "the job is not Running"}
    write_status(server, namespace, "lm", {"checkpointRequest": failed})
    assert client.request_checkpoint("lm", "mine") == "mine"
    with pytest.raises(JobFailedError, match="the job is not Running"):
        client.requested_checkpoint("lm", "mine", timeout=60)
    with pytest.raises(WaitTimeoutError, match="did not save the checkpoint within"):
        client.requested_checkpoint("lm", "never", timeout=0.5)


async def test_who_waits_for_a_checkpoint_reads_why_none_can_be_saved(server, namespace):
    asked = {"request": "mine", "state": "Requested", "time": "2026-01-01T00:00:00Z", "message": "The ranks save"}
    read: list[str] = []

    def write(**change: Any) -> threading.Timer:
        return later(0.5, lambda: write_status(server, namespace, "lm", {"checkpointRequest": {**asked, **change}}))

    def notify(text: str) -> None:
        read.append(text)
        write(state="Saved", step=7)

    async with AsyncClient(kubeconfig=server.kubeconfig, namespace=namespace) as client:
        await client.submit(job("lm"))
        write().join()
        write(message="No checkpoint can be saved: the volume is full")
        await client.requested_checkpoint("lm", "mine", timeout=60, notify=notify)
    assert read == ["No checkpoint can be saved: the volume is full"]


@pytest.mark.parametrize("name", ["", ".", "lm/..", "../..", "lm?a=b", "lm%2f..", "ptj/lm"])
def test_a_text_that_is_no_name_reaches_no_other_object(client, name):
    client.submit(job("lm"))
    for use in (client.delete, client.suspend, client.get, client.wait, client.events, lambda n: client.scale(n, 2)):
        with pytest.raises(NotFoundError, match="no job `|the name of the job is empty"):
            use(name)
    assert [found.name for found in client.list()] == ["lm"]
    assert client.get("lm").spec.suspend is False


def test_submit_rejects_another_namespace_than_that_of_the_option(server, namespace, tmp_path):
    file = tmp_path / "job.yaml"
    body = job("lm")
    body["metadata"]["namespace"] = "default"
    file.write_text(yaml.safe_dump(body))
    failed = server.cli("submit", str(file), "-n", namespace, code=2)
    assert f"`metadata.namespace` is `default`, and -n is `{namespace}`: leave one of them out" in failed.output
    assert "No jobs" in server.cli("list", "-n", "default").output
    assert "submitted to namespace default" in server.cli("submit", str(file), "-n", "default").output
    server.cli("delete", "lm", "-n", "default")


def test_submit_again_changes_only_what_the_manifest_says(client):
    client.submit(job("lm"))
    first = client.submit(job("lm", priority=3))
    assert first.raw["metadata"]["generation"] == 2
    assert client.submit(job("lm", priority=3)).raw["metadata"]["generation"] == 2


def test_submit_reads_yaml_as_kubectl_does(client, tmp_path):
    text = yaml.safe_dump(
        job("lm", workers={"image": "w", "gpusPerWorker": 1, "env": [{"name": "AT", "value": "TEXT"}]})
    )
    file = tmp_path / "job.yaml"
    file.write_text(text.replace("TEXT", "2026-01-02"))
    assert client.submit(file).spec.workers.env[0].value == "2026-01-02"
    file.write_text(text.replace("TEXT", "12:30:00"))
    assert client.submit(file).spec.workers.env[0].value == "12:30:00"
    file.write_text(text + text)
    with pytest.raises(ManifestError, match="is there twice"):
        client.submit(file)


def test_submit_a_spec_made_in_python(client):
    made = client.submit_spec("typed", parse_spec(job("typed")), labels={"team": "vision"})
    assert made.spec == parse_spec(job("typed"))
    assert [one.name for one in client.list(selector="team=vision")] == ["typed"]
    assert client.list(selector="team=other") == []


def test_submit_applies_the_other_objects_of_the_manifest(server, client, namespace, tmp_path):
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "runs"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all([claim, job("lm")]))
    client.submit(file)
    assert server.exists(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/runs")


def test_a_dry_run_validates_and_stores_nothing(client):
    assert client.submit(job("lm"), dry_run=True).name == "lm"
    assert client.list() == []
    with pytest.raises(RejectedError, match="spec.replicas"):
        client.submit(job("lm", replicas=0), dry_run=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"replicas": 0}, ["ParallelTrainingJob lm", "spec.replicas"]),
        ({"replica": 2}, ["spec.replica"]),
        ({"workers": {"image": "w", "gpusPerWorker": 2, "gpuResources": "x"}}, ["spec.workers.gpuResources"]),
    ],
)
def test_a_rejected_manifest_names_the_field(client, change, words):
    with pytest.raises(RejectedError) as caught:
        client.submit(job("lm", **change))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_rejection_lists_each_problem_with_the_values_that_work(client):
    with pytest.raises(RejectedError) as caught:
        client.submit(job("lm", replicas=3, parallelism={"tensor": 3}))
    first, *others = str(caught.value).splitlines()
    assert first == "ParallelTrainingJob lm is not valid:"
    assert others
    assert all(line.startswith("  - spec.") for line in others), caught.value
    assert caught.value.status == 422


def test_what_only_the_api_server_rejects_is_in_its_words():
    server = RejectedError('strict decoding error: unknown field "spec.gpus"', 400)
    assert str(explained(job("lm"), server)) == (
        'ParallelTrainingJob lm: strict decoding error: unknown field "spec.gpus". This version of `meshwright` knows '
        "it, so the cluster's is another one: see `meshwright doctor`"
    )
    quota = RejectedError("exceeded quota: gpus", 403)
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
    assert str(explained(claim, quota)) == "PersistentVolumeClaim runs: exceeded quota: gpus"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("kind: ParallelTrainingJob\nmetadata: {name: a}\n", "no `apiVersion`"),
        ("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n", "expected exactly one ParallelTrainingJob, found 0"),
        ("apiVersion: meshwright.dev/v1alpha1\nkind: ParallelTrainingJob\nmetadata: {}\n", "no `metadata`"),
    ],
)
def test_a_manifest_that_cannot_be_read_names_the_file(client, tmp_path, text, message):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ManifestError, match="job.yaml") as caught:
        client.submit(file)
    assert message in str(caught.value)


def test_an_unknown_kind_in_the_manifest_is_named(client, tmp_path):
    file = tmp_path / "job.yaml"
    other = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}}
    file.write_text(yaml.safe_dump_all([other, job("lm")]))
    with pytest.raises(ManifestError, match=r"Thing x: the cluster has no `example.com/v1`"):
        client.submit(file)


def test_a_missing_job_names_the_nearest_or_its_namespace(server, client, namespace):
    client.submit(job("language-model"))
    with pytest.raises(NotFoundError, match="did you mean `language-model`") as caught:
        client.get("langauge-model")
    assert caught.value.nearest == ("language-model",)
    elsewhere = Client(kubeconfig=server.kubeconfig, namespace="default")
    with elsewhere, pytest.raises(NotFoundError, match=f"it is in namespace `{namespace}`: use -n {namespace}"):
        elsewhere.get("language-model")
    with pytest.raises(NotFoundError, match="meshwright list -A"):
        client.get("zzz")


def test_what_is_forbidden_names_verb_and_resource(server, namespace):
    with Client(kubeconfig=server.as_user("jane"), namespace=namespace) as client:
        with pytest.raises(
            ForbiddenError, match=f"may not list paralleltrainingjobs.meshwright.dev in namespace `{namespace}`"
        ) as caught:  # noqa: E501
            client.list()
        assert (caught.value.verb, caught.value.resource) == ("list", "paralleltrainingjobs.meshwright.dev")
        with pytest.raises(ForbiddenError, match=r"patch paralleltrainingjobs/scale.meshwright.dev `lm`"):
            client.scale("lm", 2)


def test_events_of_the_same_second_are_in_order(server, client, namespace):
    uid = client.submit(job("lm")).uid
    for name, reason in (("b", "Recovered"), ("c", "Started"), ("a", "Completed")):
        event = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {"kind": "ParallelTrainingJob", "name": "lm", "namespace": namespace, "uid": uid},
            "reason": reason,
            "lastTimestamp": "2026-11-28T01:00:00Z",
        }
        server.call("POST", f"/api/v1/namespaces/{namespace}/events", event)
    assert [event.reason for event in client.events("lm")] == ["Recovered", "Started", "Completed"]


def test_who_may_only_read_jobs_sees_the_rest_of_them(server, client, namespace):
    client.submit(job("lm"))
    write_status(server, namespace, "lm", running())
    roles, group = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}", "rbac.authorization.k8s.io"
    rules = [{"apiGroups": ["meshwright.dev"], "resources": ["paralleltrainingjobs"], "verbs": ["get"]}]
    server.call("POST", f"{roles}/roles", {"metadata": {"name": "watcher"}, "rules": rules})
    binding = {
        "metadata": {"name": "w"},
        "subjects": [{"kind": "User", "name": "watcher", "apiGroup": group}],
        "roleRef": {"kind": "Role", "name": "watcher", "apiGroup": group},
    }
    server.call("POST", f"{roles}/rolebindings", binding)
    watcher = server.as_user("watcher")
    shown = server.cli("status", "lm", "-n", namespace, kubeconfig=watcher).output
    assert "you may not list events or list pods, which are left out" in shown
    assert "step 30 of 60" in shown
    assert "no pod" not in shown
    assert "Layout TP 2 x PP 1 x DP 2" in server.cli("explain", "lm", "-n", namespace, kubeconfig=watcher).output
    top = server.cli("top", "lm", "--once", "-n", namespace, kubeconfig=watcher).output
    assert "No metrics of ranks: you may not list pods." in top


async def test_a_pod_that_ends_while_it_is_profiled_is_named_so(server, namespace):
    async with AsyncClient(kubeconfig=server.kubeconfig, namespace=namespace) as client:
        await client.submit(job("lm"))
        gone = WorkerPod("lm-w0-0", 0, 0, "node0", "Running", True, True, 0)
        with pytest.raises(
            NotFoundError, match="a pod of these ranks has ended or was replaced: lm is Pending. Profile"
        ):
            await _profiled(client, "lm", {0: gone}, range(1, 2), 60)


def test_a_profile_needs_the_right_to_run_commands_in_pods(server, client, namespace):
    client.submit(job("lm"))
    write_status(server, namespace, "lm", running())
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rules = [
        {"apiGroups": ["", "meshwright.dev"], "resources": ["pods", "paralleltrainingjobs"], "verbs": ["get", "list"]}
    ]
    server.call("POST", f"{roles}/roles", {"metadata": {"name": "reader"}, "rules": rules})
    subject = {"kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}
    ref = {"kind": "Role", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}
    server.call("POST", f"{roles}/rolebindings", {"metadata": {"name": "r"}, "subjects": [subject], "roleRef": ref})
    spec = {"containers": [{"name": "worker", "image": "w"}], "nodeName": "node0"}
    labels = {LABEL_JOB: "lm", LABEL_WORKER: "0", LABEL_INCARNATION: "0"}
    pod = {"metadata": {"name": "lm-w0-0", "labels": labels}, "spec": spec}
    server.call("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
    with Client(kubeconfig=server.as_user("reader"), namespace=namespace) as reader:
        with pytest.raises(NotFoundError, match="the pod of rank 0 does not run"):
            reader.profile("lm")
        with pytest.raises(NotFoundError, match="lm has no rank 4: it has ranks 0 to 3"):
            reader.profile("lm", [4])
        server.patch(f"/api/v1/namespaces/{namespace}/pods/lm-w0-0/status", {"status": {"phase": "Running"}})
        with pytest.raises(ForbiddenError, match="create pods/exec") as caught:
            reader.profile("lm")
        assert (caught.value.verb, caught.value.resource) == ("create", "pods/exec")


def test_wrong_credentials_and_dead_servers_are_named(server, tmp_path):
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": "wrong"}
    wrong = tmp_path / "wrong"
    wrong.write_text(yaml.safe_dump(config))
    with Client(kubeconfig=wrong) as client, pytest.raises(UnauthorizedError, match="log in again"):
        client.list()
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    wrong.write_text(yaml.safe_dump(config))
    with Client(kubeconfig=wrong) as client, pytest.raises(UnreachableError, match=r"cannot be reached.*get-contexts"):
        client.list()


def test_an_untrusted_certificate_is_named(server, tmp_path):
    config = yaml.safe_load(server.kubeconfig.read_text())
    del config["clusters"][0]["cluster"]["certificate-authority-data"]
    file = tmp_path / "untrusted"
    file.write_text(yaml.safe_dump(config))
    with (
        Client(kubeconfig=file) as client,
        pytest.raises(UnreachableError, match=r"certificate.*-authority"),
    ):
        client.list()


def test_a_missing_definition_is_named(request, tmp_path):
    with live_server(tmp_path, request.config.getoption("--cluster"), definition=False) as bare:
        with Client(kubeconfig=bare.kubeconfig) as client:
            for use in (client.list, lambda: client.get("lm"), lambda: client.submit(job("lm"))):
                with pytest.raises(DefinitionMissingError, match="meshwright crd | kubectl apply"):
                    use()
        assert bare.cli("list", code=3).exit_code == 3


def test_wait_returns_when_the_state_is_reached(server, client, namespace, monkeypatch):
    client.submit(job("lm"))
    write_status(server, namespace, "lm", running(10))
    assert client.wait("lm", "running", timeout=30).state == "Running"
    later(0.5, lambda: write_status(server, namespace, "lm", running(25)))
    assert client.wait("lm", "step=25", timeout=60).status.step == 25
    done = running(60, conditions=[condition("Ready", "True", "Completed"), condition("Complete", "True", "Completed")])
    later(0.5, lambda: write_status(server, namespace, "lm", done))
    assert client.wait("lm", timeout=60).complete
    watch = AsyncClient.watch

    async def watching(self, name):
        # Not before it is watched: a job that is gone by then is not found.
        deleting = None
        async for seen in watch(self, name):
            deleting = deleting or later(0.1, lambda: client.delete(name))
            yield seen

    monkeypatch.setattr(AsyncClient, "watch", watching)
    assert client.wait("lm", "deleted", timeout=60) is None


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([condition("Failed", "True", "RestartLimitReached", "All 3 restarts are used")], "All 3 restarts are used"),
        ([condition("Stalled", "True", "InvalidSpec", "set `spec.data`")], "stalled: set `spec.data`"),
        ([condition("Complete", "True", "Completed")], "complete at step 30"),
    ],
)
def test_wait_ends_when_the_state_can_no_longer_be_reached(server, client, namespace, conditions, message):
    client.submit(job("lm"))
    write_status(server, namespace, "lm", running(30, conditions=conditions))
    with pytest.raises(JobFailedError, match=message):
        client.wait("lm", "step=50", timeout=60)


def test_wait_says_what_the_job_does_when_the_time_has_passed(server, client, namespace):
    client.submit(job("lm"))
    write_status(server, namespace, "lm", running(5))
    with pytest.raises(WaitTimeoutError, match=r"not step 50 within 0.5 s. It is Running: 4 ranks are training"):
        client.wait("lm", "step=50", timeout=0.5)


def test_wait_ignores_conditions_about_an_earlier_spec(server, client, namespace):
    client.submit(job("lm"))
    write_status(server, namespace, "lm", running(5))
    client.submit(job("lm", priority=1))
    with pytest.raises(WaitTimeoutError):
        client.wait("lm", "condition=Ready", timeout=0.5)
    write_status(server, namespace, "lm", running(5, observedGeneration=2))
    assert client.wait("lm", "condition=ready", timeout=30)


def test_a_job_shows_itself_in_a_notebook(server, client, namespace):
    client.submit(job("lm"))
    write_status(server, namespace, "lm", running(30, loss="<script>"))
    page = client.get("lm")._repr_html_()
    for text in ("Running", "30 of 60", "TP 2 x PP 1 x DP 2", "width:50.0%", "&lt;script&gt;"):
        assert text in page, page
    assert "<script>" not in page


def test_the_client_works_where_an_event_loop_runs(server, namespace):
    async def notebook() -> int:
        with Client(kubeconfig=server.kubeconfig, namespace=namespace) as client:
            return len(client.list())

    assert asyncio.run(notebook()) == 0


async def test_the_asynchronous_client_has_every_method_of_the_synchronous_one(server, namespace):
    public = lambda kind: {name for name in dir(kind) if not name.startswith("_")}  # noqa: E731
    assert public(AsyncClient) == public(Client) - {"namespace"}
    async with AsyncClient(kubeconfig=server.kubeconfig, namespace=namespace) as client:
        await client.submit(job("lm"))
        seen = [one async for one in _first(client.watch("lm"))]
    assert [one.name for one in seen] == ["lm"]


@pytest.mark.parametrize("forgotten", [False, True], ids=["the server remembers", "the server forgot"])
async def test_a_job_that_ended_and_was_deleted_between_two_watches_has_ended(server, namespace, forgotten):
    """As with `ttlSecondsAfterFinished: 0`. The API server ends each watch after a while."""
    async with AsyncClient(kubeconfig=server.kubeconfig, namespace=namespace) as client:
        await client.submit(job("brief"))
        real, ended = client.server.watch, []

        async def watch(*words: Any, **more: Any) -> Any:
            if ended:
                if forgotten:
                    raise RejectedError("too old", HTTPStatus.GONE)
                async for event in real(*words, **more):
                    yield event
                return
            ended.append(True)
            done = {"status": {"conditions": [condition("Complete", "True", "Completed")], "step": 60}}
            path = f"/apis/meshwright.dev/v1alpha1/namespaces/{namespace}/paralleltrainingjobs/brief"
            await asyncio.to_thread(server.patch, f"{path}/status", done)
            await asyncio.to_thread(server.call, "DELETE", path)

        client.server.watch = watch
        if forgotten:
            with pytest.raises(JobFailedError, match="brief was deleted"):
                await client.wait("brief", timeout=30)
        else:
            found = await client.wait("brief", timeout=30)
            assert found is not None
            assert found.complete


@pytest.mark.parametrize("forgotten", [False, True], ids=["the server remembers", "the server forgot"])
async def test_between_two_watches_of_all_jobs_nothing_is_missed_or_repeated(server, namespace, forgotten):
    """Only a list, which a server that has forgotten needs, cannot tell what was between it and the last change."""
    async with AsyncClient(kubeconfig=server.kubeconfig, namespace=namespace) as client:
        for name in ("one", "two"):
            await client.submit(job(name))
        real, watches, seen = client.server.watch, [], []
        path = f"/apis/meshwright.dev/v1alpha1/namespaces/{namespace}/paralleltrainingjobs/two"

        async def watch(*words: Any, **more: Any) -> Any:
            watches.append(words)
            if len(watches) == 1:
                for step in (1, 2):
                    await asyncio.to_thread(server.patch, f"{path}/status", {"status": running(step)})
                return
            if forgotten and len(watches) == 2:
                raise RejectedError("too old", HTTPStatus.GONE)
            async for event in real(*words, **more):
                yield event

        client.server.watch = watch
        async for found, deleted in client.watch_all():
            seen.append((found.name, found.status.step or 0, deleted))
            if len(watches) > 1 and found.status.step == 2:
                break
    assert seen == [
        ("one", 0, False),
        ("two", 0, False),
        *([] if forgotten else [("two", 1, False)]),
        ("two", 2, False),
    ]


async def _first(items: Any) -> Any:
    async for item in items:
        yield item
        return


# Commands


def test_commands_print_formats_and_exit_codes(server, namespace, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job("lm")))
    space = ("-n", namespace)
    result = server.cli("submit", str(file), "-o", "name", *space)
    assert result.stdout == "paralleltrainingjob.meshwright.dev/lm\n"
    write_status(server, namespace, "lm", running(30))
    assert parsed(server.cli("status", "lm", "-o", "json", *space))["status"]["step"] == 30
    assert yaml.safe_load(server.cli("status", "lm", "-o", "yaml", *space).stdout)["kind"] == "ParallelTrainingJob"
    assert parsed(server.cli("list", "-o", "json", *space))["kind"] == "List"
    assert server.cli("list", "-o", "name", *space).stdout == "paralleltrainingjob.meshwright.dev/lm\n"
    table = server.cli("list", *space).stdout.splitlines()
    assert table[0].split() == ["NAME", "STATUS", "RANKS", "STEP", "LOSS", "LEFT", "AGE"]
    assert table[1].split()[:5] == ["lm", "Running", "4/4", "30/60", "3.2"]
    assert namespace in server.cli("list", "-A", "-o", "wide").stdout
    assert server.cli("scale", "lm", "4", "-o", "json", *space).exit_code == 0
    assert server.cli("status", "lm1", *space, code=3).stderr.strip().endswith("did you mean `lm`?")
    assert server.cli("scale", "lm", "0", *space, code=2)
    assert server.cli("list", code=4, kubeconfig=server.as_user("jane"))
    assert server.cli("wait", "lm", "--for", "step=50", "--timeout", "1s", *space, code=5)
    assert server.cli("wait", "lm", "--for", "stp=50", *space, code=2)
    assert server.cli("submit", str(tmp_path / "none.yaml"), *space, code=2)
    assert server.cli("delete", "lm", *space).stdout == "lm deleted\n"
    assert "No jobs" in server.cli("list", *space).stderr


def test_submit_reads_stdin(server, namespace):
    server.cli("submit", "-", "-n", namespace, text=yaml.safe_dump(job("piped")))
    assert server.cli("status", "piped", "-n", namespace)


def test_submit_and_wait_exits_with_the_result_of_the_job(server, namespace, tmp_path):
    file = tmp_path / "job.yaml"
    for name, conditions, code in (
        ("good", [condition("Complete", "True", "Completed"), condition("Ready", "True", "Completed")], 0),
        ("bad", [condition("Failed", "True", "RankFailure", "rank 3 exited with code 7")], 1),
    ):
        file.write_text(yaml.safe_dump(job(name)))
        status = running(60, conditions=conditions)
        timer = later(1.0, lambda: write_status(server, namespace, name, status))  # noqa: B023 - joined below
        result = server.cli("submit", str(file), "--wait", "--timeout", "60s", "-n", namespace, code=code)
        timer.join()
        assert code == 0 or "rank 3 exited with code 7" in result.stderr
        again = server.cli("submit", str(file), "-n", namespace).stderr
        ended = "has completed" if code == 0 else "has failed"
        assert f"{name} {ended}" in again
        assert "does not run again: delete it first, or submit it under another name" in again
        for change in (("suspend",), ("resume",), ("scale", "1")):
            changed = server.cli(change[0], name, *change[1:], "-n", namespace)
            assert f"{name} {ended}" in changed.stderr
            assert changed.stderr.endswith("does not run again: this has no effect\n")


@pytest.mark.parametrize("option", ["--wait", "--follow"])
def test_a_job_that_is_deleted_when_it_has_completed_has_completed(server, namespace, tmp_path, option):
    """As with `ttlSecondsAfterFinished: 0`."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job("brief")))
    complete = [condition("Complete", "True", "Completed"), condition("Ready", "True", "Completed")]

    def end() -> None:
        write_status(server, namespace, "brief", running(60, conditions=complete))
        server.call("DELETE", f"{JOBS.format(namespace)}/brief")

    timer = later(1.0, end)
    result = server.cli("submit", str(file), option, "--timeout", "60s", "-n", namespace)
    timer.join()
    assert "Completed" in result.stderr


def test_scale_waits_until_that_many_replicas_train(server, namespace):
    """An elastic job is running while it grows."""
    server.cli("submit", "-", "-n", namespace, text=yaml.safe_dump(job("lm")))
    write_status(server, namespace, "lm", running(30, observedGeneration=9))
    late = server.cli("scale", "lm", "1", "--wait", "--timeout", "1s", "-n", namespace, code=5).stderr
    assert "lm was not running with 1 replica within 1 s" in late
    timer = later(1.0, lambda: write_status(server, namespace, "lm", running(31, observedGeneration=9, replicas=1)))
    result = server.cli("scale", "lm", "1", "--wait", "--timeout", "60s", "-n", namespace)
    timer.join()
    assert result.stdout.endswith("lm scaled to 1 replica\n")
    status = running(replicas=1, elastic={"wantedReplicas": 1})
    write_status(server, namespace, "lm", status)
    assert "4/4 ready, 1 of 1 replica, mesh generation 1" in server.cli("status", "lm", "-n", namespace).stdout


def test_status_and_explain_fit_narrow_terminals(server, namespace):
    server.cli("submit", "-", "-n", namespace, text=yaml.safe_dump(job("lm")))
    write_status(server, namespace, "lm", running(30))
    text = server.cli("status", "lm", "-n", namespace).stdout
    assert "rack rack0" in text
    assert "ranks 2-3" in text
    assert "DP 1, TP 0-1" in text
    explained = server.cli("explain", "lm", "-n", namespace).stdout
    assert "Proved optimal" in explained
    assert "TP 2: set by" in explained
    assert server.cli("explain", "job", "lm", "-n", namespace).stdout == explained
    assert parsed(server.cli("explain", "lm", "-o", "json", "-n", namespace))["facts"]["Crossings"].startswith("none")


def test_explain_says_why_a_job_waits_and_whom_to_free(server, namespace):
    for index in range(2):
        allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "2"}
        server.apply("/api/v1/nodes", {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{index}"},
            "status": {"allocatable": allocatable, "capacity": allocatable,
                       "conditions": [{"type": "Ready", "status": "True"}]},
        })  # fmt: skip
    owner = {"metadata": {"name": "foreign"}, "spec": {
        "nodeName": "n1", "containers": [{"name": "c", "image": "i", "resources": {
            "limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}}]}}  # fmt: skip
    server.call("POST", f"/api/v1/namespaces/{namespace}/pods", {"apiVersion": "v1", "kind": "Pod", **owner})
    server.cli("submit", "-", "-n", namespace, text=yaml.safe_dump(job("lm")))
    waiting = [condition("Ready", "False", "Placing", "1 of 2 workers fit"),
               condition("Placed", "False", "DoesNotFit", "1 of 2 workers fit")]  # fmt: skip
    write_status(server, namespace, "lm", {"observedGeneration": 1, "conditions": waiting})
    facts = parsed(server.cli("explain", "lm", "-o", "json", "-n", namespace))["facts"]
    assert facts["Needs"].startswith("2 workers with 2 GPUs each, 4 in total")
    assert facts["Free"] == "3 of 4 GPUs on 2 usable nodes, at most 2 on one node"
    assert facts["Fits now"].startswith("`spec.replicas: 1`")
    assert facts["Free up"] == f"n1, which pod {namespace}/foreign (1 GPU) uses"
    assert "Ahead" not in facts
    for name, reason in (("urgent", "DoesNotFit"), ("paused", "Suspended")):
        server.cli("submit", "-", "-n", namespace, text=yaml.safe_dump(job(name, priority=5)))
        placed = condition("Placed", "False", reason)
        write_status(server, namespace, name, {"observedGeneration": 1, "conditions": [placed]})
    facts = parsed(server.cli("explain", "lm", "-o", "json", "-n", namespace))["facts"]
    assert facts["Ahead"] == f"{namespace}/urgent: higher priority, or older"


def test_completion_of_names(server, namespace, tmp_path):
    server.cli("submit", "-", "-n", namespace, text=yaml.safe_dump(job("language-model")))
    from meshwright_cli.kubectl_plugin import completions

    options = ["--kubeconfig", str(server.kubeconfig), "-n", namespace]
    assert completions(["status", *options, "lang"])[0] == "language-model"
    assert completions(["logs", *options, "zzz"]) == [":4"]
    assert "meshwright-local" in completions(["list", "--kubeconfig", str(server.kubeconfig), "--context", ""])
    assert namespace in completions(["list", "--kubeconfig", str(server.kubeconfig), "-n", "t-"])
    started = time.monotonic()
    assert completions(["status", "--kubeconfig", str(tmp_path / "none"), ""]) == [":4"]
    assert time.monotonic() - started < 60
