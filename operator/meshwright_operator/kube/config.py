"""The connection to the API server: one configuration for the client and the watches."""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from yaml import YAMLError

SERVICE_HOST = "KUBERNETES_SERVICE_HOST"


class KubeConfigError(Exception):
    """There is no usable configuration. The message names what was tried and the fix."""


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """The configuration from `kubeconfig`. If None, from the pod's service account, or else the default kubeconfig.

    Raises:
        KubeConfigError: The configuration cannot be read.
    """
    configuration = Configuration()
    # Otherwise every request would use two threads to read proxies and passwords from the environment.
    configuration.client_session_kwargs = {"trust_env": False}
    # Python 3.13 requires extensions that the certificates of many clusters lack.
    configuration.disable_strict_ssl_verification = True
    # No limit here: the client limits its calls, and watches (one per namespace) must not count toward a limit.
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
        raise KubeConfigError(f"cannot load the cluster configuration: {error}: set --kubeconfig") from None
    except (YAMLError, TypeError, AttributeError, LookupError) as error:  # the library checks no types
        path = str(kubeconfig) if kubeconfig is not None else config.KUBE_CONFIG_DEFAULT_LOCATION
        text = " ".join(str(error).split())
        raise KubeConfigError(f"{path} is not a valid kubeconfig file ({text}): fix it, or set --kubeconfig") from None
    return configuration
