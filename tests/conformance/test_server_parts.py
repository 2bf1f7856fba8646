"""Parts of the server on their own: pure functions and the event log."""

import asyncio
import datetime

import pytest

from meshwright_local.apiserver.auth.identity import RequestAttributes
from meshwright_local.apiserver.registry.crds import version_rank
from meshwright_local.apiserver.registry.server_side_apply import decode, encode
from meshwright_local.apiserver.rest.ages import human_duration
from meshwright_local.apiserver.rest.printers import first
from meshwright_local.apiserver.rest.request_bodies import merge_patch
from meshwright_local.apiserver.rest.router import parse_target
from meshwright_local.apiserver.rest.server import expired_events
from meshwright_local.apiserver.schema.cel import CelError, check_rule, compile_expression, escape
from meshwright_local.apiserver.schema.structural import custom_schema
from meshwright_local.apiserver.schema.validation import compile_pattern, fits_format
from meshwright_local.apiserver.store import Event, EventLog, RevisionTooOldError, Stored
from meshwright_local.kube.quantities import canonical


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("0.5", "500m"), ("1000m", "1"), ("1024Mi", "1Gi"), ("1.5Gi", "1536Mi"), ("1e3", "1e3"), ("1000", "1k"),
        (512, "512"), ("0", "0"), ("100Ki", "100Ki"), ("0.5Ki", "512"), ("-1", "-1"), ("1500Mi", "1500Mi"),
    ],
)  # fmt: skip
def test_quantities(written, stored):
    assert canonical(written) == stored
    assert canonical(stored) == stored


@pytest.mark.parametrize("text", ["", "many", "1Zi", "1 Gi", "--1", "1e", ".", "1.2.3"])
def test_no_quantities(text):
    with pytest.raises(ValueError, match="not a quantity"):
        canonical(text)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/api/v1/pods", ("v1", RequestAttributes("list", "", "pods", "", "", ""))),
        ("/api/v1/namespaces", ("v1", RequestAttributes("list", "", "namespaces", "", "", ""))),
        ("/api/v1/namespaces/a", ("v1", RequestAttributes("get", "", "namespaces", "", "", "a"))),
        ("/api/v1/namespaces/a/finalize", ("v1", RequestAttributes("get", "", "namespaces", "finalize", "", "a"))),
        ("/api/v1/namespaces/a/pods", ("v1", RequestAttributes("list", "", "pods", "", "a", ""))),
        ("/api/v1/namespaces/a/pods/p/log", ("v1", RequestAttributes("get", "", "pods", "log", "a", "p"))),
        (
            "/apis/apps/v1/namespaces/a/deployments/d",
            ("v1", RequestAttributes("get", "apps", "deployments", "", "a", "d")),
        ),
        ("/apis/g.io/v1/things/t/status", ("v1", RequestAttributes("get", "g.io", "things", "status", "", "t"))),
        ("/apis/apps/v1", None),
        ("/api/v1", None),
        ("/", None),
    ],
)
def test_paths(path, target):
    assert parse_target("GET", path) == target


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (".a.b", 1),
        (".list[1]", "y"),
        (".list[*]", "x"),
        (".list[9]", None),
        (".conditions[?(@.type=='Ready')].status", "True"),
        ("{.a.b}", 1),
        (".dotted.a\\.b/c", 2),
        (".dotted['a.b/c']", 2),
        (".none.at.all", None),
    ],
)
def test_json_paths(path, value):
    obj = {
        "a": {"b": 1},
        "list": ["x", "y"],
        "conditions": [{"type": "Other", "status": "False"}, {"type": "Ready", "status": "True"}],
        "dotted": {"a.b/c": 2},
    }
    assert first(obj, path) == value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5s"), (119, "119s"), (125, "2m5s"), (600, "10m"), (10800, "3h"), (11400, "3h10m"), (190000, "2d4h")],
)
def test_durations(seconds, text):
    assert human_duration(seconds) == text


def test_versions_in_order():
    versions = ["foo", "v1alpha1", "v2", "v1beta2", "v10", "v1beta1", "v1"]
    assert sorted(versions, key=version_rank) == ["v10", "v2", "v1", "v1beta2", "v1beta1", "v1alpha1", "foo"]


def test_field_sets_survive_their_text():
    paths = {("f:a",), ("f:a", "f:b"), ("f:l", 'k:{"n":1}'), ("f:l", 'k:{"n":1}', "f:n"), ("f:s", 'v:"x"')}
    assert encode(paths)["f:a"] == {".": {}, "f:b": {}}
    assert decode(encode(paths)) == paths


def test_merge_patch_of_the_rfc():
    assert merge_patch({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}) == {"a": {"b": "d"}}
    assert merge_patch({"a": [1]}, {"a": {"b": {"c": None}}}) == {"a": {"b": {}}}
    assert merge_patch("text", {"a": 1}) == {"a": 1}


def test_patterns_mean_what_they_mean_in_go():
    assert compile_pattern("^a$").search("a\n") is None
    assert compile_pattern(r"^\d+$").search("٣") is None
    assert compile_pattern(r"^[$]$").search("$")
    assert compile_pattern(r"^a\$").search("a$")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date-time", "2026-01-31T12:00:00Z", "2026-01-31"),
        ("ipv4", "1.2.3.4", "1.2.3"),
        ("cidr", "10.0.0.0/8", "10.0.0.0/99"),
        ("duration", "1h30m", "soon"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
        ("byte", "YQ==", "a?"),
        ("unheard-of", "x", None),
    ],
)
def test_formats(form, good, bad):
    assert fits_format(form, good)
    assert bad is None or not fits_format(form, bad)


SCHEMA = {
    "type": "object",
    "properties": {
        "namespace": {"type": "string"},
        "a-b": {"type": "integer"},
        "ratio": {"type": "number"},
        "when": {"type": "string", "format": "date-time"},
        "names": {"type": "array", "items": {"type": "string"}},
    },
}


@pytest.mark.parametrize(
    ("rule", "value", "holds"),
    [
        ("self.__namespace__ == 'x'", {"namespace": "x"}, True),
        ("self.a__dash__b > 2", {"a-b": 3}, True),
        ("self.ratio < 0.5", {"ratio": 1}, False),
        ("self.when < timestamp('2026-01-01T00:00:00Z')", {"when": "2025-01-01T00:00:00Z"}, True),
        ("!has(self.names) || self.names.all(n, n.startsWith('a'))", {"names": ["ab", "ba"]}, False),
        ("self.names.isSorted() && self.names.join(',') == 'a,b'", {"names": ["a", "b"]}, True),
        ("self.names.exists(n, n.find('[0-9]+') == '42')", {"names": ["x42"]}, True),
        ("self.missing == 1", {}, False),
    ],
)
def test_cel_rules(rule, value, holds):
    cause = check_rule({"rule": rule, "message": "no"}, custom_schema(SCHEMA), value, None, "spec")
    assert (cause is None) == holds
    if cause is not None:
        assert cause.field == "spec"


def test_cel_without_an_old_value():
    node = custom_schema(SCHEMA)
    assert check_rule({"rule": "self == oldSelf"}, node, {"ratio": 1}, None, "") is None
    optional = {"rule": "oldSelf.hasValue() || self.ratio == 1.0", "optionalOldSelf": True}
    assert check_rule(optional, node, {"ratio": 1}, None, "") is None
    assert check_rule(optional, node, {"ratio": 2}, None, "") is not None
    assert check_rule(optional, node, {"ratio": 2}, {"ratio": 1}, "") is None


@pytest.mark.parametrize("expression", ["self.(", "quantity('1')", "a ==="])
def test_cel_mistakes_show_early(expression):
    with pytest.raises(CelError):
        compile_expression(expression)


def test_cel_names():
    assert [escape(n) for n in ("plain", "in", "a.b", "a-b", "a/b", "a__b")] == [
        "plain",
        "__in__",
        "a__dot__b",
        "a__dash__b",
        "a__slash__b",
        "a__underscores__b",
    ]


def event(revision):
    return Event(revision, "ADDED", ("", "x"), Stored(b"{}", "v1"), None, 0.0)


def test_event_log_is_bounded():
    log = EventLog(floor=0, size=10)
    position = log.position_after(0)
    for revision in range(1, 101):
        log.append(event(revision))
    with pytest.raises(RevisionTooOldError):
        log.read(position)
    with pytest.raises(RevisionTooOldError):
        log.position_after(1)
    recent = log.position_after(95)
    assert [e.revision for e in log.read(recent)] == [96, 97, 98, 99, 100]
    assert log.position_after(100) == log.end


async def test_event_log_wakes_those_who_wait():
    log = EventLog(floor=0, size=10)
    waiting = asyncio.create_task(log.wait(log.end, 5))
    await asyncio.sleep(0)
    log.append(event(1))
    assert await waiting
    assert not await log.wait(log.end, 0.01)


def test_events_expire_an_hour_after_their_last_touch():
    def made(**times):
        return {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, **times}

    old, touched = made(), made(lastTimestamp="2026-01-01T00:30:00Z")
    series = made(series={"lastObservedTime": "2026-01-01T00:30:00.123456Z"})
    now = datetime.datetime(2026, 1, 1, 1, 15, tzinfo=datetime.UTC)
    assert expired_events(iter([old, touched, series]), now) == [old]
