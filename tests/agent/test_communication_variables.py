"""Variables of NCCL in a mesh document: the pod's own win, and other names are left out."""

from __future__ import annotations

import json

from meshwright.protocol.messages import MeshRequest, parse_mesh_document
from meshwright_worker.agent.rank_environment import communication_variables
from tests.agent.support import mesh, training_run


def hello() -> MeshRequest:
    return MeshRequest(worker=0, incarnation=0, pod_uid="p", address="127.0.0.1", store_port=20000)


def test_the_pods_variables_win_and_other_names_are_left_out() -> None:
    document = mesh(1, training_run(1), [hello()], 1).model_copy(
        update={
            "environment": {
                "NCCL_ALGO": "Ring",
                "NCCL_CROSS_NIC": "0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "LD_PRELOAD": "/x.so",
                "NCCL_NET": "a\0b",
            }
        }
    )
    found = communication_variables(document, {"NCCL_ALGO": "Tree"})
    assert found == {"NCCL_CROSS_NIC": "0", "GLOO_SOCKET_IFNAME": "eth0"}


def test_a_document_without_them_is_as_before() -> None:
    document = mesh(1, training_run(1), [hello()], 1)
    assert "environment" not in document.wire()
    assert communication_variables(parse_mesh_document(json.dumps(document.wire()).encode()), {}) == {}
