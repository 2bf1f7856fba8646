"""The cache ends in the newest state, whatever the order in which lists and watches deliver versions."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.cache import Cache, JobKey, key_of, pod_key_of
from meshwright_operator.kube.client import KubeClient, Page
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.kube.resync import Resync
from meshwright_operator.kube.watches import EventHandlers
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics

NAMES = 3
FIRST_VERSION = 10
METRICS = OperatorMetrics()


class Lists(KubeClient):
    """Answers each list of a resource with the next pages of its script."""

    def __init__(self) -> None:
        self.scripts: dict[str, list[list[Page]]] = {}

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        resource = path.rsplit("/", 1)[1]
        script = self.scripts.get(resource)
        for page in script.pop(0) if script else [Page([], "")]:
            yield copy.deepcopy(page)


@dataclass
class Parts:
    """A cache with everything that updates it."""

    lists: Lists = field(default_factory=Lists)
    cache: Cache = field(default_factory=Cache)

    def __post_init__(self) -> None:
        queue, metrics = WorkQueue[JobKey](), OperatorMetrics()
        self.handlers = EventHandlers(self.cache, queue, metrics)
        self.resync = Resync(self.lists, self.cache, queue, metrics, (), 60)

    async def event(self, kind: str, obj: KubeObject) -> None:
        event = {"type": kind, "object": copy.deepcopy(obj)}
        match obj["kind"]:
            case "Node":
                self.handlers.node(event)
            case "Pod":
                self.handlers.pod(event)
            case _:
                self.handlers.job(event)


def node(name: str, version: int, uid: str = "", *, ready: bool = True) -> KubeObject:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    metadata = {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"kind": "Node", "metadata": metadata, "status": {"allocatable": {"cpu": "4"}, "conditions": conditions}}


def job(name: str, version: int, uid: str = "", *, state: int = 0) -> KubeObject:
    metadata = {"name": name, "namespace": "d", "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"kind": "Job", "metadata": metadata, "spec": {"state": state}}


def pod(name: str, version: int, uid: str = "", *, on: str = "n0", phase: str = "Running") -> KubeObject:
    metadata = {"name": name, "namespace": "d", "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    metadata["labels"] = {labels.LABEL_JOB: "train"}  # type: ignore[assignment]
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": on}, "status": {"phase": phase}}


def is_ready(cache: Cache, name: str) -> bool:
    return bool(cache.nodes[name]["status"]["conditions"][0]["status"] == "True")


async def test_a_list_does_not_undo_what_a_watch_reported_meanwhile() -> None:
    """A node is lost, and another one joins, after the API server has read a list and before it arrives."""
    parts = Parts()
    await parts.event("ADDED", node("n0", 5))
    parts.lists.scripts["nodes"] = [[Page([node("n0", 5)], "10"), Page([node("n1", 6)], "10")]]
    seen: list[KubeObject] = [node("n0", 11, ready=False), node("n2", 12)]
    for obj in seen:
        await parts.event("MODIFIED", obj)
    await parts.resync.relist()
    assert not is_ready(parts.cache, "n0"), "the list is older than the event"
    assert set(parts.cache.nodes) == {"n0", "n1", "n2"}, "n2 is newer than the list"


@pytest.mark.parametrize(
    ("make", "stored"),
    [
        (node, lambda cache: list(cache.nodes)),
        (job, lambda cache: [key.name for key in cache.jobs]),
        (pod, lambda cache: [request.name for request in cache.pod_requests().values()]),
    ],
)
async def test_a_deleted_object_does_not_return_with_an_older_version(
    make: Callable[..., KubeObject], stored: Callable[[Cache], list[str]]
) -> None:
    parts = Parts()
    resource = {"Node": "nodes", "Pod": "pods"}.get(make("a", 1)["kind"], labels.PLURAL)
    await parts.event("ADDED", make("a", 5))
    parts.lists.scripts[resource] = [[Page([make("a", 5)], "6")]]
    await parts.event("DELETED", make("a", 8))
    await parts.resync.relist()
    assert stored(parts.cache) == [], "the list is older than the deletion"
    await parts.event("MODIFIED", make("a", 7))
    assert stored(parts.cache) == [], "the event is older than the deletion"
    await parts.event("ADDED", make("a", 9, "new"))
    await parts.event("DELETED", make("a", 8))
    assert stored(parts.cache) == ["a"], "another object has the name now"


async def test_what_a_complete_list_lacks_does_not_return_either() -> None:
    parts = Parts()
    await parts.event("ADDED", node("n0", 5))
    parts.lists.scripts["nodes"] = [[Page([node("n1", 7)], "20")]]
    await parts.resync.relist()
    assert set(parts.cache.nodes) == {"n1"}
    await parts.event("ADDED", node("n0", 6))
    assert set(parts.cache.nodes) == {"n1"}, "its deletion was before the list, which is its tombstone"
    await parts.event("ADDED", node("n0", 21, "new"))
    assert set(parts.cache.nodes) == {"n0", "n1"}


async def test_a_server_that_was_restored_from_a_backup_is_believed() -> None:
    """Its versions begin again at an earlier number: everything would look outdated for ever."""
    parts = Parts()
    parts.lists.scripts["nodes"] = [
        [Page([node("n0", 90), node("n1", 91)], "100")],
        [Page([node("n0", 40, ready=False)], "50")],
    ]
    await parts.resync.relist()
    await parts.resync.relist()
    assert set(parts.cache.nodes) == {"n0"}
    assert not is_ready(parts.cache, "n0")
    await parts.event("MODIFIED", node("n0", 51))
    assert is_ready(parts.cache, "n0")


async def test_versions_that_are_no_numbers_count_in_the_order_of_arrival() -> None:
    parts = Parts()
    odd = node("n0", 0)
    odd["metadata"]["resourceVersion"] = "abc"
    await parts.event("ADDED", odd)
    later = copy.deepcopy(odd)
    later["status"]["conditions"][0]["status"] = "False"
    await parts.event("MODIFIED", later)
    assert not is_ready(parts.cache, "n0")
    parts.lists.scripts["nodes"] = [[Page([], "abd")]]
    await parts.resync.relist()
    assert parts.cache.nodes == {}


def test_tombstones_are_bounded() -> None:
    cache = Cache()
    for number in range(40_000):
        cache.remove_deleted_node(node("n0", number + 1, f"uid-{number}"))
    assert len(cache._nodes._tombstones) <= 32_768
    listing = cache.begin_nodes_listing()
    listing.start_page("50000")
    cache.finish_nodes_listing(listing)
    assert not cache._nodes._tombstones, "the list is their tombstone now"


# Any order.


@dataclass
class History:
    """What happened on the server: (event, object) by version, and the state after each version."""

    events: list[tuple[str, KubeObject]] = field(default_factory=list)
    states: list[dict[str, KubeObject]] = field(default_factory=lambda: [{}])

    def step(self, make: Callable[..., KubeObject], name: str, act: int) -> None:
        """Create, change or delete the object with this name."""
        state, version = dict(self.states[-1]), FIRST_VERSION + len(self.events) + 1
        old = state.get(name)
        uid = old["metadata"]["uid"] if old is not None else f"{name}-{version}"
        if old is not None and act == 0:
            del state[name]
            self.events.append(("DELETED", {**old, "metadata": {**old["metadata"], "resourceVersion": str(version)}}))
        else:
            state[name] = make(name, version, uid, act)
            self.events.append(("MODIFIED" if old is not None else "ADDED", state[name]))
        self.states.append(state)


def make_node(name: str, version: int, uid: str, act: int) -> KubeObject:
    return node(name, version, uid, ready=act == 1)


def make_job(name: str, version: int, uid: str, act: int) -> KubeObject:
    return job(name, version, uid, state=act)


def make_pod(name: str, version: int, uid: str, act: int) -> KubeObject:
    """A worker pod, or the same pod after its label was edited."""
    obj = pod(f"train-w{name}-0", version, uid, on=f"n{version % 2}")
    if act == 2:
        obj["metadata"]["labels"] = {labels.LABEL_JOB: "another"}
    elif act == 3:
        obj["status"]["phase"] = "Succeeded"
    return obj


def listed(cache: Cache, resource: str, history: History, at: int, pages: int) -> Iterable[Any]:
    """A list of the state after `at` events, which pauses after every page and before it is complete.

    It begins now. A list that begins after another one was complete is not older, because lists are consistent reads.
    """
    begin: dict[str, Callable[[], Any]] = {
        "nodes": cache.begin_nodes_listing,
        "jobs": lambda: cache.begin_jobs_listing(None),
        "pods": lambda: cache.begin_pods_listing(None),
    }
    listing: Any = begin[resource]()
    finish: Any = getattr(cache, f"finish_{resource}_listing")
    items = list(history.states[at].values())

    def arrive() -> Iterable[Any]:
        for number in range(pages):
            listing.start_page(str(FIRST_VERSION + at))
            for obj in items[number::pages]:
                _list_one(cache, resource, listing, obj)
            yield
        finish(listing)

    return arrive()


def _list_one(cache: Cache, resource: str, listing: Any, obj: KubeObject) -> None:
    uid = obj["metadata"]["uid"]
    if resource == "nodes":
        listing.add(obj["metadata"]["name"], uid)
        cache.put_node(obj)
    elif resource == "jobs":
        listing.add(key_of(obj), uid)
        cache.put_job(obj)
    else:
        listing.add(pod_key_of(obj), uid)
        read = read_pod(obj)
        cache.put_pod(read) if read is not None else cache.put_unowned_pod(obj)


def contents(cache: Cache) -> Any:
    """Everything that the cache returns about nodes, jobs and pods."""
    key = JobKey("d", "train")
    requests = sorted((r.name, r.node) for r in cache.pod_requests().values())
    pods = sorted(cache.all_pods(), key=lambda found: found.name)
    assert {p.node for p in pods} == {n for n in ("n0", "n1") if key in cache.jobs_on(n)}
    assert len(pods) == cache.count(key)
    return cache.nodes, cache.jobs, pods, requests


def watched(send: Callable[[str, KubeObject], None], events: list[tuple[str, KubeObject]]) -> Iterable[Any]:
    for kind, obj in events:
        send(kind, obj)
        yield


MAKERS = {"nodes": make_node, "jobs": make_job, "pods": make_pod}


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, History]:
    resource = draw(st.sampled_from(sorted(MAKERS)))
    history = History()
    for name, act in draw(st.lists(st.tuples(st.integers(0, NAMES - 1), st.integers(0, 3)), min_size=1, max_size=14)):
        history.step(MAKERS[resource], str(name), act)
    return resource, history


def run_to_completion(coroutine: Any) -> None:
    """Run a coroutine that waits for nothing."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


@given(histories(), st.data())
@settings(max_examples=100, deadline=None)
def test_any_order_of_pages_and_events_ends_in_the_newest_state(
    drawn: tuple[str, History], data: st.DataObject
) -> None:
    """One watch delivers everything in order. Any lists and other watches, however late, do not change the result."""
    resource, history = drawn
    cache = Cache()
    streams = [iter(watched(_sender(cache), history.events))]
    newest = len(history.events)
    for _ in range(data.draw(st.integers(0, 3))):
        at, pages = data.draw(st.integers(0, newest)), data.draw(st.integers(1, 3))
        streams.append(iter(listed(cache, resource, history, at, pages)))
    for _ in range(data.draw(st.integers(0, 2))):
        first, last = sorted(data.draw(st.tuples(st.integers(0, newest), st.integers(0, newest))))
        streams.append(iter(watched(_sender(cache), history.events[first:last])))
    _interleave(streams, data)
    assert contents(cache) == contents(_fresh(resource, history)), history.events


@given(histories(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_list_repairs_whatever_watches_missed(drawn: tuple[str, History], data: st.DataObject) -> None:
    resource, history = drawn
    cache = Cache()
    newest = len(history.events)
    some = [event for event in history.events if data.draw(st.booleans())]
    at = data.draw(st.integers(0, newest))
    streams = [iter(watched(_sender(cache), some)), iter(listed(cache, resource, history, at, 2))]
    _interleave(streams, data)
    for _ in listed(cache, resource, history, newest, 1):
        pass
    assert contents(cache) == contents(_fresh(resource, history)), history.events


def _sender(cache: Cache) -> Callable[[str, KubeObject], None]:
    handlers = EventHandlers(cache, _Keys(), METRICS)

    def send(kind: str, obj: KubeObject) -> None:
        event = {"type": kind, "object": copy.deepcopy(obj)}
        handle = {"Pod": handlers.pod, "Node": handlers.node}.get(obj["kind"], handlers.job)
        handle(event)

    return send


class _Keys(WorkQueue[JobKey]):
    """A queue that needs no event loop."""

    def add_after(self, key: JobKey, seconds: float) -> None:
        """Ignore it."""

    def add(self, key: JobKey) -> None:
        """Ignore it."""


def _fresh(resource: str, history: History) -> Cache:
    cache = Cache()
    for _ in listed(cache, resource, history, len(history.events), 1):
        pass
    return cache


def _interleave(streams: list[Any], data: st.DataObject) -> None:
    while streams:
        stream = streams[data.draw(st.integers(0, len(streams) - 1))]
        if next(stream, "end") == "end":
            streams.remove(stream)


class _Told:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.nodes: dict[str, str | None] = {}
        """Pod -> the node on which it requests something."""

    def pod_changed(self, pod: str, request: PodRequest | None) -> None:
        self.nodes[pod] = request.node if request is not None else None

    def nodes_changed(self) -> None:
        """Nothing here changes a node."""
        raise AssertionError


def test_a_listener_learns_which_requests_changed() -> None:
    cache, told = Cache(), _Told()
    cache.put_unowned_pod(pod("a", 1, on="n0"))
    cache.set_capacity_listener(told)
    assert told.nodes == {}
    cache.put_unowned_pod(pod("b", 2, on="n1"))
    cache.put_unowned_pod(pod("a", 3, on="n0"))
    assert told.nodes == {"d/b": "n1"}, "a requests the same"
    cache.put_unowned_pod(pod("a", 4, on="n0", phase="Failed"))
    assert told.nodes == {"d/b": "n1", "d/a": None}
