"""`meshwright plan --for`: a plan as the command line and the configuration files of another framework."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import PlanError
from meshwright.planner.frameworks.planning import launch_of
from meshwright.planner.frameworks.registry import TARGETS
from meshwright.planner.frameworks.target import Launch
from meshwright.planner.plan import Plan, make_plans

_VARIABLE = re.compile(r"\$[A-Z_]+")


def launch_for(framework: str, job: dict[str, Any], inventory: Inventory) -> tuple[Plan, Launch]:
    """Plan a job for a framework, and write the plan for it.

    Raises:
        InvalidSpecError: the job violates the schema.
        PlanError: no layout fits, or the framework cannot express the job.
    """
    spec, target = parse_spec(job), TARGETS[framework]
    plan = make_plans(spec, inventory, max_plans=1, target=target)[0]
    if plan.architecture is None:
        raise PlanError("`runtime.command` brings its own model: set `model`, `data` and `training`", "InvalidSpec")
    return plan, launch_of(spec, plan.architecture, plan.strategy, target)


def script(framework: str, plan: Plan, launch: Launch) -> Iterator[str]:
    """The lines of a shell script that every rank runs."""
    used = plan.strategy
    zero = f", ZeRO-{used.zero_stage}" if used.zero_stage else ""
    yield f"# {framework}: {plan.summary}{zero}, {used.micro_batches} micro-batches of {used.micro_batch_size}"
    time = f", {plan.estimate.seconds:.2f} s per step (estimated)" if plan.estimate is not None else ""
    yield f"# {used.world_size} ranks, each with the variables of torchrun{time}"
    for note in launch.notes:
        yield f"# {note}"
    for name, content in launch.files.items():
        yield from (f"cat > {shlex.quote(name)} <<'EOF'", *content.splitlines(), "EOF")
    for name, value in launch.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    yield from _folded(launch.command)


def document(framework: str, plan: Plan, launch: Launch) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "framework": framework,
        "plan": plan.to_status().model_dump(by_alias=True, exclude_none=True),
        "command": list(launch.command),
        "files": dict(launch.files),
        "environment": dict(launch.environment),
        "notes": list(launch.notes),
    }


def as_json(framework: str, plan: Plan, launch: Launch) -> str:
    """`document` as text."""
    return json.dumps(document(framework, plan, launch), indent=2)


def _folded(command: tuple[str, ...]) -> Iterator[str]:
    """The command, with each flag and its values on a line."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(f'"{word}"' if _VARIABLE.search(word) else shlex.quote(word))
    for number, words in enumerate(lines):
        indent, end = "  " if number else "", " \\" if number < len(lines) - 1 else ""
        yield f"{indent}{' '.join(words)}{end}"
