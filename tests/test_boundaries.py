"""What crosses from stage to stage, goes into a step and comes out of it, of every kind."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import smp_runtime as smp
from tests.subjects import WIDTH, Batch, Block, Subject, vectors
from tests.transparency import Case, build, check, make_batch
from tests.worlds import run_world

pytestmark = pytest.mark.world


class Pair(NamedTuple):
    """A tensor with a word."""

    tensor: Tensor
    word: str


@dataclass
class Everything:
    """Values of every kind that a module may hand to the next."""

    hidden: Tensor
    mask: Tensor
    positions: Tensor
    nothing: None
    count: int
    rate: float
    word: str
    nested: dict[str, Any]
    pair: Pair
    flags: list[bool]


def state_of(h: Tensor, count: int) -> Everything:
    """Returns values of every kind, some with a gradient and some without."""
    return Everything(
        hidden=h,
        mask=h > 0,
        positions=torch.arange(h.shape[0]),
        nothing=None,
        count=count,
        rate=0.5 + count,
        word=f"after {count}",
        nested={"tuple": (h * 2, None, {"deep": h.detach() + 1}), 3: torch.tensor(1.5)},
        pair=Pair(h.double().sum(-1), "pair"),
        flags=[True, count > 2],
    )


class Giver(nn.Module):
    """Takes and returns values of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: Everything, count: int, *, mode: str = "sum") -> Everything:
        assert state.count == count and state.word == f"after {count}"
        assert state.nothing is None and state.flags == [True, count > 2]
        assert type(state.count) is int and type(state.rate) is float
        assert type(state.pair) is Pair and state.pair.word == "pair"
        assert state.mask.dtype is torch.bool and state.positions.dtype is torch.int64
        assert state.pair.tensor.dtype is torch.float64
        doubled, none, deep = state.nested["tuple"]
        assert none is None and mode == "sum"
        h = state.hidden.masked_fill(state.mask, 0.5) * state.rate
        h = h + doubled + deep["deep"] + state.nested[3] + state.positions[:, None]
        h = h + state.pair.tensor.float()[:, None]
        return state_of(self.block(h / 10), count + 1)


class PassesEverything(nn.Module):
    """A chain of modules that hand each other values of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.givers = nn.ModuleList([Giver() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        state = state_of(x, 0)
        for index, giver in enumerate(self.givers):
            state = giver(state, index, mode="sum")
            assert state.count == index + 1 and state.flags == [True, index + 1 > 2]
            assert isinstance(state.pair, Pair)
        return state.hidden + state.nested["tuple"][2]["deep"]


class Strided(nn.Module):
    """Returns a tensor that is not contiguous, of one of several kinds."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        if self.kind == 0:
            return h.t()
        if self.kind == 1:
            return h.unsqueeze(1).expand(-1, 3, -1)
        return torch.cat([h, h], -1)[:, ::2]


class PassesStrides(nn.Module):
    """Relies on the strides of what its children return."""

    def __init__(self) -> None:
        super().__init__()
        self.children_ = nn.ModuleList([Strided(kind) for kind in range(3)])
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        transposed = self.children_[0](x)
        assert transposed.stride() == (1, WIDTH)
        expanded = self.children_[1](transposed.t())
        assert expanded.stride(1) == 0
        h = expanded.contiguous().view(-1, WIDTH)[::3]
        sliced = self.children_[2](h)
        assert not sliced.is_contiguous()
        return self.last(sliced.contiguous().view(-1).view(-1, WIDTH))


class ReturnsOutput(nn.Module):
    """Returns an output object of transformers, a dict and a tuple, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (Structured(i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).last_hidden_state
        h = self.second(h)["h"]
        h, *_ = self.third(h)
        return self.last(h)[0][0]


class Structured(nn.Module):
    """Returns what it computes in some structure."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block()

    def forward(self, x: Tensor) -> Any:
        h = self.block(x)
        structures: list[Any] = [
            BaseModelOutput(last_hidden_state=h, hidden_states=(x, h)),
            OrderedDict(h=h, nothing=None),
            (h, None, "word"),
            [(h,)],
        ]
        return structures[self.kind]


class SometimesUsed(nn.Module):
    """Returns a mask and an auxiliary value with a gradient that only some losses use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), Block()
        self.auxiliary = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.first(x)
        auxiliary = self.auxiliary(h)
        return self.last(self.second(h)), h > 0, auxiliary


def sometimes_used_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Uses the auxiliary value only where the microbatch says so."""
    out, mask, auxiliary = model(batch["x"])
    loss: Tensor = (out - batch["target"]).masked_fill(mask, 0.0).square().mean()
    return loss + auxiliary.square().mean() if bool(batch["flag"].any()) else loss


def every_other_flagged(size: int) -> Batch:
    """Returns vectors of which those of odd microbatches are flagged."""
    return vectors(size) | {"flag": torch.arange(size) // 2 % 2 == 1}


SUBJECTS = (
    Subject("every_kind_of_value", PassesEverything),
    Subject("every_kind_of_structure", ReturnsOutput),
    Subject("not_contiguous", PassesStrides),
    Subject("gradient_only_sometimes", SometimesUsed, every_other_flagged, sometimes_used_loss),
)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_crosses_stages(subject: Subject, degree: int) -> None:
    check(subject, degree, [Case(1), Case(4), Case(3, "simple")])


def test_inputs_are_split_as_declared() -> None:
    def body() -> list[Any]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(build(Subject("", lambda: nn.Sequential(Block(), Block()))))

        @smp.step(non_split_inputs=["mask", "offsets"], input_split_axes={"positions": 1})
        def step(model: Any, x: Any, positions: Any, mask: Any, offsets: Any, scale: Any) -> Any:
            out = model(x)
            shapes = str([tuple(each.shape) for each in (x, positions, mask, offsets, scale)])
            return {"shapes": shapes, "positions": positions[0, :, 0], "out": out.sum()}

        inputs: list[Any] = [None] * 5
        if smp.pp_rank() == 0:
            positions = torch.arange(4).view(1, 4, 1).expand(3, 4, 8)
            mask, offsets = torch.ones(1, 1, 8, 8), torch.arange(7)
            inputs = [torch.randn(4, WIDTH), positions, mask, offsets, torch.tensor(0.5)]
        result = step(model, *inputs)
        return [result["shapes"], [each.tolist() for each in result["positions"].outputs]]

    shapes = str([(2, 8), (3, 2, 8), (1, 1, 8, 8), (7,), ()])
    assert run_world(2, body) == [[[shapes, shapes], [[0, 1], [2, 3]]]] * 2


def test_undeclared_batch_dimensions_are_refused_on_every_rank() -> None:
    def body() -> str:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(nn.Sequential(Block(), Block()))
        step = smp.step(lambda model, x, positions: model(x).sum())
        positions = torch.zeros(3, 4, 8) if smp.pp_rank() == 0 else None
        with pytest.raises(Exception, match=r"positions \(3, 4, 8\)"):
            step(model, torch.randn(4, WIDTH), positions)
        return "refused"

    assert run_world(2, body) == ["refused"] * 2


def test_results_keep_their_types() -> None:
    subject = Subject("", lambda: nn.Sequential(Block(), Block()))

    def body() -> Any:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(build(subject))

        @smp.step
        def step(model: Any, batch: Batch) -> Any:
            out = model(batch["x"])
            losses = [(out - batch["target"]).square().mean(), out.abs().mean()]
            model.backward(losses[0] + losses[1])
            return (
                losses[0],
                {"out": out, "item": losses[1].item(), "word": "a"},
                BaseModelOutput(last_hidden_state=out, hidden_states=(out, batch["x"])),
                Pair(losses[1], "b"),
                [None, 1.5],
            )

        batch = make_batch(subject, 2, 0) if smp.pp_rank() == 0 else None
        loss, named, output, pair, rest = step(model, batch)
        assert type(output) is BaseModelOutput and type(pair) is Pair
        assert named["word"] == ["a", "a"] and pair.word == ["b", "b"]
        assert named["item"] == [each.item() for each in pair.tensor.outputs]
        assert rest == [[None, None], [1.5, 1.5]]
        assert output.hidden_states[1].concat().shape == (4, WIDTH)
        assert not loss.outputs[0].requires_grad
        return loss.reduce_mean().item(), named["out"].concat(), output.last_hidden_state.stack()

    results = run_world(2, body)
    model, batch = build(subject), make_batch(subject, 2, 0)
    expected = model(batch["x"])
    for loss, out, stacked in results:
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(stacked, expected.detach().unflatten(0, (2, 2)))
        assert loss == pytest.approx((expected - batch["target"]).square().mean().item(), rel=1e-6)
