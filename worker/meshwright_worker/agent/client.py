"""The agent's side of the protocol with the operator's coordinator."""

from __future__ import annotations

from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from meshwright.protocol import MeshDocument, MeshRequest, ReportReply, WorkerReport
from meshwright_worker.settings import Settings

# Beyond what the coordinator may hold a poll: the time for the answer to travel.
ANSWER_SECONDS = 10.0

Model = TypeVar("Model", bound=BaseModel)


class SupersededError(Exception):
    """410: a newer incarnation of this worker exists, or the job wants no pods."""


class RejectedError(Exception):
    """401 or 404: the coordinator does not know this token or this job."""


class UnavailableError(Exception):
    """The coordinator cannot be reached, or answered what nobody can read. To be retried."""


class CoordinatorClient:
    """Typed calls of the coordinator. The token travels in a header and stands in no message of an exception."""

    def __init__(self, settings: Settings) -> None:
        self._url = f"{settings.coordinator_url}/v1/jobs/{settings.namespace}/{settings.job}/{settings.uid}"
        self._headers = {"Authorization": f"Bearer {settings.token}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CoordinatorClient:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def mesh(self, request: MeshRequest) -> MeshDocument | None:
        """Poll for a mesh newer than `request.generation`; None if there was none in time.

        Raises:
            SupersededError, RejectedError, UnavailableError: as they say.
        """
        body = await self._post("mesh", request, request.wait_seconds + ANSWER_SECONDS)
        return None if body is None else _parse(MeshDocument, body)

    async def report(self, report: WorkerReport, seconds: float = ANSWER_SECONDS) -> ReportReply:
        """Send a heartbeat; give up after `seconds`.

        Raises:
            SupersededError, RejectedError, UnavailableError: as they say.
        """
        body = await self._post("report", report, seconds)
        if body is None:
            raise UnavailableError("the coordinator answered a report with 204")
        return _parse(ReportReply, body)

    async def _post(self, path: str, message: WorkerReport | MeshRequest, seconds: float) -> bytes | None:
        if self._session is None:
            raise RuntimeError("the client is used outside its context")
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=ANSWER_SECONDS)
        try:
            async with self._session.post(f"{self._url}/{path}", json=message.wire(), timeout=limit) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        match response.status:
            case 200:
                return body
            case 204:
                return None
            case 410:
                raise SupersededError
            case 401 | 404:
                raise RejectedError(f"{response.status} from {self._url}/{path}")
            case status:
                raise UnavailableError(f"{status} from {self._url}/{path}")


def _parse(model: type[Model], body: bytes) -> Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise UnavailableError(f"cannot read the coordinator's {model.__name__}: {error}") from error
