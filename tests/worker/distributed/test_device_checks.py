"""Which formats which device takes: a table, and that a rank asks before it meets others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol.messages import FailureKind
from meshwright_worker.distributed.device import DeviceProperties, device_properties
from meshwright_worker.distributed.device_checks import (
    DeviceMissingError,
    compiler_problems,
    device_problems,
    validate_device,
)
from meshwright_worker.rank.failures import InvalidRunError, classify
from meshwright_worker.trainer import train as training_loop
from tests.distributed.cases import Recorder
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import tasks_of

CPU = None
MAXWELL, TURING, AMPERE, ADA, HOPPER, BLACKWELL = (5, 2), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("capability", "precision", "fp8", "nearest"),
    [
        *((CPU, precision, False, None) for precision in Precision),
        (CPU, Precision.BF16, True, None),
        *((capability, Precision.FP32, False, None) for capability in (MAXWELL, TURING, HOPPER)),
        *((capability, Precision.FP64, False, None) for capability in (MAXWELL, TURING, HOPPER)),
        *((capability, Precision.BF16, False, None) for capability in (AMPERE, (8, 6), ADA, HOPPER, BLACKWELL)),
        (TURING, Precision.BF16, False, "nearest: fp16, fp32"),
        ((7, 0), Precision.BF16, False, "nearest: fp16, fp32"),
        (MAXWELL, Precision.BF16, False, "nearest: fp32"),
        (TURING, Precision.FP16, False, None),
        ((5, 3), Precision.FP16, False, None),
        (MAXWELL, Precision.FP16, False, "nearest: fp32"),
        *((capability, Precision.BF16, True, None) for capability in (ADA, HOPPER, BLACKWELL)),
        (AMPERE, Precision.BF16, True, "leave it out, with `training.precision: bf16`"),
        ((8, 6), Precision.FP32, True, "leave it out, with `training.precision: bf16`"),
        (TURING, Precision.FP32, True, "leave it out, with `training.precision: fp32`"),
    ],
)
def test_what_a_device_takes(
    capability: tuple[int, int] | None, precision: Precision, fp8: bool, nearest: str | None
) -> None:
    facts = DeviceProperties(capability, "This GPU", 8)
    problems = [*device_problems(facts, precision, fp8=fp8)]
    assert len(problems) == (nearest is not None)
    if nearest is not None:
        assert nearest in problems[0]
        assert ("`training.fp8`" if fp8 else f"`training.precision: {precision.value}`") in problems[0]
        assert "This GPU has" in problems[0]


def test_each_problem_is_reported() -> None:
    problems = [*device_problems(DeviceProperties(TURING, "T4", 4), Precision.BF16, fp8=True)]
    assert [problem.split("`")[1] for problem in problems] == ["training.precision: bf16", "training.fp8"]


@pytest.mark.parametrize(
    ("properties", "environment", "there", "says"),
    [
        (DeviceProperties(), {}, "gcc", "a C++ compiler on a CPU, and `workers.image` has no g++: add one"),
        (DeviceProperties(), {"CXX": "clang++ -O1"}, "g++", "has no clang++ -O1"),
        (DeviceProperties(), {}, "g++", ""),
        (DeviceProperties(HOPPER, "H100", 8), {}, "g++", "a C compiler on a GPU, and `workers.image` has no gcc or"),
        (DeviceProperties(HOPPER, "H100", 8), {"CC": "tcc"}, "gcc", "has no tcc"),
        (DeviceProperties(HOPPER, "H100", 8), {}, "clang", ""),
    ],
)
def test_compiled_layers_need_a_compiler(
    properties: DeviceProperties, environment: dict[str, str], there: str, says: str
) -> None:
    found = [*compiler_problems(properties, environment, lambda name: name if name == there else None)]
    assert len(found) == bool(says)
    assert says in "".join(found)


def test_a_run_that_compiles_is_rejected_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = small_run(training={"compile": True})
    with pytest.raises(InvalidRunError, match=r"`training.compile` needs a C\+\+ compiler .* no no-such-compiler"):
        validate_device(DeviceProperties(), 1, run.training)
    validate_device(DeviceProperties(), 1, small_run().training)


def test_gpus_that_are_missing_may_come_back() -> None:
    run = small_run(data=2, precision=Precision.BF16)
    with pytest.raises(DeviceMissingError, match=r"gpusPerWorker: 8`: the pod sees 7 GPUs; nearest: 7") as caught:
        validate_device(DeviceProperties(HOPPER, "H100", 7), 8, run.training)
    assert classify(caught.value) is FailureKind.ERROR
    validate_device(DeviceProperties(HOPPER, "H100", 8), 8, run.training)
    validate_device(DeviceProperties(), 8, run.training)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_says_so() -> None:
    assert device_properties(3) == DeviceProperties(None, "CPU", 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tells_its_capability() -> None:
    count = torch.cuda.device_count()
    assert device_properties(count + 7) == DeviceProperties(
        torch.cuda.get_device_capability(count - 1), torch.cuda.get_device_name(), count
    )


def test_a_rank_checks_its_device_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[object] = []
    joined: Callable[[object], None] = met.append
    monkeypatch.setattr(training_loop, "join_mesh", joined)
    monkeypatch.setattr(training_loop, "device_properties", lambda rank: DeviceProperties(TURING, "T4", 2))
    run = small_run(data=2, precision=Precision.BF16)
    with pytest.raises(InvalidRunError, match=r"`training.precision: bf16` needs .* 8\.0, and T4"):
        training_loop.train(tasks_of(run, port=1)[1], Recorder())
    assert not met
