"""Who may do what: tokens, roles, impersonation."""

import asyncio
import json
import time

import aiohttp
import pytest

from meshwright_local.apiserver.auth.identity import Authenticator
from tests.patience import patient

RBAC = "/apis/rbac.authorization.k8s.io/v1"


async def as_user(api, method, path, body=None, *, token=None, **headers):
    """A request with another identity than the administrator's, or none at all."""
    if token:
        headers["Authorization"] = f"Bearer {token}"
    async with aiohttp.ClientSession() as session:
        data = json.dumps(body) if body is not None else None
        headers.setdefault("Content-Type", "application/json")
        async with session.request(
            method, api.server.url + path, data=data, headers=headers, ssl=api.context
        ) as response:
            return response.status, await response.json(content_type=None)


async def account(api, name="op"):
    """A service account with a token."""
    path = f"/api/v1/namespaces/{api.namespace}/serviceaccounts"
    body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    assert (await api.call("POST", path, body))[0] == 201
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    code, answer = await api.call("POST", f"{path}/{name}/token", request)
    assert code == 201
    return answer["status"]["token"]


async def grant(api, rules, kind="Role", subject="op"):
    name = api.namespace
    where = f"{RBAC}/namespaces/{api.namespace}" if kind == "Role" else RBAC
    version = "rbac.authorization.k8s.io/v1"
    body = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "rules": rules}
    assert (await api.call("POST", f"{where}/{kind.lower()}s", body))[0] == 201
    binding = {
        "apiVersion": version,
        "kind": f"{kind}Binding",
        "metadata": {"name": name},
        "subjects": [{"kind": "ServiceAccount", "name": subject, "namespace": api.namespace}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
    }
    assert (await api.call("POST", f"{where}/{kind.lower()}bindings", binding))[0] == 201


async def test_wrong_tokens_are_rejected(api):
    code, status = await as_user(api, "GET", api.maps, token="wrong")
    assert (code, status["reason"]) == (401, "Unauthorized")


async def test_anonymous_users_see_health_and_no_more(api):
    code, _ = await as_user(api, "GET", "/version")
    assert code == 200
    code, _ = await as_user(api, "GET", api.maps)
    assert code in (401, 403)


async def test_service_accounts_may_what_roles_say(api):
    token = await account(api)
    code, status = await as_user(api, "GET", api.maps, token=token)
    assert (code, status["reason"]) == (403, "Forbidden")
    assert f"system:serviceaccount:{api.namespace}:op" in status["message"]
    await grant(api, [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch"]}])
    assert (await as_user(api, "GET", api.maps, token=token))[0] == 200
    assert (await as_user(api, "GET", "/api/v1/configmaps", token=token))[0] == 403
    assert (await as_user(api, "POST", api.maps, api.config_map("c"), token=token))[0] == 403
    assert (await as_user(api, "DELETE", api.maps, token=token))[0] == 403
    assert (await as_user(api, "GET", "/apis", token=token))[0] == 200


async def test_subresources_and_names_are_granted_apart(api, runs):
    token = await account(api)
    await api.call("POST", runs, api.run("mine"))
    await api.call("POST", runs, api.run("other"))
    group = "conformance.example.com"
    await grant(
        api,
        [
            {"apiGroups": [group], "resources": ["runs/status"], "verbs": ["patch"]},
            {"apiGroups": [group], "resources": ["runs"], "verbs": ["get"], "resourceNames": ["mine"]},
        ],
    )
    merge = {"Content-Type": "application/merge-patch+json"}
    patch = {"status": {"phase": "X"}}
    assert (await as_user(api, "PATCH", f"{runs}/other/status", patch, token=token, **merge))[0] == 200
    assert (await as_user(api, "PATCH", f"{runs}/mine", {"spec": {}}, token=token, **merge))[0] == 403
    assert (await as_user(api, "GET", f"{runs}/mine", token=token))[0] == 200
    assert (await as_user(api, "GET", f"{runs}/other", token=token))[0] == 403


async def test_cluster_roles(api):
    token = await account(api)
    await grant(api, [{"apiGroups": ["*"], "resources": ["nodes"], "verbs": ["*"]}], kind="ClusterRole")
    assert (await as_user(api, "GET", "/api/v1/nodes", token=token))[0] == 200
    for kind in ("clusterrolebindings", "clusterroles"):
        await api.call("DELETE", f"{RBAC}/{kind}/{api.namespace}")
    assert (await as_user(api, "GET", "/api/v1/nodes", token=token))[0] == 403


async def test_a_deleted_account_is_unknown(api):
    token = await account(api)
    await api.call("DELETE", f"/api/v1/namespaces/{api.namespace}/serviceaccounts/op")
    code, _ = await as_user(api, "GET", "/apis", token=token)
    if api.server.embedded:
        assert code == 401
    else:
        assert code in (200, 401)  # a real server remembers tokens for some seconds


async def test_impersonation_and_access_reviews(api):
    await account(api)
    await grant(api, [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}])
    user = f"system:serviceaccount:{api.namespace}:op"
    headers = {"Authorization": f"Bearer {api.server.token}", "Impersonate-User": user}
    assert (await as_user(api, "GET", api.pods, **headers))[0] == 200
    assert (await as_user(api, "GET", api.maps, **headers))[0] == 403
    version = "authorization.k8s.io/v1"

    async def may(**attributes):
        spec = {"resourceAttributes": {"namespace": api.namespace, **attributes}}
        body = {"apiVersion": version, "kind": "SelfSubjectAccessReview", "spec": spec}
        _, answer = await as_user(api, "POST", f"/apis/{version}/selfsubjectaccessreviews", body, **headers)
        return answer["status"]["allowed"]

    assert await may(verb="list", resource="pods")
    assert not await may(verb="create", resource="pods")
    body = {"apiVersion": version, "kind": "SubjectAccessReview", "spec": {"user": user}}
    body["spec"]["resourceAttributes"] = {"verb": "list", "resource": "pods", "namespace": api.namespace}
    _, answer = await api.call("POST", f"/apis/{version}/subjectaccessreviews", body)
    assert answer["status"]["allowed"]
    token = await account(api, "plain")
    headers = {"Impersonate-User": "admin"}
    assert (await as_user(api, "GET", api.pods, token=token, **headers))[0] == 403


def test_forged_and_expired_tokens(monkeypatch):
    accounts = {("ns", "op", "u1")}
    ours = Authenticator({}, b"key", lambda *who: who in accounts)
    theirs = Authenticator({}, b"another key", lambda *who: who in accounts)
    metadata = {"namespace": "ns", "name": "op", "uid": "u1"}
    token, expiry = ours.issue({"metadata": metadata}, 600, [])
    user = ours.identify(token)
    assert user is not None
    assert user.name == "system:serviceaccount:ns:op"
    assert theirs.identify(token) is None
    assert ours.identify(token.rpartition(".")[0] + "." + "A" * 43) is None
    assert ours.identify(ours.issue({"metadata": metadata}, 600, ["elsewhere"])[0]) is None
    assert ours.identify("") is None
    monkeypatch.setattr(time, "time", lambda: expiry + 1)
    assert ours.identify(token) is None


@pytest.mark.parametrize("header", ["Basic YTpi", "Bearer", "Bearer é", "token"])
def test_odd_authorization_headers(header):
    from meshwright_local.apiserver.status_errors import ApiError

    with pytest.raises(ApiError) as failure:
        Authenticator({}, b"key", lambda *who: True).authenticate(header)
    assert failure.value.code == 401


async def test_roles_of_users_include_the_rules_of_charts(api, runs):
    """`view`, `edit` and `admin` for built-in kinds; a chart adds its own kinds with a label."""
    name, group = f"conformance-{api.namespace}", "rbac.authorization.k8s.io"
    rules = [{"apiGroups": ["conformance.example.com"], "resources": ["runs"], "verbs": ["get", "list"]}]
    label = {f"{group}/aggregate-to-view": "true"}
    role = {"metadata": {"name": name, "labels": label}, "rules": rules}
    assert (await api.call("POST", f"{RBAC}/clusterroles", role))[0] == 201
    for who, what in (("reader", "view"), ("writer", "edit"), ("owner", "admin")):
        subject = {"kind": "User", "apiGroup": group, "name": who}
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": what}
        body = {"metadata": {"name": who}, "subjects": [subject], "roleRef": reference}
        path = f"{RBAC}/namespaces/{api.namespace}/rolebindings"
        assert (await api.call("POST", path, body))[0] == 201

    async def may(user, verb, resource, group=""):
        on = {"namespace": api.namespace, "verb": verb, "resource": resource, "group": group}
        body = {"spec": {"user": user, "resourceAttributes": on}}
        code, answer = await api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        assert code == 201, answer
        return answer["status"]["allowed"]

    deadline = time.monotonic() + patient(10)
    while not await may("owner", "list", "runs", "conformance.example.com"):  # a controller collects the rules
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    checks = {("get", "pods"): 3, ("create", "pods"): 2, ("get", "secrets"): 2, ("get", "nodes"): 0}
    for (verb, resource), number in checks.items():
        allowed = [await may(user, verb, resource) for user in ("owner", "writer", "reader")]
        assert allowed == [index < number for index in range(3)], (verb, resource)
    assert [await may(user, "create", "roles", group) for user in ("owner", "writer", "reader")] == [True, False, False]
    await api.call("DELETE", f"{RBAC}/clusterroles/{name}")
