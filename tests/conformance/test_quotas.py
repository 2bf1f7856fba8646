"""ResourceQuota and LimitRange: what is refused, in which words, and what the quota says is used."""

import asyncio

import pytest

MERGE = "application/merge-patch+json"


def asking(api, name, requests=None, limits=None, **spec):
    resources = {"requests": requests or {}, "limits": limits or {}}
    return api.pod(name, containers=[{"name": "a", "image": "b", "resources": resources}], **spec)


async def quota(api, hard, name="q"):
    """A quota, once the server enforces it: a real one waits until its controller has counted."""
    path = f"/api/v1/namespaces/{api.namespace}/resourcequotas"
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}
    code, answer = await api.call("POST", path, body)
    assert code == 201, answer
    await used(api, dict.fromkeys(hard, "0"), name)
    return f"{path}/{name}"


async def used(api, expected, name="q"):
    """Wait until the quota's status says what is used."""
    path = f"/api/v1/namespaces/{api.namespace}/resourcequotas/{name}"
    for _ in range(400):
        _, found = await api.call("GET", path)
        if found.get("status", {}).get("used") == expected:
            assert found["status"]["hard"] == found["spec"]["hard"]
            return
        await asyncio.sleep(0.05)
    raise AssertionError(found.get("status"))


async def refused(api, body, path=None):
    code, status = await api.call("POST", path or api.pods, body)
    assert (code, status.get("reason")) == (403, "Forbidden"), status
    return status["message"]


async def test_pods_are_counted(api):
    await quota(api, {"pods": "2", "count/pods": "3"})
    for name in ("p1", "p2"):
        assert (await api.call("POST", api.pods, api.pod(name)))[0] == 201
    text = 'pods "p3" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
    assert await refused(api, api.pod("p3")) == text
    await used(api, {"pods": "2", "count/pods": "2"})
    # A pod that has ended takes no place but is still there to be counted.
    await api.call("PATCH", f"{api.pods}/p1/status", {"status": {"phase": "Succeeded"}}, MERGE)
    await used(api, {"pods": "1", "count/pods": "2"})
    assert (await api.call("POST", api.pods, api.pod("p3")))[0] == 201
    text = 'pods "p4" is forbidden: exceeded quota: q, requested: count/pods=1,pods=1, used: count/pods=3,pods=2, '
    assert await refused(api, api.pod("p4")) == f"{text}limited: count/pods=3,pods=2"
    await api.call("DELETE", f"{api.pods}/p2")
    await used(api, {"pods": "1", "count/pods": "2"})


async def test_init_containers_run_beside_the_sidecars_before_them(api):
    await quota(api, {"requests.cpu": "4", "limits.cpu": "4"})

    def container(name, cpu, **more):
        resources = {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}
        return {"name": name, "image": "b", "resources": resources, **more}

    inits = [container("a", "3"), container("b", "500m", restartPolicy="Always"), container("c", "2750m")]
    body = api.pod("p", containers=[container("d", "1")], initContainers=inits)
    assert (await api.call("POST", api.pods, body))[0] == 201
    await used(api, {"requests.cpu": "3250m", "limits.cpu": "3250m"})


async def test_requests_and_limits(api):
    hard = {"requests.cpu": "2", "requests.memory": "2Gi", "limits.memory": "4Gi", "requests.nvidia.com/gpu": "3"}
    await quota(api, hard)
    first = asking(api, "p1", {"cpu": "500m", "memory": "1Gi"}, {"memory": "1536Mi", "nvidia.com/gpu": "2"})
    assert (await api.call("POST", api.pods, first))[0] == 201
    fits = {"requests.cpu": "500m", "requests.memory": "1Gi", "limits.memory": "1536Mi", "requests.nvidia.com/gpu": "2"}
    await used(api, fits)
    second = asking(api, "p2", {"cpu": "1750m", "memory": "1Gi"}, {"memory": "1Gi", "nvidia.com/gpu": "2"})
    text = 'pods "p2" is forbidden: exceeded quota: q, requested: requests.cpu=1750m,requests.nvidia.com/gpu=2, '
    text += "used: requests.cpu=500m,requests.nvidia.com/gpu=2, limited: requests.cpu=2,requests.nvidia.com/gpu=3"
    assert await refused(api, second) == text
    await api.call("DELETE", f"{api.pods}/p1")
    await used(api, dict.fromkeys(hard, "0"))
    await api.until(201, "POST", api.pods, second)


async def test_what_is_counted_must_be_specified(api):
    await quota(api, {"cpu": "2", "limits.memory": "4Gi"})
    body = asking(api, "p", {"cpu": "1"})
    assert await refused(api, body) == 'pods "p" is forbidden: failed quota: q: must specify limits.memory for: a'
    text = 'pods "p" is forbidden: failed quota: q: must specify cpu for: a; limits.memory for: a'
    assert await refused(api, api.pod("p")) == text


async def test_other_objects_are_counted(api):
    """Secrets: controllers of a real server put a ConfigMap into a new namespace, and no one can tell when."""
    await quota(api, {"count/secrets": "1"})
    path = f"/api/v1/namespaces/{api.namespace}/secrets"
    first, second = ({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}} for name in ("s1", "s2"))
    assert (await api.call("POST", path, first))[0] == 201
    text = "requested: count/secrets=1, used: count/secrets=1, limited: count/secrets=1"
    assert await refused(api, second, path) == f'secrets "s2" is forbidden: exceeded quota: q, {text}'
    await used(api, {"count/secrets": "1"})


async def test_a_larger_quota_lets_more_in(api):
    path = await quota(api, {"pods": "0"})
    await refused(api, api.pod("p"))
    assert (await api.call("PATCH", path, {"spec": {"hard": {"pods": "1"}}}, MERGE))[0] == 200
    await api.until(201, "POST", api.pods, api.pod("p"))
    await used(api, {"pods": "1"})


async def limit_range(api, *limits):
    path = f"/api/v1/namespaces/{api.namespace}/limitranges"
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"}, "spec": {"limits": list(limits)}}
    code, made = await api.call("POST", path, body)
    assert code == 201, made
    await asyncio.sleep(0 if api.server.embedded else 1)  # a real server's admission looks at a cache
    return made["spec"]["limits"]


async def test_limit_ranges_give_defaults(api):
    limits = {"type": "Container", "default": {"cpu": "500m", "memory": "1Gi"}, "defaultRequest": {"cpu": "100m"}}
    (item,) = await limit_range(api, {**limits, "max": {"memory": "2Gi"}, "min": {"cpu": "50m"}})
    assert item["default"] == {"cpu": "500m", "memory": "1Gi"}
    assert item["defaultRequest"] == {"cpu": "100m", "memory": "1Gi"}
    pod = await api.until(201, "POST", api.pods, api.pod("p"))
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "500m", "memory": "1Gi"}}
    text = "LimitRanger plugin set: cpu, memory request for container a; cpu, memory limit for container a"
    assert pod["metadata"]["annotations"]["kubernetes.io/limit-ranger"] == text
    assert pod["status"]["qosClass"] == "Burstable"


@pytest.mark.parametrize(
    ("bounds", "asked", "text"),
    [
        ({"max": {"cpu": "1"}}, ({"cpu": "1"}, {"cpu": "2"}), "maximum cpu usage per Container is 1, but limit is 2"),
        (
            {"min": {"cpu": "100m"}},
            ({"cpu": "50m"}, {"cpu": "1"}),
            "minimum cpu usage per Container is 100m, but request is 50m",
        ),
        (
            {"min": {"nvidia.com/gpu": "2"}},
            ({}, {"nvidia.com/gpu": "1"}),
            "minimum nvidia.com/gpu usage per Container is 2, but request is 1",
        ),
        (
            {"maxLimitRequestRatio": {"cpu": "2"}},
            ({"cpu": "500m"}, {"cpu": "2"}),
            "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
        ),
        (
            {"maxLimitRequestRatio": {"cpu": "2"}},
            ({}, {}),
            "cpu max limit to request ratio per Container is 2, but no request is specified or request is 0",
        ),
        (
            {"type": "Pod", "max": {"memory": "1Gi"}},
            ({}, {}),
            "maximum memory usage per Pod is 1Gi.  No limit is specified",
        ),
        (
            {"type": "Pod", "max": {"memory": "1Gi"}},
            ({"memory": "1Gi"}, {"memory": "2Gi"}),
            "maximum memory usage per Pod is 1Gi, but limit is 2Gi",
        ),
    ],
)
async def test_limit_ranges_have_bounds(api, bounds, asked, text):
    await limit_range(api, {"type": "Container", **bounds})
    body = asking(api, "p", *asked)
    assert await refused(api, body) == f'pods "p" is forbidden: {text}'


async def test_all_broken_bounds_are_named(api):
    await limit_range(api, {"type": "Container", "min": {"cpu": "1"}}, {"type": "Pod", "min": {"memory": "1Gi"}})
    message = await refused(api, asking(api, "p", {"cpu": "100m", "memory": "1Mi"}))
    assert "minimum cpu usage per Container is 1, but request is 100m" in message
    assert "minimum memory usage per Pod is 1Gi, but request is 1Mi" in message
    assert message.startswith('pods "p" is forbidden: [')
