"""Names that are part of an interface: group and kind, labels, annotations, gates, environment variables, ports."""

from __future__ import annotations

GROUP = "meshwright.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ParallelTrainingJob"
PLURAL = "paralleltrainingjobs"
SINGULAR = "paralleltrainingjob"
SHORT_NAME = "ptj"
DEFINITION = f"{PLURAL}.{GROUP}"
"""Name of the CustomResourceDefinition."""
CATEGORY = "training"

FIELD_MANAGER = "meshwright-operator"
CLI_FIELD_MANAGER = "meshwright-cli"
"""Who applies objects with the command line or the Python client, and owns the pods that they start."""
MANAGER = f"{GROUP}/operator"

LABEL_JOB = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_WORKER = f"{GROUP}/worker-index"
LABEL_INCARNATION = f"{GROUP}/incarnation"
LABEL_REVISION = f"{GROUP}/revision"

ANNOTATION_RANKS = f"{GROUP}/ranks"
ANNOTATION_DEVICES = f"{GROUP}/claimed-devices"
"""Devices that a pod claims through Dynamic Resource Allocation, by resource, as JSON: placement counts them."""

KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of a job: the LocalQueue of Kueue that admits it."""
KUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
"""Label of a job: its WorkloadPriorityClass."""
KUEUE_PREBUILT = "kueue.x-k8s.io/prebuilt-workload-name"
"""Label of a job that MultiKueue has sent to this cluster: its Workload, which exists already."""
KUEUE_MAX_SECONDS = "kueue.x-k8s.io/max-exec-time-seconds"
"""Label of a job: how long it may run after its admission."""
MULTIKUEUE = "kueue.x-k8s.io/multikueue"
"""`spec.managedBy` of a job that MultiKueue sends to another cluster."""

# Annotations of jobs that the operator reads.
ANNOTATION_NETWORK_POLICY = f"{GROUP}/network-policy"
ANNOTATION_CHECKPOINT = f"{GROUP}/checkpoint"
"""Asks for a checkpoint now. A new value is a new request."""
JOB_ANNOTATIONS = (ANNOTATION_NETWORK_POLICY, ANNOTATION_CHECKPOINT, KUEUE_PREBUILT)

GANG_GATE = f"{GROUP}/gang"

GPU_RESOURCE = "nvidia.com/gpu"

WORKER_CONTAINER = "worker"
USER_ID = 65532
"""User and group of the images, and of processes for which neither the job nor its profile names another."""
METRICS_PORT = 9464
"""Of worker pods: /metrics and /timeline."""
COORDINATOR_PORT = 9470
CHECKPOINT_MOUNT = "/meshwright/checkpoints"
DATA_MOUNT = "/meshwright/data"
SCRIPTS_MOUNT = "/meshwright/scripts"
AGENT_MOUNT = "/meshwright/agent"
"""Where the agent of `runtime.agent: Injected` is in its image and in every pod."""

# The environment variables of a worker pod that the operator sets and the agent reads.
ENV_JOB_NAME = "MESHWRIGHT_JOB_NAME"
ENV_JOB_NAMESPACE = "MESHWRIGHT_JOB_NAMESPACE"
ENV_JOB_UID = "MESHWRIGHT_JOB_UID"
ENV_WORKER_INDEX = "MESHWRIGHT_WORKER_INDEX"
ENV_INCARNATION = "MESHWRIGHT_INCARNATION"
ENV_POD_IP = "MESHWRIGHT_POD_IP"
ENV_POD_UID = "MESHWRIGHT_POD_UID"
ENV_COORDINATOR_URL = "MESHWRIGHT_COORDINATOR_URL"
ENV_COORDINATOR_CA = "MESHWRIGHT_COORDINATOR_CA"
ENV_COORDINATOR_NAME = "MESHWRIGHT_COORDINATOR_NAME"
ENV_TOKEN = "MESHWRIGHT_TOKEN"  # noqa: S105 - the variable's name, from a secretKeyRef
ENV_METRICS_PORT = "MESHWRIGHT_METRICS_PORT"
ENV_CHECKPOINT_DIR = "MESHWRIGHT_CHECKPOINT_DIR"
ENV_CHECKPOINT_URI = "MESHWRIGHT_CHECKPOINT_URI"
ENV_DATA_DIR = "MESHWRIGHT_DATA_DIR"
ENV_SCRIPTS_DIR = "MESHWRIGHT_SCRIPTS_DIR"
ENV_GRACE_SECONDS = "MESHWRIGHT_GRACE_SECONDS"
ENV_POD_NEEDS = "MESHWRIGHT_POD_NEEDS"
ENV_REPORT_FILE = "MESHWRIGHT_REPORT_FILE"
ENV_CHECKPOINT_PATH = "MESHWRIGHT_CHECKPOINT_PATH"
ENV_CHECKPOINT_STEP = "MESHWRIGHT_CHECKPOINT_STEP"
"""The checkpoint that `checkpoint.verify` is to check, and its step."""
ENV_RESUME_PATH = "MESHWRIGHT_RESUME_PATH"
ENV_RESUME_STEP = "MESHWRIGHT_RESUME_STEP"
"""The newest checkpoint that a command has reported, and its step: the same for all ranks of a mesh generation."""
ENV_SECRET_VARIABLES = "MESHWRIGHT_SECRET_VARIABLES"

# Environment variables that the agent sets for each rank, in addition to torchrun's (RANK, WORLD_SIZE, ...).
ENV_GENERATION = "MESHWRIGHT_GENERATION"
ENV_TENSOR_SIZE = "MESHWRIGHT_TENSOR_PARALLEL_SIZE"
ENV_TENSOR_RANK = "MESHWRIGHT_TENSOR_PARALLEL_RANK"
ENV_PIPELINE_SIZE = "MESHWRIGHT_PIPELINE_PARALLEL_SIZE"
ENV_PIPELINE_RANK = "MESHWRIGHT_PIPELINE_PARALLEL_RANK"
ENV_CONTEXT_SIZE = "MESHWRIGHT_CONTEXT_PARALLEL_SIZE"
ENV_CONTEXT_RANK = "MESHWRIGHT_CONTEXT_PARALLEL_RANK"
ENV_DATA_SIZE = "MESHWRIGHT_DATA_PARALLEL_SIZE"
ENV_DATA_RANK = "MESHWRIGHT_DATA_PARALLEL_RANK"
ENV_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""torchft's own variable. A job that sets it uses that lighthouse, and the agent of rank 0 runs none."""

# How `meshwright profile` asks a rank for a profile: files in the pod's directory for temporary files.
PROFILE_DIRECTORY = "meshwright-profile"
PROFILE_REQUEST = "request.json"
MAX_PROFILED_STEPS = 50
"""Steps of one request: the trace of a step may have tens of MiB."""
