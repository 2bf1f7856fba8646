"""For each alert, series with which it fires and series with which it does not.

Values are in promtool's notation, one for each minute: `0+5x10` counts up in steps of 5, `1x10` stays at 1, `_` is a
missing sample. The clock starts at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

JOB = {"namespace": "ml", "job_name": "llama"}
LONG = 500


@dataclass(frozen=True)
class Firing:
    """An alert that is expected: the labels without `severity`, and the description."""

    description: str
    labels: Mapping[str, str] = field(default_factory=lambda: JOB)


@dataclass(frozen=True)
class Case:
    """Series, and what the alert does with them at one minute."""

    alert: str
    what: str
    series: Mapping[str, str]
    minute: int
    firing: Firing | None = None

    def __str__(self) -> str:
        return f"{self.alert}: {self.what}"


def of_job(metric: str, **labels: str) -> str:
    """A series of the job."""
    pairs = ",".join(f'{name}="{value}"' for name, value in {**JOB, **labels}.items())
    return f"{metric}{{{pairs}}}"


def condition(kind: str, status: str = "True") -> dict[str, str]:
    """A condition of the job that does not change."""
    return {of_job("ptj_job_status_condition", type=kind, status=status): f"1x{LONG}"}


def placed_from(minute: int) -> dict[str, str]:
    """A job that gets nodes again at a minute."""
    there, away = (of_job("ptj_job_status_condition", type="Placed", status=status) for status in ("True", "False"))
    return {**INFO, there: f"1x10 _x{minute - 11} 1x{LONG - minute}", away: f"_x11 1x{minute - 12} _x{LONG - minute}"}


PLACED = condition("Placed")
PRESENT = of_job("ptj_job_info", uid="u", tp="1", pp="1", dp="8")
INFO = {PRESENT: f"1x{LONG}"}
TWO_JOBS = {
    of_job("ptj_job_info", uid="first", tp="1", pp="1", dp="8"): f"1x150 _x{LONG - 150}",
    of_job("ptj_job_info", uid="second", tp="1", pp="1", dp="8"): f"_x152 1x{LONG - 152}",
}
"""A job that is deleted, and another one of the same name."""
RESUMED = {
    **INFO,
    **PLACED,
    of_job("ptj_job_status_condition", type="Suspended", status="True"): f"0x20 1x79 0x{LONG}",
}
"""A job that is suspended from minute 20 to minute 100."""
STEP, RESTARTS = of_job("ptj_job_step"), of_job("ptj_job_restarts_total", cause="PodLost")
RANKS, TRAINING = of_job("ptj_job_ranks", state="total"), of_job("ptj_job_ranks", state="training")


def buckets(**values: str) -> dict[str, str]:
    """The step times of one rank: a counter for each bucket."""
    bounds = {"fast": "10.0", "slow": "177.8279", "all": "+Inf"}
    return {
        of_job("ptj_step_duration_seconds_bucket", rank="0", le=bounds[name]): value for name, value in values.items()
    }


HALF_HOURS = "0x29 1x29 2x29 3x29 4x29 5x29"
"""A step each half an hour, and none any more after 150 minutes."""
LONG_STEPS = {
    STEP: f"{HALF_HOURS} 5x200",
    **buckets(fast=f"0x{LONG}", slow=f"{HALF_HOURS} 5x200", all=f"{HALF_HOURS} 5x200"),
}


def operator_cases() -> list[Case]:
    """Cases of alerts about the operator's work."""
    down = Firing(
        "No operator process that Prometheus scrapes holds the Lease. Jobs keep training, but nothing is placed, "
        "recovered or resized.",
        {},
    )
    leader, reconciles = 'ptj_leader{instance="%s"}', 'ptj_reconcile_duration_seconds_count{result="%s"}'
    contact = 'ptj_watch_last_contact_timestamp_seconds{instance="a",resource="pods"}'
    return [
        Case("PTJOperatorDown", "no process is scraped", {}, 6, down),
        Case("PTJOperatorDown", "the leader is gone", {leader % "a": "1x2 0x20", leader % "b": "0x22"}, 10, down),
        Case("PTJOperatorDown", "one of two leads", {leader % "a": "0x20", leader % "b": "1x20"}, 10),
        Case("PTJOperatorDown", "another one takes over", {leader % "a": "1x5 0x20", leader % "b": "0x8 1x20"}, 20),
        Case(
            "PTJReconcileErrors",
            "a third fails",
            {reconciles % "ok": "0+60x60", reconciles % "error": "0+30x60"},
            40,
            Firing("33.33% of the operator's reconciles have failed in the last 10 minutes.", {}),
        ),
        Case("PTJReconcileErrors", "few fail", {reconciles % "ok": "0+95x60", reconciles % "error": "0+5x60"}, 40),
        Case(
            "PTJReconcileErrors",
            "some minutes only",
            {reconciles % "ok": "0+6x60", reconciles % "error": "0+3x10 30x50"},
            22,
        ),
        Case(
            "PTJWatchStale",
            "nothing is received",
            {contact: "60x30"},
            12,
            Firing(
                "The operator a has received nothing on its watch of pods for 11m 0s.",
                {"instance": "a", "resource": "pods"},
            ),
        ),
        Case("PTJWatchStale", "bookmarks arrive", {contact: "0+60x30"}, 20),
    ]


def configuration_cases() -> list[Case]:
    """Cases of alerts about the operator's certificates and files."""
    expiry = 'ptj_coordinator_certificate_expiry_timestamp_seconds{certificate="serving"}'
    return [
        Case(
            "PTJCertificateExpiring",
            "in four days",
            {expiry: "400000x200"},
            120,
            Firing(
                "The coordinator's certificate (serving) expires in 4d 13h 6m 40s. It should have been renewed.",
                {"certificate": "serving"},
            ),
        ),
        Case("PTJCertificateExpiring", "in ten days", {expiry: "900000x200"}, 120),
        Case(
            "PTJPolicyInvalid",
            "the file has an error",
            {"ptj_policy_valid": "1x5 0x20"},
            15,
            Firing(
                "The file with the administrator's policy, fabric or profiles has an error. The operator applies an "
                "earlier version.",
                {},
            ),
        ),
        Case("PTJPolicyInvalid", "it is valid again", {"ptj_policy_valid": "1x5 0x3 1x20"}, 15),
    ]


def progress_cases() -> list[Case]:
    """Cases of alerts about jobs that do not train."""
    stuck = Firing("ml/llama has completed no step for 10 minutes, or for ten times its step time.")
    total, training = RANKS, TRAINING
    resumed = placed_from(40)
    return [
        Case("PTJJobNotMakingProgress", "steps end", {**PLACED, STEP: "0+5x10 50x40"}, 30, stuck),
        Case("PTJJobNotMakingProgress", "steps go on", {**PLACED, STEP: "0+5x60"}, 30),
        Case("PTJJobNotMakingProgress", "it is suspended", {**PLACED, **condition("Suspended"), STEP: "50x60"}, 30),
        Case("PTJJobNotMakingProgress", "it has no nodes", {**condition("Placed", "False"), STEP: "50x60"}, 30),
        Case("PTJJobNotMakingProgress", "it has just got nodes again", {**resumed, STEP: "50x90"}, 49),
        Case("PTJJobNotMakingProgress", "it got nodes again long ago", {**resumed, STEP: "50x90"}, 60, stuck),
        Case("PTJJobNotMakingProgress", "its steps take half an hour", {**PLACED, **LONG_STEPS}, 149),
        Case("PTJJobNotMakingProgress", "it resumes slowly", {**RESUMED, STEP: f"50x{LONG}"}, 108),
        Case("PTJJobNotMakingProgress", "it resumes, and hangs", {**RESUMED, STEP: f"50x{LONG}"}, 117, stuck),
        Case("PTJJobNotMakingProgress", "its first steps are long", {**PLACED, STEP: "_x30 1x7 2x7 3x7"}, 37),
        Case("PTJJobNotMakingProgress", "even long steps end", {**PLACED, **LONG_STEPS}, 270, stuck),
        Case(
            "PTJJobNotTraining",
            "two ranks are missing",
            {**PLACED, total: "8x60", training: "6x60"},
            40,
            Firing("ml/llama has had nodes for 30 minutes, and 2 of its ranks do not train."),
        ),
        Case("PTJJobNotTraining", "it recovers", {**PLACED, total: "8x60", training: "6x20 8x40"}, 40),
        Case(
            "PTJJobStalled",
            "stalled",
            condition("Stalled"),
            10,
            Firing("ml/llama has the condition Stalled. Its message says why."),
        ),
        Case("PTJJobStalled", "not stalled", condition("Stalled", "False"), 10),
        Case(
            "PTJRescaleStuck",
            "for long",
            {**PLACED, **condition("Rescaling")},
            20,
            Firing("ml/llama has been resizing for 15 minutes."),
        ),
        Case("PTJRescaleStuck", "not yet for long", {**PLACED, **condition("Rescaling")}, 14),
        Case("PTJRescaleStuck", "it waits for nodes", {**condition("Placed", "False"), **condition("Rescaling")}, 20),
        Case(
            "PTJQueueWaitLong",
            "more than an hour",
            {of_job("ptj_job_queued_timestamp_seconds"): "60x100"},
            70,
            Firing("ml/llama has been waiting for nodes for 1h 9m 0s."),
        ),
        Case("PTJQueueWaitLong", "less than an hour", {of_job("ptj_job_queued_timestamp_seconds"): "60x100"}, 50),
    ]


def restart_cases() -> list[Case]:
    """Cases of alerts about restarts."""
    rescaled = of_job("ptj_job_restarts_total", cause="Rescaled")
    return [
        Case(
            "PTJJobRestarted",
            "the first restart",
            {**INFO, RESTARTS: "_x10 1x60"},
            14,
            Firing("ml/llama has restarted 1 times after failures in 15 minutes."),
        ),
        Case("PTJJobRestarted", "a while later", {**INFO, RESTARTS: "_x10 1x60"}, 40),
        Case("PTJJobRestarted", "rescales do not count", {**INFO, rescaled: "_x10 1x60"}, 14),
        Case(
            "PTJRestartLoop",
            "three in an hour",
            {**INFO, RESTARTS: "_x10 1x10 2x10 3x100"},
            35,
            Firing("ml/llama has restarted 3 times after failures in one hour."),
        ),
        Case(
            "PTJRestartLoop",
            "another process leads",
            {
                f'{RESTARTS[:-1]},instance="a"}}': "3x31",
                f'{RESTARTS[:-1]},instance="b"}}': "_x30 3x30",
                **INFO,
            },
            31,
        ),
        Case("PTJRestartLoop", "two in an hour", {**INFO, RESTARTS: "_x10 1x10 2x100"}, 35),
        Case("PTJRestartLoop", "three in a day", {**INFO, RESTARTS: "_x10 1x70 2x70 3x100"}, 155),
    ]


def checkpoint_cases() -> list[Case]:
    """Cases of the alert about old checkpoints."""
    saved, every = of_job("ptj_job_last_checkpoint_timestamp_seconds"), of_job("ptj_job_checkpoint_interval_seconds")
    intervals = of_job("ptj_job_checkpoint_interval_steps")
    waited = placed_from(200)
    continued = {of_job("ptj_job_resumed_from_step"): "5000x90", intervals: "10x90"}
    stale = Firing(
        "The latest checkpoint of ml/llama is much older than its interval. A failure now repeats all steps since then."
    )
    return [
        Case("PTJCheckpointStale", "it is old", {**PLACED, saved: "60x90", every: "300x90"}, 45, stale),
        Case(
            "PTJCheckpointStale",
            "there is none",
            {**PLACED, STEP: "40x90", intervals: "10x90"},
            10,
            stale,
        ),
        Case(
            "PTJCheckpointStale",
            "the job has just resumed",
            {**RESUMED, saved: f"1200x{LONG}", every: f"900x{LONG}"},
            140,
        ),
        Case(
            "PTJCheckpointStale",
            "the job has resumed, and saves none",
            {**RESUMED, saved: f"1200x{LONG}", every: f"900x{LONG}"},
            155,
            stale,
        ),
        Case("PTJCheckpointStale", "it is saved again and again", {**PLACED, saved: "0+60x90", every: "300x90"}, 45),
        Case(
            "PTJCheckpointStale",
            "the job was suspended for long, and trains again",
            {**waited, saved: "60x300", every: "_x200 300x100"},
            215,
        ),
        Case(
            "PTJCheckpointStale",
            "none is saved since it was suspended",
            {**waited, saved: "60x300", every: "_x200 300x100"},
            245,
            stale,
        ),
        Case("PTJCheckpointStale", "the interval is long", {**PLACED, saved: "60x90", every: "3600x90"}, 45),
        Case(
            "PTJCheckpointStale",
            "the first one is not due",
            {**PLACED, STEP: "20x90", intervals: "10x90"},
            10,
        ),
        Case(
            "PTJCheckpointStale",
            "the first one after that of another run is not due",
            {**PLACED, **continued, STEP: "5020x90"},
            10,
        ),
        Case(
            "PTJCheckpointStale",
            "there is none since that of another run",
            {**PLACED, **continued, STEP: "5040x90"},
            10,
            stale,
        ),
    ]


def goodput_cases() -> list[Case]:
    """Cases of the alert about the time that went into steps."""
    seconds = {cause: of_job("ptj_job_seconds_total", cause=cause) for cause in ("Training", "Restarting", "Queued")}
    return [
        Case(
            "PTJGoodputLow",
            "half of the time",
            {**INFO, seconds["Training"]: "0+30x250", seconds["Restarting"]: "0+30x250"},
            200,
            Firing("ml/llama has spent 50% of the last 6 hours on steps that count."),
        ),
        Case(
            "PTJGoodputLow",
            "little is lost",
            {**INFO, seconds["Training"]: "0+57x250", seconds["Restarting"]: "0+3x250"},
            200,
        ),
        Case(
            "PTJGoodputLow",
            "it waits for nodes",
            {**INFO, seconds["Training"]: "0+57x250", seconds["Queued"]: "0+600x250"},
            200,
        ),
        Case(
            "PTJGoodputLow",
            "it is deleted",
            {PRESENT: "1x180", seconds["Training"]: "0+30x180", seconds["Restarting"]: "0+30x180"},
            250,
        ),
        Case(
            "PTJGoodputLow",
            "it has completed",
            {
                **INFO,
                **condition("Complete"),
                seconds["Training"]: "0+30x180 5400x200",
                seconds["Restarting"]: "0+30x180 5400x200",
            },
            250,
        ),
        Case(
            "PTJGoodputLow",
            "another job had the name",
            {**TWO_JOBS, seconds["Training"]: "0+30x250", seconds["Restarting"]: "0+30x250"},
            200,
        ),
        Case(
            "PTJGoodputLow", "a new job", {**INFO, seconds["Training"]: "0+30x90", seconds["Restarting"]: "0+30x90"}, 85
        ),
    ]


def speed_cases() -> list[Case]:
    """Cases of alerts about speed."""
    tokens, slow = of_job("ptj_tokens_total"), "0+60000x240 14430000+30000x60"
    return [
        Case(
            "PTJThroughputDrop",
            "half as fast",
            {**PLACED, tokens: slow, RANKS: "8x400", TRAINING: "8x400"},
            275,
            Firing(
                "ml/llama trains on 62.5 tokens per second and GPU: less than 80% of the median of the last 6 hours."
            ),
        ),
        Case(
            "PTJThroughputDrop",
            "another job had the name",
            {**PLACED, **TWO_JOBS, tokens: slow, RANKS: "8x400", TRAINING: "8x400"},
            275,
        ),
        Case(
            "PTJThroughputDrop",
            "as fast as before",
            {**PLACED, tokens: "0+60000x300", RANKS: "8x400", TRAINING: "8x400"},
            275,
        ),
        Case(
            "PTJThroughputDrop",
            "half of the GPUs",
            {**PLACED, tokens: slow, RANKS: "8x240 4x100", TRAINING: "8x240 4x100"},
            275,
        ),
        Case(
            "PTJThroughputDrop",
            "it has restarted",
            {**PLACED, tokens: "0+60000x240 14400000x4 14460000+60000x60", RANKS: "8x400", TRAINING: "8x239 0x4 8x60"},
            253,
        ),
        Case(
            "PTJStraggler",
            "one of three ranks",
            {**PLACED, slow_rank("0"): "1x30", slow_rank("1"): "1x30", slow_rank("2"): "1x5 1.5x25"},
            20,
            Firing(
                "Rank 2 of ml/llama (pod llama-w2-0, 10.0.0.2:9464) computes 1.5 times as long as the median of the "
                "ranks. All others wait for it.",
                {**JOB, "rank": "2", "pod": "llama-w2-0", "instance": "10.0.0.2:9464"},
            ),
        ),
        Case("PTJStraggler", "for a moment", {**PLACED, slow_rank("2"): "1x5 1.5x5 1x25"}, 20),
        Case("PTJStraggler", "a little slower", {**PLACED, slow_rank("2"): "1.2x30"}, 20),
        Case("PTJStraggler", "a stage has more to compute", {**PLACED, **two_stages("1.5x30", "1.5x30")}, 20),
        Case(
            "PTJStraggler",
            "a rank is slower than its stage",
            {**PLACED, **two_stages("1.5x30", "2.5x30")},
            20,
            Firing(
                "Rank 3 of ml/llama (pod llama-w3-0, 10.0.0.3:9464) computes 2.5 times as long as the median of the "
                "ranks. All others wait for it.",
                {**JOB, "rank": "3", "pod": "llama-w3-0", "instance": "10.0.0.3:9464"},
            ),
        ),
    ]


def loss_and_placement_cases() -> list[Case]:
    """Cases of alerts about the loss and the placement."""
    loss = of_job("ptj_loss")
    cost, bound = of_job("ptj_job_placement_cost"), of_job("ptj_job_placement_cost_lower_bound")
    straddling = of_job("ptj_job_straddling_groups", kind="replica")
    return [
        Case(
            "PTJLossNaN",
            "NaN",
            {loss: "2 2 NaN NaN NaN NaN"},
            4,
            Firing("The loss of ml/llama is NaN or infinite. Further steps are useless."),
        ),
        Case(
            "PTJLossNaN",
            "infinite",
            {loss: "2 2 +Inf +Inf +Inf +Inf"},
            4,
            Firing("The loss of ml/llama is NaN or infinite. Further steps are useless."),
        ),
        Case("PTJLossNaN", "a number", {loss: "2x10"}, 4),
        Case(
            "PTJPlacementFragmented",
            "twice the bound",
            {**PLACED, cost: "20x60", bound: "10x60", straddling: "2x60"},
            40,
            Firing("The placement of ml/llama costs 2 times what is possible on the same nodes."),
        ),
        Case(
            "PTJPlacementFragmented",
            "near the bound",
            {**PLACED, cost: "12x60", bound: "10x60", straddling: "2x60"},
            40,
        ),
        Case(
            "PTJPlacementFragmented",
            "no group leaves",
            {**PLACED, cost: "20x60", bound: "10x60", straddling: "0x60"},
            40,
        ),
    ]


def slow_rank(rank: str, stage: int = 0) -> str:
    """The straggler ratio of a rank."""
    where = {"pod": f"llama-w{rank}-0", "instance": f"10.0.0.{rank}:9464"}
    return of_job("ptj_rank_straggler_ratio", rank=rank, stage=str(stage), **where)


def two_stages(first: str, second: str) -> dict[str, str]:
    """Two replicas of a pipeline with two stages: the ratios of the ranks of the second stage."""
    return {
        slow_rank("0"): "0.5x30",
        slow_rank("1", 1): first,
        slow_rank("2"): "0.5x30",
        slow_rank("3", 1): second,
    }


CASES = [
    *operator_cases(),
    *configuration_cases(),
    *progress_cases(),
    *restart_cases(),
    *checkpoint_cases(),
    *goodput_cases(),
    *speed_cases(),
    *loss_and_placement_cases(),
]
