"""How the process reaches the API server: one configuration for the client and the watches."""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

SERVICE_HOST = "KUBERNETES_SERVICE_HOST"


class KubeConfigError(Exception):
    """No usable configuration; the message names what was tried and the fix."""


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """The configuration from `kubeconfig`; without one, from the pod's service account, else from the usual kubeconfig.

    Raises:
        ConnectionFailedError: it cannot be read.
    """
    configuration = Configuration()
    # Else every request would ask two threads for the environment's proxies and passwords; the watches never do.
    configuration.client_session_kwargs = {"trust_env": False}
    # Calls are bounded where they are made; watches, one a namespace, must not take their places.
    configuration.connection_pool_maxsize = 0
    try:
        if kubeconfig is None and SERVICE_HOST in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            path = str(kubeconfig) if kubeconfig is not None else config.KUBE_CONFIG_DEFAULT_LOCATION
            loading = config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=path, client_configuration=configuration, persist_config=False
            )
            await loading
    except (config.ConfigException, OSError, ValueError) as error:
        raise KubeConfigError(f"cannot find the cluster: {error}; give --kubeconfig FILE") from None
    return configuration
