"""Requests on resources: each verb as one method."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from meshwright.local.apiserver import bodies
from meshwright.local.apiserver.definitions import Definitions
from meshwright.local.apiserver.deleting import Deleting
from meshwright.local.apiserver.errors import (
    bad_request,
    invalid_options,
    method_not_allowed,
    not_allowed,
    success,
    unknown_path,
    unsupported_media_type,
)
from meshwright.local.apiserver.eventlog import Stored
from meshwright.local.apiserver.identity import Authenticator
from meshwright.local.apiserver.kubelet import KubeletProxy
from meshwright.local.apiserver.options import WriteOptions, delete_options, list_options, write_options
from meshwright.local.apiserver.patches import json_patch, merge_patch, strategic_merge_patch
from meshwright.local.apiserver.reading import Watch, list_objects
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.reviews import token_request
from meshwright.local.apiserver.routes import Target
from meshwright.local.apiserver.store import Store
from meshwright.local.apiserver.subresources import Subresources
from meshwright.local.apiserver.views import View, negotiate
from meshwright.local.apiserver.writing import Writing

JSON_PATCH, MERGE_PATCH = "application/json-patch+json", "application/merge-patch+json"
STRATEGIC_PATCH, APPLY_PATCH = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
_OPTIONS = {"POST": "CreateOptions", "PUT": "UpdateOptions"}
_SEND_SECONDS = 60.0
_DELETES_PER_TURN = 50


@dataclass(frozen=True, slots=True)
class Call:
    """One request on one resource."""

    request: web.Request
    resource: Resource
    target: Target

    def view(self) -> View:
        """How the client wants to see the answer."""
        query = self.request.query
        return negotiate(self.resource, self.request.headers.get("Accept", ""), query.get("includeObject", ""))

    def options(self) -> WriteOptions:
        """How the client wants the write done."""
        kind = _OPTIONS.get(self.request.method, "PatchOptions")
        return write_options(kind, self.request.query, self.request.headers.get("User-Agent", ""))

    @property
    def content_type(self) -> str:
        """The media type of the body; empty when the client names none."""
        return bodies.media_type(self.request.headers.get("Content-Type", ""))

    async def object(self) -> dict[str, Any]:
        """The object in the body."""
        return bodies.parse_object(self.content_type, await self.raw())

    async def raw(self) -> bytes:
        """The body."""
        return await self.request.read()


def reply(view: View, obj: dict[str, Any], status: int = 200, warnings: list[str] | None = None) -> web.Response:
    """Answer with one object."""
    body, content_type = view.encode(view.one(Stored(obj, orjson.dumps(obj))))
    response = web.Response(body=body, status=status, content_type=content_type)
    for text in warnings or ():
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        response.headers.add("Warning", f'299 - "{escaped}"')
    return response


def plain(obj: dict[str, Any], status: int = 200) -> web.Response:
    """Answer with a document that is no stored object."""
    return web.Response(body=orjson.dumps(obj), status=status, content_type="application/json")


@dataclass(slots=True)
class ResourceRequests:
    """Answers requests on resources."""

    store: Store
    writing: Writing
    deleting: Deleting
    definitions: Definitions
    subresources: Subresources
    authenticator: Authenticator
    kubelet: KubeletProxy

    async def answer(self, call: Call) -> web.StreamResponse:
        """Answer a request.

        Raises:
            ApiError: it fails.
        """
        target, method = call.target, call.request.method
        if target.subresource:
            return await self._subresource(call)
        one: dict[str, Callable[[Call], Any]] = {
            "GET": self._get,
            "PUT": self._replace,
            "PATCH": self._patch,
            "DELETE": self._delete,
        }
        many: dict[str, Callable[[Call], Any]] = {
            "GET": self._list,
            "POST": self._create,
            "DELETE": self._delete_collection,
        }
        handler = (one if target.name else many).get(method)
        if handler is None:
            raise method_not_allowed()
        response: web.StreamResponse = await handler(call)
        return response

    def _existing(self, call: Call) -> dict[str, Any]:
        target = call.target
        found = self.writing.find(call.resource.key, target.namespace, target.name)
        if found is None:
            raise call.resource.not_found(target.name)
        return found

    async def _get(self, call: Call) -> web.StreamResponse:
        list_options(call.request.query)
        return reply(call.view(), self._existing(call))

    async def _list(self, call: Call) -> web.StreamResponse:
        options = list_options(call.request.query)
        if options.watch:
            return await self._watch(call)
        view = call.view()
        items, metadata = list_objects(self.store, call.resource, call.target.namespace, options)
        body, content_type = view.encode(view.many(items, metadata))
        return web.Response(body=body, content_type=content_type)

    async def _watch(self, call: Call) -> web.StreamResponse:
        target, options = call.target, list_options(call.request.query)
        watch = Watch(self.store, call.view(), target.namespace, options)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(call.request)

        async def send(lines: bytes) -> None:
            async with asyncio.timeout(_SEND_SECONDS):
                await response.write(lines)

        try:
            await watch.run(send)
            await response.write_eof()
        except (ConnectionResetError, TimeoutError):
            call.request.protocol.force_close()
        return response

    async def _create(self, call: Call) -> web.StreamResponse:
        if call.resource.namespaced and not call.target.namespace:
            raise method_not_allowed()
        view, options, obj = call.view(), call.options(), await call.object()
        self.definitions.refuse_when_terminating(call.resource, obj)
        created = self.writing.create(call.resource, call.target.namespace, obj, options)
        return reply(view, created, 201, options.warnings)

    async def _replace(self, call: Call) -> web.StreamResponse:
        view, options, new = call.view(), call.options(), await call.object()
        updated = self.writing.replace(call.resource, self._existing(call), new, options, call.target.subresource)
        return reply(view, updated, 200, options.warnings)

    async def _patch(self, call: Call) -> web.StreamResponse:
        view, options, raw = call.view(), call.options(), await call.raw()
        resource, target, kind = call.resource, call.target, call.content_type
        if kind == APPLY_PATCH:
            config = bodies.parse("application/yaml", raw)
            if not isinstance(config, dict):
                raise bad_request("an apply patch must be an object")
            place = (target.namespace, target.name)
            applied, created = self.writing.apply(resource, place, config, options, target.subresource)
            return reply(view, applied, 201 if created else 200, options.warnings)
        if options.force:
            raise invalid_options("PatchOptions", not_allowed("force", "may not be specified for non-apply patch"))
        patch = self._parsed(resource, kind, raw)
        old = self._existing(call)
        new = _patched(resource, kind, old, patch)
        updated = self.writing.update(resource, old, new, options, target.subresource)
        return reply(view, updated, 200, options.warnings)

    def _parsed(self, resource: Resource, kind: str, raw: bytes) -> Any:
        accepted = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH] + ([] if resource.custom else [STRATEGIC_PATCH])
        if kind not in accepted:
            raise unsupported_media_type(accepted)
        patch = bodies.parse("application/json", raw)
        if kind != JSON_PATCH and not isinstance(patch, dict):
            raise bad_request("error decoding patch: the patch must be an object")
        return patch

    async def _delete(self, call: Call) -> web.StreamResponse:
        view, body = call.view(), await call.raw()
        given = bodies.parse_object(call.content_type, body) if body else {}
        options = delete_options(call.request.query, given)
        last, gone = self.deleting.delete(call.resource, self._existing(call), options)
        if not gone or call.resource.rules.returns_deleted:
            return reply(view, last)
        resource, uid = call.resource, last["metadata"]["uid"]
        details = {"name": call.target.name, "group": resource.group, "kind": resource.plural, "uid": uid}
        return plain(success(details=details))

    async def _delete_collection(self, call: Call) -> web.StreamResponse:
        if call.resource.namespaced and not call.target.namespace:
            raise method_not_allowed()
        view, body = call.view(), await call.raw()
        given = bodies.parse_object(call.content_type, body) if body else {}
        options = {**delete_options(call.request.query, given), "preconditions": None}
        items, metadata = list_objects(
            self.store, call.resource, call.target.namespace, list_options(call.request.query)
        )
        for index, item in enumerate(items):
            namespace, name = item.obj["metadata"].get("namespace", ""), item.obj["metadata"]["name"]
            present = self.writing.find(call.resource.key, namespace, name)
            if present is not None:
                self.deleting.delete(call.resource, present, options)
            if index % _DELETES_PER_TURN == _DELETES_PER_TURN - 1:
                await asyncio.sleep(0)
        content, content_type = view.encode(view.many(items, metadata))
        return web.Response(body=content, content_type=content_type)

    async def _subresource(self, call: Call) -> web.StreamResponse:
        resource, name, method = call.resource, call.target.subresource, call.request.method
        if name == "status" and resource.has_status:
            handler = {"GET": self._get, "PUT": self._replace, "PATCH": self._patch}.get(method)
            if handler is None:
                raise method_not_allowed()
            return await handler(call)
        if name == "scale" and resource.scale is not None:
            return await self._scale(call)
        if resource.key == ("", "namespaces") and name == "finalize" and method == "PUT":
            view, options, new = call.view(), call.options(), await call.object()
            return reply(view, self.subresources.finalize(resource, self._existing(call), new, options))
        if resource.key == ("", "serviceaccounts") and name == "token" and method == "POST":
            given = await call.object()
            return plain(token_request(self.authenticator, self._existing(call), given), 201)
        if resource.key == ("", "pods"):
            return await self._pod_subresource(call)
        raise unknown_path()

    async def _pod_subresource(self, call: Call) -> web.StreamResponse:
        name, method = call.target.subresource, call.request.method
        if name == "log" and method == "GET":
            return await self.kubelet.logs(call.request, self._existing(call))
        if name == "exec" and method in ("GET", "POST"):
            return await self.kubelet.exec(call.request, self._existing(call))
        if name == "binding" and method == "POST":
            body = await call.object()
            self.subresources.bind(call.resource, self._existing(call), body, call.options())
            return plain(success(201), 201)
        if name == "eviction" and method == "POST":
            body = await call.object()
            self.subresources.evict(call.resource, self._existing(call), body)
            return plain(success(201), 201)
        if name in ("log", "exec", "binding", "eviction"):
            raise method_not_allowed()
        raise unknown_path()

    async def _scale(self, call: Call) -> web.StreamResponse:
        resource, method, options = call.resource, call.request.method, call.options()
        if method == "GET":
            return plain(self.subresources.scale_of(resource, self._existing(call)))
        if method == "PUT":
            scale = await call.object()
        elif method == "PATCH":
            patch = self._parsed(resource, call.content_type, await call.raw())
            present = self.subresources.scale_of(resource, self._existing(call))
            scale = _patched(resource, call.content_type, present, patch)
        else:
            raise method_not_allowed()
        return plain(self.subresources.rescale(resource, self._existing(call), scale, options))


def _patched(resource: Resource, kind: str, old: dict[str, Any], patch: Any) -> dict[str, Any]:
    """The object after a patch; shares nothing with `old`."""
    copy: dict[str, Any] = orjson.loads(orjson.dumps(old))
    if kind == JSON_PATCH:
        return json_patch(copy, patch)
    merged = strategic_merge_patch(resource.node, copy, patch) if kind == STRATEGIC_PATCH else merge_patch(copy, patch)
    result: dict[str, Any] = orjson.loads(orjson.dumps(merged))
    return result
