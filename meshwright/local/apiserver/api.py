"""The HTTP face of the server: who asks, may they, and which part answers. Every failure becomes a Status."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

from meshwright.local.apiserver import bodies
from meshwright.local.apiserver.discovery import REVIEWS, discover
from meshwright.local.apiserver.errors import ApiError, UnservedPath, bad_request, forbidden, method_not_allowed
from meshwright.local.apiserver.identity import SERVICE_ACCOUNT, Authenticator, User, impersonated
from meshwright.local.apiserver.openapi import OpenApi
from meshwright.local.apiserver.rbac import Attempt, Authorizer
from meshwright.local.apiserver.registry import Registry
from meshwright.local.apiserver.requests import Call, ResourceRequests, plain
from meshwright.local.apiserver.reviews import Reviews
from meshwright.local.apiserver.routes import Target, fits, parse_target, verb_of
from meshwright.local.apiserver.version import version_info

LOG = logging.getLogger(__name__)
_HEALTH_PATHS = ("/healthz", "/livez", "/readyz")


class Api:
    """Answers every request."""

    def __init__(
        self,
        registry: Registry,
        requests: ResourceRequests,
        authenticator: Authenticator,
        authorizer: Authorizer,
    ) -> None:
        self._registry = registry
        self._requests = requests
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._reviews = Reviews(authenticator, authorizer)
        self._openapi = OpenApi(registry)
        self._running: set[asyncio.Task[Any]] = set()

    def cancel_all(self) -> None:
        """End every request that is being answered; watches would else keep a stopping server alive."""
        for task in list(self._running):
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request; never raises but for a client that went away."""
        task = asyncio.current_task()
        if task is not None:
            self._running.add(task)
        try:
            return await self._answer(request)
        except ApiError as error:
            return _failure(error)
        except web.HTTPRequestEntityTooLarge:
            text = f"Request entity too large: limit is {bodies.MAX_BODY_BYTES}"
            return _failure(ApiError(413, "RequestEntityTooLarge", text))
        except RecursionError:
            return _failure(bad_request("the object provided is nested too deeply"))
        except ConnectionResetError:
            raise
        except Exception:
            LOG.exception("%s %s failed", request.method, request.path)
            return _failure(ApiError(500, "InternalError", "Internal error occurred; see the log of the server"))
        finally:
            if task is not None:
                self._running.discard(task)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        user = self._user(request)
        target = parse_target(request.path)
        if target is None:
            self._authorize(user, Attempt(request.method.lower(), path=request.path))
            return self._document(request)
        watching = request.query.get("watch", "") in ("true", "True", "1")
        verb = verb_of(request.method, target, watch=watching)
        self._authorize(
            user, Attempt(verb, target.group, target.plural, target.subresource, target.namespace, target.name)
        )
        if (target.group, target.plural) in REVIEWS:
            return await self._review(request, target, user)
        resource = self._registry.get(target.group, target.version, target.plural)
        if resource is None or not fits(target, resource):
            raise self._registry.no_such_path(request.path)
        return await self._requests.answer(Call(request, resource, target))

    def _user(self, request: web.Request) -> User:
        user = self._authenticator.authenticate(request.headers.get("Authorization", ""))
        name = request.headers.get("Impersonate-User", "")
        if not name:
            return user
        groups = request.headers.getall("Impersonate-Group", [])
        if name.startswith(SERVICE_ACCOUNT):
            namespace, _, account = name.removeprefix(SERVICE_ACCOUNT).partition(":")
            attempt = Attempt("impersonate", plural="serviceaccounts", namespace=namespace, name=account)
        else:
            attempt = Attempt("impersonate", plural="users", name=name)
        self._authorize(user, attempt)
        for group in groups:
            self._authorize(user, Attempt("impersonate", plural="groups", name=group))
        return impersonated(name, groups, request.headers.get("Impersonate-Uid", ""))

    def _authorize(self, user: User, attempt: Attempt) -> None:
        if self._authorizer.allows(user, attempt):
            return
        if attempt.path:
            text = f'User "{user.name}" cannot {attempt.verb} path "{attempt.path}"'
            raise ApiError(403, "Forbidden", f"forbidden: {text}")
        where = f'in the namespace "{attempt.namespace}"' if attempt.namespace else "at the cluster scope"
        what = f'resource "{attempt.resource}" in API group "{attempt.group}"'
        text = f'User "{user.name}" cannot {attempt.verb} {what} {where}'
        raise forbidden(attempt.group, attempt.plural, attempt.name, text)

    def _document(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if request.method not in ("GET", "HEAD"):
            raise method_not_allowed()
        if path in _HEALTH_PATHS:
            return web.Response(text="ok")
        if path.rstrip("/") == "/version":
            return plain(version_info())
        if path.startswith("/openapi/"):
            document = self._openapi.document(path, request.headers.get("Accept", ""))
            return web.Response(body=document, content_type="application/json")
        return plain(discover(self._registry, path))

    async def _review(self, request: web.Request, target: Target, user: User) -> web.StreamResponse:
        if request.method != "POST" or target.name or target.version != "v1":
            raise method_not_allowed()
        review = bodies.parse_object(bodies.media_type(request.headers.get("Content-Type", "")), await request.read())
        return plain(self._reviews.answer(target.plural, review, user), 201)


def _failure(error: ApiError) -> web.Response:
    if isinstance(error, UnservedPath):
        return web.Response(text=f"{error.message}\n", status=error.code)
    response = plain(error.status(), error.code)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response
