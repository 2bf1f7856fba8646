"""The processes of `coordinator_hostile.py`: a coordinator, honest agents, and an attacker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator

import aiohttp

from meshwright.api import labels
from meshwright.protocol.messages import AgentState, Progress, RankProcess, WorkerReport
from meshwright.protocol.signing import Sender, Signer
from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.http.limits import raise_descriptor_limit
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Address

WORKERS = 64
UID = "u1"
TOKENS = Tokens(b"k" * 32)
TOKEN = TOKENS.token("default", "train", UID)
REPORT = f"/v1/jobs/default/train/{UID}/report"
ATTACKING_SOURCES = [f"127.0.0.{number}" for number in range(2, 10)]


def pod_object(worker: int) -> dict[str, object]:
    """A worker's pod, as the API server sends it."""
    owner = {"kind": "ParallelTrainingJob", "name": "train", "uid": UID, "controller": True}
    return {
        "metadata": {
            "name": f"train-w{worker}-0",
            "namespace": "default",
            "uid": f"pod-{worker}",
            "resourceVersion": "1",
            "labels": {labels.LABEL_JOB: "train"},
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": f"n{worker}", "containers": []},
        "status": {"phase": "Running"},
    }


async def serve() -> None:
    """A coordinator with one job, until stdin is closed. Prints its port."""
    raise_descriptor_limit()
    cache = Cache()
    cache.put_job({"metadata": {"name": "train", "namespace": "default", "uid": UID, "resourceVersion": "1"}})
    for worker in range(WORKERS):
        pod = read_pod(pod_object(worker))
        assert pod is not None
        cache.put_pod(pod)
    coordinator = Coordinator(cache, TOKENS, OperatorMetrics(), lambda *_: None)
    coordinator.synced = True
    await coordinator.registry(UID).publish(None, dict.fromkeys(range(WORKERS), 0))
    async with serve_application(coordinator.application(), Address("127.0.0.1", 0)) as port:
        print(port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def report_for(port: int, seconds: float) -> None:
    """Honest agents that report every second on the connections they keep. Prints percentiles in milliseconds."""
    times: list[float] = []
    failures = 0
    end = time.monotonic() + seconds

    async def agent(worker: int, session: aiohttp.ClientSession) -> None:
        nonlocal failures
        signer = Signer(TOKEN, Sender(worker, 0, f"pod-{worker}"))
        await asyncio.sleep(random.random())  # noqa: S311
        for step in itertools.count():
            if time.monotonic() > end:
                return
            body = json.dumps(report(worker, step).wire()).encode()
            began = time.perf_counter()
            status = 0
            with contextlib.suppress(aiohttp.ClientError, OSError):
                for _ in range(2):
                    headers = signer.request("POST", REPORT, body)
                    async with session.post(f"http://127.0.0.1:{port}{REPORT}", data=body, headers=headers) as answer:
                        status = answer.status
                        await answer.read()
                    if status != 409:
                        break
                    signer.follow(answer.headers)
            failures += status != 200
            if step:
                times.append(1000 * (time.perf_counter() - began))
            # A full backlog lets agents connect in groups, which would report in step and wait for each other.
            await asyncio.sleep(1.0 if step else random.uniform(1.0, 2.0))  # noqa: S311

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(agent(worker, session) for worker in range(WORKERS)))
    cuts = statistics.quantiles(times, n=100)
    print(
        json.dumps({"p50_ms": cuts[49], "p95_ms": cuts[94], "requests": len(times), "failures": failures}), flush=True
    )


def report(worker: int, step: int) -> WorkerReport:
    """A heartbeat of steady training with eight ranks."""
    return WorkerReport(
        worker=worker,
        incarnation=0,
        pod_uid=f"pod-{worker}",
        generation=0,
        state=AgentState.RUNNING,
        ranks=[RankProcess(rank=8 * worker + n, pid=100 + n, step=step, idle_seconds=0.2) for n in range(8)],
        progress=Progress(step=step, loss=2.5, tokens_per_second=1e5, step_seconds=1.0) if worker == 0 else None,
    )


def attack(kind: str, port: int) -> None:
    """Attack without end, as fast as one core allows, from several addresses."""
    # Honest agents share this core: they run first, so that their latency shows the coordinator's, not this process's.
    os.nice(19)
    if kind == "none":
        while True:
            pass
    sources = itertools.cycle(ATTACKING_SOURCES)
    payloads = ATTACKS[kind]()
    kept: list[socket.socket] = []
    while True:
        connection = socket.socket()
        connection.settimeout(0.2)
        try:
            connection.bind((next(sources), 0))
            connection.connect(("127.0.0.1", port))
            if kind == "silent":
                kept.append(connection)
                if len(kept) > 5000:
                    kept.pop(0).close()
                continue
            while True:
                connection.sendall(next(payloads))
                if not connection.recv(4096):
                    break
        except OSError:
            pass
        connection.close()


def raw_request(headers: dict[str, str], body: bytes) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {REPORT} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode() + body


def unsigned() -> Iterator[bytes]:
    """Requests without a signature."""
    return itertools.repeat(raw_request({"Content-Length": "2"}, b"{}"))


def bodies() -> Iterator[bytes]:
    """Large bodies without a signature."""
    return itertools.repeat(raw_request({"Content-Length": "200000"}, b"x" * 200_000))


def replayed() -> Iterator[bytes]:
    """A request that was captured, again and again."""
    return itertools.repeat(raw_request(Signer(TOKEN, Sender(1, 0, "pod-1")).request("POST", REPORT, b"{}"), b"{}"))


def future() -> Iterator[bytes]:
    """Requests with the job's token and counters far ahead."""
    signer = Signer(TOKEN, Sender(1, 0, "pod-1"))
    signer.follow({"Meshwright-Session": "other", "Meshwright-Counter": str(1 << 50)})
    while True:
        yield raw_request(signer.request("POST", REPORT, b"{}"), b"{}")


def impostor() -> Iterator[bytes]:
    """Requests with the job's token for other workers, whose pod uid the sender does not know."""
    for worker in itertools.cycle(range(WORKERS)):
        signer = Signer(TOKEN, Sender(worker, 0, "guessed"))
        body = json.dumps({**report(worker, 1).wire(), "podUid": "guessed"}).encode()
        yield raw_request(signer.request("POST", REPORT, body), body)


ATTACKS = {
    "unsigned": unsigned,
    "silent": unsigned,
    "bodies": bodies,
    "replayed": replayed,
    "future": future,
    "impostor": impostor,
}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            asyncio.run(serve())
        case ["report", port, seconds]:
            asyncio.run(report_for(int(port), float(seconds)))
        case ["attack", kind, port]:
            attack(kind, int(port))
