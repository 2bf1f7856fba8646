"""Routes a request: authenticates it, parses the path, authorizes it and calls the handler.

Every failure becomes a Status, for any input.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from aiohttp import web

from meshwright_local.apiserver.admission.metadata import field_value
from meshwright_local.apiserver.auth.escalation import GrantCheck
from meshwright_local.apiserver.auth.identity import (
    ADMINS,
    SERVICE_ACCOUNT,
    Authenticator,
    Authorizer,
    RequestAttributes,
    User,
    impersonated,
    review,
)
from meshwright_local.apiserver.registry.discovery import REVIEWS, VERSION, Registry
from meshwright_local.apiserver.rest import pod_proxy, request_bodies
from meshwright_local.apiserver.rest.chaos import Chaos
from meshwright_local.apiserver.rest.handlers import Call, Handlers, body_of, plain, warning
from meshwright_local.apiserver.status_errors import ApiError, bad_request, forbidden, method_not_allowed

LOG = logging.getLogger(__name__)
_AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
CHAOS_PATH = "/debug/chaos"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}

_HEALTH = ("/healthz", "/livez", "/readyz")


def parse_target(method: str, path: str, *, watching: bool = False) -> tuple[str, RequestAttributes] | None:
    """Parse a path below `/api/<version>/` or `/apis/<group>/<version>/`; None for any other path."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    of_namespace = not group and len(rest) == 3 and rest[2] in ("status", "finalize")
    if rest[0] == "namespaces" and len(rest) > 2 and not of_namespace:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = rest[0], "".join(rest[1:2]), "/".join(rest[2:])
    if subresource.startswith(f"{pod_proxy.SUBRESOURCE}/"):
        subresource = pod_proxy.SUBRESOURCE  # the rest is a path on the pod
    verb = _VERBS.get(method, "")
    if method in ("GET", "HEAD"):
        # A single object cannot be watched by its path: `watch` is ignored.
        verb = "get" if name else "watch" if watching else "list"
    elif method == "DELETE":
        verb = "delete" if name else "deletecollection"
    return version, RequestAttributes(verb, group, plural, subresource, namespace, name)


class Routes:
    """Handles every request."""

    def __init__(
        self,
        registry: Registry,
        handlers: Handlers,
        authenticator: Authenticator,
        authorizer: Authorizer,
        chaos: Chaos,
    ) -> None:
        self._registry = registry
        self._handlers = handlers
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._chaos = chaos
        self._running: set[asyncio.Task[Any]] = set()

    def cancel_all(self) -> None:
        """Cancel every active request. Otherwise open watches would keep a stopping server alive."""
        for task in list(self._running):
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Handle a request. Raises only if the client has disconnected."""
        task = asyncio.current_task()
        if task is not None:
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        try:
            return await self._answer(request)
        except ApiError as failure:
            error = failure
        except web.HTTPRequestEntityTooLarge:
            text = f"Request entity too large: limit is {request_bodies.MAX_BODY_BYTES}"
            error = ApiError(413, "RequestEntityTooLarge", text)
        except RecursionError:
            error = bad_request("the object provided is nested too deeply")
        except ConnectionResetError:
            raise
        except Exception:
            LOG.exception("%s %s failed", request.method, request.path)
            error = ApiError(500, "InternalError", "Internal error occurred; see the log of the server")
        if error.plain:
            return web.Response(text=f"{error.message}\n", status=error.code)
        response = plain(error.status(), error.code)
        for text in error.warnings:
            response.headers.add("Warning", warning(text))
        if error.retry_after is not None:
            response.headers["Retry-After"] = str(error.retry_after)
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        user = self._user(request)
        watching = request.query.get("watch", "") in ("true", "True", "1")
        found = parse_target(request.method, request.path, watching=watching)
        if found is None:
            self._authorize(user, RequestAttributes(request.method.lower(), path=request.path))
            return await self._document(request, user)
        version, target = found
        self._authorize(user, target)
        if (target.group, target.plural) in REVIEWS:
            if request.method != "POST" or target.name or version != "v1":
                raise method_not_allowed()
            body = await body_of(request)
            answer = review(target.plural, body, user, self._authenticator, self._authorizer)
            named = {"kind": REVIEWS[target.group, target.plural], "apiVersion": f"{target.group}/{version}"}
            return plain({**named, **answer}, 201)
        resource = self._registry.get(target.group, version, target.plural)
        misplaced = resource is None or (
            (target.name and not target.namespace) if resource.namespaced else target.namespace
        )
        if resource is None or misplaced:
            raise self._registry.no_such_path(request.path)
        fault_outcome = await self._chaos.apply_rules(
            await self._named(request, target), request.headers.get("User-Agent", "")
        )
        grant_check = GrantCheck(self._authorizer, user, target)
        response = await self._handlers.answer(Call(request, resource, target, fault_outcome, grant_check))
        if fault_outcome.answer_lost and request.transport is not None:
            request.transport.abort()
        return response

    async def _named(self, request: web.Request, target: RequestAttributes) -> RequestAttributes:
        """Return the target with the name in the body of a create, if a chaos rule needs it."""
        if target.verb != "create" or target.name or not self._chaos.needs_names:
            return target
        try:
            name = field_value(orjson.loads(await request.read()), "metadata.name")
        except ValueError:
            return target
        return RequestAttributes(
            target.verb, target.group, target.plural, target.subresource, target.namespace, str(name)
        )

    def _user(self, request: web.Request) -> User:
        user = self._authenticator.authenticate(request.headers.get("Authorization", ""))
        name, groups = request.headers.get("Impersonate-User", ""), request.headers.getall("Impersonate-Group", [])
        if not name:
            return user
        attributes = RequestAttributes("impersonate", plural="users", name=name)
        if name.startswith(SERVICE_ACCOUNT):
            namespace, _, account = name.removeprefix(SERVICE_ACCOUNT).partition(":")
            attributes = RequestAttributes("impersonate", plural="serviceaccounts", namespace=namespace, name=account)
        for wanted in (
            attributes,
            *(RequestAttributes("impersonate", plural="groups", name=group) for group in groups),
        ):
            self._authorize(user, wanted)
        return impersonated(name, groups, request.headers.get("Impersonate-Uid", ""))

    def _authorize(self, user: User, attributes: RequestAttributes) -> None:
        if self._authorizer.allows(user, attributes):
            return
        text = f'User "{user.name}" cannot {attributes.verb}'
        if attributes.path:
            raise ApiError(403, "Forbidden", f'forbidden: {text} path "{attributes.path}"')
        where = f'in the namespace "{attributes.namespace}"' if attributes.namespace else "at the cluster scope"
        text = f'{text} resource "{attributes.resource}" in API group "{attributes.group}" {where}'
        raise forbidden(attributes.group, attributes.plural, attributes.name, text)

    async def _document(self, request: web.Request, user: User) -> web.StreamResponse:
        path = request.path
        if path.rstrip("/") == CHAOS_PATH:
            return await self._chaos_rules(request, user)
        if request.method not in ("GET", "HEAD"):
            raise method_not_allowed()
        if path in _HEALTH:
            verbose = "verbose" in request.query
            return web.Response(text=f"[+]ping ok\n{path[1:]} check passed\n" if verbose else "ok")
        if path.rpartition("/")[0] in _HEALTH and path.endswith("/ping"):
            return web.Response(text="ok")
        if path.rstrip("/") == "/version":
            return plain(VERSION)
        if path.startswith("/openapi/"):
            document, kind = self._registry.openapi(path, request.headers.get("Accept", ""))
            return web.Response(body=document, headers={"Content-Type": kind})
        first_choice = request.headers.get("Accept", "").split(",")[0].replace(" ", "").split(";")
        if path.rstrip("/") in ("/api", "/apis") and set(first_choice) == set(_AGGREGATED.split(";")):
            response = plain(self._registry.aggregated(path.rstrip("/")))
            response.headers["Content-Type"] = _AGGREGATED
            return response
        return plain(self._registry.discover(path))

    async def _chaos_rules(self, request: web.Request, user: User) -> web.StreamResponse:
        if ADMINS not in user.groups:
            raise ApiError(403, "Forbidden", "forbidden: only an administrator may see or change chaos rules")
        if request.method not in ("GET", "PUT", "DELETE"):
            raise method_not_allowed()
        if request.method == "PUT":
            self._chaos.replace(request_bodies.parse(request_bodies.JSON, await request.read()))
        elif request.method == "DELETE":
            self._chaos.clear()
        return plain(self._chaos.wire())
