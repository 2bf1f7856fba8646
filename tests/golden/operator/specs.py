"""What the operator does with one spec: revision, pods, mesh document and status.

`python -m tests.golden.operator.specs 012` prints this for a recorded spec; `--texts` prints the messages.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from pydantic import ValidationError

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.protocol.messages import MeshRequest
from meshwright.rules.validation import SPEC_RULES, check_edit, check_spec
from meshwright_operator.decide.applied_spec import revision_of
from tests.golden import files
from tests.golden.operator.machine import Machine, make_nodes, play
from tests.golden.operator.moves import BASE, applied
from tests.golden.operator.record import Record, delta, digest, rounded
from tests.golden.operator.wire import without_texts

PLAIN: KubeObject = {"nodes": {"count": 4, "gpus": 8}, "spec": BASE}
"""The spec that others are compared with."""
FOLDER = files.ROOT / "operator"
SECONDS = 25


def cases(name: str) -> dict[str, Any]:
    """The inputs in this file."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return {key: value for line in text.splitlines() for key, value in json.loads(line).items()}


def outcome(name: str, case: KubeObject, *, valid: bool = True) -> tuple[KubeObject, KubeObject]:
    """What the operator does with a spec on the nodes of its case, and the messages in it."""
    record = Record()
    nodes = make_nodes(**case["nodes"])
    resource = str((case["spec"].get("workers") or {}).get("gpuResource", labels.GPU_RESOURCE))
    for body in nodes:
        body["status"]["allocatable"][resource] = body["status"]["allocatable"]["nvidia.com/gpu"]
        body["status"]["capacity"][resource] = body["status"]["capacity"]["nvidia.com/gpu"]
    job = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": name},
        "spec": case["spec"],
    }

    async def story(machine: Machine) -> tuple[KubeObject, KubeObject]:
        machine.submit(job)
        for second in range(SECONDS):
            await machine.tick()
            if _rests(machine, record) and second > 3:
                break
        return await _found(machine, record, name, valid)

    return play(lambda: Machine(0, nodes, record), story)


def beside(base: KubeObject, found: dict[str, KubeObject]) -> dict[str, KubeObject]:
    """The outcome of the plain spec, and the difference of each other outcome from it."""
    return {"base": base} | {name: delta(base, value) for name, value in found.items()}


def problems(spec: KubeObject) -> tuple[KubeObject, list[str]]:
    """The schema errors of a spec or the rules that it breaks, and their messages.

    A rule is named by its field and its position among the rules of that field.
    """
    try:
        parsed = ParallelTrainingJobSpec.model_validate(spec)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        return {"schema": [[".".join(map(str, e["loc"])), e["type"]] for e in found]}, [e["msg"] for e in found]
    broken = check_spec(parsed)
    return {"rules": [_rule(p.field, p.message) for p in broken]}, [p.message for p in broken]


def revision(spec: KubeObject) -> str:
    """The revision hash: pods restart when it changes."""
    return revision_of(ParallelTrainingJobSpec.model_validate(spec))


def edited(before: KubeObject, change: KubeObject) -> tuple[KubeObject, list[str]]:
    """The revision after an edit of a started job, and the immutable fields that it changes, with messages."""
    old, new = (ParallelTrainingJobSpec.model_validate(spec) for spec in (before, applied(before, change)))
    forbidden = check_edit(old, new)
    return {"revision": revision_of(new), "forbidden": [p.field for p in forbidden]}, [p.message for p in forbidden]


def _rule(field: str, message: str) -> str:
    same = [rule.message for rule in SPEC_RULES if rule.field == field]
    return f"{field}#{same.index(message)}"


def _rests(machine: Machine, record: Record) -> bool:
    """Whether all ranks have started, or will not start."""
    pods = machine.pods()
    started = sum(entry["what"] == "start" for entry in record.entries)
    return started >= len(pods) and machine.seconds() > (4 if pods else 8)


async def _found(machine: Machine, record: Record, name: str, valid: bool) -> tuple[KubeObject, KubeObject]:
    job = machine.job(name)
    assert job is not None
    made: dict[str, list[KubeObject]] = {"pods": [], "services": [], "secrets": []}
    for entry in record.entries:
        if entry["what"] == "write" and "/events" not in entry["path"] and entry["verb"] != "DELETE":
            kind = entry["path"].split("/namespaces/default/")[1].split("/")[0]
            if entry["verb"] == "POST" or kind in ("services", "secrets"):
                made[kind].append(entry["body"])
    texts: list[str] = []
    status = without_texts(job["status"], texts)
    rest = {key: status.pop(key) for key in ("placement", "appliedSpec", "selector") if key in status}
    found: KubeObject = {
        "revision": revision(job["spec"]) if valid else None,
        "document": await _document(machine, job),
        "pod": made["pods"][0] if made["pods"] else None,
        "pods": [len(made["pods"]), digest(made["pods"])],
        "children": digest([*made["services"], *made["secrets"]]),
        "status": status,
        "rest of status": digest([rest]),
        "notes": record.notes(name),
    }
    messages = {c["type"]: c.get("message", "") for c in job["status"].get("conditions", ())}
    plan = job["status"].get("plan", {})
    return rounded(found), {
        "conditions": messages,
        "plan": [plan.get("summary", ""), *plan.get("reasons", ())],
        "sha256": digest(record.texts),
    }


async def _document(machine: Machine, job: KubeObject) -> KubeObject | None:
    """The mesh document as it is sent to agents."""
    agents = [agent for agent in machine.agents.values() if agent.document is not None]
    if not agents:
        return None
    first = agents[0]
    request = MeshRequest(
        worker=first.pod.worker,
        incarnation=first.pod.incarnation,
        pod_uid=first.pod.uid,
        address=first.address,
        store_port=20000,
    )
    sent = await machine.operators[0].coordinator.registry(job["metadata"]["uid"]).wait_for_newer(request)
    assert sent is not None
    document: KubeObject = json.loads(sent.body)
    return document


def main() -> None:
    """Prints what the operator does with a recorded spec."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--texts", action="store_true", help="print the messages instead")
    asked = parser.parse_args()
    found = outcome("train", cases("specs.jsonl")[asked.case])
    print(json.dumps(found[asked.texts], indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
