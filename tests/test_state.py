"""State dicts of a partitioned model look like those of the plain one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_runtime.saving.state import full_state_dict, load_into
from tests.local_ranks import LocalRank, backward, run_ranks


class Tied(nn.Module):
    """An embedding tied to a head, a buffer, state without a tensor, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 7}

    def set_extra_state(self, state: Any) -> None:
        """Takes nothing back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


PINS = {"embedding": 0, "norm": 1, "head": 1}
TOKENS = torch.tensor([0, 1, 2])


def state_on(rank: LocalRank, model: nn.Module, only_rank0: bool) -> dict[str, Any]:
    mine = rank.place(model, PINS, TOKENS)
    assert rank.part is not None
    return full_state_dict(mine, rank.part, rank.engine, only_rank0)


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for key, entry in expected.items():
        if isinstance(entry, Tensor):
            assert torch.equal(found[key], entry), key
        else:
            assert found[key] == entry


def test_the_whole_state_is_gathered_on_every_rank() -> None:
    model = Tied()
    for found in run_ranks(2, lambda rank: state_on(rank, model, only_rank0=False)):
        check_equal(found, dict(model.state_dict()))
        assert not any(isinstance(entry, nn.Parameter) for entry in found.values())


def test_names_of_one_parameter_share_one_tensor() -> None:
    for found in run_ranks(2, lambda rank: state_on(rank, Tied(), only_rank0=False)):
        assert found["head.weight"] is found["embedding.weight"]


def test_rank_0_alone_can_have_it() -> None:
    model = Tied()
    first, second = run_ranks(2, lambda rank: state_on(rank, model, only_rank0=True))
    check_equal(first, dict(model.state_dict()))
    assert second == {}


def test_state_can_be_gathered_again_and_again() -> None:
    model = Tied()

    def body(rank: LocalRank) -> list[float]:
        mine = rank.place(model, PINS, TOKENS)
        assert rank.part is not None
        sums = []
        for _ in range(3):
            state = full_state_dict(mine, rank.part, rank.engine, False)
            sums.append(state["norm.weight"].sum().item())
            with torch.no_grad():
                if rank.index == 1:
                    mine.norm.weight += 1  # type: ignore[operator, union-attr]
        return sums

    assert run_ranks(2, body) == [[4.0, 8.0, 12.0]] * 2


def test_what_was_gathered_is_loaded_where_it_belongs() -> None:
    source, target = Tied(), Tied()
    entries = dict(source.state_dict())

    def body(rank: LocalRank) -> dict[str, Any]:
        mine = rank.place(target, PINS, TOKENS)
        result = load_into(mine, {**entries}, strict=True)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert rank.part is not None
        return full_state_dict(mine, rank.part, rank.engine, False)

    for found in run_ranks(2, body):
        check_equal(found, entries)


def test_an_optimizers_parameters_stay_the_same_objects() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    load_into(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, strict=True)
    assert model.weight is weight
    assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_rank_needs_only_its_own_entries() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    result = load_into(model, {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, strict=True)
    assert result.missing_keys == []
    assert model[1].weight.is_meta


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"weight": torch.ones(2, 2)}, r"missing keys: bias"),
        (
            {"weight": torch.ones(2, 2), "bias": torch.ones(2), "scale": torch.ones(1)},
            r"unexpected keys: scale",
        ),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2)},
            r"weight has shape \(2, 3\) in the state dict and \(2, 2\) in the model",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    entries: dict[str, Tensor], match: str
) -> None:
    model = nn.Linear(2, 2)
    before = {key: entry.clone() for key, entry in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=match):
        load_into(model, entries, strict=True)
    check_equal(dict(model.state_dict()), before)


def test_without_strict_missing_and_unexpected_keys_are_returned() -> None:
    model = nn.Linear(2, 2)
    result = load_into(model, {"weight": torch.ones(2, 2), "scale": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["scale"])
    assert model.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_types_are_converted() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    load_into(model, {"weight": torch.full((1, 1), 2.0)}, strict=True)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == 2.0


class KeepsMean(nn.Module):
    """A parent on several ranks that puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x))
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return h


def test_a_buffer_that_glue_replaces_is_that_of_its_new_owner() -> None:
    model, x = KeepsMean(), torch.ones(3, 4)
    expected = copy.deepcopy(model)
    for _ in range(2):
        expected(x)

    def body(rank: LocalRank) -> dict[str, Any]:
        mine: Any = rank.place(model, {"": 0, "first": 0, "second": 1}, x)
        for _ in range(2):
            rank.step(lambda x: backward(mine(x).sum()), [x])
        assert rank.part is not None
        return full_state_dict(mine, rank.part, rank.engine, False)

    for found in run_ranks(2, body):
        assert torch.allclose(found["mean"], expected.state_dict()["mean"])
