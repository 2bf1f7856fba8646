"""What happens to the job of a demo, in order: a pod is lost, then a node for good, then a node joins.

Before that, a job that is too short for it gets more steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright_cli.demo.display import Display
from meshwright_cli.demo.fault import Fault
from meshwright_cli.demo.lost_node import LostNode
from meshwright_cli.demo.observer import Observer
from meshwright_cli.demo.pace import Pace
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_local.kube.client import ApiClient


@dataclass(slots=True)
class Story:
    """The faults of a demo."""

    fault: Fault
    """The pod."""
    node: LostNode | None
    """The node. None if the job cannot train without it: it is not elastic, or has one replica."""
    pace: Pace = field(default_factory=Pace)

    async def go_on(self, client: ApiClient, namespace: str, observer: Observer, now: Snapshot, shown: Display) -> None:
        """Do what is due, and announce it and what came of it."""
        if self.node is not None and self.fault.deleted_pod is None and not self.pace.settled(now):
            await self._set_pace(client, namespace, now, shown)
        elif self.fault.due(now):
            pod = await self.fault.inject(client, namespace, now)
            shown.announce(f"FAULT: deleting worker pod {pod.name} on {pod.node}, as kubectl delete pod does")
        elif self.fault.observe(now) and self.fault.seconds is not None:
            self.fault.resumed_after = await observer.resumed_after(now)
            shown.announce(f"RECOVERED: every rank trains again, {self.fault.seconds:.1f} s after the pod was deleted")
        elif self.node is not None and self.fault.recovered_at is not None:
            await self._go_on_without(self.node, observer, now, shown)

    async def _set_pace(self, client: ApiClient, namespace: str, now: Snapshot, shown: Display) -> None:
        if self.pace.observe(now):
            few, many = f"{now.total_steps:,}", f"{self.pace.steps:,}"
            shown.announce(
                f"FAST: a step takes {self.pace.step_seconds:.3f} s, so that {few} steps would end before a node can"
                f" join. The job gets {many}"
            )
            await self.pace.lengthen(client, namespace, now)

    @staticmethod
    async def _go_on_without(node: LostNode, observer: Observer, now: Snapshot, shown: Display) -> None:
        if node.due(now):
            shown.announce(f"FAULT: node {await node.remove(now)} is gone for good, and no other node is free")
        elif node.observe(now):
            resize = node.resized(now, await observer.resumed_after(now))
            size = f"{resize.replicas} of {node.replicas} replicas"
            if resize is node.grown:
                shown.announce(f"GROWN: {size} train again, {resize.seconds:.1f} s after the node joined")
            else:
                trains = "trains" if resize.replicas == 1 else "train"
                shown.announce(f"SMALLER: {size} {trains} on, {resize.seconds:.1f} s after the node was lost")
        elif node.join_due(now):
            shown.announce(f"NODE: {await node.join()} joins the cluster")
