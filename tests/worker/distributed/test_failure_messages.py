"""Messages of NCCL, gloo and torch.distributed, each with the report that it is from, and whose failure they tell."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from meshwright.protocol.messages import FailureKind
from meshwright_worker.agent.mesh_generation import _kind_of_exit
from meshwright_worker.rank.failures import classify_output

LOST, OWN = FailureKind.PEER_LOST, FailureKind.ERROR


@dataclass(frozen=True)
class Reported:
    """A message, shortened, and the issue in which a user reported it."""

    source: str
    kind: FailureKind
    text: str


MESSAGES = (
    Reported(
        "github.com/NVIDIA/Megatron-LM/issues/1207",
        LOST,
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600013 milliseconds before timing out.",
    ),
    Reported(
        "github.com/OFA-Sys/OFA/issues/271",
        LOST,
        "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing "
        "out.",
    ),
    Reported(
        "github.com/sgl-project/sglang/issues/1693",
        LOST,
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG 3 Rank 5] Process group watchdog thread terminated with exception: [Rank 5] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=9141, OpType=_ALLGATHER_BASE, NumelIn=19008, NumelOut=152064, "
        "Timeout(ms)=600000) ran for 600020 milliseconds before timing out.",
    ),
    Reported(
        "github.com/tatsu-lab/stanford_alpaca/issues/207",
        LOST,
        "[E ProcessGroupNCCL.cpp:455] Some NCCL operations have failed or timed out. Due to the asynchronous nature of "
        "CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
        "[E ProcessGroupNCCL.cpp:460] To avoid data inconsistency, we are taking the entire process down.",
    ),
    Reported(
        "github.com/NVIDIA/nccl/issues/2076",
        LOST,
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a "
        "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.\nLast error:\n"
        "socketProgressOpt: Call to recv failed : Connection reset by peer",
    ),
    Reported(
        "github.com/NVIDIA/nccl/issues/1928",
        LOST,
        "[rank3]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely.\n[rank3]: Last error:\n[rank3]: NET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 113.",
    ),
    Reported(
        "github.com/NVIDIA/nccl/issues/795",
        LOST,
        "misc/socket.cc:538 NCCL WARN Net : Connection closed by remote peer",
    ),
    Reported(
        "github.com/NVIDIA/nccl/issues/1664",
        LOST,
        "NET/IBP:Got completion from peer with status=12 opcode=32698 len=32696 vendor err 129 (Send)",
    ),
    Reported(
        "github.com/NVIDIA/nccl/issues/1814",
        LOST,
        "NCCL WARN NET/IB : Got completion from peer with status=12 opcode=1 len=0 vendor err 129 (Send)",
    ),
    Reported(
        "github.com/pytorch/pytorch/issues/128680",
        LOST,
        "[rank1]:[E614 11:14:03.086670611 ProcessGroupNCCL.cpp:1319] [PG 0 Rank 1] Failed to get exception dump flag "
        "from the global store.Connection reset by peer",
    ),
    Reported(
        "github.com/vllm-project/vllm/pull/32139",
        LOST,
        "[rank2]:[W112 01:48:44.277417495 ProcessGroupNCCL.cpp:1771] [PG ID 0 PG GUID 0 Rank 2] Failed to check the "
        '"should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe',
    ),
    Reported(
        "github.com/sgl-project/sglang/issues/20859",
        LOST,
        "[rank12]:[W318 10:00:41.915284135 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=135): "
        "Connection reset by peer",
    ),
    Reported(
        "github.com/RVC-Project/Retrieval-based-Voice-Conversion-WebUI/issues/1882",
        LOST,
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        "[127.0.0.1]:10895",
    ),
    Reported(
        "github.com/RVC-Project/Retrieval-based-Voice-Conversion-WebUI/issues/1882",
        LOST,
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer",
    ),
    # Failures of this rank, its device or its pod.
    Reported(
        "github.com/hiyouga/LlamaFactory/issues/6953",
        OWN,
        "[rank144]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 144] ProcessGroupNCCL's watchdog got stuck for 600 seconds "
        "without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API hang "
        "blocking the watchdog",
    ),
    Reported(
        "github.com/NVIDIA/nccl/issues/1518",
        OWN,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-NzwJ7O (size 9637888)",
    ),
    Reported(
        "github.com/NVIDIA/nccl/issues/1241",
        OWN,
        "NCCL error in: ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version 2.17.1\nncclInvalidUsage: This usually "
        "reflects invalid usage of NCCL library.",
    ),
    Reported(
        "github.com/pytorch/pytorch/issues/111187",
        OWN,
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, "
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    ),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: f"{message.source} {message.kind}")
def test_messages_of_communication_libraries_are_recognized(message: Reported) -> None:
    assert classify_output(message.text) is message.kind


@pytest.mark.parametrize(
    "text",
    [
        "what():  [Rank 0] Process group watchdog thread terminated with exception: CUDA error: an illegal memory "
        "access was encountered\nNCCL communicator was aborted on rank 0.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: uncorrectable ECC error encountered\nNCCL communicator was aborted on rank 3.",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ],
)
def test_an_aborted_communicator_is_not_the_cause_of_a_failed_device(text: str) -> None:
    assert classify_output(text) is OWN


def test_a_rank_that_the_watchdog_aborts_is_not_the_one_to_blame() -> None:
    tail = next(message.text for message in MESSAGES if "terminate called" in message.text).splitlines()
    assert _kind_of_exit(-signal.SIGABRT, tail) is LOST
    assert _kind_of_exit(-signal.SIGSEGV, tail) is OWN
