"""Models of other frameworks, and an exported one, run with transformers. Started with their interpreter, not imported.

`framework_models.py EXPORTED OUTPUT PORT`: writes the logits of the exported model, and for each framework a model
directory from one of its checkpoints, with the logits.
"""

import os
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.utils.data import Dataset

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
EXPORTED, OUTPUT = Path(sys.argv[1]), Path(sys.argv[2])
TOKENS = torch.arange(40).reshape(2, 20)


class Tokens(Dataset):
    """Random tokens."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def fresh():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
        )
    )  # fmt: skip


def record(name, model):
    """Write what the model answers."""
    model.eval()
    with torch.no_grad():
        torch.save(model(TOKENS).logits.float(), OUTPUT / f"{name}.logits")


def of_trainer(directory):
    arguments = transformers.TrainingArguments(
        output_dir=directory.parent / "trainer", max_steps=2, save_steps=2, report_to="none", use_cpu=True, seed=0,
        disable_tqdm=True, per_device_train_batch_size=2, learning_rate=1e-2, ddp_backend="gloo",
    )  # fmt: skip
    trainer = transformers.Trainer(model=fresh(), args=arguments, train_dataset=Tokens())
    trainer.train()
    (directory.parent / "trainer" / "checkpoint-2").rename(directory)
    return trainer.model


def step_of(model, forward, backward, step):
    for index in range(2):
        batch = Tokens()[index]["input_ids"].unsqueeze(0)
        backward(forward(input_ids=batch, labels=batch).loss)
        step()
    return model


def of_deepspeed(directory):
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    model = fresh()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    step_of(engine, engine, engine.backward, engine.step)
    engine.save_checkpoint(directory.parent / "deepspeed-checkpoint", tag="last")
    # What `python zero_to_fp32.py CHECKPOINT OUTPUT --safe_serialization` does.
    convert_zero_checkpoint_to_fp32_state_dict(
        str(directory.parent / "deepspeed-checkpoint"), str(directory), safe_serialization=True
    )
    model.config.save_pretrained(directory)
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def of_fully_shard(directory):
    """FSDP2, which Lightning's ModelParallelStrategy is: the whole state of the module, as safetensors."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(fresh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_of(model, model, lambda loss: loss.backward(), optimizer.step)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    model.config.save_pretrained(directory)
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def main():
    record("exported", transformers.AutoModelForCausalLM.from_pretrained(EXPORTED))
    for name, train in (("trainer", of_trainer), ("deepspeed", of_deepspeed), ("fully_shard", of_fully_shard)):
        if name == "deepspeed":
            torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
        record(name, train(OUTPUT / f"{name}-model"))


if __name__ == "__main__":
    main()
