r"""Fine-tunes a causal language model over pipeline ranks, and saves it as a Hugging Face folder.

    python -m launch configs/finetune_cpu.yaml examples/finetune_causal_lm.py
    torchrun --nproc-per-node 4 examples/finetune_causal_lm.py \
        --config configs/finetune_tiny_pp4.yaml
    python examples/finetune_causal_lm.py --config configs/finetune_tiny_one_process.yaml
    python -m launch configs/finetune_cpu.yaml examples/finetune_causal_lm.py --resume
    python -m launch --max-restarts 3 configs/finetune_cpu.yaml examples/finetune_causal_lm.py

A config has two parts: `smp` for the runtime and `train` for the settings below, which may also
be given at the end of the command line: `steps=100 text=my.jsonl`.
"""

import argparse
import difflib
import itertools
import json
import os
import resource
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from load_model import load_model
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from text_data import SettingError, endless_batches, hold_out, pack, read_documents
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import smp_runtime as smp

BAR = "step {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # of tqdm


class Settings(BaseModel, extra="forbid", frozen=True):
    """The part `train` of a config."""

    model: str = "gguf"  # folder, name on the hub, `gguf` (SmolLM2-135M-Instruct) or `tiny-random`
    text: str = "pydoc_data.topics"  # file, .jsonl with a field `text`, or Python's help texts
    steps: PositiveInt = 20  # optimizer steps
    batch_size: PositiveInt = 8  # sequences per step and replica; a multiple of `microbatches`
    sequence_length: int = Field(128, ge=2)  # tokens per sequence
    learning_rate: PositiveFloat = 1e-4  # of AdamW, the same in every step
    max_grad_norm: PositiveFloat = 1.0  # gradients are scaled down to this global norm
    activation_checkpointing: Literal["off", "each", "auto"] = "off"  # which blocks recompute
    held_out_sequences: PositiveInt = 32  # about how many of the last tenth the loss is measured on
    prompt: str = ""  # what the samples continue; empty: the beginning of the held-out text
    sample_tokens: NonNegativeInt = 40  # how many tokens a sample adds; 0: no samples
    seed: int = 0  # of the shuffling, and of the weights of `tiny-random`
    output: str = ""  # where the model is saved; empty: runs/<name of the config>
    save_every: NonNegativeInt = 10  # steps between checkpoints, kept in output; 0: none


def read_settings(path: str, assignments: list[str]) -> Settings:
    """Returns the settings in a config, overruled by those of the command line."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise SettingError(
            f"--config {path}: {error}. Write a file like those in configs/"
        ) from None
    given = dict(content.get("train") or {})
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        given[name] = yaml.safe_load(value)
    given["output"] = given.get("output") or f"runs/{Path(path).stem}"
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingError("\n".join(map(explain, error.errors()))) from None


def explain(error: Any) -> str:
    """Returns what to write in place of a setting that pydantic refused."""
    name, known = str(error["loc"][0]), list(Settings.model_fields)
    if error["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        return f"unknown setting {name!r}: did you mean {nearest!r}? There are {', '.join(known)}"
    return f"{name}={error['input']!r}: {error['msg'].replace('Input should', 'it should')}"


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


@smp.step
def evaluation_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def held_out_loss(model: smp.DistributedModel, batches: Iterable[torch.Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [evaluation_step(model, batch).reduce_mean().item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def train(
    model: smp.DistributedModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[torch.Tensor],
    settings: Settings,
    progress: dict[str, Any],
) -> list[Any]:
    """Trains from where `progress` says to the last step, and saves a checkpoint now and then.

    Returns:
        A report for every step: where its time went on this rank.
    """
    reports = []
    done, last = progress["step"], settings.steps
    bar = {"bar_format": BAR, "ncols": 90, "total": last, "initial": done}
    steps = tqdm(range(done, last), **bar, disable=smp.rank() != 0)
    for step, batch in zip(steps, itertools.islice(batches, done, None), strict=False):
        began = time.perf_counter()
        loss = train_step(model, batch).reduce_mean().item()
        model.clip_grad_norm_(settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        reports.append(model.step_report())
        rate = batch.numel() * smp.dp_size() / seconds
        text = f"loss {loss:.3f}, {rate:.0f} tokens/s, {seconds:.2f} s/step"
        steps.set_postfix_str(text, refresh=False)
        if settings.save_every and (step + 1) % settings.save_every == 0:
            smp.save_checkpoint(
                checkpoints(settings),
                f"step{step + 1}",
                user_content={**progress, "step": step + 1},
                num_kept_partial_checkpoints=2,
                async_save=True,
            )
    return reports


def checkpoints(settings: Settings) -> Path:
    """Returns where the checkpoints of a run are."""
    return Path(settings.output) / "checkpoints"


def has_begun(settings: Settings) -> bool:
    """Returns whether the launcher has started the ranks again and this run has a checkpoint.

    The file `run` in the output folder is as old as the run. What is older was left by another
    one, and only `--resume` goes on from there. Every rank calls this, and gets the same answer.
    """
    restarts: list[Any] = [0] * smp.size()  # each machine counts its own
    dist.all_gather_object(restarts, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    found = [False]
    if smp.rank() == 0:
        run, newest = Path(settings.output) / "run", checkpoints(settings) / "newest"
        name = os.environ.get("TORCHELASTIC_RUN_ID", "")
        if any(restarts) and run.exists() and run.read_text() == name:
            found = [newest.exists() and newest.stat().st_mtime_ns >= run.stat().st_mtime_ns]
        else:
            run.parent.mkdir(parents=True, exist_ok=True)
            run.write_text(name)
    dist.broadcast_object_list(found)
    return found[0]


def continuation(model: Any, tokenizer: Any, prompt: str, num_tokens: int) -> str:
    """Returns a prompt and the most probable tokens after it, by a plain model on one rank."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    model.eval()
    tokens = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)[0]
    model.train()
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def reset_peak_memory() -> None:
    """Makes `peak_memory` forget what loading the whole model took."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif (forget := Path("/proc/self/clear_refs")).exists():
        forget.write_text("5")  # Linux: sets VmHWM back to what is resident now


def peak_memory() -> int:
    """Returns peak bytes: allocated on the GPU, or resident in this process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if (status := Path("/proc/self/status")).exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row_of_this_rank(model: smp.DistributedModel, reports: list[Any]) -> list[str]:
    """Returns a line of the final table."""
    wall = sum(report.wall for report in reports)
    busy = sum(report.busy for report in reports)
    row = [
        f"{smp.rank()}",
        f"{smp.pp_rank()}",
        f"{smp.dp_rank()}",
        f"{sum(p.numel() for p in model.local_parameters()) / 1e6:.2f} M",
        f"{peak_memory() / 2**20:.0f} MiB",
        f"{busy / wall:.0%}",
        f"{1 - busy / wall:.0%}",
    ]
    if emulated := sum(report.clock for report in reports):
        row.append(f"{emulated / len(reports):.3f} s")
    return row


def final_table(rows: list[list[str]]) -> Table:
    names = ["rank", "pp_rank", "dp_rank", "parameters", "peak memory", "busy", "bubble"]
    table = Table(*names, *["emulated step"] * (len(rows[0]) - len(names)), box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    return table


def save(
    model: smp.DistributedModel, tokenizer: Any, folder: Path, held_out: dict[str, Any]
) -> None:
    """Saves a plain Hugging Face folder, and beside it what `check_saved_model.py` compares."""
    model.save_pretrained(folder, tokenizer)  # every rank sends its part to rank 0
    if smp.rank() == 0:
        (folder / "held_out.json").write_text(json.dumps(held_out))


def finetune(settings: Settings, resume: bool) -> bool:
    """Does what the settings say; returns whether the held-out loss is lower than before."""
    console = Console(width=100, markup=False, highlight=False, quiet=smp.rank() != 0)
    torch.manual_seed(settings.seed)  # every rank makes or loads the same whole model
    console.print(f"model {settings.model}, text {settings.text}, ranks {smp.size()}")
    plain, tokenizer = load_model(settings.model)
    most = getattr(plain.config, "max_position_embeddings", None) or settings.sequence_length
    if settings.sequence_length > most:
        raise SettingError(
            f"sequence_length={settings.sequence_length} is more than the model takes: write at "
            f"most {most}"
        )

    sequences = pack(read_documents(settings.text), tokenizer, settings.sequence_length)
    size = settings.batch_size
    training, held_out = hold_out(sequences, size, smp.dp_size(), settings.held_out_sequences)
    batches = endless_batches(training, size, smp.dp_rank(), smp.dp_size(), settings.seed)
    console.print(f"{len(training)} sequences to train on, {len(held_out)} to measure the loss on")

    prompt = settings.prompt or tokenizer.decode(held_out[0, :16], skip_special_tokens=True)
    before = ""
    if smp.rank() == 0 and settings.sample_tokens:
        before = continuation(plain, tokenizer, prompt, settings.sample_tokens)

    model = smp.DistributedModel(plain)
    if settings.activation_checkpointing != "off":
        blocks = model.module.module.module.transformer.seq_layers
        smp.set_activation_checkpointing(blocks, strategy=settings.activation_checkpointing)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    )
    if resume:
        progress = smp.resume_from_checkpoint(checkpoints(settings))
        console.print(f"resumed after step {progress['step']}")
    else:
        loss = held_out_loss(model, held_out.split(size))  # the first step partitions the model
        progress = {"step": 0, "loss_before": loss}
    loss_before = progress["loss_before"]
    console.print(f"held-out loss before: {loss_before:.4f}")

    reset_peak_memory()
    began = time.perf_counter()
    reports = train(model, optimizer, batches, settings, progress)
    console.print(f"{len(reports)} steps took {time.perf_counter() - began:.1f} s")
    if reports:
        rows: list[Any] = [None] * smp.size()
        dist.all_gather_object(rows, row_of_this_rank(model, reports))
        console.print(final_table(rows))

    loss = held_out_loss(model, held_out.split(size))
    console.print(f"held-out loss before {loss_before:.4f}, after {loss:.4f}")
    folder = Path(settings.output)
    measured = {"loss": loss, "batch_size": size, "token_ids": held_out.tolist()}
    save(model, tokenizer, folder, measured)

    if smp.rank() == 0 and settings.sample_tokens:
        saved = AutoModelForCausalLM.from_pretrained(folder)
        after = continuation(saved, tokenizer, prompt, settings.sample_tokens)
        for title, sample in (("before", before), ("after", after)):
            text = textwrap.indent(sample, "    ")
            console.print(f"\nsample {title} the training:\n{text}", soft_wrap=True)
    check = [sys.executable, Path(__file__).with_name("check_saved_model.py")]
    command = " ".join([*map(os.path.relpath, check), str(folder)])
    console.print(
        f"\nsaved as a Hugging Face folder: {folder}\ncheck it: {command}", soft_wrap=True
    )
    smp.barrier()
    return loss < loss_before


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a causal language model.")
    parser.add_argument("--config", required=True, help="a file like those in configs/")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="overrules the config")
    arguments = parser.parse_args()
    try:
        settings = read_settings(arguments.config, arguments.settings)
        smp.init(arguments.config)
        has_learned = finetune(settings, has_begun(settings) or arguments.resume)
    except SettingError as error:
        sys.exit(f"finetune_causal_lm.py: {error}")
    if not has_learned:
        sys.exit("finetune_causal_lm.py: the held-out loss is not lower than before")


if __name__ == "__main__":
    main()
