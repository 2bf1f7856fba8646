"""The chart's admission policy on a real API server: who may not create pods may not create or edit jobs.

The embedded server stores the objects and does not evaluate them, so this needs `--cluster assets`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from tests.operator.support import JOBS, ROOT, Api, job, until

TEMPLATE = ROOT / "helm" / "meshwright" / "templates" / "admission-policy.yaml"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
NAME = "job-creators"
RIGHTS: dict[str, list[dict[str, Any]]] = {
    "jobs-only": [
        {"apiGroups": ["meshwright.dev"], "resources": ["paralleltrainingjobs"], "verbs": ["create", "get", "patch"]}
    ],
    "jobs-and-pods": [
        {"apiGroups": ["meshwright.dev"], "resources": ["paralleltrainingjobs"], "verbs": ["create", "get", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]},
    ],
}


def policy_objects() -> list[dict[str, Any]]:
    """The policy and its binding, from the chart's template."""
    text = re.sub(r"^\{\{-.*\}\}\n|^  labels: \{\{.*\}\}\n", "", TEMPLATE.read_text(), flags=re.MULTILINE)
    return list(yaml.safe_load_all(text.replace("{{ $name }}", NAME)))


def test_the_template_binds_the_policy_that_it_makes() -> None:
    policy, binding = policy_objects()
    assert policy["kind"] == "ValidatingAdmissionPolicy"
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    (resources,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert resources["resources"] == ["paralleltrainingjobs"], "subresources are not for people who start jobs"


@pytest_asyncio.fixture
async def guarded(api: Api, real_server: str) -> AsyncIterator[Api]:
    """A server with the policy, and two users."""
    if not real_server:
        pytest.skip("the embedded server evaluates no admission policies")
    made = []
    for obj in policy_objects():
        kind = {"ValidatingAdmissionPolicy": "validatingadmissionpolicies"}.get(
            obj["kind"], "validatingadmissionpolicybindings"
        )
        await api.create(f"{ADMISSION}/{kind}", obj)
        made.append(f"{ADMISSION}/{kind}/{obj['metadata']['name']}")
    for user, rules in RIGHTS.items():
        metadata = {"name": user}
        await api.create(f"{RBAC}/clusterroles", {"metadata": metadata, "rules": rules})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user}
        subjects = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]
        body = {"metadata": metadata, "roleRef": reference, "subjects": subjects}
        await api.create(f"{RBAC}/clusterrolebindings", body)
        made += [f"{RBAC}/clusterrolebindings/{user}", f"{RBAC}/clusterroles/{user}"]
    try:
        yield api
    finally:
        for path in made:
            await api.delete(path)


async def as_user(
    api: Api, session: aiohttp.ClientSession, user: str, method: str, path: str, body: Any
) -> tuple[int, Any]:
    """A request that the administrator sends in the user's name."""
    headers = {"Authorization": f"Bearer {api.token}", "Impersonate-User": user}
    if method == "PATCH":
        headers["Content-Type"] = "application/merge-patch+json"
    async with session.request(method, api.url + path, json=body, headers=headers, ssl=False) as answer:
        return answer.status, await answer.json()


async def test_only_who_may_create_pods_may_create_and_edit_jobs(guarded: Api, session: aiohttp.ClientSession) -> None:
    async def refused() -> Any:
        code, answer = await as_user(guarded, session, "jobs-only", "POST", f"{JOBS}?dryRun=All", job("refused"))
        return answer if code == 403 else None

    answer = await until(refused, "the policy is in effect", 60)
    assert "user jobs-only may not create pods in namespace default" in answer["message"]
    code, answer = await as_user(guarded, session, "jobs-and-pods", "POST", JOBS, job("mine"))
    assert code == 201, answer
    edit, label = {"spec": {"suspend": True}}, {"metadata": {"labels": {"team": "a"}}}
    code, answer = await as_user(guarded, session, "jobs-only", "PATCH", f"{JOBS}/mine", edit)
    assert code == 403
    code, answer = await as_user(guarded, session, "jobs-only", "PATCH", f"{JOBS}/mine", label)
    assert code == 200, answer
    code, answer = await as_user(guarded, session, "jobs-and-pods", "PATCH", f"{JOBS}/mine", edit)
    assert code == 200, answer
