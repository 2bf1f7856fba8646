"""Handlers of requests on resources: every verb, and subresources with their own behavior."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import duplicate_keys, status_errors
from meshwright_local.apiserver.admission.admit import check_place
from meshwright_local.apiserver.admission.metadata import field_value
from meshwright_local.apiserver.admission.pods import EPHEMERAL, label_topology
from meshwright_local.apiserver.auth.escalation import GrantCheck
from meshwright_local.apiserver.auth.identity import Authenticator, RequestAttributes
from meshwright_local.apiserver.query_options import (
    ListOptions,
    WriteOptions,
    check_list_options,
    delete_options,
    invalid_options,
    list_options,
    write_options,
)
from meshwright_local.apiserver.registry.objects import NAMESPACES, Objects
from meshwright_local.apiserver.resource_types import Resource, set_condition
from meshwright_local.apiserver.rest import pod_proxy, request_bodies
from meshwright_local.apiserver.rest.chaos import Chaos, FaultOutcome
from meshwright_local.apiserver.rest.kubelet_proxy import KubeletProxy
from meshwright_local.apiserver.rest.list_watch import Watch, list_objects
from meshwright_local.apiserver.rest.printers import View, negotiate
from meshwright_local.apiserver.status_errors import ApiError, Cause
from meshwright_local.apiserver.store import Store, Stored
from meshwright_local.kube import timestamps
from meshwright_local.kube.selectors import labels_match, selector_text

BUDGETS = ("policy", "poddisruptionbudgets")
_SEND_SECONDS = 60.0
DELETES_PER_TURN = 50
"""Deletions after which other requests are served."""
_SCALE_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


@dataclass(frozen=True, slots=True)
class Call:
    """One request on one resource."""

    request: web.Request
    resource: Resource
    target: RequestAttributes
    fault_outcome: FaultOutcome
    grant_check: GrantCheck
    """Whether its user may grant what it writes."""

    def view(self) -> View:
        """Format of the response."""
        headers, query = self.request.headers, self.request.query
        return negotiate(self.resource, headers.get("Accept", ""), query.get("includeObject", ""))

    def options(self) -> WriteOptions:
        """Options of the write."""
        request = self.request
        options = write_options(request.method, request.query, request.headers.get("User-Agent", ""))
        options.check = self.grant_check
        return options

    @property
    def content_type(self) -> str:
        """Media type of the body without parameters; empty if the client sets none."""
        return content_type(self.request)

    async def object(self, options: WriteOptions | None = None) -> KubeObject:
        """Return the object in the body. Its duplicate keys are told in `options`."""
        obj = await body_of(self.request)
        if options is not None:
            obj = self.checked(await self.request.read(), obj, options)
        return obj

    def checked(self, raw: bytes, value: Any, options: WriteOptions) -> Any:
        """Return the value of a body, and tell the keys that it has twice."""
        custom = self.resource.custom
        value, options.duplicates = request_bodies.with_duplicates(self.content_type, raw, value, custom=custom)
        return value


def content_type(request: web.Request) -> str:
    """Return the media type of a body."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def body_of(request: web.Request) -> KubeObject:
    """Return the object in a request's body; raises ApiError."""
    return request_bodies.parse_object(content_type(request), await request.read())


Methods = dict[str, Callable[[Call], Any]]
"""HTTP method -> handler."""


def plain(obj: Any, status: int = 200) -> web.Response:
    """Return a response with a document that is not a stored object."""
    return web.Response(body=orjson.dumps(obj), status=status, content_type="application/json")


def _reply(
    view: View, obj: KubeObject | Stored, status: int = 200, options: WriteOptions | None = None
) -> web.Response:
    body, content_type = view.encode(view.one(obj if isinstance(obj, Stored) else Stored.of(obj)))
    response = web.Response(body=body, status=status, content_type=content_type)
    for text in options.warnings if options else ():
        response.headers.add("Warning", warning(text))
    return response


def warning(text: str) -> str:
    """The value of a Warning header."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'299 - "{escaped}"'


@dataclass(slots=True)
class Handlers:
    """Handles requests on resources. Every method raises ApiError if the request fails."""

    store: Store
    objects: Objects
    authenticator: Authenticator
    kubelet: KubeletProxy
    chaos: Chaos

    async def answer(self, call: Call) -> web.StreamResponse:
        """Handle a request."""
        target, resource = call.target, call.resource
        single: Methods = {"GET": self._get, "PUT": self._replace, "PATCH": self._patch}
        handlers: Methods = {"GET": self._list, "POST": self._create}
        if target.subresource:
            path = (*resource.key, target.subresource)
            special = {**self._special(), **({(*resource.key, "status"): single} if resource.has_status else {})}
            special |= {(*resource.key, "scale"): dict.fromkeys(single, self._scale)} if resource.scale else {}
            if path not in special:
                raise status_errors.unknown_path()
            handlers = special[path]
        elif target.name:
            handlers = {**single, "DELETE": self._delete}
        else:
            handlers["DELETE"] = self._delete_collection
        handler = handlers.get(call.request.method)
        if handler is None:
            raise status_errors.method_not_allowed()
        response: web.StreamResponse = await handler(call)
        if resource.deprecation and not response.prepared:
            response.headers.add("Warning", warning(resource.deprecation))
        return response

    def _special(self) -> dict[tuple[str, str, str], Methods]:
        return {
            ("", "namespaces", "finalize"): {"PUT": self._finalize},
            ("", "serviceaccounts", "token"): {"POST": self._token},
            ("", "pods", "log"): {"GET": lambda call: self.kubelet.logs(call.request, self._existing(call))},
            **{
                ("", "pods", action): dict.fromkeys(("GET", "POST"), partial(self._stream, action))
                for action in ("exec", "attach")
            },
            ("", "pods", "portforward"): dict.fromkeys(
                ("GET", "POST"), lambda call: self.kubelet.port_forward(call.request, self._existing(call))
            ),
            ("", "pods", pod_proxy.SUBRESOURCE): {"GET": self._proxy},
            ("", "pods", EPHEMERAL): {"GET": self._get, "PUT": self._replace, "PATCH": self._patch},
            ("", "pods", "binding"): {"POST": self._bind},
            ("", "pods", "eviction"): {"POST": self._evict},
        }

    async def _stream(self, action: str, call: Call) -> web.StreamResponse:
        return await self.kubelet.stream(action, call.request, self._existing(call))

    def _existing(self, call: Call) -> KubeObject:
        _check_path_segment(call.target.name)
        found = self.store.find(call.resource.key, call.target.namespace, call.target.name)
        if found is None:
            raise call.resource.not_found(call.target.name)
        return call.resource.in_version(found)

    async def _proxy(self, call: Call) -> web.StreamResponse:
        name = pod_proxy.pod_of(call.target.name)
        pod = self.store.find(call.resource.key, call.target.namespace, name)
        if pod is None:
            raise call.resource.not_found(name)
        return await pod_proxy.forward(call.request, pod, call.target.name)

    def _as_of(self, call: Call) -> int | None:
        lag = call.fault_outcome.stale_revisions
        return max(self.store.log(call.resource.key).floor, self.store.revision - lag) if lag else None

    async def _get(self, call: Call) -> web.Response:
        list_options(call.request.query)
        _check_path_segment(call.target.name)
        as_of, key, place = self._as_of(call), call.resource.key, (call.target.namespace, call.target.name)
        found = (
            self.store.get(key, *place) if as_of is None else dict(self.store.items(key, place[0], as_of)).get(place)
        )
        if found is None:
            raise call.resource.not_found(call.target.name)
        return _reply(call.view(), found)

    async def _list(self, call: Call) -> web.StreamResponse:
        options = list_options(call.request.query)
        check_list_options(options)
        if options.watch:
            return await self._watch(call, options)
        view = call.view()
        found = list_objects(self.store, call.resource, call.target.namespace, options, self._as_of(call))
        body, content_type = view.encode(view.many(*found))
        return web.Response(body=body, content_type=content_type)

    async def _watch(self, call: Call, options: ListOptions) -> web.StreamResponse:
        request, agent = call.request, call.request.headers.get("User-Agent", "")
        watch = Watch(self.store, call.view(), call.target.namespace, options)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        async def send(lines: bytes) -> None:
            async with asyncio.timeout(_SEND_SECONDS):
                await response.write(lines)

        def cut() -> None:
            if request.transport is not None:
                request.transport.abort()

        try:
            with self.chaos.watching(call.target, agent, watch.watch_fault, cut):
                await watch.run(send)
            await response.write_eof()
        except (ConnectionResetError, TimeoutError):
            request.protocol.force_close()
        return response

    async def _create(self, call: Call) -> web.Response:
        if call.resource.namespaced and not call.target.namespace:
            raise status_errors.method_not_allowed()
        view, options = call.view(), call.options()
        obj = await call.object(options)
        return _reply(view, self.objects.create(call.resource, call.target.namespace, obj, options), 201, options)

    def _create_by_put(self, call: Call, new: KubeObject, options: WriteOptions) -> KubeObject:
        """Create the object of a PUT; raises ApiError 409 if it is that of another one."""
        metadata = new.setdefault("metadata", {})
        if isinstance(metadata, dict):
            if metadata.get("uid"):
                text = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: "
                raise call.resource.conflict(call.target.name, text)
            metadata.pop("resourceVersion", None)
            metadata["name"] = call.target.name
        return self.objects.create(call.resource, call.target.namespace, new, options)

    async def _replace(self, call: Call) -> web.Response:
        view, options = call.view(), call.options()
        new = await call.object(options)
        resource, target = call.resource, call.target
        place = (target.namespace, target.name)
        if isinstance(new.get("metadata"), dict):  # checked before the object is looked up
            check_place("name", new, target.name)
        if resource.rules.put_creates and not target.subresource and self.store.find(resource.key, *place) is None:
            return _reply(view, self._create_by_put(call, new, options), 201, options)
        updated = self.objects.replace(resource, self._existing(call), new, options, target.subresource)
        return _reply(view, updated, 200, options)

    async def _patch(self, call: Call) -> web.Response:
        view, options, raw = call.view(), call.options(), await call.request.read()
        resource, target = call.resource, call.target
        patch = request_bodies.parse_patch(call.content_type, raw, custom=resource.custom)
        patch = call.checked(raw, patch, options)
        if call.content_type == request_bodies.APPLY_PATCH:
            _check_applied(options)
            place = (target.namespace, target.name)
            applied, created = self.objects.apply(resource, place, patch, options, target.subresource)
            return _reply(view, applied, 201 if created else 200, options)
        if options.force:
            raise invalid_options(
                "PatchOptions", status_errors.not_allowed("force", "may not be specified for non-apply patch")
            )
        old = self._existing(call)
        new = request_bodies.patched(resource.node, call.content_type, old, patch)
        try:
            updated = self.objects.update(resource, old, new, options, target.subresource)
        except status_errors.UnreadableError as error:
            # The object was readable before the patch, so the patch is what is invalid.
            cause = Cause("patch", "FieldValueInvalid", f"Invalid value: {error.message}")
            raise status_errors.invalid(resource.group, resource.kind, target.name, [cause]) from None
        return _reply(view, updated, 200, options)

    async def _delete_options(self, call: Call) -> KubeObject:
        body = await call.request.read()
        return delete_options(call.request.query, request_bodies.parse_object(call.content_type, body) if body else {})

    async def _delete(self, call: Call) -> web.Response:
        view, options, resource = call.view(), await self._delete_options(call), call.resource
        last, gone = self.objects.delete(resource, self._existing(call), options)
        if not gone or resource.rules.returns_deleted:
            return _reply(view, last)
        details = {"name": call.target.name, "group": resource.group, "kind": resource.plural}
        details = {key: value for key, value in details.items() if value}
        return plain(status_errors.success(details={**details, "uid": last["metadata"]["uid"]}))

    async def _delete_collection(self, call: Call) -> web.Response:
        resource, namespace = call.resource, call.target.namespace
        if (resource.namespaced and not namespace) or resource.key == NAMESPACES:
            raise status_errors.method_not_allowed()
        view, options = call.view(), {**await self._delete_options(call), "preconditions": None}
        selected = list_options(call.request.query)
        check_list_options(selected)
        items, metadata = list_objects(self.store, resource, namespace, selected)
        for index, item in enumerate(items):
            identity = item.obj["metadata"]
            present = self.store.find(resource.key, identity.get("namespace", ""), identity["name"])
            if present is not None:
                self.objects.delete(resource, present, options)
            if index % DELETES_PER_TURN == DELETES_PER_TURN - 1:
                await asyncio.sleep(0)
        body, content_type = view.encode(view.many(items, metadata))
        return web.Response(body=body, content_type=content_type)

    async def _token(self, call: Call) -> web.Response:
        return plain(self.authenticator.token_request(self._existing(call), await call.object()), 201)

    async def _finalize(self, call: Call) -> web.Response:
        """Replace `spec.finalizers` of a namespace. Removing the last one completes a deletion."""
        view, options, given = call.view(), call.options(), await call.object()
        finalizers = field_value(given, "spec.finalizers") or []
        if not isinstance(finalizers, list) or any(not isinstance(f, str) for f in finalizers):
            raise status_errors.bad_request("spec.finalizers must be a list of names")
        old = self._existing(call)
        new = _with_revision_of(old, given)
        new["spec"] = {"finalizers": finalizers} if finalizers else {}
        return _reply(view, self.objects.update(call.resource, old, new, options, "finalize"))

    async def _scale(self, call: Call) -> web.Response:
        resource, method, options = call.resource, call.request.method, call.options()
        if method == "GET":
            return plain(_scale_of(resource, self._existing(call)))
        if method == "PUT":
            scale = await call.object()
        else:
            patch = request_bodies.parse_patch(call.content_type, await call.request.read(), custom=resource.custom)
            present = _scale_of(resource, self._existing(call))
            scale = request_bodies.patched(resource.node, call.content_type, present, patch)
        old = self._existing(call)
        replicas = field_value(scale, "spec.replicas") or 0
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            cause = status_errors.invalid_value("spec.replicas", replicas, "must be a number that is not negative")
            raise status_errors.invalid("autoscaling", "Scale", call.target.name, [cause])
        new = _with_revision_of(old, scale)
        *parents, last = resource.scale["specReplicasPath"].split(".")
        node = new
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = replicas
        return plain(_scale_of(resource, self.objects.update(resource, old, new, options, "scale")))

    async def _bind(self, call: Call) -> web.Response:
        """Bind a pod to the node of a Binding; 409 if it is gated, bound or being deleted."""
        binding, options, pod = await call.object(), call.options(), self._existing(call)
        node, name, spec = field_value(binding, "target.name"), call.target.name, pod["spec"]
        if field_value(binding, "metadata.name") not in (None, "", name):
            raise status_errors.bad_request("name in URL does not match name in Binding object")
        if not isinstance(node, str) or not node:
            raise status_errors.invalid("", "Binding", name, [status_errors.required("target.name")])
        if (kind := field_value(binding, "target.kind")) not in (None, "", "Node"):
            cause = status_errors.unsupported_value("target.kind", kind, ("Node", "<empty>"))
            raise status_errors.invalid("", "Binding", name, [cause])
        for key in ("uid", "resourceVersion"):
            if field_value(binding, f"metadata.{key}") not in (None, "", pod["metadata"][key]):
                raise call.resource.conflict(name, f"Precondition failed: {key} in precondition")
        problems = {
            f"pod {name} is being deleted, cannot be assigned to a host": pod["metadata"].get("deletionTimestamp"),
            f"pod {name} has non-empty .spec.schedulingGates": spec.get("schedulingGates"),
            f'pod {name} is already assigned to node "{spec.get("nodeName")}"': spec.get("nodeName"),
        }
        for text in (text for text, holds in problems.items() if holds):
            raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on pods/binding "{name}": {text}')
        new = orjson.loads(orjson.dumps(pod))
        new["spec"]["nodeName"] = node
        for key in ("annotations", "labels"):
            given = field_value(binding, f"metadata.{key}")
            if isinstance(given, dict):
                new["metadata"][key] = {**(new["metadata"].get(key) or {}), **given}
        label_topology(new, self.store)
        set_condition(new, "PodScheduled", "True", timestamps.now())
        if not options.dry_run:
            self.objects.commit(call.resource, new)
        return plain(status_errors.success(201), 201)

    async def _evict(self, call: Call) -> web.Response:
        """Delete a pod unless a disruption budget forbids it."""
        eviction = await call.object()
        body = field_value(eviction, "deleteOptions")
        options, pod = delete_options({}, body if isinstance(body, dict) else {}), self._existing(call)
        if field_value(eviction, "metadata.name") not in (None, "", call.target.name):
            raise status_errors.bad_request("name in URL does not match name in Eviction object")
        ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Pending")
        if not ended and not pod["metadata"].get("deletionTimestamp"):
            self._spend_budget(pod, dry_run=options["dryRun"])
            if not options["dryRun"]:
                new, why = orjson.loads(orjson.dumps(pod)), "Eviction API: evicting"
                more = {"reason": "EvictionByEvictionAPI", "message": why}
                set_condition(new, "DisruptionTarget", "True", timestamps.now(), **more)
                pod, options["preconditions"] = self.objects.commit(call.resource, new), None
        self.objects.delete(call.resource, pod, options)
        return plain(status_errors.success(201), 201)

    def _spend_budget(self, pod: KubeObject, *, dry_run: bool) -> None:
        labels, namespace = pod["metadata"].get("labels") or {}, pod["metadata"]["namespace"]
        for found in list(self.store.all(BUDGETS, namespace)):
            if not labels_match((found.get("spec") or {}).get("selector"), labels):
                continue
            budget = orjson.loads(orjson.dumps(found))
            status, name = budget.setdefault("status", {}), budget["metadata"]["name"]
            if _spares_budget(budget, pod):
                continue
            current = status.get("observedGeneration", 0) >= budget["metadata"].get("generation", 0)
            if not current or status.get("disruptionsAllowed", 0) <= 0:
                text = f"The disruption budget {name} needs {status.get('desiredHealthy', 0)} healthy pods"
                text += f" and has {status.get('currentHealthy', 0)} currently"
                details = status_errors.details_of("", "", "", [Cause("", "DisruptionBudget", text)])
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise ApiError(429, "TooManyRequests", text, details, retry_after=None if current else 10)
            status["disruptionsAllowed"] -= 1
            status.setdefault("disruptedPods", {})[pod["metadata"]["name"]] = timestamps.now()
            if not dry_run:
                self.objects.commit(self.objects.registry.builtin(BUDGETS), budget)


def _check_applied(options: WriteOptions) -> None:
    """Raise `ApiError` for a configuration with duplicate keys under strict validation."""
    if options.field_validation == "Strict" and options.duplicates is not None and options.duplicates.lines:
        why = duplicate_keys.yaml_error(options.duplicates.lines)
        raise status_errors.bad_request(f"error strict decoding YAML: error converting YAML to JSON: {why}")


def _check_path_segment(name: str) -> None:
    """Raise `ApiError` for a name that no object can have, because it would lead elsewhere in a path."""
    problem = f"may not be '{name}'" if name in (".", "..") else "may not contain '%'" if "%" in name else ""
    if problem:
        raise status_errors.bad_request(f'Name parameter invalid: "{name}": {problem}')


def _spares_budget(budget: KubeObject, pod: KubeObject) -> bool:
    """Return whether the eviction of a pod that is not ready needs nothing of a budget."""
    conditions, status = (pod.get("status") or {}).get("conditions") or (), budget["status"]
    if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
        return False
    desired = status.get("desiredHealthy", 0)
    always = budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
    return bool(always or 0 < desired <= status.get("currentHealthy", 0))


def _with_revision_of(old: KubeObject, given: KubeObject) -> KubeObject:
    """Return a copy of an object with the revision that a client's write is based on."""
    new: KubeObject = orjson.loads(orjson.dumps(old))
    revision = field_value(given, "metadata.resourceVersion")
    if revision:
        new["metadata"]["resourceVersion"] = revision
    return new


def _scale_of(resource: Resource, obj: KubeObject) -> KubeObject:
    paths, metadata = resource.scale, obj["metadata"]
    status: KubeObject = {"replicas": field_value(obj, paths["statusReplicasPath"]) or 0}
    if paths.get("labelSelectorPath"):
        selector = field_value(obj, paths["labelSelectorPath"]) or ""
        status["selector"] = selector_text(selector) if isinstance(selector, dict) else selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: metadata[key] for key in _SCALE_METADATA if key in metadata},
        "spec": {"replicas": field_value(obj, paths["specReplicasPath"]) or 0},
        "status": status,
    }
