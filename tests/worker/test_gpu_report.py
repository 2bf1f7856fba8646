"""What `make gpu` does with what its parts print, and how a profile names kernels. The parts themselves need a GPU."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import Part, Ran, parts, report, run_part
from benchmarks.profile_step import Kernel, kind_of, summarize


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
    for part in parts(tmp_path, quick=True, parity_seconds=60):
        module = part.command[2]
        if module not in helped:
            helped[module] = help_of(module, monkeypatch, capsys)
        for flag in (word for word in part.command[3:] if word.startswith("--")):
            assert flag in helped[module], (module, flag)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert not list(tmp_path.iterdir())
