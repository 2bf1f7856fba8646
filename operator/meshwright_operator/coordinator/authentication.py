"""Checks the headers of an agent's request, before its body is read.

In this order: the length, the signature, the version, the job, the pod, the counter, and the worker's rate. So a client
without the job's token costs one HMAC, and a request that someone else captured costs the worker nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from aiohttp import web

from meshwright.api.objects import KubeObject, pod_name
from meshwright.protocol import signing
from meshwright.protocol.signing import RequestHead, Sender
from meshwright.protocol.versions import VERSION_HEADER, VersionError, negotiate
from meshwright_operator.coordinator.agent_registry import AgentRegistry
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.http.server import tolerate, verify
from meshwright_operator.kube.cache import Cache, JobKey

MESH_BYTES = 2 << 10
"""Largest body of a poll, or of a request for the CA bundle."""
REPORT_BYTES = 32 << 10
"""Largest body of a report, without its ranks."""
RANK_BYTES = 192
"""Bytes of one rank in a report."""
MIN_RANKS = 64
"""Ranks that any worker may report. One with more GPUs may report as many."""
MAX_RANKS = 1024
UNKNOWN_POD_SECONDS = 2


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """A request whose headers are signed with the job's token by one of the job's pods."""

    endpoint: str
    key: JobKey
    registry: AgentRegistry
    token: str = field(repr=False)
    head: RequestHead
    max_ranks: int
    """Most ranks that the worker can have."""

    @property
    def sender(self) -> Sender:
        """The pod that sent it."""
        return self.head.sender


class Authenticator:
    """Knows which requests to serve."""

    def __init__(self, cache: Cache, tokens: Tokens, registry: Callable[[str], AgentRegistry]) -> None:
        self._cache = cache
        self._tokens = tokens
        self._registry = registry
        self.session = secrets.token_urlsafe(12)
        """The session of this process: requests that were signed for another one are rejected."""
        self.synced = False
        """Whether the cache contains all jobs, so that a job that is not in it does not exist."""

    def authenticate(self, endpoint: str, request: web.Request) -> SignedRequest:
        """The request, if it may be served.

        Raises:
            web.HTTPException: It may not. The answer is signed if the request is.
        """
        key, uid, token, head = self._check_signature(endpoint, request)
        try:
            return self._check_signed(endpoint, request, key, uid, token, head)
        except web.HTTPException as http_error:
            body = http_error.body if isinstance(http_error.body, bytes) else b""
            last = 0
            if http_error.status == web.HTTPConflict.status_code:
                last = self._registry(uid).rate_limiter.last_counter(endpoint, head.sender)
            digest = signing.digest_of(body)
            http_error.headers.update(
                signing.answer_headers(token, head.signature, http_error.status, digest, self.session, last)
            )
            raise

    def answer_headers(self, signed_request: SignedRequest, status: int, digest: str) -> dict[str, str]:
        """The headers with the signature of an answer to a request that is served."""
        head = signed_request.head
        return signing.answer_headers(signed_request.token, head.signature, status, digest, self.session, head.counter)

    def _check_signature(self, endpoint: str, request: web.Request) -> tuple[JobKey, str, str, RequestHead]:
        length = request.headers.get(signing.LENGTH, "")
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in request.headers:
            raise web.HTTPLengthRequired(text="the request needs a Content-Length")
        largest = REPORT_BYTES + RANK_BYTES * MAX_RANKS if endpoint == "report" else MESH_BYTES
        if len(length) > 9 or int(length) > largest:  # noqa: PLR2004 - digits
            raise _too_large(largest)
        namespace, name, uid = (request.match_info[part] for part in ("namespace", "name", "uid"))
        token = self._tokens.token(namespace, name, uid)
        try:
            path = f"/v1/jobs/{namespace}/{name}/{uid}/{endpoint}"
            head = signing.check_request(token, request.method, path, request.headers)
        except signing.SignatureError as error:
            raise web.HTTPUnauthorized(text=f"not signed with this job's token: {error}") from None
        return JobKey(namespace, name), uid, token, head

    def _check_signed(
        self, endpoint: str, request: web.Request, key: JobKey, uid: str, token: str, head: RequestHead
    ) -> SignedRequest:
        try:
            negotiate(request.headers.get(VERSION_HEADER))
        except VersionError as error:
            raise web.HTTPUpgradeRequired(text=str(error)) from None
        job = self._cache.jobs.get(key)
        if job is None or job["metadata"].get("uid") != uid:
            if not self.synced:
                raise web.HTTPServiceUnavailable(text="starting", headers={"Retry-After": "1"})
            raise web.HTTPNotFound(text="job not found")
        registry, sender = self._registry(uid), head.sender
        if registry.superseded(sender):
            raise superseded_error()
        pod = self._cache.pod(key, pod_name(key.name, sender.worker, sender.incarnation))
        if pod is None or pod.owner != uid or pod.uid != sender.pod_uid:
            text = f"pod {sender} of this job is not known yet, or not any more"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": str(UNKNOWN_POD_SECONDS)})
        if head.session != self.session:
            tolerate(request)  # the agent's first request to this process
            raise web.HTTPConflict(text="signed for another session of the coordinator")
        if not registry.rate_limiter.is_next(endpoint, sender, head.counter):
            raise web.HTTPConflict(text="this request, or a later one of the same pod, was received before")
        if (seconds := registry.rate_limiter.delay_for(sender.worker)) > 0:
            raise rate_limited(seconds)
        verify(request, (uid, sender.worker))
        max_ranks = min(MAX_RANKS, max(MIN_RANKS, _gpus_per_worker(job)))
        if head.length > REPORT_BYTES + RANK_BYTES * max_ranks:
            raise _too_large(REPORT_BYTES + RANK_BYTES * max_ranks)
        return SignedRequest(endpoint, key, registry, token, head, max_ranks)


def rate_limited(seconds: float) -> web.HTTPTooManyRequests:
    """The worker must wait."""
    return web.HTTPTooManyRequests(
        text="too many requests from this worker", headers={"Retry-After": str(ceil(seconds))}
    )


def superseded_error() -> web.HTTPGone:
    """The pod must exit."""
    return web.HTTPGone(text="superseded: a newer incarnation of this worker exists, or the job needs no pods")


def _too_large(largest: int) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(largest, text=f"the body must have at most {largest} bytes")


def _gpus_per_worker(job: KubeObject) -> int:
    """The ranks of a worker, from a spec that may be malformed."""
    spec = job.get("spec")
    workers = spec.get("workers") if isinstance(spec, dict) else None
    count = workers.get("gpusPerWorker") if isinstance(workers, dict) else None
    return count if isinstance(count, int) else 0
