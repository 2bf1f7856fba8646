"""What must be prepared before some blocks run: `scene=NAME` on a block's fence names one of these."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.api.objects import KubeObject
from meshwright.models.huggingface.registry import config_from_architecture
from meshwright.models.presets import PRESETS
from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import setup
from meshwright_local.kube.resources import PODS
from tests.docs.sandbox import Sandbox
from tests.e2e.local_stack import NAMESPACE, Stage, eventually, tiny

LINES = [f"the quick brown fox jumps over {number} lazy dogs" for number in range(200)]


async def text(sandbox: Sandbox) -> AsyncIterator[None]:
    """`./text` with lines of JSON, and `tokenizer.json`."""
    directory = sandbox.checkout / "text"
    directory.mkdir()
    (directory / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(sandbox.checkout / "tokenizer.json"))
    yield


async def llama(sandbox: Sandbox) -> AsyncIterator[None]:
    """`./llama-3.1-8b` with a config.json."""
    directory = sandbox.checkout / "llama-3.1-8b"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_from_architecture(PRESETS[directory.name])))
    yield


async def encoder(sandbox: Sandbox) -> AsyncIterator[None]:
    """Python's `module`, `plan`, `loss`, `mesh`, `batches` and `directory`: one rank of examples/own_module."""
    port = str(setup.free_port())
    sandbox.environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sandbox.prelude = "from tests.docs.one_rank import batches, directory, loss, mesh, module, plan\n"
    yield


async def cluster(sandbox: Sandbox) -> AsyncIterator[None]:
    """The cluster of `meshwright local up`, and in it the pod POD."""
    async with Programs() as programs:
        await _cluster(programs, sandbox)
        async with setup.connect(Path(sandbox.environment["KUBECONFIG"])) as client:
            await client.create(PODS, _sleeper("sleeper"), NAMESPACE)

            async def runs() -> bool:
                return bool((await client.get(PODS, "sleeper", NAMESPACE))["status"].get("phase") == "Running")

            await eventually("the pod runs", runs, 120)
        sandbox.words["POD"] = "sleeper"
        yield


async def job(sandbox: Sandbox) -> AsyncIterator[None]:
    """A cluster with an operator and the completed job NAME, whose checkpoints are in DIR."""
    async with Programs() as programs:
        kubeconfig = await _cluster(programs, sandbox)
        async with setup.connect(kubeconfig) as client:
            await setup.install_crd(client)
            ports, name = setup.Ports(), "shown"
            operator = await setup.start_operator(programs, sandbox.state, kubeconfig, ports)
            stage = Stage(sandbox.state, kubeconfig, client, programs, operator, ports, kubeconfig)
            evaluation = {"everySteps": 10, "samples": 4}
            held_out = {"data": {"heldOut": 0.1}, "training": {"steps": 20, "evaluation": evaluation}}
            await stage.apply(tiny(name, replicas=1, **held_out))
            await stage.complete(name, 600)
            sandbox.words |= {"NAME": name, "DIR": str((await stage.checkpoint(name)).parent)}
            yield


SCENES: dict[str, Callable[[Sandbox], AsyncIterator[None]]] = {
    each.__name__: each for each in (text, llama, encoder, cluster, job)
}
SHARED = {cluster.__name__, job.__name__}
"""Prepared once for all blocks: each leaves it in order."""


class Sandboxes:
    """Sandboxes for blocks, each with its scene; ends what they started."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._shared: dict[str, Sandbox] = {}

    async def __aenter__(self) -> Sandboxes:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def sandbox(self, scene: str) -> AsyncIterator[Sandbox]:
        """A sandbox in which a scene is ready; an empty one without a scene."""
        if scene not in SHARED:
            async with _sandbox(scene) as made:
                yield made
            return
        if scene not in self._shared:
            self._shared[scene] = await self._stack.enter_async_context(_sandbox(scene))
        yield self._shared[scene]


@asynccontextmanager
async def _sandbox(scene: str) -> AsyncIterator[Sandbox]:
    with TemporaryDirectory(prefix="docs-") as home, closing(Sandbox(Path(home))) as made:
        ready: AbstractAsyncContextManager[None] = asynccontextmanager(SCENES[scene] if scene else _nothing)(made)
        async with ready:
            yield made


async def _nothing(sandbox: Sandbox) -> AsyncIterator[None]:
    yield


async def _cluster(programs: Programs, sandbox: Sandbox) -> Path:
    """A cluster where `meshwright local` looks for it."""
    sandbox.state.mkdir(parents=True)
    kubeconfig = await setup.start_cluster(programs, sandbox.state, setup.Shape())
    sandbox.environment["KUBECONFIG"] = str(kubeconfig)
    return kubeconfig


def _sleeper(name: str) -> KubeObject:
    container = {"name": "main", "image": "busybox", "command": ["sleep", "1000"]}
    spec = {"nodeName": "rack1-node0", "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**spec, "containers": [container]},
    }  # fmt: skip
