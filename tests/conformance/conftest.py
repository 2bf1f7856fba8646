"""The server under test, and a small HTTP client that says exactly what goes over the wire.

By default the embedded server is tested, with the garbage collector and the namespace controller beside it as they are
on any cluster. `--cluster assets` tests the real kube-apiserver of KUBEBUILDER_ASSETS, and MESHWRIGHT_TEST_SERVER with
MESHWRIGHT_TEST_TOKEN any server: a check that fails there is a wrong check.
"""

import asyncio
import contextlib
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from meshwright_local.controllers.garbage_collector import GarbageCollector
from meshwright_local.controllers.namespaces import NamespaceController
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.kube.reflector import Informers
from meshwright_local.providers.embedded import EmbeddedProvider
from tests.patience import patient

GROUP = "conformance.example.com"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"

RUN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["workers"],
            "properties": {
                "workers": {"type": "integer", "minimum": 1, "maximum": 64},
                "backoffLimit": {"type": "integer", "default": 3},
                "command": {"type": "array", "items": {"type": "string"}},
                "frozen": {
                    "type": "string",
                    "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "is immutable"}],
                },
                "tolerations": {
                    "type": "array",
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["key"],
                    "items": {
                        "type": "object",
                        "required": ["key"],
                        "properties": {"key": {"type": "string"}, "value": {"type": "string"}},
                    },
                },
            },
            "x-kubernetes-validations": [
                {
                    "rule": "self.workers <= 32 || self.backoffLimit > 0",
                    "messageExpression": "'big runs need a backoffLimit' + (self.workers > 32 ? ', as over 32' : '')",
                    "reason": "FieldValueForbidden",
                    "fieldPath": ".backoffLimit",
                }
            ],
        },
        "status": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": {"replicas": {"type": "integer"}, "selector": {"type": "string"}},
        },
    },
}


def definition(plural: str, kind: str, **version: Any) -> dict[str, Any]:
    """A CustomResourceDefinition of the test group with one version."""
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    schema = {"openAPIV3Schema": version.pop("schema", {"type": "object"})}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema, **version}],
        },
    }


@dataclass(frozen=True)
class Server:
    """Where the server under test is."""

    url: str
    token: str
    ca: str | None
    embedded: bool
    controllers: bool


@dataclass
class Api:
    """A client of the server, with a namespace of its own."""

    server: Server
    session: aiohttp.ClientSession
    namespace: str
    context: ssl.SSLContext
    made: list[str] = field(default_factory=list)

    @property
    def maps(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/configmaps"

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def runs(self) -> str:
        return f"/apis/{GROUP}/v1/namespaces/{self.namespace}/runs"

    @staticmethod
    def foreign(obj: dict[str, Any]) -> bool:
        """Whether this is a ConfigMap that controllers put into every namespace: `kube-root-ca.crt`, vendors' own."""
        return str(obj["metadata"].get("name", "")).endswith("ca.crt")

    async def call(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", **query: str
    ) -> tuple[int, Any]:
        """Send a request; the answer's code and JSON (or text)."""
        data = body if body is None or isinstance(body, str | bytes) else json.dumps(body)
        headers = {"Content-Type": kind, "Accept": "application/json"}
        async with self.session.request(
            method, self.server.url + path, data=data, headers=headers, params=query, ssl=self.context
        ) as response:
            text = await response.text()
            with contextlib.suppress(ValueError):
                return response.status, json.loads(text)
            return response.status, text

    async def watch(self, path: str, seconds: float, *, expect: int = 0, **query: str) -> list[dict[str, Any]]:
        """The events that arrive within a time, or the first `expect` that are of the test's own objects."""
        events: list[dict[str, Any]] = []
        timeout = aiohttp.ClientTimeout(total=patient(seconds) if expect else seconds)
        with contextlib.suppress(TimeoutError):
            async with self.session.get(
                self.server.url + path, params={"watch": "true", **query}, ssl=self.context, timeout=timeout
            ) as response:
                async for line in response.content:
                    if line.strip():
                        events.append(json.loads(line))
                    if expect and len([e for e in events if not self.foreign(e["object"])]) >= expect:
                        break
        return events

    async def until(self, expected: int, method: str, path: str, body: Any = None) -> Any:
        """Repeat a request until its code is the expected one: what others have to notice first takes a moment."""
        deadline = time.monotonic() + patient(5)
        while True:
            code, answer = await self.call(method, path, body)
            if code == expected or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        assert code == expected, answer
        return answer

    async def until_gone(self, path: str, seconds: float = 10.0) -> bool:
        """Whether an object vanishes in time."""
        deadline = time.monotonic() + patient(seconds)
        while (await self.call("GET", path))[0] != 404:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def define(self, crd: dict[str, Any]) -> dict[str, Any]:
        """Create a definition if it is missing and wait until it is served."""
        code, _ = await self.call("POST", CRDS, crd)
        assert code in (201, 409)
        path = f"{CRDS}/{crd['metadata']['name']}"
        deadline = time.monotonic() + patient(5)
        while time.monotonic() < deadline:
            _, found = await self.call("GET", path)
            conditions = {c["type"]: c["status"] for c in found.get("status", {}).get("conditions") or ()}
            if conditions.get("Established") == "True":
                spec = crd["spec"]
                served = f"/apis/{spec['group']}/v1/{spec['names']['plural']}"
                if (await self.call("GET", served))[0] == 200:
                    return found
            await asyncio.sleep(0.05)
        raise AssertionError("the definition is not established")

    def config_map(self, name: str, labels: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": labels or {}, **metadata},
            "data": {"k": "v"},
        }

    def pod(self, name: str, **spec: Any) -> dict[str, Any]:
        container = {"name": "a", "image": "busybox", "env": [{"name": "A", "value": "1"}]}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"containers": [container], "schedulerName": "nobody", **spec},
        }

    def run(self, name: str, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": f"{GROUP}/v1",
            "kind": "Run",
            "metadata": {"name": name},
            "spec": {"workers": 2, **spec},
        }


class Background:
    """An event loop in a thread, in which the server and the controllers live as they do in a cluster's process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(patient(60))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(patient(5))


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    url = os.environ.get("MESHWRIGHT_TEST_SERVER")
    if url:
        yield Server(url, os.environ.get("MESHWRIGHT_TEST_TOKEN", ""), None, False, True)
        return
    if request.config.getoption("--cluster", "embedded") == "kubeconfig":
        there = Connection.from_kubeconfig(Path(os.environ["KUBECONFIG"]))
        yield Server(there.url, there.token or "", there.ca_pem, False, True)
        return
    directory = tmp_path_factory.mktemp("server")
    if request.config.getoption("--cluster", "embedded") == "assets":
        from meshwright_local.providers.envtest import EnvtestProvider

        provider: Any = EnvtestProvider(directory)
    else:
        provider = EmbeddedProvider(directory, in_memory=True)
    background = Background()
    control_plane = background.wait(provider.start())
    stop = background.wait(_start_controllers(control_plane)) if not control_plane.has_controllers else None
    connection = control_plane.connection
    embedded = isinstance(provider, EmbeddedProvider)
    yield Server(connection.url, connection.token or "", connection.ca_pem, embedded, True)
    if stop is not None:
        background.wait(stop())
    background.wait(provider.stop())
    background.stop()


async def _start_controllers(control_plane: Any) -> Any:
    client = ApiClient(control_plane.connection)
    await client.wait_ready()
    informers = Informers(client)
    tasks = [asyncio.create_task(c.run()) for c in (GarbageCollector(informers), NamespaceController(informers))]
    informers.start()

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await informers.stop()
        await client.close()

    return stop


@pytest_asyncio.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    context = ssl.create_default_context(cadata=server.ca) if server.ca else ssl.create_default_context()
    if server.ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=patient(30))) as session:
        client = Api(server, session, f"check-{secrets.token_hex(4)}", context)
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": client.namespace}}
        code, answer = await client.call("POST", "/api/v1/namespaces", space)
        assert code == 201, answer
        yield client
        await client.call("DELETE", f"/api/v1/namespaces/{client.namespace}")


@pytest_asyncio.fixture
async def runs(api: Api) -> str:
    """The collection of a custom resource with a schema, defaults, CEL rules, status and scale."""
    scale = {
        "specReplicasPath": ".spec.workers",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        {"name": "Workers", "type": "integer", "jsonPath": ".spec.workers"},
        {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    ]
    subresources = {"status": {}, "scale": scale}
    version = {"schema": RUN_SCHEMA, "subresources": subresources, "additionalPrinterColumns": columns}
    await api.define(definition("runs", "Run", **version))
    return api.runs
