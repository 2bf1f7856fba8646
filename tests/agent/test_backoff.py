"""How long an agent waits before it tries again."""

from __future__ import annotations

from meshwright_worker.agent.coordinator_link import LAST_RETRY_SECONDS, Backoff


def test_an_agent_that_a_standby_turned_away_tries_again_soon() -> None:
    backoff = Backoff()
    delays = [backoff.delay(1.0) for _ in range(200)]
    assert all(1.0 <= delay <= 2.5 for delay in delays), "many tries may miss the leader: none takes long"
    assert len(set(delays)) > 100, "agents do not try again in lockstep"


def test_without_an_answer_the_delay_grows_to_its_bound() -> None:
    backoff = Backoff()
    delays = [backoff.delay() for _ in range(20)]
    assert delays[0] <= 0.25
    assert LAST_RETRY_SECONDS / 2 <= delays[-1] <= LAST_RETRY_SECONDS
