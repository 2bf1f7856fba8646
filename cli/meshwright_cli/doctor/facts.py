"""Reads what the checks need from the cluster, with the user's rights. What is forbidden is None, and named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_cli.client.api_server import CLAIMS, DEFINITIONS, JOBS, NAMESPACES, NODES, PODS, Action, Kind
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.errors import DefinitionMissingError, ForbiddenError, NotFoundError
from meshwright_cli.cluster_fabric import cluster_documents
from meshwright_cli.doctor.rights import (
    KUEUE_CLUSTER_RIGHTS,
    KUEUE_RIGHTS,
    OPERATOR_CLUSTER_RIGHTS,
    OPERATOR_HOME_RIGHTS,
    OPERATOR_RIGHTS,
    SOME_COMMANDS,
    USER_RIGHTS,
    Right,
    queue_rights,
)

DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment")
SERVICES = Kind("", "v1", "services", "Service")
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")
STORAGE_CLASSES = Kind("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False)
OPERATOR_SELECTOR = "app.kubernetes.io/name=meshwright,app.kubernetes.io/component=operator"

EMBEDDED = "-meshwright-embedded"
"""End of the version of embedded clusters."""

Items = Sequence[KubeObject]


@dataclass(frozen=True)
class Facts:
    """The cluster as the user may see it. None: forbidden, and then `forbidden` says what."""

    namespace: str
    now: datetime
    version: str = ""
    """Version of the API server, such as `v1.34.1`."""
    definition: KubeObject | None = None
    jobs: Items | None = None
    nodes: Items | None = None
    pods: Items | None = None
    deployments: Items | None = None
    """Deployments of operators."""
    services: Items | None = None
    leases: Items | None = None
    classes: Items | None = None
    claims: Items | None = None
    """Claims of all namespaces, or of the namespace if only these may be seen."""
    fabrics: Items | None = ()
    """ConfigMaps with the fabric of the site."""
    namespace_missing: bool = False
    """Whether the namespace is known not to exist. Who may do everything may do it there too."""
    user_lacks: Sequence[Right] = ()
    """Rights that the user does not have in the namespace."""
    operator_lacks: Mapping[str, Sequence[Right]] | None = field(default_factory=dict)
    """Service account of each operator -> rights that it does not have."""
    forbidden: Mapping[str, str] = field(default_factory=dict)
    """Name of a field above -> what the user may not do."""


async def read_facts(client: AsyncClient) -> Facts:
    """Read everything, several requests at a time.

    Raises:
        MeshwrightError: the cluster cannot be reached, or does not accept the credentials.
    """
    reader = _Reader(client)
    version = await client.server.request("GET", "/version", Action("get"))
    lists = {
        "jobs": reader.collect("jobs", JOBS),
        "nodes": reader.collect("nodes", NODES),
        "pods": reader.collect("pods", PODS),
        "deployments": reader.collect("deployments", DEPLOYMENTS, selector=OPERATOR_SELECTOR),
        "services": reader.collect("services", SERVICES, selector=OPERATOR_SELECTOR),
        "leases": reader.collect("leases", LEASES),
        "classes": reader.collect("classes", STORAGE_CLASSES),
        "claims": reader.collect("claims", CLAIMS),
        "fabrics": reader.fabrics(),
        "definition": reader.definition(),
        "namespace_missing": reader.namespace_missing(),
        "user_lacks": reader.lacking((*USER_RIGHTS, *SOME_COMMANDS), client.namespace),
    }
    found: dict[str, Any] = dict(zip(lists, await asyncio.gather(*lists.values()), strict=True))
    found["operator_lacks"] = await reader.operators(found["deployments"], found["jobs"] or ())
    text = str(version.get("gitVersion") or "")
    return Facts(client.namespace, datetime.now(UTC), text, **found, forbidden=reader.forbidden)


class _Reader:
    """Requests of which each may be forbidden."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.forbidden: dict[str, str] = {}

    async def collect(self, name: str, kind: Kind, *, selector: str = "") -> Items | None:
        """All objects of a kind, else those of the namespace, else None."""
        spaces = [None, self._client.namespace] if kind.namespaced else [None]
        for space in spaces:
            try:
                return (await self._client.server.collect(kind, space, selector=selector))[0]
            except ForbiddenError:
                where = " of all namespaces" if space is None and kind.namespaced else ""
                self.forbidden.setdefault(name, f"list {kind.resource}{where}")
            except (DefinitionMissingError, NotFoundError):
                return []
        return None

    async def namespace_missing(self) -> bool:
        """Whether the namespace does not exist. False if the user may not see that."""
        try:
            return await self._client.server.find(NAMESPACES, self._client.namespace) is None
        except ForbiddenError:
            return False

    async def fabrics(self) -> Items | None:
        """The ConfigMaps with a fabric, or None if ConfigMaps may not be listed."""
        try:
            return await cluster_documents(self._client)
        except ForbiddenError:
            self.forbidden["fabrics"] = "list configmaps"
            return None

    async def definition(self) -> KubeObject | None:
        """The CustomResourceDefinition, or None if it does not exist or may not be read."""
        try:
            return await self._client.server.get(DEFINITIONS, labels.DEFINITION)
        except ForbiddenError:
            self.forbidden["definition"] = "get customresourcedefinitions.apiextensions.k8s.io"
        except NotFoundError:
            pass
        return None

    async def lacking(self, wanted: Sequence[Right], namespace: str | None, user: str | None = None) -> list[Right]:
        """The rights that this user, or the service account `user`, does not have."""
        groups: tuple[str, ...] = ()
        if user is not None:
            home = user.split(":")[2]
            groups = ("system:serviceaccounts", f"system:serviceaccounts:{home}", "system:authenticated")
        path = "/apis/authorization.k8s.io/v1/" + ("self" if user is None else "") + "subjectaccessreviews"
        action = Action("create", Kind("authorization.k8s.io", "v1", path.rpartition("/")[2], "Review"))

        async def allowed(right: Right) -> bool:
            body = right.review(namespace, user=user, groups=groups)
            answer = await self._client.server.request("POST", path, action, body=body)
            return bool(answer["status"].get("allowed"))

        answers = await asyncio.gather(*(allowed(right) for right in wanted))
        return [right for right, answer in zip(wanted, answers, strict=True) if not answer]

    async def operators(self, deployments: Items | None, jobs: Iterable[KubeObject]) -> dict[str, list[Right]] | None:
        """The rights that the operators' service accounts lack, by account; None if that may not be asked."""
        found: dict[str, list[Right]] = {}
        queued: dict[str, set[Right]] = {}
        for job in jobs:
            if asked := queue_rights(job):
                queued.setdefault(str(job["metadata"].get("namespace") or ""), set()).update(asked)
        kueue = any(KUEUE_RIGHTS[0] in wanted for wanted in queued.values())
        try:
            for deployment in deployments or ():
                home = deployment["metadata"]["namespace"]
                account = deployment["spec"]["template"]["spec"].get("serviceAccountName") or "default"
                user = f"system:serviceaccount:{home}:{account}"
                lacking = await self.lacking(OPERATOR_CLUSTER_RIGHTS, None, user)
                served = served_namespaces(deployment)
                for space in served or (None,):
                    lacking += await self.lacking(OPERATOR_RIGHTS, space, user)
                lacking += await self.lacking(OPERATOR_HOME_RIGHTS, home, user)
                lacking += await self.lacking(KUEUE_CLUSTER_RIGHTS if kueue else (), None, user)
                for space, wanted in queued.items():
                    if not served or space in served:
                        lacking += await self.lacking(sorted(wanted), space, user)
                found[f"{home}/{account}"] = sorted(set(lacking))
        except ForbiddenError:
            self.forbidden["operator_lacks"] = "create subjectaccessreviews.authorization.k8s.io"
            return None
        return found


def arguments(deployment: KubeObject) -> list[str]:
    """The command line of an operator."""
    containers = deployment["spec"]["template"]["spec"].get("containers") or []
    return [str(argument) for container in containers[:1] for argument in container.get("args") or ()]


def argument(deployment: KubeObject, flag: str) -> str:
    """The last value of an operator's flag, or an empty string."""
    values = [text.partition("=")[2] for text in arguments(deployment) if text.startswith(f"{flag}=")]
    return values[-1] if values else ""


def served_namespaces(deployment: KubeObject) -> list[str]:
    """The namespaces that an operator serves; empty for all."""
    return [text.partition("=")[2] for text in arguments(deployment) if text.startswith("--namespace=")]
