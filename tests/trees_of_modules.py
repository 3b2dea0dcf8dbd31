"""Hand-made trees of module costs, for tests that need no model."""

from __future__ import annotations

from itertools import count

from smp_runtime.planning.module_tree import ModuleNode, OwnCost, ParameterFact, is_below
from smp_runtime.planning.partitioning import Partition


class TreeMaker:
    """Numbers calls and parameters while a tree is written down in execution order."""

    def __init__(self) -> None:
        self._calls = count()
        self._groups = count()

    def call(self) -> int:
        return next(self._calls)

    def parameter(
        self,
        size: int = 1,
        *,
        group: int | None = None,
        name: str = "weight",
        first_use: int | None = None,
    ) -> ParameterFact:
        number = next(self._groups) if group is None else group
        return ParameterFact(name, number, size, 4 * size, first_use=first_use)

    def leaf(
        self, path: str, compute: float = 1.0, size: int = 1, *, group: int | None = None
    ) -> ModuleNode:
        call = self.call()
        own = (OwnCost(call, compute),)
        return ModuleNode(path, "Linear", (call,), (self.parameter(size, group=group),), own)


def row_of_layers(costs: list[float], sizes: list[int] | None = None) -> ModuleNode:
    """A Sequential of one-parameter layers."""
    make = TreeMaker()
    call = make.call()
    layers = [make.leaf(str(i), cost, sizes[i] if sizes else 1) for i, cost in enumerate(costs)]
    return ModuleNode("", "Sequential", (call,), children=tuple(layers), is_repeated_container=True)


def language_model(
    num_blocks: int, *, head: float = 1.0, vocabulary: int = 100, tied: bool = True
) -> ModuleNode:
    """Embedding, blocks of attention and MLP, norm and head, shaped and named like GPT-2."""
    make = TreeMaker()
    root_call, body_call = make.call(), make.call()
    wte = make.leaf("transformer.wte", 0.1, vocabulary, group=1000)
    blocks = []
    for i in range(num_blocks):
        call = make.call()
        parts = (
            make.leaf(f"transformer.h.{i}.attn", 0.4),
            make.leaf(f"transformer.h.{i}.mlp", 0.6),
        )
        blocks.append(ModuleNode(f"transformer.h.{i}", "Block", (call,), children=parts))
    h = ModuleNode(
        "transformer.h", "ModuleList", children=tuple(blocks), is_repeated_container=True
    )
    ln_f = make.leaf("transformer.ln_f", 0.05)
    body = ModuleNode("transformer", "GPT2Model", (body_call,), children=(wte, h, ln_f))
    lm_head = make.leaf("lm_head", head / 2, vocabulary, group=1000 if tied else None)
    # The loss is computed by the root, on what the head returned.
    loss = OwnCost(lm_head.calls[0], head / 2)
    return ModuleNode("", "GPT2LMHeadModel", (root_call,), (), (loss,), children=(body, lm_head))


def homes(result: Partition, name: str) -> list[str]:
    """The places at which the parameter `name` is assigned; should be one."""
    module = name.rpartition(".")[0]
    return [p for p in result.assignment if is_below(module, p)] + [
        p for p in result.parameters if p == name
    ]
