"""The headless Service and the Secret of a job, and the metadata of all objects that a job owns."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.api.labels import API_VERSION, KIND, LABEL_JOB, LABEL_JOB_UID, METRICS_PORT
from meshwright.api.objects import KubeObject, secret_name, service_name

TOKEN_KEY = "token"  # noqa: S105 - the key in the secret, not a secret


def owner_reference(name: str, uid: str) -> KubeObject:
    """The ownerReference to the job, with which the garbage collector deletes owned objects. Needs no finalizer."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def job_labels(name: str, uid: str) -> dict[str, str]:
    """The labels of every owned object."""
    return {
        LABEL_JOB: name,
        LABEL_JOB_UID: uid,
        "app.kubernetes.io/name": "meshwright",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/managed-by": "meshwright-operator",
    }


def service(name: str, namespace: str, uid: str) -> KubeObject:
    """The headless Service that gives worker pods their DNS names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service_name(name, uid), namespace, name, uid),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_JOB: name, LABEL_JOB_UID: uid},
            "ports": [{"name": "metrics", "port": METRICS_PORT, "protocol": "TCP", "targetPort": "metrics"}],
        },
    }


def token_secret(name: str, namespace: str, uid: str, data: Mapping[str, str]) -> KubeObject:
    """The Secret from which pods get the job's coordinator token. The operator never reads or changes it.

    Args:
        name: The job's name.
        namespace: The job's namespace.
        uid: The job's uid.
        data: The token under `TOKEN_KEY`, and what else the agents need to reach the coordinator. The Secret's name
            depends on all of it, so other data make another Secret.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(secret_name(name, uid, data), namespace, name, uid),
        "type": "Opaque",
        "immutable": True,
        "stringData": dict(data),
    }


def metadata(child: str, namespace: str, name: str, uid: str) -> KubeObject:
    """The metadata of the object `child`, which the job owns."""
    return {
        "name": child,
        "namespace": namespace,
        "labels": job_labels(name, uid),
        "ownerReferences": [owner_reference(name, uid)],
    }
