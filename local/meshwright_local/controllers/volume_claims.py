"""Persistent volume claims: each gets its own directory, shared by all nodes of the cluster.

The provisioner creates a PersistentVolume of type hostPath for a claim and binds the two. All embedded nodes are one
machine, so any number of pods on any nodes can mount such a directory, in every access mode. The provisioner ignores
claims with another storage class, a volume name or a selector. As on a real cluster, a claim in use is not deleted
until no pod needs it; its directory is deleted with it.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key
from meshwright_local.kube.client import ApiError
from meshwright_local.kube.reflector import Change, Informers
from meshwright_local.kube.resources import CLAIMS, PODS, VOLUMES, has_ended, key_of

STORAGE_CLASS = "local-directory"
PROVISIONER = "meshwright.dev/local-directory"

_CLAIM_PROTECTION = "kubernetes.io/pvc-protection"
_VOLUME_PROTECTION = "kubernetes.io/pv-protection"
_PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"


class ClaimController(Controller):
    """Provisions, binds, protects and cleans up."""

    def __init__(self, informers: Informers, directory: Path) -> None:
        super().__init__(informers, PROVISIONER)
        self._directory = directory
        self._claims = self.watch_resource(CLAIMS)
        self._volumes = self.watch_resource(VOLUMES, lambda change: [_claimant(change.object)])
        self.watch_resource(PODS, self._leaving_claims)

    def _leaving_claims(self, change: Change) -> list[Key]:
        space = change.object["metadata"]["namespace"]
        claims = [self._claims.get((space, name)) for name in _claims_of(change.object)]
        return [key_of(claim) for claim in claims if claim and claim["metadata"].get("deletionTimestamp")]

    async def reconcile(self, key: Key) -> float | None:
        """Provision and bind one claim's volume, or finish the deletion of both."""
        claim = await self.client.find(CLAIMS, key[1], key[0])
        uid = claim["metadata"]["uid"] if claim else None
        for volume in [item for item in self._volumes.values() if _claimant(item) == key]:
            if volume["spec"]["claimRef"].get("uid") != uid:
                await self._reclaim(volume)
        if claim is None:
            return None
        if claim["metadata"].get("deletionTimestamp"):
            await self._remove_protection(claim)
        elif (claim.get("status") or {}).get("phase") != "Bound" and self._serves(claim):
            await self._bind(claim, await self._provision(claim))
        return None

    def _serves(self, claim: KubeObject) -> bool:
        spec, own = claim["spec"], f"pvc-{claim['metadata']['uid']}"
        ours = spec.get("storageClassName") in (None, "", STORAGE_CLASS) and not spec.get("selector")
        return ours and spec.get("volumeName") in (None, "", own)

    async def _provision(self, claim: KubeObject) -> KubeObject:
        """Create the volume of a claim. Its name contains the claim's uid, so a retry finds the existing one."""
        metadata, spec = claim["metadata"], claim["spec"]
        name = f"pvc-{metadata['uid']}"
        path = self._directory / name
        await asyncio.to_thread(path.mkdir, parents=True, exist_ok=True)
        reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        reference |= {field: metadata[field] for field in ("namespace", "name", "uid")}
        requested = ((spec.get("resources") or {}).get("requests") or {}).get("storage", "1Gi")
        body = {
            "metadata": {"name": name, "annotations": {_PROVISIONED_BY: PROVISIONER}},
            "spec": {
                "capacity": {"storage": requested},
                "accessModes": spec.get("accessModes") or ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": spec.get("storageClassName") or "",
                "volumeMode": "Filesystem",
                "hostPath": {"path": str(path), "type": "Directory"},
                "claimRef": reference,
            },
        }
        try:
            volume = await self.client.create(VOLUMES, body)
        except ApiError as error:
            if error.status != 409:
                raise
            return await self.client.get(VOLUMES, name)
        self.events.emit(claim, "Normal", "ProvisioningSucceeded", f"Successfully provisioned volume {name}")
        return volume

    async def _bind(self, claim: KubeObject, volume: KubeObject) -> None:
        (space, name), metadata, made = key_of(claim), claim["metadata"], volume["spec"]
        exact = {
            "uid": metadata["uid"],
            "annotations": {"pv.kubernetes.io/bind-completed": "yes"},
            "finalizers": sorted({*(metadata.get("finalizers") or ()), _CLAIM_PROTECTION}),
        }
        body = {"metadata": exact, "spec": {"volumeName": volume["metadata"]["name"]}}
        await self.client.patch(CLAIMS, name, body, space)
        bound = {"status": {"phase": "Bound"}}
        await self.client.patch(VOLUMES, volume["metadata"]["name"], bound, subresource="status")
        status = {"phase": "Bound", "accessModes": made["accessModes"], "capacity": made["capacity"]}
        await self.client.patch(CLAIMS, name, {"status": status}, space, subresource="status")

    async def _remove_protection(self, claim: KubeObject) -> None:
        """Remove the protection finalizer of a deleted claim once no pod that may still run uses it."""
        (space, name), metadata = key_of(claim), claim["metadata"]
        finalizers = metadata.get("finalizers") or []
        if _CLAIM_PROTECTION not in finalizers:
            return
        for pod in (await self.client.list(PODS, space)).items:
            if not has_ended(pod) and name in _claims_of(pod):
                return
        remaining = [item for item in finalizers if item != _CLAIM_PROTECTION]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": remaining or None}}
        await self.client.patch(CLAIMS, name, body, space)

    async def _reclaim(self, volume: KubeObject) -> None:
        """Delete the volume of a deleted claim, with its directory, if it was provisioned here."""
        metadata = volume["metadata"]
        if (metadata.get("annotations") or {}).get(_PROVISIONED_BY) != PROVISIONER:
            return
        path = Path(volume["spec"]["hostPath"]["path"])
        if path.parent == self._directory:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await self.client.delete(VOLUMES, metadata["name"], uid=metadata["uid"])
        if _VOLUME_PROTECTION in (metadata.get("finalizers") or ()):
            remaining = [item for item in metadata["finalizers"] if item != _VOLUME_PROTECTION]
            await self.client.patch(VOLUMES, metadata["name"], {"metadata": {"finalizers": remaining or None}})


def _claims_of(pod: KubeObject) -> list[str]:
    volumes = pod["spec"].get("volumes") or ()
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def _claimant(volume: KubeObject) -> Key:
    reference = volume["spec"].get("claimRef") or {}
    return reference.get("namespace", ""), reference.get("name", "")
