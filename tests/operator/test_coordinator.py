"""The coordinator over real HTTP: who is let in, what a long poll answers and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from meshwright.protocol.messages import AgentState, FailureKind, MeshDocument, MeshRequest, WorkerReport, parse_message
from meshwright.protocol.signing import Sender, Signer
from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.coordinator.agent_registry import AgentRegistry
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address
from tests.operator.builders import observed, pod, report
from tests.patience import patient, until

KEY = JobKey("default", "train")
WORKERS = {0: 0, 1: 0, 2: 1, 3: 0}


class Stage:
    """A coordinator that serves one job."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        cache = Cache()
        cache.put_job({"metadata": {"name": "train", "namespace": "default", "uid": "u1", "resourceVersion": "1"}})
        self.cache = cache
        for worker in range(4):
            for incarnation in range(2):
                self.cache.put_pod(pod(worker, incarnation, owner="u1"))
        self.tokens = Tokens(b"k" * 32)
        self.told: list[tuple[JobKey, bool]] = []
        self.coordinator = Coordinator(cache, self.tokens, OperatorMetrics(), lambda *what: self.told.append(what))
        self.coordinator.synced = True
        self.token = self.tokens.token("default", "train", "u1")
        self.signers: dict[tuple[int, int, str], Signer] = {}
        self.headers: Mapping[str, str] = {}
        self.port = 0
        self._session = session

    @property
    def registry(self) -> AgentRegistry:
        return self.coordinator.registry("u1")

    def signer(self, worker: int = 0, incarnation: int = 0, pod_uid: str = "") -> Signer:
        """The signer of a pod's agent."""
        who = worker, incarnation, pod_uid or f"uid-{worker}-{incarnation}"
        return self.signers.setdefault(who, Signer(self.token, Sender(*who)))

    async def post(self, endpoint: str, body: Any) -> tuple[int, Any]:
        """What an agent does: it follows the coordinator's session."""
        signer = self.signer(max(0, body.get("worker", 0)), body.get("incarnation", 0), body.get("podUid", ""))
        path, data = f"/v1/jobs/default/train/u1/{endpoint}", json.dumps(body).encode()
        for _ in range(2):
            headers = signer.request("POST", path, data)
            status, answer = await self.send(path, data, headers, signer)
            if status != 409:
                break
            signer.follow(self.headers)
        return status, answer

    async def send(self, path: str, data: bytes, headers: dict[str, str], signer: Signer) -> tuple[int, Any]:
        async with self._session.post(f"http://127.0.0.1:{self.port}{path}", data=data, headers=headers) as response:
            answer = await response.read()
            if response.status in (200, 204, 400, 409, 410, 426, 429):
                signer.check_answer(headers, response.status, response.headers, answer)
            self.headers = response.headers
            return response.status, (
                json.loads(answer) if response.content_type == "application/json" else answer.decode()
            )

    async def poll(
        self, worker: int = 0, wait: float = 2.0, generation: int = 0, incarnation: int = 0
    ) -> tuple[int, Any]:
        request = MeshRequest(
            worker=worker,
            incarnation=incarnation,
            pod_uid=f"uid-{worker}-{incarnation}",
            generation=generation,
            address="10.0.0.1",
            store_port=2000 + generation % 100,
            wait_seconds=wait,
        )
        return await self.post("mesh", request.wire())


@pytest_asyncio.fixture
async def stage(session: aiohttp.ClientSession) -> AsyncIterator[Stage]:
    stage = Stage(session)
    async with serve_application(stage.coordinator.application(), Address("127.0.0.1", 0)) as port:
        stage.port = port
        yield stage


def mesh_document(generation: int = 1) -> MeshDocument:
    seen = observed()
    found = document(seen, seen.mesh.model_copy(update={"generation": generation}))
    assert found is not None
    return found


async def test_only_the_jobs_own_token_is_let_in(stage: Stage) -> None:
    others = stage.tokens.token("default", "train", "u2")
    sender = Sender(0, 0, "uid-0-0")
    for token in ("", "nonsense", others):
        signer, path = Signer(token, sender), "/v1/jobs/default/train/u1/report"
        status, _ = await stage.send(path, b"{}", signer.request("POST", path, b"{}"), signer)
        assert status == 401
    signer, path = Signer(others, sender), "/v1/jobs/default/train/u2/report"
    status, _ = await stage.send(path, b"{}", signer.request("POST", path, b"{}"), signer)
    assert status == 404, "the token is right, but the job is gone"
    assert stage.told == []


async def test_agents_of_unknown_jobs_wait_until_everything_was_listed(stage: Stage) -> None:
    token = stage.tokens.token("default", "train", "u2")
    path = "/v1/jobs/default/train/u2/report"

    async def send() -> int:
        signer = Signer(token, Sender(0, 0, "uid-0-0"))
        return (await stage.send(path, b"{}", signer.request("POST", path, b"{}"), signer))[0]

    stage.coordinator.synced = False
    assert await send() == 503, "a new leader's watches may be behind"
    stage.coordinator.synced = True
    assert await send() == 404


async def test_a_body_that_breaks_the_protocol_is_refused_with_the_field(stage: Stage) -> None:
    status, text = await stage.post("mesh", {"worker": 0, "incarnation": 0, "address": "a", "storePort": 0})
    assert status == 400
    assert "storePort" in text


async def test_a_poll_is_answered_when_the_generation_is_announced(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS)
    waiting = asyncio.create_task(stage.poll(wait=60))
    await until(lambda: set(stage.registry.agents().waiting_agents) == {0})
    await stage.registry.publish(mesh_document(), WORKERS, generation=1)
    status, body = await asyncio.wait_for(waiting, patient(1))
    assert status == 200
    assert MeshDocument.model_validate(body) == mesh_document()
    assert stage.registry.agents().waiting_agents == {}, "its store port is in use now"


async def test_a_poll_for_a_generation_that_runs_already_waits(stage: Stage) -> None:
    await stage.registry.publish(mesh_document(3), WORKERS, generation=3)
    assert (await stage.poll(generation=3, wait=0.1))[0] == 204
    assert (await stage.poll(generation=2))[0] == 200
    assert (await stage.poll(generation=0))[0] == 200


async def test_agents_of_an_older_incarnation_are_told_to_go(stage: Stage) -> None:
    assert (await stage.poll(worker=2, incarnation=0, wait=0.1))[0] == 204, "nothing is published yet: wait"
    waiting = asyncio.create_task(stage.poll(worker=2, incarnation=0, wait=60))
    await until(lambda: stage.registry.polls(2) == 1)
    await stage.registry.publish(None, WORKERS)
    assert (await asyncio.wait_for(waiting, patient(1)))[0] == 410
    assert (await stage.poll(worker=2, incarnation=1, wait=0.1))[0] == 204
    assert (await stage.poll(worker=9, incarnation=0))[0] == 410
    status, _ = await stage.post("report", report(2, AgentState.RUNNING, incarnation=0).wire())
    assert status == 410
    await stage.registry.publish(None, WORKERS, closed=True)
    assert (await stage.poll(worker=0))[0] == 410


async def test_an_agent_that_hangs_up_is_away(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright_operator.coordinator.agent_registry.ABSENT_SECONDS", 0.0)
    await stage.registry.publish(None, WORKERS)
    waiting = asyncio.create_task(stage.poll(wait=60))
    await until(lambda: set(stage.registry.agents().waiting_agents) == {0})
    waiting.cancel()
    await until(lambda: stage.registry.agents().waiting_agents == {})


async def test_reports_are_urgent_when_they_tell_something_new(stage: Stage) -> None:
    await stage.registry.publish(mesh_document(), WORKERS, generation=1)

    async def send(body: WorkerReport) -> bool:
        stage.told.clear()
        status, reply = await stage.post("report", body.wire())
        assert (status, reply) == (200, {"generation": 1, "reportSeconds": 2.0})
        (_, urgent), *_ = stage.told
        return urgent

    assert await send(report(0, AgentState.STARTING))
    assert await send(report(0, AgentState.RUNNING))
    assert not await send(report(0, AgentState.RUNNING))
    assert await send(report(0, AgentState.RUNNING, progress=None))
    assert not await send(report(0, AgentState.RUNNING, progress=None))
    assert await send(report(0, AgentState.RUNNING)), "until then the status has the step of the last generation"
    failure = report(0, AgentState.FAILED, failure=FailureKind.ERROR, message="boom")
    assert await send(failure)
    first = stage.registry.agents().reports[0].halted_seconds
    await asyncio.sleep(0.05)
    assert not await send(failure)
    assert stage.registry.agents().reports[0].halted_seconds > first + 0.04, "the clock of a failure runs on"
    assert not await send(report(0, AgentState.RUNNING, generation=0)), "an old generation's report changes nothing"
    assert stage.registry.agents().reports[0].report.state is AgentState.FAILED


async def test_a_generation_beyond_reason_is_not_believed(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS)
    hello = MeshRequest(worker=0, incarnation=0, pod_uid="uid-0-0", address="10.0.0.1", store_port=2000)
    assert (await stage.post("mesh", {**hello.wire(), "generation": 1 << 40}))[0] == 400
    await stage.poll(generation=7, wait=0.01)
    assert stage.registry.agents().newest_generation == 7


async def test_a_job_that_is_gone_lets_its_agents_go(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS)
    waiting = asyncio.create_task(stage.poll(wait=60))
    await until(lambda: stage.registry.polls(0) == 1)
    await stage.coordinator.forget("u1")
    assert (await asyncio.wait_for(waiting, patient(1)))[0] == 410


async def test_a_request_that_was_changed_on_its_way_is_refused(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS)
    await stage.post("report", report(0, AgentState.RUNNING).wire())
    stage.told.clear()
    path, data = "/v1/jobs/default/train/u1/report", json.dumps(report(0, AgentState.RUNNING).wire()).encode()
    signer = stage.signer()
    headers = signer.request("POST", path, data)
    changes = {
        "Meshwright-Counter": "9",
        "Meshwright-Session": "other",
        "Meshwright-Sender": "1.0.uid-1-0",
        "Meshwright-Digest": "0" * 64,
    }
    for name, value in changes.items():
        assert (await stage.send(path, data, {**headers, name: value}, signer))[0] == 401
    assert (await stage.send(path.replace("u1/report", "u1/mesh"), data, headers, signer))[0] == 401
    assert stage.told == []
    assert (await stage.send(path, data, headers, signer))[0] == 200
    headers = signer.request("POST", path, data)
    assert (await stage.send(path, data.replace(b"7", b"8"), headers, signer))[0] == 401
    assert len(stage.told) == 1


async def test_another_version_of_the_protocol_is_refused_in_words(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS)
    path, data = "/v1/jobs/default/train/u1/report", json.dumps(report(0, AgentState.RUNNING).wire()).encode()
    signer = stage.signer()
    headers = {**signer.request("POST", path, data), "Meshwright-Protocol": "9"}
    status, text = await stage.send(path, data, headers, signer)
    assert status == 426
    assert "supports protocol version 9, the coordinator 1: upgrade the operator" in text


async def test_an_agent_that_asks_too_often_waits_and_others_do_not(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS)
    stage.registry.rate_limiter._clock = lambda: 1000.0
    answers = [await stage.post("report", report(0, AgentState.RUNNING).wire()) for _ in range(60)]
    assert [status for status, _ in answers] == [200] * 40 + [429] * 20
    assert stage.headers["Retry-After"] == "1"
    assert (await stage.post("report", report(1, AgentState.RUNNING).wire()))[0] == 200


async def test_a_worker_holds_few_polls_open(stage: Stage) -> None:
    await stage.registry.publish(None, WORKERS)
    polls = [asyncio.create_task(stage.poll(wait=60, generation=n)) for n in range(4)]
    await until(lambda: stage.registry.polls(0) == 4)
    assert (await stage.poll(wait=5))[0] == 429
    assert (await stage.poll(worker=1, wait=0.1))[0] == 204
    for poll in polls:
        poll.cancel()


async def test_a_pod_that_is_not_in_the_mesh_is_not_invited(stage: Stage) -> None:
    await stage.registry.publish(mesh_document(2), {**WORKERS, 2: 0}, generation=2)
    assert (await stage.poll(worker=2, incarnation=1, wait=0.1))[0] == 204, "its mesh is still being formed"
    assert (await stage.poll(worker=2, incarnation=0))[0] == 200


async def test_what_a_newer_operator_adds_is_left_out_by_an_older_agent(stage: Stage) -> None:
    await stage.registry.publish(mesh_document(), WORKERS, generation=1)
    _, body = await stage.poll()
    newer = {**body, "futureField": {"a": 1}, "run": {**body["run"], "futureField": 3}}
    assert parse_message(MeshDocument, json.dumps(newer).encode()) == mesh_document()
    with pytest.raises(ValueError, match="generation"):
        parse_message(MeshDocument, json.dumps({**newer, "generation": "many"}).encode())


async def test_a_process_that_outlived_its_pod_is_told_from_the_pod_of_the_same_name(stage: Stage) -> None:
    stage.cache.put_pod(pod(0, uid="new", owner="u1"))
    message = report(0, AgentState.RUNNING)
    old, new = (message.model_copy(update={"pod_uid": uid}).wire() for uid in ("old", "new"))
    assert (await stage.post("report", old))[0] == 503, "nothing is published yet: wait"
    await stage.registry.publish(mesh_document(), WORKERS, generation=1, pods={0: "new"})
    assert (await stage.post("report", old))[0] == 410
    assert (await stage.post("report", new))[0] == 200
    hello = MeshRequest(worker=0, incarnation=0, pod_uid="old", address="10.0.0.1", store_port=2000)
    assert (await stage.post("mesh", hello.wire()))[0] == 410
