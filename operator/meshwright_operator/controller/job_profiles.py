"""The administrator's profiles, and which of them each job gets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.profiles.document import NOT_ALLOWED, Profiles
from meshwright.profiles.merged import CONFLICT, conflict
from meshwright_operator.decide.observed import Rejection
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.profiles.applied import AppliedProfile, choose_profile


class JobProfiles:
    """Chooses the profile of each job."""

    def __init__(self, seal: Callable[[str, str, str, str], str]) -> None:
        """`seal` seals a text about a job, which is given by namespace, name and uid."""
        self._seal = seal
        self._profiles = Profiles()

    def use(self, profiles: Profiles) -> None:
        """Use these profiles for pods that start from now on."""
        self._profiles = profiles

    def choose(
        self,
        key: JobKey,
        job: KubeObject,
        spec: ParallelTrainingJobSpec,
        revision: str,
        status: ParallelTrainingJobStatus,
        *,
        has_pods: bool,
    ) -> AppliedProfile | Rejection:
        """The profile of a job with `workers.profile`, or why the job cannot have it.

        Args:
            key: The job's key.
            job: The job's object.
            spec: Its spec, without what the profile adds.
            revision: The revision of the spec.
            status: Its status.
            has_pods: Whether pods of the job are left, which keep the profile that they have.
        """
        name = spec.workers.profile
        assert name is not None
        seal = partial(self._seal, key.namespace, key.name, job["metadata"]["uid"])
        found = choose_profile(name, key.namespace, revision, status, self._profiles, seal, has_pods=has_pods)
        if isinstance(found, str):
            return Rejection(NOT_ALLOWED, found)
        problem = conflict(spec, name, found.profile)
        return Rejection(CONFLICT, problem) if problem else found
