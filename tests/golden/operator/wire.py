"""The API server of a virtual cluster, as the operator's own client speaks to it: verbs, addresses and JSON bodies.

Only the last call is replaced, which sends a request. So the record has what a real API server
would get, with field managers, preconditions and content types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

from kubernetes.aio.client import Configuration

from meshwright.api.objects import KubeObject
from meshwright_operator.kube.client import ApiError, KubeClient, _Connections
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.golden.files import canonical
from tests.operator.memory import MemoryCluster

Fault = Callable[[str, str, KubeObject], ApiError | None]

READ = "GET"
TEXT = "text"
"""Replaces a message in a recorded object."""
EVENT = re.compile(r"(/events/.*\.)[0-9a-f]{16}$")
TIMES = ("firstTimestamp", "lastTimestamp", "eventTime")


class Server:
    """Serves the objects of a `MemoryCluster` and reports every write with its outcome."""

    def __init__(self, memory: MemoryCluster, wrote: Callable[[KubeObject], None]) -> None:
        self._memory = memory
        self._wrote = wrote
        self.fault: Fault = lambda verb, path, body: None
        """Called before every request; its error is the answer. Code 0: the server is unreachable."""

    def client(self, metrics: OperatorMetrics, number: int) -> KubeClient:
        """The client of one operator process."""
        return KubeClient(Configuration(host=f"http://{number}"), metrics)

    async def answer(self, verb: str, url: str, kind: str, body: KubeObject | None) -> Answer:
        """The answer to a request."""
        parts = urlsplit(url)
        sent: KubeObject = json.loads(canonical(body or {}))
        code, answer = 200, {}
        try:
            if (error := self.fault(verb, parts.path, sent)) is not None:
                raise error
            answer = await self._serve(verb, parts.path, parts.query, kind, json.loads(canonical(sent)))
        except ApiError as error:
            code, answer = error.code, {"reason": error.reason, "message": error.message}
        if verb != READ:
            self._wrote(
                {
                    "operator": int(parts.netloc),
                    "verb": verb,
                    "path": parts.path,
                    "query": parts.query,
                    "kind": kind,
                    "body": sent,
                    "code": code,
                }
            )
        if code == 0:
            raise OSError(answer["message"])
        return Answer(code, canonical(answer).encode())

    async def _serve(self, verb: str, path: str, query: str, kind: str, body: KubeObject) -> KubeObject:
        if "/events" in path:
            return body
        if verb == READ:
            fields = {key: values[0] for key, values in parse_qs(query).items()}
            if "limit" not in fields:
                return await self._memory.get(path)
            del fields["limit"]
            pages = [page async for page in self._memory.pages(path, **fields)]
            return {"items": [item for page in pages for item in page.items], "metadata": {"resourceVersion": "1"}}
        if verb == "POST":
            return await self._memory.create(path, body)
        if verb == "DELETE":
            await self._memory.delete(path, body["preconditions"]["uid"])
            return {}
        return await self._memory.merge_patch(path, body)


@contextmanager
def served_by(server: Callable[[], Server]) -> Iterator[None]:
    """Sends every request of the client library to a server."""

    def begin(rest: Any, configuration: Any) -> None:
        rest.configuration = configuration

    async def send(
        rest: Any, verb: str, url: str, headers: KubeObject, data: bytes | None, timeout_options: object
    ) -> Any:
        return await server().answer(verb, url, headers["Content-Type"], json.loads(data) if data is not None else None)

    with patch.object(_Connections, "__init__", begin), patch.object(_Connections, "send", send):
        yield


class Answer:
    """The part of aiohttp's response that the operator reads."""

    def __init__(self, status: int, data: bytes) -> None:
        self.status = status
        self.headers: dict[str, str] = {}
        self._data = data

    async def read(self) -> bytes:
        return self._data

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def without_texts(value: Any, texts: list[str]) -> Any:
    """The object with `TEXT` in place of messages, which go to `texts`. Decodes `appliedSpec`."""
    if isinstance(value, list):
        return [without_texts(item, texts) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in sorted(value.items()):
        if key in ("message", "summary") and isinstance(item, str):
            found[key] = _text(item, texts)
        elif key == "reasons" and isinstance(item, list):
            found[key] = [_text(text, texts) for text in item]
        elif key == "appliedSpec" and isinstance(item, str):
            found[key] = json.loads(item) if item else ""
        else:
            found[key] = without_texts(item, texts)
    return found


def stable_event(write: KubeObject) -> KubeObject:
    """A write of an event, without real time and without the hash of time and message in its name."""
    if "/events" not in write["path"]:
        return write
    body = {key: "time" if key in TIMES else value for key, value in write["body"].items()}
    if "metadata" in body:
        name = body["metadata"]["name"].rpartition(".")[0]
        body["metadata"] = {**body["metadata"], "name": f"{name}.*"}
    return {**write, "path": EVENT.sub(r"\1*", write["path"]), "body": body}


def _text(text: str, texts: list[str]) -> str:
    texts.append(text)
    return TEXT if text else ""
