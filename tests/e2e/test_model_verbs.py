"""`meshwright generate` and `meshwright export` with a job's checkpoint where it is, in a pod of its image.

The job trains adapters of a base model with a tokenizer, both on its data claim: a pod must find all of them. The text
and the files must be those of the same programs on a local directory.
"""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from meshwright.api import conditions
from meshwright_local.kube.resources import PODS
from meshwright_local.nodeagent.volumes import claim_directory
from tests.data.conftest import WORDS, bpe_file
from tests.e2e.local_stack import NAMESPACE, eventually, merged, tiny
from tests.e2e.test_command_line import run, started
from tests.patience import patient
from tests.pretrained.published import LLAMA, random_weights, write_model

__all__ = ["bpe_file"]

pytestmark = pytest.mark.long
CONFIG = {**LLAMA, "vocab_size": 320}
SAMPLING = ("--prompt", "the quick", "--tokens", "12", "--temperature", "0")


def claim(name: str) -> dict:
    made, _ = tiny(name)
    return made


async def own_pods(stage, verb):
    items = (await stage.client.list(PODS, NAMESPACE, label_selector=f"app.kubernetes.io/name=meshwright-{verb}")).items
    return [pod["metadata"]["name"] for pod in items if "deletionTimestamp" not in pod["metadata"]]


async def test_generate_and_export_find_checkpoint_base_and_tokenizer(stage, tmp_path, bpe_file):
    _, job = tiny(
        "tuned",
        replicas=1,
        training={"steps": 6, "initialWeights": "/meshwright/data/model", "lora": {"rank": 4, "alpha": 8},
                  "sequenceLength": 16},
        checkpoint={"everySteps": 6},
    )  # fmt: skip
    job["spec"]["model"] = {"huggingFace": json.dumps(CONFIG)}
    job["spec"]["data"] = {
        "source": "Files", "claimName": "texts", "pattern": "en/*.txt", "tokenizer": "BPE",
        "tokenizerFile": "tokenizer.json",
    }  # fmt: skip
    await stage.apply([claim("texts"), claim("tuned"), {**job, "spec": {**job["spec"], "suspend": True}}])
    texts = await eventually("the claim is bound", lambda: directory(stage, "texts"))
    write_model(texts / "model", CONFIG, random_weights(CONFIG))
    shutil.copy(bpe_file, texts / "tokenizer.json")
    (texts / "en").mkdir()
    for number in range(4):
        (texts / "en" / f"{number}.txt").write_text("\n".join(WORDS * 20))

    early = await run(stage, "generate", "tuned", code=3)
    assert "tuned has no complete checkpoint yet. It is Suspended, step 0, and saves one every 6 steps" in early.err
    assert "did you mean `tuned`?" in (await run(stage, "generate", "tune", code=3)).err

    await run(stage, "resume", "tuned")
    await stage.complete("tuned")
    there = await run(stage, "generate", "tuned", *SAMPLING)
    assert there.out.startswith("the quick")
    checkpoint = await stage.checkpoint("tuned")
    moved = ("--base", str(texts / "model"), "--tokenizer", str(texts / "tokenizer.json"))
    here = await run(stage, "generate", str(checkpoint.parent), *SAMPLING, *moved)
    assert here.out == there.out

    out = tmp_path / "model"
    done = await run(stage, "export", "tuned", "-d", str(out), "--dtype", "bf16")
    assert f"step 6: 1 file(s) in {out}; tokenizer in tokenizer.json" in done.out
    assert (out / "tokenizer.json").read_bytes() == bpe_file.read_bytes()
    assert "`" in (await run(stage, "export", "tuned", "-d", str(out), code=2)).err  # not empty
    kept = await run(stage, "export", "tuned", "--on-claim", "exported/bf16", "--dtype", "bf16", "--step", "6")
    assert "in exported/bf16 on the claim `tuned`; tokenizer in tokenizer.json" in kept.out
    on_claim = await directory(stage, "tuned") / "exported" / "bf16"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (on_claim / name).read_bytes() == (out / name).read_bytes(), name

    await continues_the_adapter(stage, job, texts)
    wrong = await run(stage, "generate", "tuned", "--base", "/meshwright/data/none", *SAMPLING, code=1)
    assert "/none" in wrong.err, wrong.err
    assert not await own_pods(stage, "generate")
    assert not await own_pods(stage, "export")


async def continues_the_adapter(stage, job, texts):
    """Another job begins with the exported adapter, and one whose `training.lora` is not its own stalls."""
    await run(stage, "export", "tuned", "-d", str(texts / "adapter"), "--adapter")
    for name, alpha in (("longer", 8), ("wrong", 9)):
        training = {"lora": {"rank": 4, "alpha": alpha, "initialAdapter": "/meshwright/data/adapter"}}
        spec = merged(job["spec"], {"training": training, "checkpoint": {"claimName": "tuned"}})
        await stage.apply([{**job, "metadata": {"name": name}, "spec": spec}])
    await stage.complete("longer")
    tree = (await run(stage, "lineage", "longer")).out
    assert "began with the adapter of " in tree
    assert tree.index("job default/longer") < tree.index("job default/tuned") < tree.index("/meshwright/data/model")

    def stalled(status):
        ready = conditions.find(status.conditions, conditions.READY)
        message = (
            "`training.lora.alpha` must be 8, with which the adapter in /meshwright/data/adapter was trained, got 9"
        )
        return ready is not None and ready.reason == "InvalidInput" and message in ready.message

    status = await stage.until("wrong", stalled, "the message with the value that the field needs")
    assert conditions.is_true(status.conditions, conditions.STALLED)


async def test_a_command_that_is_stopped_deletes_its_pod(stage):
    _, job = tiny("stopped", training={"steps": 6}, checkpoint={"everySteps": 6})
    await stage.apply([claim("stopped"), job])
    await stage.complete("stopped")
    process = await started(stage, "meshwright", "generate", "stopped", "--tokens", "30")
    await eventually("the pod exists", lambda: own_pods(stage, "generate"))
    process.terminate()
    out, err = await asyncio.wait_for(process.communicate(), patient(60))
    assert process.returncode == 143, (out, err)
    assert not await own_pods(stage, "generate")


async def directory(stage, name):
    try:
        return await claim_directory(stage.client, NAMESPACE, name)
    except Exception:
        return None
