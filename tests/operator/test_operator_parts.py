"""The small parts: tokens, settings, status patches, reading pods, the cache, API retries, events, the chronicle."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration

from meshwright.api.parsing import parse_status
from meshwright.api.status import CheckpointStatus, Condition, ParallelTrainingJobStatus
from meshwright.protocol.messages import AgentState, Phase
from meshwright_operator import settings
from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.controller.start_timeline import StartTimeline
from meshwright_operator.controller.status_patch import is_urgent, merge_diff
from meshwright_operator.coordinator.tokens import KeyFileError, Tokens, load_key
from meshwright_operator.decide import gang
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.kube import client as client_module
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.job_event import JobEvent
from meshwright_operator.kube.job_watch import cancel_stuck_watchers, watch_jobs
from meshwright_operator.kube.paths import core_path, jobs_path, lease_path, pods_path, resource_of
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.kube.recorder import EventRecorder
from meshwright_operator.kube.resync import Resync
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address
from tests.operator.builders import agents, observed, pod, report, running_status
from tests.patience import patient, until


def test_tokens_depend_on_key_and_job() -> None:
    tokens = Tokens(b"a" * 32)
    token = tokens.token("ns", "job", "uid")
    assert tokens.valid(token, "ns", "job", "uid")
    assert Tokens(b"a" * 32).token("ns", "job", "uid") == token
    for other in (("ns2", "job", "uid"), ("ns", "job2", "uid"), ("ns", "job", "uid2"), ("nsjob", "", "uid")):
        assert not tokens.valid(token, *other)
    assert not Tokens(b"b" * 32).valid(token, "ns", "job", "uid")
    assert not tokens.valid("café", "ns", "job", "uid")


def test_a_key_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = load_key(path)
    assert len(key) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(path) == key
    (tmp_path / "short").write_text("abc")
    with pytest.raises(KeyFileError, match="must contain at least 32"):
        load_key(tmp_path / "short")
    with pytest.raises(KeyFileError, match="--key-file"):
        load_key(tmp_path / "no" / "such" / "folder")


def test_flags_win_over_the_environment() -> None:
    environment = {
        "MESHWRIGHT_OPERATOR_LEASE_NAME": "from-env",
        "MESHWRIGHT_OPERATOR_NAMESPACE": "a,b",
        "MESHWRIGHT_OPERATOR_COORDINATOR_URL": "https://coordinator:9470",
        "MESHWRIGHT_OPERATOR_TLS_NAME": "a.example,b.example",
    }
    found = settings.parse(["--lease-name", "from-flag", "--metrics-listen", "127.0.0.1:1"], environment)
    assert (found.lease_name, found.namespaces) == ("from-flag", ("a", "b"))
    assert (found.tls, found.tls_names, found.key_file) == ("managed", ("a.example", "b.example"), None)
    assert found.metrics_listen == Address("127.0.0.1", 1)
    assert found.identity


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--coordinator-url is required"),
        (["--coordinator-listen", "here"], "HOST:PORT"),
        (["--coordinator-listen", "127.0.0.1:99999"], "HOST:PORT"),
        (["--coordinator-url", "http://a", "--workers", "0"], "--workers must be"),
        (["--coordinator-url", "http://a", "--lease-seconds", "0.5"], "--lease-seconds must be"),
        (["--coordinator-url", "http://a", "--lease-seconds", "nan"], "--lease-seconds must be"),
        (["--coordinator-url", "http://a", "--resync-seconds", "inf"], "--resync-seconds must be"),
        (["--coordinator-url", "http://a", "--drain-seconds", "nan"], "--drain-seconds must not"),
        (["--coordinator-url", "https://a", "--tls-ca-days", "inf"], "--tls-ca-days must be"),
        (["--coordinator-url", "http://a"], "--coordinator-url must start with https:// with --tls managed"),
        (
            ["--coordinator-url", "https://a", "--tls", "disabled"],
            "--coordinator-url must start with http:// with --tls disabled",
        ),
        (["--coordinator-url", "https://a", "--tls", "files"], "--tls files requires --tls-cert-file"),
        (["--coordinator-url", "https://a", "--tls-ca-file", "ca"], "require --tls files, got --tls managed"),
        (["--coordinator-url", "https://a", "--tls-ca-days", "0"], "--tls-ca-days must be above 0"),
        (["--coordinator-url", "https://a", "--tls", "maybe"], "invalid choice"),
    ],
)
def test_bad_settings_name_the_flag(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(arguments, {})
    assert words in capsys.readouterr().err


def apply_merge(target: Any, patch: Any) -> Any:
    """RFC 7386, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_merge(result.get(key), value)
    return result


leaves = st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
trees = st.dictionaries(
    st.sampled_from("abc"), st.recursive(leaves, lambda t: st.dictionaries(st.sampled_from("abc"), t, max_size=3))
)


@given(trees, trees)
def test_the_patch_of_a_difference_gives_the_new_status(old: dict[str, Any], new: dict[str, Any]) -> None:
    patch = merge_diff(old, new)
    assert apply_merge(old, patch) == new
    assert bool(patch) == (old != new)


def test_progress_and_wording_are_not_urgent() -> None:
    old = decide(observed()).status
    new = old.model_copy(deep=True)
    new.step, new.loss, new.tokens_per_second = 99, "1.0", 5
    new.conditions[0].message = "other words"
    assert not is_urgent(old.wire(), new.wire())
    new.conditions[0].reason = "Restarting"
    assert is_urgent(old.wire(), new.wire())
    renewed = old.model_copy(update={"restart_count": 1})
    assert is_urgent(old.wire(), renewed.wire())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(st.fixed_dictionaries({"metadata": json_values, "spec": json_values, "status": json_values}))
def test_a_pod_of_any_shape_is_read_or_left_out(obj: dict[str, Any]) -> None:
    found = read_pod(obj)
    assert found is None or isinstance(found.name, str)


@given(
    st.fixed_dictionaries({}, optional={k: json_values for k in ("mesh", "placement", "conditions", "plan", "step")})
)
def test_a_status_of_any_shape_is_read(status: dict[str, Any]) -> None:
    read = parse_status({"status": status})
    assert ParallelTrainingJobStatus.model_validate(read.wire()) == read


def test_a_damaged_field_of_status_takes_nothing_else_with_it() -> None:
    good = running_status().wire()
    damaged = {
        **good,
        "step": "many",
        "conditions": [{"type": "Ready"}, 7],
        "mesh": {**good["mesh"], "startedTime": 5, "surprise": True},  # type: ignore[dict-item]
        "restarts": [{"cause": "", "count": 1}, {"cause": "PodLost", "count": 2}],
    }
    status = parse_status({"status": damaged})
    assert status.mesh is not None
    assert status.mesh.generation == 1
    assert status.placement == running_status().placement
    assert [(r.cause, r.count) for r in status.restarts] == [("PodLost", 2)]
    assert status.step is None
    assert status.conditions == []


def pod_object(**changes: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "train-w2-5",
            "namespace": "default",
            "uid": "u",
            "resourceVersion": "12",
            "labels": {"meshwright.dev/job-name": "train", "meshwright.dev/worker-index": "99"},
            "ownerReferences": [{"uid": "other"}, {"uid": "mine", "controller": True}],
        },
        "spec": {"schedulingGates": [{"name": "meshwright.dev/gang"}, {"name": "kueue"}]},
        "status": {"phase": "Pending"},
        **changes,
    }


def test_a_pod_is_identified_by_name_and_owner_not_by_labels() -> None:
    found = read_pod(pod_object())
    assert found is not None
    assert (found.worker, found.incarnation, found.owner, found.gated) == (2, 5, "mine", True)
    assert found.gates == ("meshwright.dev/gang", "kueue")
    assert read_pod(pod_object(metadata={**pod_object()["metadata"], "name": "other-w2-5"})) is None


UNSEEN = [(137, "ContainerStatusUnknown"), (255, "Unknown")]
"""What the kubelet, or containerd, reports of a container after its node has restarted."""


def terminated(state: dict[str, Any], reason: str = "") -> dict[str, Any]:
    """The status of a pod that had run."""
    return {
        "phase": "Failed",
        "reason": reason,
        "containerStatuses": [{"name": "worker", "state": {"terminated": state}}],
    }


@pytest.mark.parametrize(("code", "reason"), UNSEEN)
def test_a_pod_whose_node_has_restarted_says_so(code: int, reason: str) -> None:
    found = read_pod(pod_object(status=terminated({"exitCode": code, "reason": reason})))
    assert found is not None
    assert found.disruption == "ContainerStatusUnknown"


@pytest.mark.parametrize(
    ("status", "disrupted"),
    [
        ({"phase": "Failed", "reason": "Evicted"}, True),
        ({"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True"}]}, True),
        ({"phase": "Failed"}, False),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": 143}}}],
            },
            True,
        ),
        (
            {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": 1}}}]},
            False,
        ),
        *((terminated({"exitCode": code, "reason": reason}), True) for code, reason in UNSEEN),
        (terminated({"exitCode": 255, "reason": "Error"}), False),
        *((terminated({"exitCode": 137}, reason), True) for reason in ("OutOfnvidia.com/gpu", "TopologyAffinityError")),
    ],
)
def test_whose_fault_a_failed_pod_is(status: dict[str, Any], disrupted: bool) -> None:
    found = read_pod(pod_object(status=status))
    assert found is not None
    assert found.disrupted is disrupted


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("ErrImagePull", "ErrImagePull"), ("R" * 500, "R" * 64), ("Größe", "PodProblem"), ("1st", "PodProblem")],
)
def test_what_a_kubelet_says_fits_a_condition(reason: str, expected: str) -> None:
    waiting = {"reason": reason, "message": "no such image " * 10_000}
    found = read_pod(pod_object(status={"phase": "Pending", "containerStatuses": [_waiting(waiting)]}))
    assert found is not None
    assert len(found.problem) <= 64 + 2 + 512
    assert gang._condition_reason(found.problem.partition(":")[0]) == expected
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node " * 10_000}
    unscheduled = read_pod(pod_object(status={"phase": "Pending", "conditions": [refused]}))
    assert unscheduled is not None
    assert unscheduled.problem.startswith("Unschedulable: no node")
    assert len(unscheduled.problem) <= 64 + 2 + 512


def _waiting(state: dict[str, Any]) -> dict[str, Any]:
    return {"name": "worker", "state": {"waiting": state}}


def test_the_cache_never_goes_back() -> None:
    cache = Cache()
    key = JobKey("default", "train")
    cache.put_pod(pod(0, version=5))
    cache.put_pod(pod(0, version=4, phase="Pending"))
    assert [p.version for p in cache.pods(key, "job-uid")] == [5]
    assert cache.pods(key, "somebody-else") == []
    cache.remove_pod(pod(0, version=6))
    cache.put_pod(pod(0, version=5))
    assert cache.pods(key, "job-uid") == []
    cache.put_pod(pod(0, uid="again", version=7))
    assert len(cache.pods(key, "job-uid")) == 1


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        (jobs_path("default", "a"), "paralleltrainingjobs"),
        (jobs_path("default", "a") + "/status", "paralleltrainingjobs/status"),
        (jobs_path(None), "paralleltrainingjobs"),
        (pods_path("default", "a"), "pods"),
        (core_path(None, "nodes", "n0"), "nodes"),
        (lease_path("default", "l"), "leases"),
    ],
)
def test_requests_are_counted_by_resource(path: str, resource: str) -> None:
    assert resource_of(path) == resource


class Server:
    """Sends scripted responses one after the other, and records the requests."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: dict[str, str] = {}

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        return application

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path_qs, body))
        code, answer = self.answers.pop(0)
        return web.json_response(answer, status=code, headers=self.headers)


async def with_cluster(server: Server, use: Any) -> Any:
    async with serve_application(server.application(), Address("127.0.0.1", 0)) as port:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        cluster = KubeClient(configuration, OperatorMetrics(), timeout=patient(5))
        try:
            return await use(cluster)
        finally:
            await cluster.close()


async def test_the_watch_starts_as_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the operator's container nothing names the user."""

    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr(getpass, "getuser", no_name)
    asked = asyncio.Event()
    liveness = WatchLiveness(OperatorMetrics(), stale_after=60)

    async def answer(_: web.Request) -> web.Response:
        asked.set()
        return web.json_response({"message": "not found"}, status=404)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with serve_application(application, Address("127.0.0.1", 0)) as port:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        watch = asyncio.create_task(watch_jobs(lambda _: None, configuration, (), liveness, 5, lambda: None))
        waiting = asyncio.create_task(asked.wait())
        await asyncio.wait([watch, waiting], return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        assert asked.is_set()


async def test_the_client_is_patient_when_asked_to_be() -> None:
    server = Server((429, {"message": "slow down"}), (200, {"ok": True}))
    assert await with_cluster(server, lambda cluster: cluster.get("/api/v1/x")) == {"ok": True}
    assert len(server.requests) == 2


async def test_the_client_pages_and_preconditions() -> None:
    server = Server((200, {"items": [1], "metadata": {"continue": "next"}}), (200, {"items": [2], "metadata": {}}))

    async def collect(cluster: KubeClient) -> list[Any]:
        return [item async for page in cluster.pages("/api/v1/pods") for item in page.items]

    assert await with_cluster(server, collect) == [1, 2]
    assert "continue=next" in server.requests[1][1]
    gone = Server((404, {"reason": "NotFound"}))
    await with_cluster(gone, lambda cluster: cluster.delete("/api/v1/x", "the-uid"))
    assert gone.requests[0][2]["preconditions"] == {"uid": "the-uid"}


async def test_refusals_carry_the_servers_words() -> None:
    server = Server((403, {"reason": "Forbidden", "message": "exceeded quota"}))
    with pytest.raises(ApiError, match="403 Forbidden: exceeded quota"):
        await with_cluster(server, lambda cluster: cluster.create("/api/v1/x", {}))


async def test_a_resync_drops_ghosts_and_keeps_what_came_meanwhile() -> None:
    """Nobody tells what vanished while a watch was down."""
    cache, queue, metrics = Cache(), WorkQueue[JobKey](), OperatorMetrics()
    key = JobKey("default", "train")
    cache.put_node({"metadata": {"name": "gone"}})
    cache.put_pod(pod(0))
    cache.put_pod(pod(1))
    cache.put_job({"metadata": {"name": "ghost", "namespace": "default", "uid": "g", "resourceVersion": "1"}})
    here = {**pod_object()["metadata"], "name": "train-w1-0", "uid": "uid-1-0", "resourceVersion": "11"}
    here["ownerReferences"] = [{"uid": "job-uid", "controller": True}]
    server = Server(
        (200, {"items": [{"metadata": {"name": "n0"}}, {"metadata": 7}]}),
        (200, {"items": [{"metadata": here}, {"metadata": {"name": "junk"}}, {"metadata": {}}, 7]}),
        (200, {"items": [{"spec": {}}, {"metadata": {"name": "train", "namespace": "default", "uid": "job-uid"}}]}),
    )

    async def sync(cluster: KubeClient) -> None:
        resync = Resync(cluster, cache, queue, metrics, (), 60)
        assert not resync.is_fresh()
        await resync.relist()
        assert resync.is_fresh()

    await with_cluster(server, sync)
    assert set(cache.nodes) == {"n0"}
    assert [p.name for p in cache.pods(key, "job-uid")] == ["train-w1-0"]
    assert set(cache.jobs) == {key}
    assert len(queue) == 2, "the ghost's job and the living one are looked at"


async def test_repeated_events_are_counted_up() -> None:
    server = Server((201, {}), (200, {}), (201, {}))
    job = {"metadata": {"name": "train", "namespace": "default", "uid": "u"}}

    async def post(cluster: KubeClient) -> None:
        recorder = EventRecorder(cluster, "test", OperatorMetrics())
        for message in ("same", "same", "other"):
            recorder.post(job, JobEvent("PodLost", message))
        await recorder.flush(5)

    await with_cluster(server, post)
    assert [method for method, _, _ in server.requests] == ["POST", "PATCH", "POST"]
    assert server.requests[0][2]["involvedObject"]["uid"] == "u"
    assert server.requests[1][2]["count"] == 2


async def test_an_event_that_cannot_be_written_does_not_stop_those_after_it() -> None:
    server = Server((201, {}))
    job = {"metadata": {"name": "train", "namespace": "default", "uid": "u"}}

    async def post(cluster: KubeClient) -> None:
        recorder = EventRecorder(cluster, "test", OperatorMetrics())
        for reason, message in (("Pod\udcff", "broken"), ("PodLost", "file \udcff is missing"), ("PodLost", "next")):
            recorder.post(job, JobEvent(reason, message))
        await recorder.flush(5)

    await with_cluster(server, post)
    assert [body["message"] for _, _, body in server.requests] == ["file ? is missing", "next"]


def test_the_chronicle_tells_where_a_recovery_spent_its_time() -> None:
    timeline = StartTimeline()
    assert timeline.update(decide(observed()), 100.0) == []
    broken = decide(observed([pod(0), pod(1), pod(2, deleting=True), pod(3)]))
    assert timeline.update(broken, 200.0) == []
    replaced = replace_draft(decide(observed([pod(0), pod(1), pod(3)], broken.status)), create=[2])
    assert timeline.update(replaced, 201.5) == []
    formed = decide(observed(status=broken.status))
    assert formed.mesh.generation == 2
    assert timeline.update(formed, 203.5) == []
    phases = [Phase(name="rendezvous", seconds=0.4), Phase(name="first-step", seconds=0.9)]
    reports = [report(0, AgentState.RUNNING, 2, phases=phases)]
    trains = decide(observed(status=formed.status, received=agents(reports)))
    (note,) = timeline.update(trains, 205.0)
    assert note.reason == "Recovered"
    assert note.message == (
        "Training again after 4.8 s: detect 0.0, drain 1.5, replace pod 2.0, rendezvous 0.4, first step 0.9 "
        "(generation 2, PodLost)"
    )
    assert timeline.update(trains, 206.0) == []


def test_checkpoints_are_reported_once_a_minute_and_the_last_one_with_the_end_of_the_job() -> None:
    """A finished job may never be looked at again."""
    timeline, steps = StartTimeline(), []
    time = "2026-01-01T00:00:00Z"
    last = Condition(type="Complete", status="True", reason="Completed", message="", last_transition_time=time)
    for clock, step, conditions in (
        (0.0, 10, []), (70.0, 20, []), (80.0, 30, []), (90.0, 40, []), (91.0, 50, [last]), (92.0, 50, [last]),
    ):  # fmt: skip
        status = running_status()
        status = status.model_copy(
            update={
                "checkpoint": CheckpointStatus(step=step, time=time, path="p"),
                "conditions": [*status.conditions, *conditions],
            }
        )
        draft = replace_draft(decide(observed(status=status)), status=status)
        steps += [(clock, note.message.rpartition(" ")[2]) for note in timeline.update(draft, clock)]
    assert steps == [(70.0, "20"), (91.0, "50")]


def test_a_worker_that_joins_and_waits_delays_no_detection() -> None:
    timeline = StartTimeline()
    joins = report(4, AgentState.IDLE, 0)
    running = [report(worker, AgentState.RUNNING) for worker in range(4)]
    waits = agents([*running, joins], halted_seconds=6.7)
    broken = decide(observed([pod(0), pod(1), pod(2, deleting=True), pod(3)], received=waits))
    assert timeline.update(broken, 200.0) == []
    formed = decide(observed(status=broken.status))
    assert timeline.update(formed, 203.5) == []
    phases = [Phase(name="first-step", seconds=0.5)]
    trains = decide(observed(status=formed.status, received=agents([report(0, AgentState.RUNNING, 2, phases=phases)])))
    (note,) = timeline.update(trains, 205.0)
    assert note.message.startswith("Training again after 4.0 s: detect 0.0, ")


def replace_draft(decision: Any, **changes: Any) -> Any:
    return replace(decision, **changes)


def test_times_are_written_as_kubernetes_does() -> None:
    from meshwright_operator.timestamps import format_micro_time, format_time, parse_time, seconds_since

    moment = datetime(2026, 1, 2, 3, 4, 5, 678900, tzinfo=UTC)
    assert format_time(moment) == "2026-01-02T03:04:05Z"
    assert format_micro_time(moment) == "2026-01-02T03:04:05.678900Z"
    assert parse_time("2026-01-02T03:04:05Z") == moment.replace(microsecond=0)
    assert parse_time("yesterday") is parse_time(None) is None
    assert seconds_since("2026-01-02T03:04:00Z", moment) == pytest.approx(5.6789)


async def test_a_watcher_that_survives_its_cancellation_is_cancelled_again() -> None:
    """kopf waits for it without a limit, so that the operator would not exit after a failure."""

    async def watcher() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:  # taken for the end of a connection
            await asyncio.sleep(1000)

    stuck = asyncio.create_task(watcher(), name="watcher for nodes.v1@None")
    healthy = asyncio.create_task(watcher(), name="watcher for pods.v1@None")
    insisting = asyncio.create_task(cancel_stuck_watchers(0.01))
    await asyncio.sleep(0.05)
    stuck.cancel()
    await asyncio.wait([stuck], timeout=patient(5))
    assert stuck.cancelled()
    assert not healthy.done()
    for task in (healthy, insisting):
        task.cancel()


async def test_the_next_page_is_requested_while_one_is_read() -> None:
    server = Server(
        (200, {"items": [1], "metadata": {"continue": "next"}}),
        (200, {"items": [2], "metadata": {"continue": "last"}}),
        (200, {"items": [3], "metadata": {}}),
    )

    async def collect(cluster: KubeClient) -> list[int]:
        requested = []
        async for _ in cluster.pages("/api/v1/pods"):
            expected = min(len(requested) + 2, 3)
            await until(lambda: len(server.requests) >= expected)  # noqa: B023 - before the next page
            await asyncio.sleep(0.1)
            requested.append(len(server.requests))
        return requested

    assert await with_cluster(server, collect) == [2, 3, 3]


async def test_an_error_of_a_page_ends_the_list_after_the_pages_before_it() -> None:
    server = Server((200, {"items": [1], "metadata": {"continue": "next"}}), (410, {"reason": "Expired"}))
    seen: list[int] = []

    async def collect(cluster: KubeClient) -> None:
        async for page in cluster.pages("/api/v1/pods"):
            await asyncio.sleep(0.1)
            seen.extend(page.items)  # type: ignore[arg-type]

    with pytest.raises(ApiError, match="410"):
        await with_cluster(server, collect)
    assert seen == [1]


@pytest.mark.parametrize(("seconds", "connections"), [(client_module.KEEP_ALIVE_SECONDS, 1), (0.01, 2)])
async def test_connections_stay_open_between_calls(
    seconds: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client_module.KEEP_ALIVE_SECONDS > 60, "a gang may start long after the last one"
    monkeypatch.setattr(client_module, "KEEP_ALIVE_SECONDS", seconds)
    ports: set[int] = set()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.json_response({})

    application = web.Application()
    application.router.add_get("/api/v1/x", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cluster = KubeClient(configuration, OperatorMetrics(), timeout=patient(5))
    await cluster.get("/api/v1/x")
    await asyncio.sleep(0.1)
    await cluster.get("/api/v1/x")
    await cluster.close()
    await runner.cleanup()
    assert len(ports) == connections


async def test_a_body_that_is_not_valid_unicode_is_sent_all_the_same() -> None:
    server = Server((201, {}), (201, {}))
    await with_cluster(server, lambda cluster: cluster.create("/api/v1/x", {"a": "\ud800", "b": 2**70}))
    assert server.requests[0][2] == {"a": "\ud800", "b": 2**70}


async def test_a_job_that_was_deleted_before_its_watch_began_is_noticed_without_another_list_of_pods() -> None:
    cache, queue, metrics = Cache(), WorkQueue[JobKey](), OperatorMetrics()

    def job_object(name: str, version: int) -> dict[str, Any]:
        return {"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version)}}

    for name in ("same", "changed", "ghost"):
        cache.put_job(job_object(name, 5))
    cache.put_pod(pod(0))
    jobs = [job_object("same", 5), job_object("changed", 6)]
    server = Server(
        (200, {"items": jobs, "metadata": {"resourceVersion": "9"}}),
    )

    async def catch_up(cluster: KubeClient) -> None:
        resync = Resync(cluster, cache, queue, metrics, (), 60)
        await resync.jobs()
        assert len(queue) == 2, "the job that has changed, and the one that is gone"

    await with_cluster(server, catch_up)
    assert set(cache.jobs) == {JobKey("default", "same"), JobKey("default", "changed")}
    assert not any("/pods" in path for _, path, *_ in server.requests)
    assert len(list(cache.all_pods())) == 1
