"""The end of a demo in a page. Pure: facts in, a rich renderable out."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.demo.evidence import Saved
from meshwright.cli.demo.fault import Fault
from meshwright.cli.demo.loss import LossCurve, sparkline
from meshwright.cli.demo.snapshot import Snapshot
from meshwright.cli.demo.words import clock
from meshwright.planner.show import placement_lines

RECOVERED = "Recovered"


@dataclass(frozen=True, slots=True)
class Ending:
    """What there is to tell when the job is over."""

    end: Snapshot
    curve: LossCurve
    fault: Fault | None
    saved: Saved | None
    prompt: str
    text: str
    """What the trained model wrote after the prompt."""
    seconds: float
    """The whole demo."""


def summary(ending: Ending) -> RenderableType:
    """The page. Its lines are as long as they are: a path that is cut short is of no use."""
    parts: list[RenderableType] = [Text()]
    parts += [Text.assemble((f"{name:<12}", "dim"), text) for name, text in rows(ending)]
    plan, placement = ending.end.status.plan, ending.end.status.placement
    if plan is not None and placement is not None:
        parts += [Text("\nplacement", style="dim"), *(Text(f"  {line}") for line in placement_lines(plan, placement))]
    if ending.text:
        heading = f"\ntext from the trained model, after the prompt {ending.prompt!r}"
        lines = (line.rstrip() for line in ending.text.splitlines())
        parts += [Text(heading, style="dim"), *(Text(f"  {line}", style="cyan") for line in lines)]
    return Group(*parts)


def rows(ending: Ending) -> list[tuple[str, str]]:
    """Name and value of each fact."""
    end, status = ending.end, ending.end.status
    out = [("job", f"{end.name}: {end.state}, {end.message}"), ("plan", status.plan.summary if status.plan else "")]
    first, last = ending.curve.first, ending.curve.last
    if first and last:
        drawn = sparkline(ending.curve.values(), 32)
        out.append(("loss", f"{first[1]:.4f} (step {first[0]})  {drawn}  {last[1]:.4f} (step {last[0]})"))
    if ending.fault is not None:
        out += fault_rows(end, ending.fault)
    if ending.saved is not None:
        steps = f"step {ending.saved.step}, {ending.saved.samples:,} samples, data digest {ending.saved.digest}"
        out.append(("trained", steps))
    if status.checkpoint is not None:
        out.append(("checkpoint", status.checkpoint.path))
    out.append(("total time", clock(ending.seconds)))
    return out


def fault_rows(end: Snapshot, fault: Fault) -> list[tuple[str, str]]:
    """What was lost, how long it took to come back and where the time went."""
    if fault.struck is None:
        return []
    out = [("fault", f"pod {fault.struck.name} on {fault.struck.node} deleted near step {fault.step}")]
    if fault.seconds is not None and fault.replacement is not None:
        out.append(("recovery", f"{fault.seconds:.1f} s, with {fault.replacement.name} on {fault.replacement.node}"))
    if fault.resumed_after is not None:
        again = (
            f"{fault.repeated} finished steps were run again" if fault.repeated else "no finished step was run again"
        )
        out.append(("", f"resumed after step {fault.resumed_after}: {again}"))
    return out + [("", event.note) for event in end.events if event.reason == RECOVERED]
