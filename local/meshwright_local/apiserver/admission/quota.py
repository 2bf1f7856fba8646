"""ResourceQuota and LimitRange: limits of a namespace, and of one pod or container.

Both are admission plugins of the real server. Errors are the same here, word for word: a gang of pods that does not fit
must fail as it does on a cluster. The use of each quota is recounted from the existing objects, so it cannot drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

import orjson

from meshwright.api.objects import KubeObject, is_sidecar
from meshwright_local.apiserver.resource_types import Resource, Rules
from meshwright_local.apiserver.status_errors import Cause, forbidden, not_allowed, qualified, unsupported_value
from meshwright_local.apiserver.store import Store
from meshwright_local.kube import quantities
from meshwright_local.kube.resources import has_ended

PODS, QUOTAS, LIMIT_RANGES = ("", "pods"), ("", "resourcequotas"), ("", "limitranges")
_WITH_GENERATION = ("pods", "services", "secrets", "configmaps", "persistentvolumeclaims", "resourcequotas")
_ALIASES = {name: f"requests.{name}" for name in ("cpu", "memory", "ephemeral-storage")}
_DEMANDED = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
Amounts = dict[str, tuple[Fraction, quantities.Form]]
"""Resource name -> amount, and how it was written."""


def containers_of(spec: KubeObject, path: str = "spec") -> list[tuple[str, KubeObject]]:
    """Yield all containers of a pod's spec, init containers first, each with its path."""
    return [
        (f"{path}.{key}[{index}]", container)
        for key in ("initContainers", "containers")
        for index, container in enumerate(spec.get(key) or ())
    ]


class QuotaRules(Rules):
    """ResourceQuotas."""

    def create(self, obj: KubeObject, store: Store) -> None:
        """Set the first status, with the current use."""
        obj["status"] = _status(store, obj)

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Reject what is not enforced here."""
        spec = obj.get("spec") or {}
        causes = [
            not_allowed(f"spec.{key}", "not enforced here") for key in ("scopes", "scopeSelector") if spec.get(key)
        ]
        known = (*_WITH_GENERATION, *_ALIASES, "count/<plural>", "requests.<resource>", "limits.<resource>")
        wrong = [
            name
            for name in spec.get("hard") or {}
            if name not in (*_WITH_GENERATION, *_ALIASES) and not name.startswith(("count/", "requests.", "limits."))
        ]
        return causes + [unsupported_value(f"spec.hard[{name}]", name, known) for name in wrong]


class LimitRangeRules(Rules):
    """LimitRanges: bounds of containers and pods, and defaults of containers."""

    put_creates = True

    def defaults(self, obj: KubeObject) -> None:
        """Default a container's limit to the maximum, and its request to the limit, or else to the minimum."""
        for item in (obj.get("spec") or {}).get("limits") or ():
            if item.get("type") == "Container":
                item["default"] = {**(item.get("max") or {}), **(item.get("default") or {})}
                requests = {**(item.get("min") or {}), **item["default"], **(item.get("defaultRequest") or {})}
                item["defaultRequest"] = requests

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Reject what is not enforced here."""
        types = [item["type"] for item in (obj.get("spec") or {}).get("limits") or ()]
        wrong = [(i, kind) for i, kind in enumerate(types) if kind not in ("Container", "Pod")]
        return [unsupported_value(f"spec.limits[{i}].type", kind, ("Container", "Pod")) for i, kind in wrong]


def apply_limits(store: Store, pod: KubeObject) -> None:
    """Apply the defaults of the namespace's LimitRanges to a new pod in place, and enforce their bounds.

    Raises:
        ApiError: 403, with every bound that it violates.
    """
    ranges = store.all(LIMIT_RANGES, pod["metadata"]["namespace"])
    items = [item for found in ranges for item in (found.get("spec") or {}).get("limits") or ()]
    containers = [container for _, container in containers_of(pod["spec"])]
    notes = []
    for container in containers:
        resources = container.setdefault("resources", {})
        for kind, key in (("requests", "defaultRequest"), ("limits", "default")):
            given: KubeObject = resources.get(kind) or {}
            defaults = {k: v for item in reversed(items) for k, v in (item.get(key) or {}).items() if k not in given}
            if defaults:
                resources[kind] = {**given, **defaults}
                notes.append(f"{', '.join(sorted(defaults))} {kind[:-1]} for container {container['name']}")
    if notes:
        pod["metadata"].setdefault("annotations", {})["kubernetes.io/limit-ranger"] = (
            f"LimitRanger plugin set: {'; '.join(notes)}"
        )
    problems: list[str] = []
    for item in items:
        subjects = [c["resources"] for c in containers] if item["type"] == "Container" else [_totals(pod["spec"])]
        for resources in subjects:
            problems += _violated_bounds(item, resources.get("requests") or {}, resources.get("limits") or {})
    if problems:
        text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
        raise forbidden("", "pods", pod["metadata"]["name"], text)


def _violated_bounds(item: KubeObject, requests: KubeObject, limits: KubeObject) -> Iterator[str]:
    """Return the bounds that a container or pod violates, as the real server words them."""
    kind = item["type"]
    for bound, missing, given in (("min", "request", requests), ("max", "limit", limits)):
        for name, enforced in (item.get(bound) or {}).items():
            text = f"{bound}imum {name} usage per {kind} is {enforced}"
            if name not in given:
                yield f"{text}.  No {missing} is specified"
                continue
            for word, values in sorted((("request", requests), ("limit", limits)), key=lambda p: p[0] != missing):
                value, edge = (quantities.parse(q)[0] for q in (values.get(name, enforced), enforced))
                if (value < edge) if bound == "min" else (value > edge):
                    yield f"{text}, but {word} is {values[name]}"
                    break
    for name, enforced in (item.get("maxLimitRequestRatio") or {}).items():
        request, limit = (quantities.parse(values.get(name, 0))[0] for values in (requests, limits))
        text = f"{name} max limit to request ratio per {kind} is {enforced}, but"
        if not request or not limit:
            word = "limit" if request else "request"
            yield f"{text} no {word} is specified or {word} is 0"
        elif limit / request > quantities.parse(enforced)[0]:
            yield f"{text} provided ratio is {float(limit / request):f}"


def check_quotas(store: Store, resource: Resource, obj: KubeObject) -> None:
    """Enforce the quotas of a new object's namespace.

    Raises:
        ApiError: 403, as the real server words it.
    """
    namespace, name = obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
    quotas = sorted(store.all(QUOTAS, namespace), key=lambda q: str(q["metadata"]["name"])) if namespace else ()
    for item in quotas:
        hard, title = (item.get("spec") or {}).get("hard") or {}, item["metadata"]["name"]
        wanted = {key: value for key, value in _use(resource.key, obj).items() if key in hard}
        if resource.key == PODS and (missing := _missing(hard, obj["spec"])):
            raise forbidden("", "pods", name, f"failed quota: {title}: must specify {missing}")
        used = _used(store, namespace, hard)
        over = [key for key in sorted(wanted) if used[key][0] + wanted[key][0] > quantities.parse(hard[key])[0]]
        if over and any(wanted[key][0] for key in over):
            written = [{k: quantities.render(*v) for k, v in amounts.items()} for amounts in (wanted, used)]
            texts = [",".join(f"{key}={values[key]}" for key in over) for values in (*written, hard)]
            text = "exceeded quota: {}, requested: {}, used: {}, limited: {}".format(title, *texts)
            raise forbidden(resource.group, resource.plural, name, text)


def updated_quotas(store: Store, resource: Resource, obj: KubeObject) -> Iterator[KubeObject]:
    """Return copies of the quotas whose status a write of `obj` changed, with the new status."""
    namespace = obj["metadata"].get("namespace")
    for item in list(store.all(QUOTAS, namespace)) if namespace else ():
        hard = (item.get("spec") or {}).get("hard") or {}
        counts = resource.key in (PODS, QUOTAS) or not hard.keys().isdisjoint(_use(resource.key, obj))
        status = _status(store, item) if counts else item.get("status")
        if status != item.get("status"):
            yield {**orjson.loads(orjson.dumps(item)), "status": status}


def _status(store: Store, item: KubeObject) -> KubeObject:
    hard = (item.get("spec") or {}).get("hard") or {}
    used = _used(store, item["metadata"]["namespace"], hard)
    return {"hard": dict(hard), "used": {key: quantities.render(*amount) for key, amount in used.items()}}


def _used(store: Store, namespace: str, hard: KubeObject) -> Amounts:
    counts = {key.removeprefix("count/") for key in hard if key.startswith("count/") or key in _WITH_GENERATION}
    keys = [(group, plural) for plural, _, group in (count.partition(".") for count in counts)]
    total: Amounts = {key: (Fraction(0), "decimal") for key in hard}
    for resource_key in {PODS, *keys}:
        for obj in store.all(resource_key, namespace):
            total = _added(total, {k: v for k, v in _use(resource_key, obj).items() if k in hard})
    return total


def _use(key: tuple[str, str], obj: KubeObject) -> Amounts:
    """Return one object's use, by every name that a quota may have; pods that have ended are only counted."""
    use: Amounts = {f"count/{qualified(*key)}": (Fraction(1), "decimal")}
    ended = key == PODS and has_ended(obj)
    if not key[0] and key[1] in _WITH_GENERATION and not ended:
        use[key[1]] = (Fraction(1), "decimal")
    if key == PODS and not ended:
        totals = _totals(obj["spec"])
        use |= {
            f"{kind}.{name}": quantities.parse(v) for kind, amounts in totals.items() for name, v in amounts.items()
        }
        use |= {short: use[full] for short, full in _ALIASES.items() if full in use}
    return use


def _totals(spec: KubeObject) -> dict[str, dict[str, str]]:
    """Return a pod's requests and limits: the sum over its containers and sidecars, or those of an init container with
    the sidecars before it, if larger; plus the overhead.
    """
    out: dict[str, dict[str, str]] = {}
    for kind in ("requests", "limits"):
        total: Amounts = {}
        for container in spec.get("containers") or ():
            total = _added(total, _amounts(container, kind))
        sidecars: Amounts = {}
        peaks: list[Amounts] = []
        for container in spec.get("initContainers") or ():
            if is_sidecar(container):
                sidecars = _added(sidecars, _amounts(container, kind))
            else:
                peaks.append(_added(_amounts(container, kind), sidecars))
        total = _added(total, sidecars)
        for peak in peaks:
            for name, amount in peak.items():
                total[name] = max(total.get(name, amount), amount, key=lambda a: a[0])
        overhead = {name: quantities.parse(value) for name, value in (spec.get("overhead") or {}).items()}
        # Of a limit that no container has, the pod has none.
        total = _added(total, {n: a for n, a in overhead.items() if kind == "requests" or n in total})
        out[kind] = {name: quantities.render(*amount) for name, amount in total.items()}
    return out


def _amounts(container: KubeObject, kind: str) -> Amounts:
    values = (container.get("resources") or {}).get(kind) or {}
    return {name: quantities.parse(value) for name, value in values.items()}


def _added(total: Amounts, more: Amounts) -> Amounts:
    """Return the sums, each written in the form of its first summand that is not 0."""
    out = dict(total)
    for name, (value, form) in more.items():
        before = total.get(name, (Fraction(0), form))
        out[name] = (before[0] + value, before[1] if before[0] else form)
    return out


def _missing(hard: KubeObject, spec: KubeObject) -> str:
    """Return what a quota counts but containers do not set, such as `limits.cpu for: a,b; memory for: a`."""
    found = []
    for name in sorted(set(_DEMANDED).intersection(hard)):
        kind, _, resource = _ALIASES.get(name, name).partition(".")
        open_in: Iterable[str] = (
            c["name"] for _, c in containers_of(spec) if resource not in ((c.get("resources") or {}).get(kind) or {})
        )
        if names := ",".join(sorted(open_in)):
            found.append(f"{name} for: {names}")
    return "; ".join(found)
