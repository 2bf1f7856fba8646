"""What a command's report lines and log lines say about its progress."""

from __future__ import annotations

import math
import time

import pytest

from meshwright.api.progress_patterns import DEFAULT_PATTERNS, FRAMEWORK_PATTERNS, pattern_problem
from meshwright.api.spec import ProgressSpec
from meshwright_worker.command.log_patterns import MAX_SEARCHED, LogPatterns
from meshwright_worker.command.progress import CommandProgress
from meshwright_worker.command.report_line import (
    MAX_LINE,
    ReportedStep,
    ReportedWork,
    ReportLineError,
    parse_line,
    parse_report,
)
from meshwright_worker.rank.messages import AtWork, CheckpointSaved, StepDone
from meshwright_worker.rank.task import Work

MEGATRON = (
    " [2026-01-01 10:00:00] iteration       10/     100 | consumed samples:         2560 | elapsed time per iteration "
    "(ms): 512.3 | learning rate: 1.500000E-04 | global batch size:   256 | lm loss: 7.123456E+00 | loss scale: 1.0 |"
)


RED, GREEN, ORANGE, BLUE, RESET = "\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[34m", "\x1b[39m"
TORCHTITAN = (
    f"[titan] 2026-01-01 10:00:00,123 - root - INFO - {RED}step: 10  {GREEN}loss:  7.1234  {ORANGE}grad_norm:  1.2345  "
    f"memory: 11.65GiB(12.27%)  {BLUE}tps: 6,300  tflops: 91.04  mfu: 9.21%{RESET}"
)
DEEPSPEED_PIPELINE = "steps: 10 loss: 4.1235 iter time (s): 0.512 samples/sec: 31.250"
DEEPSPEED_ENGINE = (
    "[2026-01-01 10:00:00,123] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], "
    "mom=[(0.9, 0.999)]"
)
NANOTRON = (
    "01/01/2026 10:00:00 [INFO|DP=0|PP=0|TP=0]: iteration: 15 / 100 | consumed_tokens: 61.4K | "
    "elapsed_time_per_iteration_ms: 73.2 | tokens_per_sec: 56K | tokens_per_sec_per_gpu: 14K | global_batch_size: 16 | "
    "lm_loss: 10.8 | lr: 0.0003 | model_tflops_per_gpu: 0.41 | hardware_tflops_per_gpu: 0.41 | grad_norm: 0.51"
)
LIGHTNING = "Epoch 2:  50%|█████     | 4/8 [00:01<00:01,  4.10it/s, v_num=0, train_loss=2.310]"


def test_a_report_may_have_only_a_step() -> None:
    assert parse_report(b'{"step": 3}') == ReportedStep(3)
    full = b'{"step": 3, "loss": 2.5, "tokens": 4096, "learning_rate": 1e-3, "total_steps": 9, "checkpoint": "/c/3"}'
    assert parse_report(full) == ReportedStep(3, 2.5, 4096, 1e-3, 9, "/c/3")
    assert parse_report(b'{"step": 3, "loss": null, "grad": {"x": 1}}') == ReportedStep(3)


@pytest.mark.parametrize(
    ("number", "loss"),
    [(b"9" * 400, math.nan), (b"-" + b"9" * 400, math.nan), (b"1e400", math.inf), (b"1e300", math.nan), (b"7", 7.0)],
)
def test_a_number_may_be_larger_than_a_float(number: bytes, loss: float) -> None:
    found = parse_report(b'{"step": 1, "loss": ' + number + b"}").loss
    assert found == pytest.approx(loss, nan_ok=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"step 3", "must be a JSON object"),
        (b"[3]", "must be a JSON object"),
        (b"[" * 3000, "must be a JSON object"),
        (b'{"loss": 3}', "`step` is required"),
        (b'{"step": "3"}', "`step` must be an integer of at least 0, got '3'"),
        (b'{"step": -1}', "`step` must be an integer"),
        (b'{"step": true}', "`step` must be an integer"),
        (b'{"step": 1, "loss": "low"}', "`loss` must be a number, got 'low'"),
        (b'{"step": 1, "checkpoint": 7}', "`checkpoint` must be a path"),
        (rb'{"step": 1, "checkpoint": "/c/caf\udce9"}', "`checkpoint` must be a path in UTF-8"),
        (b'{"step": 1, "x": "' + b"x" * MAX_LINE + b'"}', f"at most {MAX_LINE} bytes"),
    ],
)
def test_a_report_that_is_invalid_names_its_field(line: bytes, message: str) -> None:
    with pytest.raises(ReportLineError, match=message):
        parse_report(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step 12 loss 3.4", ReportedStep(12, 3.4)),
        ("Step: 12, Loss: 3.4e-1, time 3", ReportedStep(12, 0.34)),
        ("step 12/100 loss=3.4012 lr=0.003", ReportedStep(12, 3.4012, total_steps=100)),
        ("2026-01-01 INFO [trainer] step=12 of 100 | train_loss=3.4", ReportedStep(12, 3.4, total_steps=100)),
        ("step 500: train loss 4.2874, val loss 4.2823", ReportedStep(500, 4.2874)),
        ("step 500: validation loss 4.2823, loss 4.1", ReportedStep(500, 4.1)),
        ("step 500/600 eval_loss: 4.2823", ReportedStep(500, total_steps=600)),
        ("after step 50, held out: loss 3.3608", ReportedStep(50)),
        ("iter 250: loss 2.1034, time 120.1ms, mfu 30.2%", ReportedStep(250, 2.1034)),
        (MEGATRON, ReportedStep(10, 7.123456, learning_rate=1.5e-4, total_steps=100)),
        (" 12%|█▏        | 12/100 [00:10<01:20,  1.10it/s]", ReportedStep(12, total_steps=100)),
        (TORCHTITAN, ReportedStep(10, 7.1234)),
        (DEEPSPEED_PIPELINE, ReportedStep(10, 4.1235)),
        (DEEPSPEED_ENGINE, ReportedStep(10, learning_rate=1e-3)),
        (NANOTRON, ReportedStep(15, 10.8, learning_rate=3e-4, total_steps=100)),
        (LIGHTNING, ReportedStep(2 * 8 + 4, 2.31)),
        ("Epoch 0: 100%|██████████| 8/8 [00:00<00:00, 123.45it/s, v_num=0]", ReportedStep(8)),
    ],
)
def test_common_lines_are_read(line: str, expected: ReportedStep) -> None:
    assert LogPatterns(None).read(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "Map:  50%|█████     | 500/1000 [00:01<00:01, 400.00 examples/s]",
        "loaded 12 steps of 100 from /data/loss.txt",
        "the loss is 3",
        "footstep 12 loss 3",
        "",
    ],
)
def test_other_lines_are_left_alone(line: str) -> None:
    assert LogPatterns(None).read(line) is None


@pytest.mark.parametrize(
    ("framework", "line"),
    [
        ("MegatronLM", MEGATRON),
        ("TorchTitan", TORCHTITAN),
        ("DeepSpeed", DEEPSPEED_PIPELINE),
        ("DeepSpeed", DEEPSPEED_ENGINE),
        ("Nanotron", NANOTRON),
        ("Transformers", " 12%|█▏        | 12/100 [00:10<01:20,  1.10it/s]"),
        ("Lightning", LIGHTNING),
    ],
)
def test_each_framework_has_its_patterns(framework: str, line: str) -> None:
    own = LogPatterns(list(FRAMEWORK_PATTERNS[framework])).read(line)
    assert own is not None
    assert own == LogPatterns(None).read(line), "no other pattern takes the line first"
    others = [pattern for name, some in FRAMEWORK_PATTERNS.items() if name != framework for pattern in some]
    assert LogPatterns(others).read(line) is None


def test_patterns_may_be_set_as_a_job_sets_them() -> None:
    for some in FRAMEWORK_PATTERNS.values():
        assert ProgressSpec(patterns=list(some)).patterns == list(some)


def test_a_line_with_only_a_loss_belongs_to_the_step_before() -> None:
    patterns = LogPatterns(None)
    line = "{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.5}"
    assert patterns.read(line) is None
    assert patterns.read(" 10%|#         | 10/100 [00:10<01:20,  1.10it/s]") == ReportedStep(10, total_steps=100)
    assert patterns.read(line) == ReportedStep(10, 2.31, learning_rate=5e-5)
    assert patterns.read(" 50%|#####     | 4/8 [00:01<00:01,  4.10it/s]") is None, "the bar of an evaluation"


def test_patterns_of_the_job_replace_the_common_ones() -> None:
    patterns = LogPatterns([r"batch (?P<step>[\d,]+) -> (?P<loss>\S+) at (?P<tokens>\d+)"])
    assert patterns.read("Batch 1,200 -> 2.5 at 4096") == ReportedStep(1200, 2.5, 4096)
    assert patterns.read("step 12 loss 3.4") is None
    assert LogPatterns([]).read("step 12 loss 3.4") is None


def test_a_pattern_that_takes_exponential_time_is_stopped_and_dropped() -> None:
    patterns = LogPatterns([r"(?P<step>1)?(x+x+)+y", r"at (?P<step>\d+)"])
    line = "x" * MAX_SEARCHED
    started = time.thread_time()
    for _ in range(50):
        assert patterns.read(line) is None
    assert time.thread_time() - started < 5, "without a deadline it would not end"
    assert len(patterns._patterns) == 1
    assert patterns.read("at 7") == ReportedStep(7)


def test_common_patterns_take_little_time_on_long_lines() -> None:
    patterns = LogPatterns(None)
    for line in ("step " * 500, "iteration 1/ 2 | " + "learning rate: " * 100, "{'loss': 1" * 100, "1" * 2000):
        patterns.read(line)
    assert len(patterns._patterns) == len(DEFAULT_PATTERNS)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("step (?P<step>[0-9]+", "is not a regular expression: missing )"),
        ("(?i)(?P<step>[a-\uffffb-\uffffc-\uffffd-\uffffe-\uffff]+)", "has more than 4 ranges up to a character"),
        (
            r"(?P<step>a)(?si:[a-\uffffb-\uffff][c-\U0001ffffd-\uffff]-\uffff)",
            "has more than 4 ranges up to a character",
        ),
        (
            "(?P<speed>[0-9]+)",
            "has the unknown group `speed`: use step, loss, tokens, learning_rate, total_steps or epoch",
        ),
        ("step [0-9]+", "has neither the group `step` nor `loss`"),
        (r"step (?P<step>\d+)", ""),
    ],
)
def test_what_a_pattern_must_have(pattern: str, problem: str) -> None:
    assert pattern_problem(pattern).startswith(problem)
    if problem:
        with pytest.raises(ValueError, match="pattern 0"):
            ProgressSpec(patterns=[pattern])


def test_the_time_of_a_step_is_measured_between_reports() -> None:
    progress = CommandProgress()
    (first,) = progress.messages(ReportedStep(10, 3.0, 100, 1e-3, 50), 5.0)
    assert isinstance(first, StepDone)
    assert (first.report.step, first.report.seconds, first.report.total_steps) == (10, 0.0, 50)
    (second,) = progress.messages(ReportedStep(20), 10.0)
    assert isinstance(second, StepDone)
    assert second.report.seconds == 0.5
    assert math.isnan(second.report.loss)


def test_repetitions_and_floods_are_left_out() -> None:
    progress = CommandProgress()
    assert progress.messages(ReportedStep(1, 3.0), 1.0)
    assert progress.messages(ReportedStep(1, 3.0), 2.0) == []
    assert progress.messages(ReportedStep(2, 3.0), 2.0)
    assert progress.messages(ReportedStep(3, 3.0), 2.001) == []
    assert progress.messages(ReportedStep(4, 2.0), 2.1)
    (again,) = progress.messages(ReportedStep(4, 1.5), 2.101)
    assert isinstance(again, StepDone)
    assert again.report.loss == 1.5


def test_a_loss_that_is_not_a_number_is_repeated_no_more_often_than_another() -> None:
    progress = CommandProgress()
    assert [len(progress.messages(ReportedStep(1, math.nan), 10.0 + n / 1000)) for n in range(3)] == [1, 0, 0]
    assert len(progress.messages(ReportedStep(1, 2.0), 10.1)) == 1
    assert len(progress.messages(ReportedStep(1, math.nan), 10.2)) == 1


def test_the_last_step_of_a_flood_is_reported_at_the_end() -> None:
    progress = CommandProgress()
    assert progress.rest(0.5) == []
    progress.messages(ReportedStep(1, 3.0), 1.0)
    progress.messages(ReportedStep(2, 2.0), 1.001)
    progress.messages(ReportedStep(3, 1.0), 1.002)
    (last,) = progress.rest(1.004)
    assert isinstance(last, StepDone)
    assert (last.report.step, last.report.loss, last.report.seconds) == (3, 1.0, pytest.approx(0.002))
    assert progress.rest(2.0) == []
    progress.messages(ReportedStep(4, 0.5), 3.0)
    assert progress.rest(3.1) == [], "it was reported"


def test_a_checkpoint_is_reported_once() -> None:
    progress = CommandProgress()
    _, saved = progress.messages(ReportedStep(10, checkpoint="/c/10"), 1.0)
    assert saved == CheckpointSaved(10, "/c/10", 0.0)
    assert progress.messages(ReportedStep(10, checkpoint="/c/10"), 2.0) == []


def test_a_line_about_a_load_has_no_step() -> None:
    assert parse_line(b'{"work": "weights", "done": 3}') == ReportedWork("weights", 3)
    full = b'{"work": "checkpoint", "done": 3, "total": 9, "seconds": 1.5, "x": 1}'
    assert parse_line(full) == ReportedWork("checkpoint", 3, 9, 1.5)
    assert parse_line(b'{"step": 3, "work": "anything"}') == ReportedStep(3), "another program may use this name"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"work": "tea", "done": 3}', "`work` must be one of `verify`, `checkpoint`, `weights`, got 'tea'"),
        (b'{"work": ["weights"], "done": 3}', "`work` must be one of"),
        (b'{"work": "weights"}', "`done` is required with `work`"),
        (b'{"work": "weights", "done": -1}', "`done` must be an integer"),
        (b'{"work": "weights", "done": 3, "total": 2}', "`done` must be at most `total`, got 3 of 2"),
        (b'{"done": 3}', "`step` is required"),
    ],
)
def test_a_line_about_a_load_that_is_wrong_names_the_field(line: bytes, message: str) -> None:
    with pytest.raises(ReportLineError) as raised:
        parse_line(line)
    assert message in str(raised.value)


def test_loads_are_timed_from_their_first_line_unless_the_command_does_it() -> None:
    progress = CommandProgress()
    assert progress.load_messages(ReportedWork("verify", 1, 4), 100.0) == [AtWork(Work("verify", 1, 4, 1, 1, 0.1))]
    assert progress.load_messages(ReportedWork("verify", 2, 4), 100.001) == [], "too soon"
    assert progress.load_messages(ReportedWork("verify", 4, 4), 100.002) == [AtWork(Work("verify", 4, 4, 1, 1, 0.1))]
    assert progress.load_messages(ReportedWork("weights", 0), 110.0) == [AtWork(Work("weights", 0, None, 1, 1, 0.1))]
    assert progress.load_messages(ReportedWork("weights", 8), 112.0) == [AtWork(Work("weights", 8, None, 1, 1, 2.0))]
    (timed,) = progress.load_messages(ReportedWork("weights", 9, None, 7.0), 113.0)
    assert isinstance(timed, AtWork)
    assert timed.work is not None
    assert timed.work.seconds == 7.0


@pytest.mark.parametrize("seconds", [math.nan, -1.0, math.inf])
def test_a_time_that_makes_no_sense_does_not_leave_the_agent(seconds: float) -> None:
    (timed,) = CommandProgress().load_messages(ReportedWork("weights", 9, None, seconds), 114.0)
    assert isinstance(timed, AtWork)
    assert timed.work is not None
    assert timed.work.seconds == 0.1
