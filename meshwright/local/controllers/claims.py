"""Persistent volume claims: each gets a directory of its own, shared by all nodes of the cluster.

The provisioner makes a PersistentVolume of type hostPath for a claim and binds the two. All embedded nodes are one
machine, so such a directory can be mounted by any number of pods on any nodes at once, whatever the access mode. Claims
of another storage class are left for whoever serves it. A claim in use is kept until no pod needs it, as on a real
cluster, and its directory is deleted with it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from meshwright.local.client import ApiClient, ApiError
from meshwright.local.events import EventRecorder
from meshwright.local.informers import Informers
from meshwright.local.reflector import Change, ChangeType
from meshwright.local.resources import CLAIMS, PODS, VOLUMES, Object, key_of
from meshwright.local.workqueue import WorkQueue

logger = logging.getLogger(__name__)

STORAGE_CLASS = "local-directory"
PROVISIONER = "meshwright.dev/local-directory"

_CLAIM_PROTECTION = "kubernetes.io/pvc-protection"
_VOLUME_PROTECTION = "kubernetes.io/pv-protection"
_PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
_BIND_COMPLETED = "pv.kubernetes.io/bind-completed"

ClaimKey = tuple[str, str]


class ClaimController:
    """Provisions, binds, protects and cleans up."""

    def __init__(self, informers: Informers, directory: Path) -> None:
        self._client: ApiClient = informers.client
        self._directory = directory
        self._claims = informers.get(CLAIMS)
        self._volumes = informers.get(VOLUMES)
        self._pods = informers.get(PODS)
        self._events = EventRecorder(informers.client, PROVISIONER)
        self._queue: WorkQueue[ClaimKey] = WorkQueue("claim", self._look_at_claim)
        self._released: WorkQueue[str] = WorkQueue("volume", self._look_at_volume)
        self._claims.listeners.append(self._claim_changed)
        self._volumes.listeners.append(self._volume_changed)
        self._pods.listeners.append(self._pod_changed)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            for reflector in (self._claims, self._volumes, self._pods):
                await reflector.synced.wait()
            group.create_task(self._queue.run())
            group.create_task(self._released.run())

    def _claim_changed(self, change: Change) -> None:
        if change.type is not ChangeType.DELETED:
            self._queue.add(key_of(change.object))
        elif volume := change.object["spec"].get("volumeName"):
            self._released.add(volume)

    def _volume_changed(self, change: Change) -> None:
        if change.type is not ChangeType.DELETED:
            self._released.add(change.object["metadata"]["name"])
        name = change.object["metadata"]["name"]
        for key, claim in self._claims.objects.items():
            if claim["spec"].get("volumeName") == name:
                self._queue.add(key)

    def _pod_changed(self, change: Change) -> None:
        namespace = change.object["metadata"]["namespace"]
        for name in _claims_of(change.object):
            claim = self._claims.objects.get((namespace, name))
            if claim is not None and claim["metadata"].get("deletionTimestamp"):
                self._queue.add((namespace, name))

    async def _look_at_claim(self, key: ClaimKey) -> float | None:
        claim = await self._client.find(CLAIMS, key[1], key[0])
        if claim is None:
            return None
        if claim["metadata"].get("deletionTimestamp"):
            await self._let_go(claim)
        elif (claim.get("status") or {}).get("phase") != "Bound":
            await self._bind(claim)
        return None

    async def _bind(self, claim: Object) -> None:
        spec = claim["spec"]
        name = spec.get("volumeName")
        if name:
            volume = await self._client.find(VOLUMES, name)
            if volume is None or not _claimed_by(volume, claim):
                return
        elif spec.get("storageClassName") in (None, "", STORAGE_CLASS) and not spec.get("selector"):
            volume = await self._provision(claim)
        else:
            return
        await self._complete(claim, volume)

    async def _provision(self, claim: Object) -> Object:
        """Make the volume of a claim; its name follows from the claim's uid, so a repetition finds the first."""
        volume_name = f"pvc-{claim['metadata']['uid']}"
        path = self._directory / volume_name
        await asyncio.to_thread(path.mkdir, parents=True, exist_ok=True)
        requested = ((claim["spec"].get("resources") or {}).get("requests") or {}).get("storage", "1Gi")
        body = {
            "metadata": {"name": volume_name, "annotations": {_PROVISIONED_BY: PROVISIONER}},
            "spec": {
                "capacity": {"storage": requested},
                "accessModes": claim["spec"].get("accessModes") or ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": claim["spec"].get("storageClassName") or "",
                "volumeMode": "Filesystem",
                "hostPath": {"path": str(path), "type": "Directory"},
                "claimRef": _reference(claim),
            },
        }
        try:
            volume = await self._client.create(VOLUMES, body)
        except ApiError as error:
            if error.status != 409:
                raise
            return await self._client.get(VOLUMES, volume_name)
        self._events.emit(claim, "Normal", "ProvisioningSucceeded", f"Successfully provisioned volume {volume_name}")
        return volume

    async def _complete(self, claim: Object, volume: Object) -> None:
        namespace, name = key_of(claim)
        volume_name, metadata = volume["metadata"]["name"], claim["metadata"]
        finalizers = sorted({*(metadata.get("finalizers") or ()), _CLAIM_PROTECTION})
        body: Object = {
            "metadata": {"uid": metadata["uid"], "annotations": {_BIND_COMPLETED: "yes"}, "finalizers": finalizers},
            "spec": {"volumeName": volume_name},
        }
        await self._client.patch(CLAIMS, name, body, namespace)
        if not volume["spec"].get("claimRef"):
            await self._client.patch(VOLUMES, volume_name, {"spec": {"claimRef": _reference(claim)}})
        if (volume.get("status") or {}).get("phase") != "Bound":
            await self._client.patch(VOLUMES, volume_name, {"status": {"phase": "Bound"}}, subresource="status")
        status = {
            "phase": "Bound",
            "accessModes": volume["spec"]["accessModes"],
            "capacity": volume["spec"]["capacity"],
        }
        await self._client.patch(CLAIMS, name, {"status": status}, namespace, subresource="status")

    async def _let_go(self, claim: Object) -> None:
        """Drop the protection of a claim being deleted once no pod that may still run names it."""
        namespace, name = key_of(claim)
        finalizers = claim["metadata"].get("finalizers") or []
        if _CLAIM_PROTECTION not in finalizers:
            return
        for pod in (await self._client.list(PODS, namespace)).items:
            over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            if not over and name in _claims_of(pod):
                return
        kept = [item for item in finalizers if item != _CLAIM_PROTECTION]
        body = {"metadata": {"resourceVersion": claim["metadata"]["resourceVersion"], "finalizers": kept or None}}
        await self._client.patch(CLAIMS, name, body, namespace)

    async def _look_at_volume(self, name: str) -> float | None:
        volume = await self._client.find(VOLUMES, name)
        if volume is None or not volume["spec"].get("claimRef"):
            return None
        reference = volume["spec"]["claimRef"]
        claim = await self._client.find(CLAIMS, reference["name"], reference["namespace"])
        if claim is not None and claim["metadata"]["uid"] == reference.get("uid"):
            return None
        await self._reclaim(volume)
        return None

    async def _reclaim(self, volume: Object) -> None:
        """The claim is gone: delete a provisioned volume with its directory; others are only marked Released."""
        metadata, name = volume["metadata"], volume["metadata"]["name"]
        ours = (metadata.get("annotations") or {}).get(_PROVISIONED_BY) == PROVISIONER
        if not ours or volume["spec"].get("persistentVolumeReclaimPolicy") != "Delete":
            if volume["spec"]["claimRef"].get("uid") and (volume.get("status") or {}).get("phase") == "Bound":
                await self._client.patch(VOLUMES, name, {"status": {"phase": "Released"}}, subresource="status")
            return
        path = Path(volume["spec"]["hostPath"]["path"])
        if path.parent == self._directory:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await self._client.delete(VOLUMES, name, uid=metadata["uid"])
        kept = [item for item in metadata.get("finalizers") or () if item != _VOLUME_PROTECTION]
        if len(kept) != len(metadata.get("finalizers") or ()):
            await self._client.patch(VOLUMES, name, {"metadata": {"finalizers": kept or None}})


def _claims_of(pod: Object) -> list[str]:
    volumes = pod["spec"].get("volumes") or ()
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def _reference(claim: Object) -> Object:
    namespace, name = key_of(claim)
    uid = claim["metadata"]["uid"]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": name, "uid": uid}


def _claimed_by(volume: Object, claim: Object) -> bool:
    reference = volume["spec"].get("claimRef")
    if reference is None:
        return True
    same = (reference.get("namespace"), reference.get("name")) == key_of(claim)
    return same and reference.get("uid") in (None, "", claim["metadata"]["uid"])
