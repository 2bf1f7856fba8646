"""Checks of the installation: API server, definition, operator, lease, coordinator and rights. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib import metadata
from typing import Any

from meshwright.api.labels import VERSION
from meshwright.api.objects import KubeObject
from meshwright.crd.definition import custom_resource_definition
from meshwright_cli.client.objects import parse_time, pod_state
from meshwright_cli.doctor.facts import EMBEDDED, Facts, argument
from meshwright_cli.doctor.findings import Finding, error, ok, skipped, warning
from meshwright_cli.doctor.rights import QUEUE_RIGHTS, SOME_COMMANDS
from meshwright_cli.text import duration

OLDEST = (1, 30)
"""Oldest supported minor version of Kubernetes."""
LEASES = ("meshwright-operator", "meshwright")
"""Names of the Lease: the operator's default, and that of a release called `meshwright`."""
UPGRADE = "Upgrade the chart, or apply the definition: `meshwright crd | kubectl apply --server-side -f -`"
MAX_NAMED = 5


def check_version(facts: Facts) -> Iterator[Finding]:
    """The API server is new enough."""
    found = re.match(r"v?(\d+)\.(\d+)", facts.version)
    wanted = ".".join(map(str, OLDEST))
    if found is None:
        yield warning("API server", f"unknown version `{facts.version}`", f"Use Kubernetes {wanted} or newer")
    elif (int(found[1]), int(found[2])) < OLDEST:
        yield error("API server", f"Kubernetes {facts.version} is too old", f"Upgrade to {wanted} or newer")
    else:
        yield ok("API server", f"Kubernetes {facts.version}")


def check_definition(facts: Facts) -> Iterator[Finding]:
    """The CustomResourceDefinition exists, serves the version, and has the fields that this program knows."""
    name = "Definition"
    if "definition" in facts.forbidden:
        yield skipped(name, facts.forbidden["definition"])
        return
    if facts.definition is None:
        fix = "Install the chart, or only the definition: `meshwright crd | kubectl apply --server-side -f -`"
        yield error(name, "the cluster has no CustomResourceDefinition of ParallelTrainingJob", fix)
        return
    versions = {one["name"]: one for one in facts.definition["spec"]["versions"]}
    served = versions.get(VERSION)
    if served is None or not served.get("served"):
        yield error(name, f"version {VERSION} is not served: it has {', '.join(sorted(versions))}", UPGRADE)
        return
    own = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    mine, theirs = set(_fields(own)), set(_fields(served["schema"]["openAPIV3Schema"]))
    if missing := sorted(mine - theirs):
        yield warning(name, f"the definition is older than this program: it lacks {_named(missing)}", UPGRADE)
    elif newer := sorted(theirs - mine):
        fix = "Upgrade this program: `pip install --upgrade meshwright-cli`"
        yield warning(name, f"the definition is newer than this program: it has {_named(newer)}", fix)
    else:
        yield ok(name, f"{VERSION}, with all fields of this program")


def _fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all fields of a schema."""
    for name, value in (schema.get("properties") or {}).items():
        if path or name in ("spec", "status"):
            yield f"{path}{name}"
            yield from _fields(value, f"{path}{name}.")
    if isinstance(schema.get("items"), dict):
        yield from _fields(schema["items"], path)


def check_operator(facts: Facts) -> Iterator[Finding]:
    """An operator runs, in the version of this program."""
    name = "Operator"
    if facts.deployments is None:
        yield skipped(name, facts.forbidden["deployments"])
        return
    if not facts.deployments:
        if "deployments" in facts.forbidden:
            yield skipped(name, facts.forbidden["deployments"])
        elif not _current_lease(facts):
            yield _not_installed(facts)
        else:
            yield ok(name, "an operator holds the lease; it runs outside the cluster")
        return
    for deployment in facts.deployments:
        yield _operator(facts, deployment)


def _not_installed(facts: Facts) -> Finding:
    if facts.version.endswith(EMBEDDED):  # no Deployment runs there
        fix = "Run it in another terminal: `meshwright-operator --coordinator-listen 127.0.0.1:9470`"
        return error("Operator", "no operator runs for this embedded cluster", fix)
    fix = "Install it: `helm install meshwright helm/meshwright --namespace meshwright --create-namespace`"
    return error("Operator", "no operator is installed: there is no Deployment with the chart's labels", fix)


def _operator(facts: Facts, deployment: KubeObject) -> Finding:
    name, namespace = deployment["metadata"]["name"], deployment["metadata"]["namespace"]
    where = f"deployment {namespace}/{name}"
    status = deployment.get("status") or {}
    available, wanted = int(status.get("availableReplicas") or 0), int(deployment["spec"].get("replicas", 1))
    if wanted == 0:
        return error(
            "Operator", f"{where} has 0 replicas", f"Run `kubectl -n {namespace} scale deploy/{name} --replicas 2`"
        )
    if available == 0:
        states = sorted({pod_state(pod) for pod in _pods_of(facts, deployment["spec"]["selector"], namespace)})
        why = f": its pods are {', '.join(states)}" if states else ", and it has no pods"
        fix = f"Read `kubectl -n {namespace} describe pods` and `kubectl -n {namespace} logs deploy/{name}`"
        return error("Operator", f"{where} has no available pod{why}", fix)
    label = (deployment["metadata"].get("labels") or {}).get("app.kubernetes.io/version") or ""
    own = metadata.version("meshwright")
    if label and label != own:
        fix = f"Upgrade the older one: `helm upgrade`, or `pip install meshwright-cli=={label}`"
        return warning("Operator", f"{where} has version {label}, and this program {own}", fix)
    if available < wanted:
        fix = f"Read `kubectl -n {namespace} describe pods`"
        return warning("Operator", f"{where}: {available} of {wanted} pods are available", fix)
    return ok("Operator", f"{where}: {available} of {wanted} pods are available, version {label or own}")


def check_lease(facts: Facts) -> Iterator[Finding]:
    """An operator leads: the lease has a holder that renews it."""
    name = "Lease"
    if facts.leases is None:
        yield skipped(name, facts.forbidden["leases"])
        return
    lease = _lease(facts)
    if lease is None:
        fix = "Start the operator. Its log names the lease that it waits for"
        yield error(name, f"there is no lease named {' or '.join(_lease_names(facts))}: no operator has led", fix)
        return
    where = f"{lease['metadata']['namespace']}/{lease['metadata']['name']}"
    holder = (lease.get("spec") or {}).get("holderIdentity")
    renewed = parse_time((lease.get("spec") or {}).get("renewTime"))
    if _is_current(lease, facts.now):
        yield ok(name, f"{where} is held by {holder}")
        return
    since = f" for {duration((facts.now - renewed).total_seconds())}" if renewed is not None else ""
    why = f"{where} has no holder" if not holder else f"{where}: {holder} has not renewed it{since}"
    fix = "Check that an operator pod runs and reaches the API server: `kubectl logs` of its pods. No job is reconciled"
    yield error(name, why, fix)


def _lease_names(facts: Facts) -> list[str]:
    own = [argument(deployment, "--lease-name") for deployment in facts.deployments or ()]
    return list(dict.fromkeys([*filter(None, own), *LEASES]))


def _lease(facts: Facts) -> KubeObject | None:
    names = _lease_names(facts)
    found = [lease for lease in facts.leases or () if lease["metadata"]["name"] in names]
    return max(found, key=lambda lease: str((lease.get("spec") or {}).get("renewTime") or ""), default=None)


def _current_lease(facts: Facts) -> bool:
    lease = _lease(facts)
    return lease is not None and _is_current(lease, facts.now)


def _is_current(lease: KubeObject, now: datetime) -> bool:
    spec = lease.get("spec") or {}
    renewed = parse_time(spec.get("renewTime"))
    # Clocks of the machines may differ by seconds.
    limit = timedelta(seconds=2 * int(spec.get("leaseDurationSeconds") or 15) + 10)
    return bool(spec.get("holderIdentity")) and renewed is not None and now - renewed <= limit


def check_coordinator(facts: Facts) -> Iterator[Finding]:
    """The coordinator's Service leads to a ready operator pod, and agents of jobs reach it."""
    name = "Coordinator"
    for job in facts.jobs or ():
        for condition in (job.get("status") or {}).get("conditions") or ():
            if condition.get("reason") == "AgentsMissing" and condition.get("status") == "True":
                fix = "Allow worker pods to reach the coordinator: check NetworkPolicies, DNS, and `--coordinator-url`"
                where = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
                yield error(name, f"agents of job {where} do not reach the coordinator: {condition['message']}", fix)
                return
    if facts.services is None or facts.pods is None:
        yield skipped(name, facts.forbidden.get("services") or facts.forbidden["pods"])
        return
    for service in facts.services:
        yield _coordinator(facts, service)
    if not facts.services and facts.deployments:
        fix = "Restore it with `helm upgrade`, or set the value `coordinator.url`"
        yield error(name, "the operator has no Service: worker pods cannot find the coordinator", fix)
    elif not facts.services and _current_lease(facts):
        yield ok(name, "the operator runs outside the cluster, and no agent is missing")


def _coordinator(facts: Facts, service: KubeObject) -> Finding:
    namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
    ports = {port.get("name"): port["port"] for port in service["spec"].get("ports") or ()}
    fix = "Restore the Service with `helm upgrade`"
    if "coordinator" not in ports:
        return error("Coordinator", f"service {namespace}/{name} has no port named `coordinator`", fix)
    selector = {"matchLabels": service["spec"].get("selector") or {}}
    pods = _pods_of(facts, selector, namespace)
    if not pods:
        return error("Coordinator", f"service {namespace}/{name} selects no pod: its selector matches none", fix)
    if not any(_is_ready(pod) for pod in pods):
        states = ", ".join(sorted({pod_state(pod) for pod in pods}))
        fix = f"Read `kubectl -n {namespace} describe pods`"
        return error("Coordinator", f"no pod of service {namespace}/{name} is ready: they are {states}", fix)
    return ok("Coordinator", f"service {namespace}/{name}, port {ports['coordinator']}")


def _pods_of(facts: Facts, selector: KubeObject, namespace: str) -> list[KubeObject]:
    labels = selector.get("matchLabels") or {}
    return [
        pod
        for pod in facts.pods or ()
        if pod["metadata"]["namespace"] == namespace
        and labels
        and labels.items() <= (pod["metadata"].get("labels") or {}).items()
    ]


def _is_ready(pod: KubeObject) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def check_operator_rights(facts: Facts) -> Iterator[Finding]:
    """The operator's service account has the rights of the chart."""
    name = "Operator's role"
    if facts.operator_lacks is None:
        yield skipped(name, facts.forbidden["operator_lacks"])
        return
    for account, lacking in facts.operator_lacks.items():
        if lacking:
            fix = "Restore the roles and bindings with `helm upgrade`"
            if set(lacking) <= QUEUE_RIGHTS:
                fix = "Set `queues.kueue.enabled` and `queues.podGroups` in the chart's values as the jobs need them"
            yield error(name, f"service account {account} may not {_named(map(str, lacking))}", fix)
        else:
            yield ok(name, f"service account {account} has all rights of the chart")


def check_user_rights(facts: Facts) -> Iterator[Finding]:
    """The user may use the commands of this program in the namespace."""
    name = "Your rights"
    if facts.namespace_missing:
        fix = f"Create it with `kubectl create namespace {facts.namespace}`, or select another one with -n"
        yield error(name, f"namespace {facts.namespace} does not exist", fix)
        return
    lacking = facts.user_lacks or ()
    if needed := [right for right in lacking if right not in SOME_COMMANDS]:
        fix = "Ask an administrator for the role `edit` in this namespace, which the chart extends"
        yield warning(name, f"in namespace {facts.namespace} you may not {_named(map(str, needed))}", fix)
        return
    commands = dict.fromkeys(command for right in lacking for command in SOME_COMMANDS[right])
    but = f", except {', '.join(commands)}: you may not {_named(map(str, lacking))}" if commands else ""
    yield ok(name, f"you may use every command in namespace {facts.namespace}{but}")


def _named(names: Any) -> str:
    """The first names of many."""
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more
