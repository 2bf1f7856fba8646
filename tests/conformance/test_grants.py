"""What a user who is no administrator may write into roles and bindings."""

import asyncio
import json
import time

import pytest_asyncio

from tests.patience import patient

GROUP = "rbac.authorization.k8s.io"
RBAC = f"/apis/{GROUP}/v1"
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"


def rule(groups, resources, *verbs, **more):
    return {"apiGroups": groups, "resources": resources, "verbs": list(verbs), **more}


def role(name, *rules, kind="Role", **more):
    return {"apiVersion": f"{GROUP}/v1", "kind": kind, "metadata": {"name": name}, "rules": list(rules), **more}


def binding(name, to, *, kind="Role", user="mallory"):
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "subjects": [{"kind": "User", "name": user}],
        "roleRef": {"apiGroup": GROUP, "kind": kind, "name": to},
    }


class Bob:
    """A user who may write roles and bindings, and has a few other rights."""

    def __init__(self, api):
        self.api = api
        self.roles, self.bindings = (f"{RBAC}/namespaces/{api.namespace}/{kind}" for kind in ("roles", "rolebindings"))

    async def call(self, method, path, body=None, kind="application/json", **query):
        headers = {"Impersonate-User": "bob", "Impersonate-Group": "devs", "Content-Type": kind}
        async with self.api.session.request(
            method,
            self.api.server.url + path,
            data=None if body is None else json.dumps(body),
            headers=headers,
            params=query,
            ssl=self.api.context,
        ) as response:
            return response.status, await response.json()

    async def until_allowed(self, verb, resource, group=""):
        """Wait until the authorizer has noticed a role or binding."""
        attributes = {"verb": verb, "resource": resource, "group": group, "namespace": self.api.namespace}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        deadline = time.monotonic() + patient(10)
        while time.monotonic() < deadline:
            body = {**review, "spec": {"resourceAttributes": attributes}}
            _, answer = await self.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
            if answer["status"]["allowed"]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"bob may not {verb} {resource}")


def missing(plural, name, *lines):
    who = 'user "bob" (groups=["devs" "system:authenticated"])'
    text = f"{who} is attempting to grant RBAC permissions not currently held:"
    return f'{plural}.{GROUP} "{name}" is forbidden: {text}\n' + "\n".join(lines)


@pytest_asyncio.fixture
async def bob(api):
    user = Bob(api)
    rules = [
        rule([""], ["pods", "pods/log"], "get", "list"),
        rule([""], ["secrets"], "get", resourceNames=["a", "b"]),
        rule(["*"], ["*/scale"], "update"),
        rule([GROUP], ["roles", "rolebindings"], "get", "create", "update", "patch"),
    ]
    assert (await api.call("POST", user.roles, role("bobs", *rules)))[0] == 201
    assert (await api.call("POST", user.bindings, binding("bobs", "bobs", user="bob")))[0] == 201
    await user.until_allowed("create", "rolebindings", GROUP)
    return user


async def test_a_role_may_have_the_rights_of_its_writer(bob):
    rules = [
        rule([""], ["pods"], "get"),
        rule([""], ["secrets"], "get", resourceNames=["a"]),
        rule(["apps"], ["deployments/scale"], "update"),
    ]
    code, answer = await bob.call("POST", bob.roles, role("own", *rules))
    assert code == 201, answer
    assert (await bob.call("POST", bob.bindings, binding("own", "own")))[0] == 201


async def test_a_role_with_more_rights_is_forbidden(bob):
    more = role("more", rule([""], ["pods", "secrets"], "get", "delete"), rule(["apps"], ["deployments"], "*"))
    code, status = await bob.call("POST", bob.roles, more)
    assert (code, status["reason"]) == (403, "Forbidden")
    assert status["message"] == missing(
        "roles",
        "more",
        '{APIGroups:[""], Resources:["pods"], Verbs:["delete"]}',
        '{APIGroups:[""], Resources:["secrets"], Verbs:["get" "delete"]}',
        '{APIGroups:["apps"], Resources:["deployments"], Verbs:["*"]}',
    )
    named = role("named", rule([""], ["secrets"], "get", "list", resourceNames=["a", "c"]))
    code, status = await bob.call("PATCH", f"{bob.roles}/named", named, APPLY, fieldManager="bob")
    lines = (
        '{APIGroups:[""], Resources:["secrets"], ResourceNames:["a"], Verbs:["list"]}',
        '{APIGroups:[""], Resources:["secrets"], ResourceNames:["c"], Verbs:["get" "list"]}',
    )
    assert (code, status["message"]) == (403, missing("roles", "named", *lines))
    assert (await bob.api.call("GET", f"{bob.roles}/named"))[0] == 404
    assert (await bob.call("POST", bob.roles, more, dryRun="All"))[0] == 403


async def test_an_update_to_more_rights_is_forbidden(bob):
    assert (await bob.call("POST", bob.roles, role("grows", rule([""], ["pods"], "get"))))[0] == 201
    patch = {"rules": [rule([""], ["nodes"], "get")]}
    assert (await bob.call("PATCH", f"{bob.roles}/grows", patch, MERGE))[0] == 403
    assert (await bob.call("PATCH", f"{bob.roles}/grows", {"metadata": {"labels": {"a": "b"}}}, MERGE))[0] == 200
    # A role that has more already: only what the garbage collector needs may change.
    assert (await bob.api.call("POST", bob.roles, role("big", rule([""], ["secrets"], "*"))))[0] == 201
    assert (await bob.call("PATCH", f"{bob.roles}/big", {"metadata": {"labels": {"a": "b"}}}, MERGE))[0] == 403
    finalizers = {"metadata": {"finalizers": ["example.com/keep"]}}
    assert (await bob.call("PATCH", f"{bob.roles}/big", finalizers, MERGE))[0] == 200
    await bob.api.call("PATCH", f"{bob.roles}/big", {"metadata": {"finalizers": None}}, MERGE)


async def test_a_binding_to_a_larger_role_is_forbidden(bob):
    assert (await bob.api.call("POST", bob.roles, role("big", rule([""], ["nodes"], "get"))))[0] == 201
    code, status = await bob.call("POST", bob.bindings, binding("b", "big"))
    line = '{APIGroups:[""], Resources:["nodes"], Verbs:["get"]}'
    assert (code, status["message"]) == (403, missing("rolebindings", "b", line))
    code, status = await bob.call("POST", bob.bindings, binding("b", "cluster-admin", kind="ClusterRole"))
    lines = ('{APIGroups:["*"], Resources:["*"], Verbs:["*"]}', '{NonResourceURLs:["*"], Verbs:["*"]}')
    assert (code, status["message"]) == (403, missing("rolebindings", "b", *lines))
    code, status = await bob.call("POST", bob.bindings, binding("b", "nowhere"))
    assert (code, status["message"]) == (404, f'rolebindings.{GROUP} "nowhere" not found')


async def test_the_verbs_escalate_and_bind(bob):
    big = role("big", rule([""], ["nodes"], "get"))
    assert (await bob.api.call("POST", bob.roles, big))[0] == 201
    verbs = [rule([GROUP], ["roles"], "escalate"), rule([GROUP], ["roles"], "bind", resourceNames=["big"])]
    assert (await bob.api.call("POST", bob.roles, role("verbs", *verbs)))[0] == 201
    assert (await bob.api.call("POST", bob.bindings, binding("verbs", "verbs", user="bob")))[0] == 201
    await bob.until_allowed("escalate", "roles", GROUP)
    assert (await bob.call("POST", bob.roles, {**big, "metadata": {"name": "bigger"}}))[0] == 201
    assert (await bob.call("POST", bob.bindings, binding("b", "big")))[0] == 201
    assert (await bob.call("POST", bob.bindings, binding("c", "bigger")))[0] == 403


async def test_an_aggregate_needs_all_rights(bob):
    name = f"writer-{bob.api.namespace}"
    everything = [rule([GROUP], ["clusterroles"], "create")]
    assert (await bob.api.call("POST", f"{RBAC}/clusterroles", role(name, *everything, kind="ClusterRole")))[0] == 201
    body = {**binding(name, name, kind="ClusterRole", user="bob"), "kind": "ClusterRoleBinding"}
    assert (await bob.api.call("POST", f"{RBAC}/clusterrolebindings", body))[0] == 201
    await bob.until_allowed("create", "clusterroles", GROUP)
    selectors = {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]}
    aggregate = role(f"all-{bob.api.namespace}", kind="ClusterRole", aggregationRule=selectors)
    code, status = await bob.call("POST", f"{RBAC}/clusterroles", aggregate)
    assert code == 403
    assert status["message"].endswith("must have cluster-admin privileges to use the aggregationRule")
    for kind in ("clusterrolebindings", "clusterroles"):
        await bob.api.call("DELETE", f"{RBAC}/{kind}/{name}")
