"""What the manifests of a job's pods have in common, and the job's Secret."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.api.objects import KubeObject
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.decide.decision import Decision
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.manifests import network_policy
from meshwright_operator.manifests.network_policy import NetworkPolicyOptions
from meshwright_operator.manifests.owned_objects import TOKEN_KEY, token_secret
from meshwright_operator.manifests.worker_pod import CoordinatorTrust, PodContext
from meshwright_operator.scheduling.inventories import Inventories


@dataclass(frozen=True, slots=True)
class PodContexts:
    """Makes it from a decision, and from what is the same for all jobs."""

    tokens: Tokens
    inventories: Inventories
    """Have the network of the site."""
    coordinator_url: Callable[[], str]
    trust: Callable[[], CoordinatorTrust] = CoordinatorTrust
    """How agents verify the coordinator."""
    network_policies: NetworkPolicyOptions | None = None
    """Whether, and with which peers, jobs get a NetworkPolicy."""
    agent_image: str = ""
    """Image of the injected agent."""

    def of(self, key: JobKey, job: KubeObject, draft: Decision) -> tuple[PodContext, KubeObject]:
        """What the pods of a job have in common after `draft`, and the job's Secret."""
        observed, admission = draft.observed, draft.observed.admission
        token = self.tokens.token(key.namespace, key.name, observed.uid)
        secret = token_secret(key.name, key.namespace, observed.uid, {TOKEN_KEY: token})
        context = PodContext(
            name=key.name,
            namespace=key.namespace,
            uid=observed.uid,
            spec=observed.placed_spec,
            revision=observed.revision,
            coordinator_url=self.coordinator_url(),
            trust=self.trust(),
            secret=secret["metadata"]["name"],
            network=self.inventories.site.network.kind or "",
            agent_image=self.agent_image,
            several_workers=len(observed.plan.workers) > 1 or observed.elastic is not None,
            members=len(observed.workers),
            queue_labels=admission.pod_labels if admission is not None else {},
            queue_annotations=admission.pod_annotations if admission is not None else {},
            devices=observed.devices,
            network_policy=self._network_policy(key, job),
            profile=observed.profile.profile if observed.profile is not None else None,
        )
        return context, secret

    def _network_policy(self, key: JobKey, job: KubeObject) -> KubeObject | None:
        """The job's NetworkPolicy, if the administrator wants them and the job does not say no."""
        if self.network_policies is None or not network_policy.wanted(job):
            return None
        uid = job["metadata"]["uid"]
        return network_policy.network_policy(key.name, key.namespace, uid, self.network_policies)
