r"""Trains a GPT-2 with `transformers.Trainer`, as in one process but for one call at the top.

    torchrun --nproc-per-node 2 examples/finetune_with_trainer.py     # over two pipeline ranks
    torchrun --nproc-per-node 4 examples/finetune_with_trainer.py     # and two replicas
    torchrun --nproc-per-node 2 examples/finetune_with_trainer.py --resume --steps 12
    python examples/finetune_with_trainer.py --plain                  # one process, to compare

It trains on Python's own help texts, a token for each byte, measures loss and accuracy on texts
held out, and saves checkpoints and the model. The losses are those of `--plain`.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from text_data import read_documents

import smp_runtime.hf

BATCH = 8  # sequences of one backward pass, in all replicas together
ACCUMULATED = 2  # backward passes of one optimizer step
LENGTH = 64  # bytes of a sequence


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (8)")
    parser.add_argument("--output", default="runs/trainer", help="folder for what is saved")
    parser.add_argument("--model", default="", help="folder or name of a GPT-2; default: a new one")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--plain", action="store_true", help="one process, without this runtime")
    return parser.parse_args()


def byte_sequences() -> list[dict[str, torch.Tensor]]:
    """Returns 160 sequences of bytes; the first of each are no labels, of some more than others."""
    text = "\n".join(read_documents("pydoc_data.topics")).encode()
    tokens = torch.frombuffer(bytearray(text[: 160 * LENGTH]), dtype=torch.uint8).long()
    sequences = []
    for number, sequence in enumerate(tokens.view(-1, LENGTH)):
        labels = sequence.clone()
        labels[: number % 16] = -100
        sequences.append({"input_ids": sequence, "labels": labels})
    return sequences


def make_model(name: str) -> Any:
    """Returns a pretrained GPT-2, or a new small one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if name:
        return GPT2LMHeadModel.from_pretrained(name)
    shape = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**shape, **no_dropout, bos_token_id=0, eos_token_id=0))


def accuracy(prediction: Any) -> dict[str, float]:
    """Returns the share of bytes that the model predicts."""
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


def main() -> None:
    line = read_command_line()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    degree = min(num_ranks, 2)
    if not line.plain:
        smp_runtime.hf.enable(
            {"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": num_ranks > degree}
        )
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    per_replica = BATCH * degree // num_ranks
    sequences = byte_sequences()
    trainer = Trainer(
        model=make_model(line.model),
        args=TrainingArguments(
            line.output,
            max_steps=line.steps,
            per_device_train_batch_size=per_replica,
            per_device_eval_batch_size=per_replica,
            gradient_accumulation_steps=ACCUMULATED,
            gradient_checkpointing=True,
            learning_rate=3e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=2,
            max_grad_norm=0.5,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            report_to=[],
            use_cpu=line.plain,
        ),
        train_dataset=sequences[: 15 * BATCH + 3],
        eval_dataset=sequences[-13:],
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=line.resume)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"saved to {Path(line.output)}")


if __name__ == "__main__":
    main()
