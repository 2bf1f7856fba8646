"""TRL's SFTTrainer with DDP. Started once for each rank, as by torchrun."""

import json
import os
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

STEPS, EVERY = int(os.environ.get("STEPS", "40")), 10
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]
LENGTH, BATCH = 32, 2


def report(**fields):
    """Print a line of JSON, and report it to Meshwright."""
    if os.environ["RANK"] == "0":
        line = json.dumps({**fields, "time": time.time()})
        print(line, flush=True)
        if "MESHWRIGHT_REPORT_FILE" in os.environ:
            with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a") as file:
                file.write(line + "\n")


class Report(TrainerCallback):
    """Reports steps and checkpoints to Meshwright."""

    loss = None

    def on_log(self, args, state, control, logs=None, **rest):
        if "loss" in (logs or {}):
            self.loss = logs["loss"]
            tokens = LENGTH * BATCH * args.world_size
            report(step=state.global_step, total_steps=state.max_steps, loss=float(self.loss), tokens=tokens)

    def on_save(self, args, state, control, **rest):
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        report(step=state.global_step, checkpoint=path)

    def on_step_end(self, args, state, control, **rest):
        time.sleep(PAUSE)


def tokenizer():
    """A tokenizer of 64 words: nothing is downloaded."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts():
    draw = torch.Generator().manual_seed(0)
    return [" ".join(f"w{i}" for i in torch.randint(0, 62, (LENGTH,), generator=draw).tolist()) for _ in range(512)]


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    cuda, callback = torch.cuda.is_available(), Report()
    arguments = SFTConfig(
        output_dir=ROOT, max_steps=STEPS, save_steps=EVERY, save_total_limit=2, logging_steps=1, seed=0,
        per_device_train_batch_size=BATCH, learning_rate=1e-3, report_to="none", disable_tqdm=True,
        use_cpu=not cuda, bf16=cuda, ddp_backend="nccl" if cuda else "gloo", max_length=LENGTH,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict({"text": texts()}),
        processing_class=tokenizer(), callbacks=[callback],
    )  # fmt: skip
    last = get_last_checkpoint(ROOT)
    if trainer.is_world_process_zero():
        print(f"resumed after step {last.rpartition('-')[2] if last else 0}", flush=True)
    trainer.train(resume_from_checkpoint=last)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel), type(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        print(f"runs {type(trainer.model_wrapped).__name__}, final loss {callback.loss!r}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
