"""A partition turned into facts: who holds what, what stays, what is let go."""

from typing import Any

import torch
from torch import Tensor, nn

from smp_runtime.execution.placing import LocalPart, named_state
from tests.local_ranks import LocalRank, run_ranks


class Model(nn.Module):
    """A tied head, a buffer, a parameter that the parent uses, an LSTM with weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) * self.scale + self.table
        return self.head(self.norm(self.lstm(h)[0]))


PINS = {"": 0, "embedding": 0, "lstm": 1, "norm": 1, "head": 1}
TOKENS = torch.tensor([[0, 1, 2]])


def look(rank: LocalRank) -> tuple[Any, LocalPart]:
    mine: Any = rank.place(Model(), PINS, TOKENS)
    assert rank.part is not None
    return mine, rank.part


def test_each_rank_holds_its_own_and_the_rest_is_on_meta() -> None:
    def body(rank: LocalRank) -> list[str]:
        mine, part = look(rank)
        for _, parameter in mine.named_parameters():
            assert part.is_local(parameter) is not parameter.is_meta
            assert part.is_partitioned(parameter)
        assert not mine.table.is_meta
        return [name for name, parameter in mine.named_parameters() if part.is_local(parameter)]

    first, second = run_ranks(2, body)
    assert first == ["scale", "embedding.weight"]
    assert second == [
        "embedding.weight",  # the head's
        *[f"lstm.{kind}_{part}_l0" for kind in ("weight", "bias") for part in ("ih", "hh")],
        "norm.weight",
        "norm.bias",
    ]


def test_parameters_stay_the_same_objects() -> None:
    def body(rank: LocalRank) -> bool:
        mine, part = look(rank)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        held = optimizer.param_groups[0]["params"]
        return [id(p) for p in held] == [id(p) for p in mine.parameters()] and all(
            isinstance(p, nn.Parameter) for p in held
        )

    assert run_ranks(2, body) == [True, True]


def test_shared_parameters_are_known_with_their_holders() -> None:
    def body(rank: LocalRank) -> Any:
        mine, part = look(rank)
        ((name, parameter, ranks),) = part.shared
        assert parameter is mine.embedding.weight
        counted = [n for n, p in mine.named_parameters() if part.counts_here(p)]
        return name, ranks, part.holders("head.weight"), part.holders("norm.bias"), counted

    first, second = run_ranks(2, body)
    assert first[:4] == second[:4] == ("embedding.weight", (0, 1), {0, 1}, {1})
    assert first[4] == ["scale", "embedding.weight"]
    assert "embedding.weight" not in second[4]
    assert len(first[4]) + len(second[4]) == len(list(Model().parameters()))


def test_modules_on_this_rank_are_listed_with_those_inside() -> None:
    def body(rank: LocalRank) -> list[str]:
        _, part = look(rank)
        return [name for name, _ in part.modules()]

    assert run_ranks(2, body) == [["embedding"], ["lstm", "norm", "head"]]


def test_placed_modules_keep_their_class_in_name_and_kind() -> None:
    def body(rank: LocalRank) -> Any:
        mine, _ = look(rank)
        kinds = [isinstance(mine.lstm, nn.LSTM), isinstance(mine.head, nn.Linear)]
        assert repr(mine.norm) == "LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)"
        return kinds, type(mine.head).__qualname__, type(mine.head).__module__

    expected = ([True, True], "Linear", "torch.nn.modules.linear")
    assert run_ranks(2, body) == [expected] * 2


def test_placed_modules_can_be_called_outside_a_step() -> None:
    def body(rank: LocalRank) -> tuple[int, ...]:
        mine, _ = look(rank)
        module = mine.norm if rank.index == 1 else mine.embedding
        given = torch.ones(1, 4) if rank.index == 1 else TOKENS
        return tuple(module(given).shape)

    assert run_ranks(2, body) == [(1, 3, 4), (1, 4)]


def test_named_state_has_every_name() -> None:
    names = [name for name, _ in named_state(Model())]
    assert {"embedding.weight", "head.weight", "table"} <= set(names)
