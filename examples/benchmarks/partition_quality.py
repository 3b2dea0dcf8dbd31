"""How good is the automatic partition in measured time?

For GPT-2 and Llama shapes with small and large vocabularies, every module is timed in one process
(CPU time of forward and backward, one thread), so the slowest stage of any split into two is
known. Printed is the slowest stage of the split that the planner chose over that of the best
contiguous split: 1.00 is perfect, and above 1.10 somebody should look at the cost model.

    python examples/benchmarks/partition_quality.py
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from smp_runtime.planning.atoms import atoms_at_level, charge
from smp_runtime.planning.module_tree import ModuleNode
from smp_runtime.planning.partitioning import partition
from smp_runtime.tracing.trace import trace_model

SHAPES = {
    "gpt2": {"n_embd": 256, "n_layer": 8, "n_head": 8},
    "llama": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
    | {"num_attention_heads": 8},
}
VOCABULARIES = (2048, 50257, 128000)


def build(name: str, vocabulary: int) -> PreTrainedModel:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(name, vocab_size=vocabulary, **tokens, **SHAPES[name])
    return AutoModelForCausalLM.from_config(config).train()


def batch(vocabulary: int, size: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (size, length))
    return {"input_ids": ids, "labels": ids}


def measure(model: nn.Module, paths: list[str], kwargs: dict[str, torch.Tensor]) -> list[float]:
    """Returns the seconds of each of the modules at `paths`, which run one after the other.

    What runs between two of them counts to the earlier one, in forward as in backward.
    """
    forward_marks: dict[int, float] = {}
    backward_marks: dict[int, float] = {}

    def mark_forward(index: int) -> None:
        forward_marks[index] = time.process_time()

    def mark_backward(module: nn.Module, args: tuple[torch.Tensor, ...], index: int) -> None:
        # The gradient of its input is there: all of its own backward is done.
        if args and args[0].requires_grad:
            args[0].register_hook(
                lambda gradient: backward_marks.__setitem__(index, time.process_time())
            )

    hooks = []
    for index, path in enumerate(paths):
        module = model.get_submodule(path)
        hooks.append(module.register_forward_pre_hook(lambda m, a, i=index: mark_forward(i)))
        hooks.append(module.register_forward_pre_hook(lambda m, a, i=index: mark_backward(m, a, i)))
    try:
        loss = model(**kwargs).loss
        forward_end = time.process_time()
        backward_start = time.process_time()
        loss.backward()
        backward_end = time.process_time()
    finally:
        for hook in hooks:
            hook.remove()
    seconds = []
    for index in range(len(paths)):
        end = forward_marks.get(index + 1, forward_end)
        start = backward_marks.get(index + 1, backward_start)
        # The embeddings have no gradient of their input: the last of them gets the rest.
        done = backward_marks.get(index, backward_end if index + 1 in backward_marks else start)
        seconds.append(end - forward_marks[index] + done - start)
    return seconds


def slowest_of_choice(
    root: ModuleNode, paths: list[str], seconds: list[float], memory_weight: float, tied: str
) -> tuple[float, str]:
    """Returns the measured time of the slowest rank of the planner's choice, and its summary."""
    chosen = partition(root, 2, memory_weight=memory_weight, tied=tied)
    placed = [node for node in root.walk() if node.path in chosen.assignment]
    modelled = charge(root, placed)
    busy = [0.0, 0.0]
    for path, total in zip(paths, seconds, strict=True):
        inside = [p for p in chosen.assignment if p == path or p.startswith(path + ".")]
        around = [p for p in chosen.assignment if not p or path.startswith(p + ".")]
        weights = {p: modelled[p].compute for p in inside} or {around[0]: 1.0}
        for part, weight in weights.items():
            # A block that is cut inside is shared out as modelled.
            busy[chosen.assignment[part]] += total * weight / sum(weights.values())
    return max(busy), f"{chosen.tied}, {' '.join(f'{time * 1e3:.0f}' for time in busy)} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-weight", type=float, nargs="+", default=[0.0, 0.2, 0.8])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(
        "shape", "vocabulary", "memory_weight", "tied", "chosen", "best ms", "chosen/best"
    )
    for name in SHAPES:
        for vocabulary in VOCABULARIES:
            model = build(name, vocabulary)
            kwargs = batch(vocabulary, arguments.batch, arguments.length)
            root = trace_model(model, (), kwargs).root
            paths = [atom.node.path for atom in atoms_at_level(root, 0)]
            runs = [measure(model, paths, kwargs) for _ in range(arguments.repeats + 1)][1:]
            seconds = [min(run) for run in zip(*runs, strict=True)]
            best = min(
                max(sum(seconds[:cut]), sum(seconds[cut:])) for cut in range(1, len(seconds))
            )
            for weight in arguments.memory_weight:
                for tied in ("auto", "together") if name == "gpt2" else ("auto",):
                    slowest, summary = slowest_of_choice(root, paths, seconds, weight, tied)
                    table.add_row(
                        name,
                        f"{vocabulary}",
                        f"{weight}",
                        tied,
                        summary,
                        f"{best * 1e3:.0f}",
                        f"{slowest / best:.2f}",
                    )
    Console().print(table)


if __name__ == "__main__":
    main()
