"""Every name that crosses a boundary: group and kind, labels, annotations, gates, environment variables, ports."""

from __future__ import annotations

GROUP = "meshwright.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ParallelTrainingJob"
PLURAL = "paralleltrainingjobs"
SINGULAR = "paralleltrainingjob"
SHORT_NAME = "ptj"
CATEGORY = "training"

FIELD_MANAGER = "meshwright-operator"

LABEL_JOB = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_WORKER = f"{GROUP}/worker-index"
LABEL_INCARNATION = f"{GROUP}/incarnation"
LABEL_REVISION = f"{GROUP}/revision"

ANNOTATION_RANKS = f"{GROUP}/ranks"

GANG_GATE = f"{GROUP}/gang"

GPU_RESOURCE = "nvidia.com/gpu"

WORKER_CONTAINER = "worker"
METRICS_PORT = 9464
COORDINATOR_PORT = 9470
CHECKPOINT_MOUNT = "/meshwright/checkpoints"
DATA_MOUNT = "/meshwright/data"
SCRIPTS_MOUNT = "/meshwright/scripts"

# What the operator sets in a worker pod's environment; the agent reads these and nothing else of the cluster.
ENV_JOB_NAME = "MESHWRIGHT_JOB_NAME"
ENV_JOB_NAMESPACE = "MESHWRIGHT_JOB_NAMESPACE"
ENV_JOB_UID = "MESHWRIGHT_JOB_UID"
ENV_WORKER_INDEX = "MESHWRIGHT_WORKER_INDEX"
ENV_INCARNATION = "MESHWRIGHT_INCARNATION"
ENV_POD_IP = "MESHWRIGHT_POD_IP"
ENV_COORDINATOR_URL = "MESHWRIGHT_COORDINATOR_URL"
ENV_TOKEN = "MESHWRIGHT_TOKEN"  # noqa: S105 - the variable's name, from a secretKeyRef
ENV_METRICS_PORT = "MESHWRIGHT_METRICS_PORT"
ENV_CHECKPOINT_DIR = "MESHWRIGHT_CHECKPOINT_DIR"
ENV_DATA_DIR = "MESHWRIGHT_DATA_DIR"
ENV_GRACE_SECONDS = "MESHWRIGHT_GRACE_SECONDS"

# What the agent sets for each rank's process beside torchrun's own (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
ENV_GENERATION = "MESHWRIGHT_GENERATION"
ENV_TENSOR_SIZE = "MESHWRIGHT_TENSOR_PARALLEL_SIZE"
ENV_TENSOR_RANK = "MESHWRIGHT_TENSOR_PARALLEL_RANK"
ENV_PIPELINE_SIZE = "MESHWRIGHT_PIPELINE_PARALLEL_SIZE"
ENV_PIPELINE_RANK = "MESHWRIGHT_PIPELINE_PARALLEL_RANK"
ENV_DATA_SIZE = "MESHWRIGHT_DATA_PARALLEL_SIZE"
ENV_DATA_RANK = "MESHWRIGHT_DATA_PARALLEL_RANK"
