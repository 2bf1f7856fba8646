"""One seeded trace of the operator in virtual time, and its digest.

`python -m tests.golden.operator.trace SEED` prints the whole trace as JSON lines, `--texts` its messages. To explain a
digest that changed, run it before and after the change and compare.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from meshwright.api.objects import KubeObject
from tests.golden.files import canonical
from tests.golden.operator.faults import Faults
from tests.golden.operator.jobs import Jobs
from tests.golden.operator.machine import Machine, make_nodes, play
from tests.golden.operator.record import Record, delta, digest, rounded, samples


@dataclass(frozen=True)
class Kind:
    """A kind of trace: its jobs, its events and the time between them."""

    name: str
    jobs: tuple[str, ...] = ("small", "piped", "narrow")
    count: tuple[int, ...] = (1, 1, 2)
    steps: tuple[int, ...] = (300, 10000, 10000)
    acts: tuple[str, ...] = ()
    waits: tuple[int, ...] = (3, 8, 15, 40)
    product: str = ""
    steady: bool = False
    """Whether jobs train until the end of the trace unless an event stops them."""
    gpus: tuple[int, ...] = (2, 4, 4)
    nodes: tuple[int, ...] = (2, 3, 4, 5)


PODS_END = ("crash_pod", "end_container", "kubelet_evicts", "evict", "disrupt")
RANKS_END = ("fail_rank", "lose_peer", "fail_rank", "fail_rank fail_rank", "end_container", "fail_rank crash_pod")
HANGS = ("hang", "silence", "speak", "hang evict")
NODES_CHANGE = ("node_down", "node_up", "node_gone", "node_added", "cordon", "taint", "uncordon_all", "crash_pod")
EDITS = ("edit_pods", "edit_replicas", "edit_ranks", "edit_live", "edit_forbidden", "edit_invalid", "edit_back")
EDITS_AND_FAULTS = ("edit_invalid crash_pod", "edit_pods crash_pod", "edit_replicas evict", "edit_forbidden fail_rank")
SERVER = (
    *("fail_requests crash_pod", "fail_requests edit_pods", "lose_watches crash_pod", "lose_watches edit_live"),
    *("heal", "see_again", "restart_operator", "crash_pod restart_operator", "edit_pods restart_operator"),
)
REFUSALS = (
    *("refuse_pods crash_pod", "refuse_pods edit_pods", "refuse_secrets edit_pods", "break_image edit_pods"),
    *("break_image crash_pod", "mute edit_pods", "mute crash_pod", "refuse_node crash_pod", "heal", "heal"),
)
OBJECTS = (
    *("strip_label", "strip_label crash_pod", "take_name", "damage_status", "damage_status restart_operator"),
    *("refuse_status edit_pods", "heal", "create_again", "delete_job", "hand_over crash_pod", "edit_live"),
)
SPARES = ("cordon", "taint", "uncordon_all", "node_down", "node_up", "submit", "edit_live")
FAILS = "fail_rank wait:15 fail_rank wait:15 fail_rank wait:20 fail_rank wait:25 fail_rank wait:40"
LIMITS = (
    "break_image edit_pods wait:420 wait:90 wait:130 heal",
    "stall_containers edit_pods wait:2000 heal",
    "mute edit_pods wait:800 heal",
    "pause_ranks wait:45 pause_ranks wait:25",
    f"{FAILS} fail_rank wait:70 fail_rank wait:90 fail_rank wait:90",
    f"{FAILS} wait:640 fail_rank wait:60",
    "cordon_all wait:150 node_added wait:130",
    "refuse_node crash_pod wait:200 heal wait:850 crash_pod wait:100",
    "refuse_pods edit_pods wait:2000 heal",
    "refuse_pods crash_pod wait:60 heal",
    "hang wait:1000",
    "silence wait:150 speak",
    "kubelet_evicts kubelet_evicts wait:60",
)
LONG = (20, 65, 130, 330, 700)

KINDS = (
    Kind("runs", count=(1, 2, 3), steps=(20, 60, 200), acts=("edit_live", "evict", "learn"), waits=(10, 40, 100)),
    Kind("pods end", acts=PODS_END),
    Kind("ranks end", acts=RANKS_END),
    Kind("ranks hang", acts=HANGS, waits=(40, 130, 340, 340, 950)),
    Kind("nodes change", acts=NODES_CHANGE, waits=(5, 30, 130)),
    Kind("edits", acts=(*EDITS, *EDITS_AND_FAULTS), waits=(5, 15, 40)),
    Kind("suspended", acts=("suspend", "resume", "evict", "edit_pods", "resume"), waits=(3, 15, 60)),
    Kind("operators", acts=("second_operator crash_pod", "first_operator_ends", *SERVER)),
    Kind("queue", count=(3, 4), acts=("submit", "edit_live", "crash_pod", "hold_node", "free_nodes"), nodes=(2, 3)),
    Kind("refusals", acts=REFUSALS, waits=LONG),
    Kind(
        "external scheduler",
        jobs=("theirs",),
        acts=("stop_binding evict", "heal", *PODS_END, *NODES_CHANGE),
        waits=LONG,
    ),
    Kind("commands", jobs=("command",), acts=(*PODS_END, "fail_rank", "edit_pods", "suspend", "resume")),
    Kind(
        "planned",
        jobs=("large", "chosen"),
        acts=("learn", "hold_node", "free_nodes", "node_gone", "node_added", "edit_replicas", "crash_pod"),
        product="NVIDIA-H100-80GB-HBM3",
        gpus=(4, 8),
    ),
    Kind("odd objects", acts=OBJECTS),
    Kind("time limits", count=(1, 2), jobs=("small", "narrow"), acts=LIMITS, steady=True, waits=(10,), nodes=(3, 4)),
    Kind("spares and moves", acts=SPARES, waits=(15, 130), nodes=(4, 5, 6)),
)
ANY = (*PODS_END, *RANKS_END, *NODES_CHANGE, *EDITS, *SERVER, *REFUSALS, "refuse_run", "hang", "submit", "suspend")


@dataclass
class Trace:
    """The trace of one seed."""

    kind: str
    record: Record
    conditions: dict[str, list[list[str]]]
    messages: dict[str, dict[str, str]]
    metrics: dict[str, str]
    jobs: dict[str, KubeObject]

    def summary(self) -> KubeObject:
        """The main facts, and a digest of everything but messages."""
        writes = Counter(
            f"{entry['verb']} {_resource(entry['path'])} {entry['code']}"
            for entry in self.record.entries
            if entry["what"] == "write"
        )
        acts = [f"{entry['act']} {entry['to'] or ''}".strip() for entry in self.record.entries if "act" in entry]
        names = sorted({entry["job"] for entry in self.record.entries if entry["what"] == "note"})
        return {
            "kind": self.kind,
            "acts": acts,
            "writes": dict(sorted(writes.items())),
            "generations": Counter(entry["job"] for entry in self.record.entries if entry["what"] == "mesh"),
            "reasons": {name: self.record.notes(name) for name in names},
            "conditions": self.conditions,
            "restarts": {name: job.get("restarts", []) for name, job in sorted(self.jobs.items())},
            "metrics": len(self.metrics),
            "entries": len(self.record.entries),
            "sha256": digest([*self.record.entries, self.metrics]),
        }

    def messages_summary(self) -> KubeObject:
        """The messages of the final conditions, and a digest of all messages."""
        return {"conditions": self.messages, "texts": len(self.record.texts), "sha256": digest(self.record.texts)}

    def lines(self) -> dict[str, Any]:
        """Every entry and metric, without messages."""
        found = {f"{number:05}": rounded(entry) for number, entry in enumerate(self.record.entries)}
        return {**found, "metrics": self.metrics}

    def short_lines(self) -> dict[str, Any]:
        """`lines` in half the space: only the changes of bodies and conditions, and no histogram buckets."""
        last: dict[str, Any] = {}
        found = {}
        for key, line in self.lines().items():
            body = line.get("body", {})
            if "status" in body:
                path, conditions = line["path"], _as_strings(body["status"].get("conditions"))
                new = [text for text in conditions if text not in last.get(path, ())]
                last[path] = conditions or last.get(path, ())
                body = {**body, "status": {**body["status"], "conditions": new}}
            elif body:
                base = last.setdefault(f"body of {line['verb']} {_resource(line['path'])}", body)
                body = body if body is base else delta(base, body)
            if body:
                line = {**line, "body": body}
                how = {name: line.pop(name) for name in ("query", "kind")}
                if last.setdefault(f"{line['verb']} {_resource(line['path'])}", how) is how:
                    line |= how
            found[key] = line
        metrics = {name: value for name, value in self.metrics.items() if "_bucket " not in name}
        return {**found, "metrics": metrics}

    def texts(self) -> dict[str, str]:
        """Every message."""
        return {f"{number:05}": text for number, text in enumerate(self.record.texts)}


def run(seed: int) -> Trace:
    """The trace of a seed."""
    kind, chance, record = KINDS[seed % len(KINDS)], Random(f"trace {seed}"), Record()
    nodes = make_nodes(
        chance.choice(kind.nodes), chance.choice(kind.gpus), per_rack=chance.choice((1, 2, 4)), product=kind.product
    )
    jobs = Jobs(chance, kind.jobs, kind.steps, steady=kind.steady)

    async def story(machine: Machine) -> Trace:
        faults = Faults(machine, jobs, chance)
        for _ in range(chance.choice(kind.count)):
            await faults.act("submit")
            await machine.run(chance.choice((0, 1, 5)))
        await machine.run(10)
        for _ in range(chance.choice((1, 2)) if kind.steady else chance.choice((4, 6, 8))):
            acts = chance.choice(kind.acts if kind.steady or chance.random() < 0.85 else ANY)
            for name in acts.split():
                if name.startswith("wait:"):
                    await _wait(machine, chance, int(name.removeprefix("wait:")))
                else:
                    await faults.act(name)
            await _wait(machine, chance, chance.choice(kind.waits))
        for name in ("heal", "see_again", "speak", "resume"):
            await faults.act(name)
        await _wait(machine, chance, chance.choice((60, 200, 700)))
        return _ended(kind.name, record, machine)

    return play(lambda: Machine(seed, nodes, record), story)


async def _wait(machine: Machine, chance: Random, seconds: int) -> None:
    """Lets time pass, in seconds at first, then in longer steps. Uneven steps meet different time limits."""
    quick = min(seconds, chance.choice((4, 9, 25)))
    await machine.run(quick)
    if seconds > quick:
        steps = min(seconds - quick, chance.choice((7, 10, 15)))
        for _ in range(steps):
            await machine.tick((seconds - quick) / steps)


def _ended(kind: str, record: Record, machine: Machine) -> Trace:
    jobs = {name: body["status"] for name in machine.jobs() if (body := machine.job(name)) is not None}
    conditions, messages = {}, {}
    for name, status in sorted(jobs.items()):
        found = status.get("conditions")
        listed = [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []
        conditions[name] = [[c["type"], c["status"], c["reason"]] for c in listed]
        messages[name] = {c["type"]: c.get("message", "") for c in listed}
    record.add("end", objects=[f"{path} {_phase(obj)}" for path, obj in sorted(machine.cluster.objects.items())])
    metrics: dict[str, str] = {}
    for number, operator in enumerate(machine.operators):
        found_samples = samples(operator.metrics.exposition())
        metrics |= {f"{number} {name}": value for name, value in found_samples.items()}
    return Trace(kind, record, conditions, messages, metrics, jobs)


def _resource(path: str) -> str:
    parts = path.split("/namespaces/default/")[-1].split("/")
    return "/".join([parts[0], *parts[2:]])


def _as_strings(conditions: Any) -> list[str]:
    """Each condition as one string."""
    listed = conditions if isinstance(conditions, list) else []
    return [" ".join(str(value) for _, value in sorted(condition.items())) for condition in listed]


def _phase(obj: KubeObject) -> str:
    return str(obj.get("status", {}).get("phase", ""))


def main() -> None:
    """Prints a trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--texts", action="store_true", help="print the messages instead")
    parser.add_argument("--summary", action="store_true", help="print the summaries instead")
    asked = parser.parse_args()
    trace = run(asked.seed)
    if asked.summary:
        print(canonical({f"{asked.seed:03}": trace.summary()}))
        print(canonical({f"{asked.seed:03}": trace.messages_summary()}))
        return
    for key, value in (trace.texts() if asked.texts else trace.lines()).items():
        print(canonical({key: value}))


if __name__ == "__main__":
    main()
