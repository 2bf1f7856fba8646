"""The summary of a demo. Pure: turns facts into a rich renderable."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.planner.render import render_placement
from meshwright_cli.demo.checks import CheckpointRecord
from meshwright_cli.demo.fault import Fault
from meshwright_cli.demo.loss_curve import LossCurve, sparkline
from meshwright_cli.demo.lost_node import LostNode
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_cli.demo.story import Story
from meshwright_cli.demo.text import clock

RECOVERED = "Recovered"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The facts for the summary."""

    end: Snapshot
    curve: LossCurve
    story: Story | None
    record: CheckpointRecord | None
    prompt: str
    text: str
    """Text that the trained model generated after the prompt."""
    seconds: float
    """Duration of the demo."""
    digest: str = ""
    """Digest that was computed from the data alone; empty if it was not."""


def summary(result: DemoResult) -> RenderableType:
    """The summary. Lines are not cut, because a truncated path is useless."""
    parts: list[RenderableType] = [Text()]
    parts += [Text.assemble((f"{name:<12}", "dim"), text) for name, text in rows(result)]
    plan, placement = result.end.status.plan, result.end.status.placement
    if plan is not None and placement is not None:
        parts += [Text("\nplacement", style="dim"), *(Text(f"  {line}") for line in render_placement(plan, placement))]
    if result.text:
        heading = f"\ntext from the trained model, after the prompt {result.prompt!r}"
        lines = (line.rstrip() for line in result.text.splitlines())
        parts += [Text(heading, style="dim"), *(Text(f"  {line}", style="cyan") for line in lines)]
    return Group(*parts)


def rows(result: DemoResult) -> list[tuple[str, str]]:
    """Name and value of each fact."""
    end, status = result.end, result.end.status
    out = [("job", f"{end.name}: {end.state}. {end.message}"), ("plan", status.plan.summary if status.plan else "")]
    first, last = result.curve.first, result.curve.last
    if first and last:
        curve_line = sparkline(result.curve.values(), 32)
        out.append(("loss", f"{first[1]:.4f} (step {first[0]})  {curve_line}  {last[1]:.4f} (step {last[0]})"))
    if result.story is not None:
        out += fault_rows(end, result.story.fault)
        out += node_rows(end, result.story.node) if result.story.node is not None else []
    if result.record is not None:
        out.append(("trained", f"step {result.record.step}, {result.record.samples:,} samples"))
        same = ", as computed from the data alone" if result.digest == result.record.digest else ""
        out.append(("digest", f"{result.record.digest}{same}"))
    if status.checkpoint is not None:
        out.append(("checkpoint", status.checkpoint.path))
    out.append(("total time", clock(result.seconds)))
    return out


def fault_rows(end: Snapshot, fault: Fault) -> list[tuple[str, str]]:
    """The deleted pod, the duration of the recovery, and its phases."""
    if fault.deleted_pod is None:
        return []
    out = [("fault", f"pod {fault.deleted_pod.name} on {fault.deleted_pod.node} deleted near step {fault.step}")]
    if fault.seconds is not None and fault.replacement is not None:
        out.append(("recovery", f"{fault.seconds:.1f} s, with {fault.replacement.name} on {fault.replacement.node}"))
    if fault.resumed_after is not None:
        out.append(("", f"resumed after step {fault.resumed_after}: {repeated(fault.repeated_steps)}"))
    return out + phases(end, fault.generation + 1)


def node_rows(end: Snapshot, node: LostNode) -> list[tuple[str, str]]:
    """The lost node, the node that joined, and both resizes with their phases."""
    if not node.name:
        return []
    out = [("node lost", f"{node.name} removed near step {node.step}; no other node was free")]
    if (shrunk := node.shrunk) is not None:
        out.append(("", f"trained on with {shrunk.replicas} of {node.replicas} replicas after {shrunk.seconds:.1f} s"))
        if shrunk.resumed_after is not None:
            out.append(("", f"resumed after step {shrunk.resumed_after}: {repeated(node.repeated_steps)}"))
        out += phases(end, shrunk.generation)
    if node.joined:
        out.append(("node joined", f"{node.joined}"))
    if (grown := node.grown) is not None:
        after = "" if grown.resumed_after is None else f", from step {grown.resumed_after + 1} on"
        out.append(("", f"trained with {grown.replicas} replicas again after {grown.seconds:.1f} s{after}"))
        out += phases(end, grown.generation)
    return out


def repeated(steps: int | None) -> str:
    """How many completed steps were repeated."""
    if steps == 1:
        return "1 completed step was repeated"
    return f"{steps} completed steps were repeated" if steps else "no completed step was repeated"


def phases(end: Snapshot, generation: int) -> list[tuple[str, str]]:
    """The phases of the recovery that a generation began with, as the operator reported them."""
    mark = f"(generation {generation},"
    return [("", event.note) for event in end.events if event.reason == RECOVERED and mark in event.note]
