"""What modules hand out by other ways than their return value arrives all the same."""

from collections import UserDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_runtime.errors import PathMismatchError
from tests.subjects import Batch, Block, Subject, regression, vectors
from tests.transformer_subjects import (
    GPT2,
    LLAMA,
    MOE,
    T5,
    causal,
    padded_text,
    tiny,
    translation,
)
from tests.transparency import Case, check

pytestmark = pytest.mark.world


def hidden_states_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Adds to the loss what depends on every layer's hidden state."""
    out = model(**batch, output_hidden_states=True)
    assert len(out.hidden_states) == 5
    penalties = [state.square().mean() * (i + 1) for i, state in enumerate(out.hidden_states)]
    loss: Tensor = out.loss + 0.01 * torch.stack(penalties).sum()
    return loss


def attentions_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Adds to the loss what depends on every layer's attention."""
    out = model(**batch, output_attentions=True)
    assert len(out.attentions) == 4
    loss: Tensor = out.loss
    for i, attention in enumerate(out.attentions):
        assert attention.shape[1:] == (4, 7, 7)
        loss = loss + 0.01 * (i + 1) * attention.square().sum(-1).mean()
    return loss


def router_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Takes the loss with the auxiliary loss of the routers in it."""
    out = model(**batch, output_router_logits=True)
    assert len(out.router_logits) == 4
    assert out.aux_loss.requires_grad
    loss: Tensor = out.loss
    return loss


gpt2 = tiny("GPT2", "LMHeadModel", **GPT2)
eager_gpt2 = tiny("GPT2", "LMHeadModel", **GPT2, attn_implementation="eager")
llama = tiny("Llama", **LLAMA)
eager_llama = tiny("Llama", **LLAMA, attn_implementation="eager")
t5 = tiny("T5", "ForConditionalGeneration", **T5, attn_implementation="eager")
mixtral = tiny("Mixtral", **LLAMA, **MOE, num_local_experts=4)
qwen3_moe = tiny("Qwen3Moe", **LLAMA, **MOE, head_dim=4, num_experts=4, moe_intermediate_size=24)


# Bodies of several microbatches take turns, and each has a context of its own.
collected: ContextVar[list[Tensor]] = ContextVar("collected")


class WithHook(nn.Module):
    """A stack whose user collects the output of an inner layer with a forward hook."""

    def __init__(self, changes_output: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(3)])
        for block in self.blocks:
            block[0].layer.register_forward_hook(self.collect)
        if changes_output:
            self.blocks[1][1].register_forward_hook(lambda module, args, out: out * 0.5)

    def collect(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        collected.get().append(output)

    def forward(self, x: Tensor) -> Tensor:
        collected.set([])
        for block in self.blocks:
            x = block(x)
        assert len(collected.get()) == len(self.blocks)
        return x + torch.stack(collected.get()).mean(0)


class Remembering(Block):
    """Keeps something in an attribute for others to read."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last_norm = out.square().mean()
        return out


class ReadsAttributes(nn.Module):
    """Adds up what its children have left in their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembering() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        penalty = sum(block.last_norm for block in self.blocks)
        return x + 0.1 * penalty


class Gate(nn.Module):
    """Appends its auxiliary loss to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        out = self.block(x)
        losses.append(out.abs().mean())
        return out


class FillsList(nn.Module):
    """Lets its children append to one list."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for gate in self.gates:
            x = gate(x, losses)
        assert len(losses) == len(self.gates)
        return x + torch.stack(losses).sum()


class Recalling(Block):
    """Remembers its last output, and starts from it unless told to forget."""

    def forward(self, x: Tensor) -> Tensor:
        self.memory = super().forward(x + self.memory)
        return self.memory


class Resets(nn.Module):
    """Makes its children forget before it calls any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Recalling()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block[0].memory = torch.zeros(x.shape)
        for block in self.blocks:
            x = block(x)
        return x


class Sharing(nn.Module):
    """Reads from a mapping what an earlier layer of its kind has left there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block()

    def forward(self, x: Tensor, shared: UserDict[str, tuple[Tensor]]) -> Tensor:
        out = self.block(x)
        if self.kind in shared:
            out = out + shared[self.kind][0]
        else:
            shared[self.kind] = (out,)
        return out


class Shares(nn.Module):
    """Passes a mapping, which is no dict, through its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sharing(kind) for kind in "abab"])

    def forward(self, x: Tensor) -> Tensor:
        shared: UserDict[str, tuple[Tensor]] = UserDict()
        for layer in self.layers:
            x = layer(x, shared)
        return x


def every_output_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Adds to the loss what depends on all that an encoder and a decoder can give out."""
    out = model(**batch, output_attentions=True, output_hidden_states=True)
    loss: Tensor = out.loss
    kinds = ("encoder_hidden_states", "decoder_hidden_states", "cross_attentions")
    for kind in (*kinds, "encoder_attentions", "decoder_attentions"):
        for i, value in enumerate(out[kind]):
            loss = loss + 0.01 * (i + 1) * value.square().mean()
    return loss


def continued_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Calls the model twice, the second time with the cache of the first."""
    ids, labels = batch["input_ids"], batch["labels"]
    cache = model(input_ids=ids[:, :4], use_cache=True).cache
    loss: Tensor = model(input_ids=ids[:, 4:], cache=cache, labels=labels[:, 4:]).loss
    return loss


def with_loss(
    name: str, build: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Tensor]
) -> Subject:
    """Returns a language model as a subject with a loss of its own."""
    return Subject(name, build, padded_text, loss)


SUBJECTS = (
    with_loss("gpt2_hidden_states", gpt2, hidden_states_loss),
    with_loss("llama_hidden_states", llama, hidden_states_loss),
    with_loss("gpt2_attentions", eager_gpt2, attentions_loss),
    with_loss("llama_attentions", eager_llama, attentions_loss),
    with_loss("mixtral_router_logits", mixtral, router_loss),
    with_loss("qwen3_moe_router_logits", qwen3_moe, router_loss),
    causal(
        "mixtral_router_logits_by_config",
        tiny("Mixtral", **LLAMA, **MOE, num_local_experts=4, output_router_logits=True),
    ),
    Subject("t5_every_output", t5, translation, every_output_loss),
    Subject("attributes_reset", Resets, vectors, regression),
    Subject("mapping_argument", Shares, vectors, regression),
    Subject("forward_hook", WithHook, vectors, regression),
    Subject("forward_hook_that_changes", lambda: WithHook(True), vectors, regression),
    Subject("attributes", ReadsAttributes, vectors, regression),
    Subject("list_argument", FillsList, vectors, regression),
)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_side_channel_trains_as_one_process_does(subject: Subject, degree: int) -> None:
    check(subject, degree, [Case(1), Case(3, "simple")])


def test_cache_that_others_filled_is_refused() -> None:
    # The ranks could not tell from their own caches what the second call is given.
    with pytest.raises(PathMismatchError, match="a cache, say"):
        check(with_loss("llama_continued", llama, continued_loss), 2, [Case(2)])
