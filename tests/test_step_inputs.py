"""A step's arguments come from pipeline rank 0; what belongs to a process stays its own."""

import argparse
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from smp_runtime.errors import UsageError
from smp_runtime.execution.step_inputs import share_inputs
from tests.local_ranks import LocalRank, run_ranks


def shared(make: Callable[[int], Any], num_ranks: int = 2) -> list[Any]:
    """Returns what each rank gets for an argument that it made by ``make(rank)``."""

    def body(rank: LocalRank) -> Any:
        call, _ = share_inputs(rank.engine, ((make(rank.index),), {}), 0)
        return call[0][0]

    return run_ranks(num_ranks, body)


def test_positional_and_keyword_arguments_come_from_rank_0() -> None:
    def body(rank: LocalRank) -> Any:
        mine = torch.full((2,), float(rank.index))
        return share_inputs(rank.engine, ((mine, rank.index), {"flag": rank.index == 0}), 0)[0]

    for args, kwargs in run_ranks(3, body):
        assert args[0].tolist() == [0.0, 0.0]
        assert (args[1], kwargs) == (0, {"flag": True})


def test_rank_0_keeps_its_very_arguments() -> None:
    x = torch.zeros(2)

    def body(rank: LocalRank) -> bool:
        return share_inputs(rank.engine, ((x,), {}), 0)[0][0][0] is x

    assert run_ranks(2, body) == [True, False]


@pytest.mark.parametrize("nothing", [torch.zeros(4, 0), torch.zeros(0), None, "nothing", []])
def test_other_ranks_may_pass_nothing(nothing: Any) -> None:
    full = torch.arange(12).view(4, 3)
    result = shared(lambda rank: full if rank == 0 else nothing)[1]
    assert torch.equal(result, full)


def test_other_ranks_may_pass_another_structure() -> None:
    result = shared(lambda rank: {"x": [torch.ones(1)]} if rank == 0 else torch.zeros(0))[1]
    assert result["x"][0].item() == 1.0


def test_tensors_keep_layout_type_and_gradient_flag() -> None:
    sent = torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    sent.requires_grad_()
    result = shared(lambda rank: sent if rank == 0 else None)[1]
    assert (result.dtype, result.stride()) == (sent.dtype, sent.stride())
    assert result.requires_grad
    assert result.is_leaf


def test_a_large_batch_travels() -> None:
    assert shared(lambda rank: torch.arange(1_000_000) if rank == 0 else None)[1].sum() == (
        999_999 * 500_000
    )


def test_one_tensor_in_two_places_stays_one() -> None:
    x = torch.zeros(2)
    first, second = shared(lambda rank: (x, {"labels": x}) if rank == 0 else None)[1]
    assert first is second["labels"]


class Batch(dict[str, Any]):
    """A dict of a type of its own."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Sample:
    x: Any
    word: str = "kept"


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, 1),
        lambda x: [x, 1],
        lambda x: {x},
        lambda x: OrderedDict(x=x),
        lambda x: Batch(x=x),
        lambda x: Pair(x, "right"),
        lambda x: Sample(x),
        lambda x: BaseModelOutput(last_hidden_state=x),
        lambda x: BatchEncoding({"x": x}),
    ],
)
def test_containers_keep_their_types(make: Callable[[torch.Tensor], Any]) -> None:
    one, other = shared(lambda rank: make(torch.ones(2)) if rank == 0 else None)
    assert type(one) is type(other)
    assert list(map(str, parts(one))) == list(map(str, parts(other)))


def parts(nest: Any) -> list[Any]:
    if isinstance(nest, Sample):
        return [nest.x, nest.word]
    return list(nest.values()) if hasattr(nest, "values") else list(nest)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        1j,
        "word",
        b"bytes",
        range(3),
        slice(1, 2),
        torch.device("cpu"),
        torch.bfloat16,
        torch.Size([2, 3]),
        argparse.Namespace(lr=0.1),
        np.float32(1.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_travel(value: Any) -> None:
    result = shared(lambda rank: value if rank == 0 else "mine")[1]
    assert type(result) is type(value)
    assert result == value


def test_numpy_arrays_travel() -> None:
    assert shared(lambda rank: np.arange(3) + rank)[1].tolist() == [0, 1, 2]


class Own:
    """An object that pickle could send, but that belongs to its process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.mark.parametrize(
    "nest",
    [
        lambda own: own,
        lambda own: [torch.zeros(1), own],
        lambda own: {"a": (own,)},
        lambda own: Pair(own, torch.zeros(1)),
        lambda own: Batch(a=own, x=torch.zeros(1)),
    ],
)
def test_objects_stay_with_their_process(nest: Callable[[Own], Any]) -> None:
    def find(obj: Any) -> Own:
        if isinstance(obj, Own):
            return obj
        return next(filter(None, (find(part) for part in parts(obj) if not torch.is_tensor(part))))

    results = shared(lambda rank: nest(Own(rank)))
    assert [find(result).rank for result in results] == [0, 1]
    assert type(results[0]) is type(results[1])


def test_modules_optimizers_and_functions_stay_with_their_process() -> None:
    def body(rank: LocalRank) -> list[bool]:
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        function = lambda: rank.index  # noqa: E731 - a function of this process
        mine = (module, {"optimizer": optimizer, "function": function})
        (args, _), _ = share_inputs(rank.engine, (mine, {}), 0)
        return [args[0] is module, args[1]["optimizer"] is optimizer,
                args[1]["function"] is function]  # fmt: skip

    assert run_ranks(2, body) == [[True, True, True]] * 2


def test_a_missing_object_of_ones_own_is_named() -> None:
    def body(rank: LocalRank) -> None:
        kwargs = {"model": nn.Linear(1, 1)} if rank.index == 0 else {}
        share_inputs(rank.engine, ((), kwargs), 0)

    with pytest.raises(UsageError, match=r"rank 0 passed a 1/model .*on every rank"):
        run_ranks(2, body)


class Sliceable:
    """Splits itself, so it travels."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def smp_slice(self, num_microbatches: int, microbatch: int, axis: int) -> "Sliceable":
        return Sliceable(self.x[microbatch])


def test_objects_that_split_themselves_travel() -> None:
    result = shared(lambda rank: Sliceable(torch.ones(2)) if rank == 0 else None)[1]
    assert result.x.tolist() == [1.0, 1.0]


def test_the_seed_is_that_of_rank_0() -> None:
    def body(rank: LocalRank) -> int:
        return share_inputs(rank.engine, ((), {}), 100 + rank.index)[1]

    assert run_ranks(3, body) == [100, 100, 100]
