"""What `make gpu` does with what its parts print, and how a profile names kernels. The parts themselves need a GPU."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._entry_process import EntryProcess
from benchmarks._gpu_settings import GOALS, goal_on
from benchmarks._gpu_throughput import failed
from benchmarks._step_profile import Idle, Kernel, idle_times, kind_of, summarize
from benchmarks.gpu import Part, Ran, card_name, limited, parts, report, run_all, run_part
from tests.worker.entry_outcome import outcome


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("Memcpy HtoD (Pageable -> Device)", "pageable copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::cunn_SoftMaxForward<4, float, float, float>", "loss"),
        ("multi_tensor_apply_kernel", "optimizer"),
        ("triton_poi_fused_mul_silu_0", "other"),
        ("triton_red_fused__to_copy_amax_exp_sub_sum_unsqueeze_0", "other"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_profile_adds_up() -> None:
    kernels = [Kernel("gemm", 4, 0.3), Kernel("flash_fwd", 2, 0.1), Kernel("cublasLt", 2, 0.2)]
    found = summarize(kernels, step_seconds=0.4, steps=2)
    assert found.busy_seconds == pytest.approx(0.3)
    assert found.kinds == pytest.approx({"products": 5 / 6, "attention": 1 / 6})
    assert [kernel.name for kernel in found.kernels] == ["gemm", "cublasLt", "flash_fwd"]


def test_idle_times_are_those_in_which_no_stream_runs_a_kernel() -> None:
    spans = [("c", 7.0, 8.0), ("a", 1.0, 2.0), ("long", 1.5, 5.0), ("b", 3.0, 4.0), ("b", 8.5, 9.0), ("c", 9.0, 9.5)]
    assert idle_times(spans) == [Idle("c", 1, 2.0), Idle("b", 1, 0.5)]
    assert idle_times([]) == []


def test_a_part_that_fails_or_takes_too_long_is_reported() -> None:
    failed = run_part(Part("a", (sys.executable, "-c", "print('seen'); raise SystemExit(3)"), 60))
    assert (failed.outcome, failed.text) == ("failed with exit status 3", "seen\n")
    slow = run_part(Part("b", (sys.executable, "-uc", "print('begun'); import time; time.sleep(60)"), 3))
    assert slow.outcome == "did not end within 3 s"
    text = report({"device": "some GPU"}, [failed, slow, Ran("c", "succeeded", 1.0, "\n".join(map(str, range(100))))])
    assert "- device: some GPU" in text
    assert "It failed with exit status 3 after" in text
    assert "\n99\n" in text
    assert "\n10\n" not in text  # the last lines only


def test_processes_that_a_part_leaves_behind_neither_hold_it_up_nor_survive(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    leaves = (
        "import subprocess, sys; "
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(pid)!r}, 'w').write(str(left.pid)); print('done')"
    )
    ran = run_part(Part("a", (sys.executable, "-c", leaves), 300))
    assert (ran.outcome, ran.text) == ("succeeded", "done\n")
    left = Path("/proc", pid.read_text(), "stat")
    while is_running(left):
        time.sleep(0.05)  # until the test's limit


def is_running(stat: Path) -> bool:
    """Whether a process runs: one that was killed stays as a zombie until init reaps it."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_part_that_crashes_or_cannot_start_is_reported() -> None:
    crashed = run_part(Part("a", (sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"), 60))
    assert crashed.outcome == "was ended by SIGSEGV"
    assert "could not be started" in run_part(Part("b", ("/nowhere/python",), 60)).outcome


def test_a_report_begins_with_the_outcomes_and_names_every_failed_test() -> None:
    printed = [f"FAILED tests/cuda/test_a.py::test_{number} - Error" for number in range(60)]
    text = report({"device": "some GPU"}, [Ran("Tests", "failed with exit status 1", 9.0, "\n".join(printed))])
    assert "| Tests | failed with exit status 1 | 9 |" in text
    assert all(line in text for line in printed)


def printing(title: str, text: str, *, status: int = 0, **options: Any) -> Part:
    return Part(title, (sys.executable, "-c", f"print({text!r}); raise SystemExit({status})"), 60, **options)


def test_a_failed_part_costs_no_other_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    planned = [printing("Compiler", "found"), printing("b", "why", status=1), printing("c", "c", compiles=True)]
    saved: list[list[str]] = []
    ran = run_all(planned, None, lambda so_far: saved.append([one.outcome for one in so_far]))
    assert [one.outcome for one in ran] == ["succeeded", "failed with exit status 1", "succeeded"]
    assert [len(so_far) for so_far in saved] == [1, 2, 3]
    assert "b: failed with exit status 1 after 0 s: why" in capsys.readouterr().out


def test_without_a_c_compiler_parts_that_compile_are_not_run() -> None:
    """What Triton says where there is none."""
    said = "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    planned = [printing("Compiler", said, status=1), printing("b", "b", compiles=True), printing("c", "c")]
    ran = run_all(planned, None, lambda _: None)
    assert [one.outcome for one in ran] == ["failed with exit status 1", "was not run", "succeeded"]
    assert said in ran[1].text
    assert "needs `gcc` or `clang`" in ran[1].text


def test_parts_share_the_time_that_is_given() -> None:
    planned = parts(Path(), "card", quick=False, parity_seconds=600)
    needed = sum(part.usual for part in planned)
    for number, part in enumerate(planned):
        later = planned[number + 1 :]
        left = sum(one.usual for one in later) + 4 * part.usual
        # One that takes too long leaves the later ones what they usually need.
        assert limited(part, later, left).limit + sum(one.usual for one in later) <= left
    first, *later = planned
    assert limited(first, later, 10).limit == 10
    assert limited(planned[-1], [], 100_000) == planned[-1]
    # A machine that is slower than usual still shows what matters most, at the cost of the last parts.
    for part in planned[:4]:
        limit = limited(part, planned[planned.index(part) + 1 :], needed / 2).limit
        assert limit >= part.usual * (1.0 if part.shortens else 1.5) or limit == needed / 2


def test_a_part_for_which_no_time_is_left_is_not_begun() -> None:
    planned = [printing("Compiler", "found"), printing("b", "b", usual=500), printing("c", "c", usual=4)]
    ran = run_all(planned, 60, lambda _: None)
    assert [one.outcome for one in ran] == ["succeeded", "was not run", "succeeded"]
    assert "it usually takes 500 s" in ran[1].text


def test_a_slow_probe_of_the_compiler_is_no_reason_not_to_compile() -> None:
    slow = Part("Compiler", (sys.executable, "-c", "import time; time.sleep(60)"), 1)
    ran = run_all([slow, printing("b", "b", compiles=True)], None, lambda _: None)
    assert [one.outcome for one in ran] == ["did not end within 1 s", "succeeded"]


def test_the_parity_matrix_gets_the_seconds_that_other_parts_leave() -> None:
    planned = parts(Path(), "card", quick=False, parity_seconds=600)
    number = next(number for number, part in enumerate(planned) if part.title == "Parity")

    def seconds(left: float) -> float:
        command = limited(planned[number], planned[number + 1 :], left).command
        return float(command[command.index("--seconds") + 1])

    others = sum(part.usual for part in planned[number + 1 :])
    assert seconds(others + 200) == 150
    assert 0 < seconds(others) < 60
    assert seconds(5000) == 600


def test_files_have_the_name_of_the_card() -> None:
    assert card_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    written = [word for part in parts(Path("out"), "card", quick=False, parity_seconds=60) for word in part.command]
    files = [word for word in written if word.startswith("out/")]
    assert len({*files}) == 2
    assert all("card" in file for file in files)


def test_goals_on_other_gpus_are_in_proportion() -> None:
    for model, goal in GOALS.items():
        assert goal_on("NVIDIA H200", model, recomputed=4 / 3) == pytest.approx(goal)
        h100 = goal_on("NVIDIA H100 80GB HBM3", model)
        assert h100 is not None
        assert 0.8 * goal < h100 < 0.95 * goal
        assert goal_on("NVIDIA H100 80GB HBM3", model, recomputed=4 / 3) == pytest.approx(h100 * 3 / 4)
        assert goal_on("unknown", model) is None


def test_an_entry_that_breaks_its_process_costs_no_other_its_result() -> None:
    process = EntryProcess(outcome, 600)
    try:
        first = process.outcome("fine", 5, quick=False)
        assert first[1:] == ((5, False), "")
        assert process.outcome("fine", 2, quick=True) == (first[0], (2, True), "")
        assert process.outcome("dies", 5, quick=False) == (None, None, "its process ended with exit code 3")
        second = process.outcome("fine", 5, quick=False)
        assert second[0] != first[0]
        assert "illegal memory access" in process.outcome("loses the device", 5, quick=False)[2]
        assert process.outcome("fine", 5, quick=False)[0] != second[0]
    finally:
        process.close()
    hanging = EntryProcess(outcome, 1)
    assert hanging.outcome("hangs", 5, quick=False) == (None, None, "did not end within 1 s")


def test_runs_that_a_gpu_is_too_small_for_have_not_failed() -> None:
    numbers = {"a": {"problem": "needs a GPU of 139 GiB"}, "b": {"problem": "out of memory"}, "c": {"seconds": [1.0]}}
    assert failed(numbers) == ["b"]


def help_of(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `python -m module --help` prints. Our modules run in this process, which has imported torch."""
    if module == "pytest":
        command = [sys.executable, "-m", module, "--help"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code in (None, 0), module
    return capsys.readouterr().out


def test_every_part_is_a_command_of_this_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    helped: dict[str, str] = {}
    for part in parts(tmp_path, "card", quick=True, parity_seconds=60):
        if part.command[1] == "-c":
            continue
        module = part.command[2]
        if module not in helped:
            helped[module] = help_of(module, monkeypatch, capsys)
        for flag in (word.partition("=")[0] for word in part.command[3:] if word.startswith("--")):
            assert flag in helped[module], (module, flag)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert not list(tmp_path.iterdir())
