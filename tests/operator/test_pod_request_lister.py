"""What placement counts: the jobs' own pods without asking for them, and everybody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from meshwright.api import labels
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.client import ApiError, KubeClient, Page
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.scheduling import pod_request_lister
from meshwright_operator.scheduling.pod_request_lister import PodRequestLister
from tests.operator.support import node

GPU = labels.GPU_RESOURCE


def pod(name: str, on: str = "", *, job: str = "", pin: str = "", gpus: int = 2, phase: str = "Running") -> Any:
    owner = {"kind": labels.KIND, "name": job, "uid": f"uid-{job}", "controller": True}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": "5",
            "labels": {labels.LABEL_JOB: job} if job else {},
            "ownerReferences": [owner] if job else [],
        },
        "spec": {
            "containers": [{"name": "c", "env": [], "resources": {"limits": {GPU: str(gpus)}}}],
            **({"nodeName": on} if on else {}),
            **({"nodeSelector": {"kubernetes.io/hostname": pin}} if pin else {}),
        },
        "status": {"phase": phase},
    }


class Server(KubeClient):
    """Answers lists with what it was given, and remembers what it was asked."""

    def __init__(self, *pods: Any, forbidden: bool = False) -> None:
        self.pods = pods
        self.forbidden = forbidden
        self.asked: list[tuple[str, str, str]] = []

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        if self.forbidden and path == "/api/v1/pods":
            raise ApiError(403, "Forbidden", "no")
        self.asked.append((path, query["labelSelector"], query["fieldSelector"]))
        yield Page(list(self.pods), "")


def cache_with(*pods: Any) -> Cache:
    cache = Cache()
    for name in ("n0", "n1"):
        body = node(name, "r0")
        body["metadata"]["labels"]["kubernetes.io/hostname"] = f"host-{name}"
        cache.put_node(body)
    for obj in pods:
        read = read_pod(obj)
        assert read is not None
        cache.put_pod(read)
    return cache


async def test_own_pods_come_from_the_cache_and_only_others_are_asked_for() -> None:
    cache = cache_with(pod("a-w0-0", "n0", job="a"), pod("a-w1-0", "n1", job="a", phase="Succeeded"))
    server = Server(pod("notebook", "n1"), pod("pinned", pin="host-n1"), pod("anywhere"))
    foreign = await PodRequestLister(server, cache, ()).list_if_due()
    assert foreign is not None
    found = [*cache.pod_requests().values(), *foreign]
    assert [(c.name, c.node, c.job, c.job_uid) for c in found] == [
        ("a-w0-0", "n0", "a", "uid-a"), ("notebook", "n1", "", ""), ("pinned", "n1", "", ""),
    ]  # fmt: skip
    assert all(pod_request.amount(GPU).gpus == 2 for pod_request in found)
    assert server.asked == [("/api/v1/pods", f"!{labels.LABEL_JOB}", pod_request_lister.ACTIVE)]


async def test_one_that_serves_some_namespaces_counts_the_jobs_of_others_too() -> None:
    server = Server()
    await PodRequestLister(server, cache_with(), ("team", "lab")).list_if_due()
    elsewhere = f"{pod_request_lister.ACTIVE},metadata.namespace!=team,metadata.namespace!=lab"
    assert server.asked[1:] == [("/api/v1/pods", labels.LABEL_JOB, elsewhere)]


async def test_one_that_may_not_list_the_cluster_counts_what_it_may_see() -> None:
    server = Server(forbidden=True)
    await PodRequestLister(server, cache_with(), ("team", "lab")).list_if_due()
    assert [path for path, *_ in server.asked] == [
        "/api/v1/namespaces/team/pods", "/api/v1/namespaces/lab/pods",
    ]  # fmt: skip
    with pytest.raises(ApiError):
        await PodRequestLister(server, cache_with(), ()).list_if_due()


async def test_a_listing_that_takes_long_serves_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pod_request_lister.time, "monotonic", lambda: now[0])
    server = Server(pod("notebook", "n1"))
    counting = PodRequestLister(server, cache_with(), ())

    async def slow(*_: Any, **__: Any) -> AsyncIterator[Page]:
        now[0] += 2.0
        async for page in Server.pages(server, "/api/v1/pods", labelSelector="", fieldSelector=""):
            yield page

    await counting.list_if_due()
    await counting.list_if_due()
    assert len(server.asked) == 2, "a quick one is made anew"
    monkeypatch.setattr(server, "pages", slow)
    for passed, listed in ((0.0, True), (19.0, False), (2.0, True)):
        now[0] += passed
        foreign = await counting.list_if_due()
        assert ([pod_request.name for pod_request in foreign] if foreign else None) == (
            ["notebook"] if listed else None
        )
    assert len(server.asked) == 4


async def test_one_very_slow_listing_is_not_believed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pod_request_lister.time, "monotonic", lambda: now[0])
    server = Server(pod("notebook", "n1"))
    lister = PodRequestLister(server, cache_with(), ())
    waits = [300.0]

    async def slow(*_: Any, **__: Any) -> AsyncIterator[Page]:
        now[0] += waits.pop() if waits else 0.0
        async for page in Server.pages(server, "/api/v1/pods", labelSelector="", fieldSelector=""):
            yield page

    monkeypatch.setattr(server, "pages", slow)
    assert await lister.list_if_due() is not None
    now[0] += pod_request_lister.LONGEST_REUSE_SECONDS - 1
    assert await lister.list_if_due() is None
    now[0] += 2
    assert await lister.list_if_due() is not None


def test_a_pod_that_carries_the_label_and_is_no_jobs_holds_its_node() -> None:
    cache = cache_with()
    stray = pod("not-a-workers-name", "n0", job="a")
    assert read_pod(stray) is None
    cache.put_unowned_pod(stray)
    assert [pod_request.node for pod_request in cache.pod_requests().values()] == ["n0"]
    stray["status"]["phase"] = "Failed"
    cache.put_unowned_pod(stray)
    assert cache.pod_requests() == {}


def test_a_pod_that_lost_the_label_and_got_it_back_is_seen_again() -> None:
    cache = cache_with(pod("a-w0-0", "n0", job="a"))
    gone = pod("a-w0-0", "n0", job="a")
    gone["metadata"]["resourceVersion"] = "6"
    cache.remove_pod(read_pod(gone))  # type: ignore[arg-type]
    late, back = pod("a-w0-0", "n0", job="a"), pod("a-w0-0", "n0", job="a")
    assert not cache.put_pod(read_pod(late))  # type: ignore[arg-type]
    back["metadata"]["resourceVersion"] = "7"
    assert cache.put_pod(read_pod(back))  # type: ignore[arg-type]
