"""Lifecycle hooks: what a container's `postStart` and `preStop` do."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from meshwright.api.objects import KubeObject
from meshwright_local.nodeagent.runtime import handlers
from meshwright_local.nodeagent.runtime.handlers import HandlerError, Target
from meshwright_local.nodeagent.runtime.process import StartError

logger = logging.getLogger(__name__)


def hook_of(container: KubeObject, name: str) -> KubeObject | None:
    """Return the handler of `postStart` or `preStop`."""
    hook: KubeObject | None = (container.get("lifecycle") or {}).get(name)
    return hook


async def run_hook(hook: KubeObject, target: Target) -> bool:
    """Run a hook to its end. Return whether it succeeded: any answer of an HTTP server is a success.

    Why it failed is not in events: a kubelet keeps it to itself too, because it may be a secret.
    """
    try:
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"].get("seconds") or 0)
        elif "httpGet" in hook:
            await handlers.get(hook["httpGet"], target, "lifecycle")
        elif "exec" in hook:
            return (await target.run(list(hook["exec"]["command"])))[0] == 0
        else:
            raise HandlerError(f"invalid handler: {hook}")
    except (HandlerError, StartError, aiohttp.ClientError, OSError) as error:
        logger.info("hook of container %s failed: %s", target.container["name"], error)
        return False
    return True
