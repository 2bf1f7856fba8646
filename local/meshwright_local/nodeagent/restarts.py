"""Which ended containers are restarted: the restart policies of pod and container, and rules for exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.api.objects import KubeObject

RESTART, RESTART_ALL = "Restart", "RestartAllContainers"
RESTARTING_ALL = "RestartingAllContainers"
"""The reason in statuses of containers that are restarted because another one has ended."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The policy of one container. The first rule that matches an exit code counts, else the policy."""

    policy: str
    rules: tuple[KubeObject, ...] = ()

    @classmethod
    def of(cls, container: KubeObject, pod_policy: str) -> RestartPolicy:
        """Return the policy of a container, with that of its pod as the default. Rules need a policy of their own."""
        own = container.get("restartPolicy")
        return cls(str(own or pod_policy), tuple(container.get("restartPolicyRules") or ()) if own else ())

    def action(self, code: int) -> str:
        """Return what follows from an exit code: `Restart`, `RestartAllContainers`, or nothing."""
        for rule in self.rules:
            codes = rule.get("exitCodes") or {}
            if codes and (code in (codes.get("values") or ())) == (codes.get("operator") == "In"):
                return str(rule["action"])
        restarted = self.policy == "Always" or (self.policy == "OnFailure" and code != 0)
        return RESTART if restarted else ""


def may_restart_all(containers: Iterable[KubeObject]) -> bool:
    """Whether a container of a pod has a rule that restarts all of them."""
    return any(
        rule.get("action") == RESTART_ALL
        for container in containers
        for rule in container.get("restartPolicyRules") or ()
    )
