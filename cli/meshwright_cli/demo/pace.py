"""How many steps the job of a demo needs: on a fast machine it would end before another node has joined.

New workers take seconds to start, however fast the steps are. So the time of a step is measured first, and a job that
is too short gets more steps, by an edit of its spec.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from meshwright_cli.demo.fault import all_ranks_train
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import JOBS

SHORTEST_SECONDS = 30.0
"""Time of all steps that is enough: four fifths of them follow the loss of the node, which must be over by then."""
CHOSEN_SECONDS = 45.0
"""Time of all steps of a job that gets more."""
MEASURED_STEPS = 5
ROUNDED_TO = 50
MOST_STEPS = 20_000


@dataclass(slots=True)
class Pace:
    """The time of a step, and the steps that the job gets because of it."""

    step_seconds: float = 0.0
    """0 until it is measured."""
    steps: int = 0
    """The steps that the job gets. 0 if its own are enough."""
    _generation: int = 0
    _first_step: int = 0
    _first_at: float = 0.0

    def settled(self, now: Snapshot) -> bool:
        """Whether the job trains with enough steps."""
        return self.step_seconds > 0 and self.steps in (0, now.total_steps) and all_ranks_train(now)

    def observe(self, now: Snapshot) -> bool:
        """Observe the job. Returns true once, if it needs more steps."""
        if self.step_seconds > 0 or now.sample is None or not all_ranks_train(now):
            return False
        moment = time.monotonic()
        if now.generation != self._generation:
            self._generation, self._first_step, self._first_at = now.generation, now.step, moment
        done = now.step - self._first_step
        if done < MEASURED_STEPS or moment <= self._first_at:
            return False
        self.step_seconds = (moment - self._first_at) / done
        if now.total_steps * self.step_seconds < SHORTEST_SECONDS:
            wanted = CHOSEN_SECONDS / self.step_seconds
            self.steps = min(MOST_STEPS, math.ceil(wanted / ROUNDED_TO) * ROUNDED_TO)
        return self.steps > now.total_steps

    async def lengthen(self, client: ApiClient, namespace: str, now: Snapshot) -> None:
        """Edit the steps of the job: its ranks save a checkpoint and start again."""
        await client.patch(JOBS, now.name, {"spec": {"training": {"steps": self.steps}}}, namespace)
