"""Random trees of modules, placed at random, train as in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.subjects import WIDTH, Subject, linear
from tests.transparency import Case, check

pytestmark = pytest.mark.world

# A tree is a kind and its children; leaves are strings. Every module maps vectors to vectors.
Tree = Any


class Leaf(nn.Module):
    """A layer, perhaps with something unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = linear()
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x: Tensor, unused: Any = None) -> Any:
        self.num_calls += 1
        h = torch.tanh(self.layer(x))
        if self.kind == "in_place":
            h = h.clone().mul_(2)
            h += x
        if self.kind == "without_gradient":
            h = h.detach()
        return h


class Parent(nn.Module):
    """Combines its children in one of several ways."""

    def __init__(self, kind: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(children)
        if kind == "scaled":
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor, unused: Any = None) -> Tensor:
        if self.kind == "parallel":
            return torch.stack([part(x) for part in self.parts]).mean(0)
        if self.kind == "dense":
            seen = [x]
            for part in self.parts:
                seen.append(part(sum(seen) / len(seen)))
            return torch.cat(seen, -1).unflatten(-1, (-1, WIDTH)).sum(-2)
        start = x
        for index, part in enumerate(self.parts):
            x = part(x, unused=[None, index])
            if self.kind == "repeated":
                x = part(x)
            if self.kind == "scaled":
                x = x * self.scale
            if self.kind == "branching" and x.mean() > 0:
                x = -x
        return x + start if self.kind == "residual" else x


leaves = st.sampled_from(["plain", "in_place", "without_gradient", "shared"])
kinds = st.sampled_from(
    ["chain", "residual", "parallel", "dense", "repeated", "scaled", "branching"]
)
trees = st.tuples(
    kinds,
    st.lists(
        st.recursive(
            leaves,
            lambda child: st.tuples(kinds, st.lists(child, min_size=1, max_size=3)),
            max_leaves=6,
        ),
        min_size=2,
        max_size=4,
    ),
)


def build(tree: Tree, shared: nn.Module) -> nn.Module:
    """Makes the modules of a tree; all leaves called shared are one module."""
    if isinstance(tree, str):
        return shared if tree == "shared" else Leaf(tree)
    kind, children = tree
    return Parent(kind, [build(child, shared) for child in children])


def make_model(tree: Tree) -> nn.Module:
    """Makes a model with a layer before and after the tree, so that something always trains."""
    return nn.Sequential(linear(), build(tree, Leaf("plain")), linear())


def subject_of(tree: Tree, places: list[int] | None) -> Subject:
    """Returns the model of a tree, with its modules placed in turn on the given partitions."""

    def pins(model: nn.Module, num_partitions: int) -> Mapping[str, int]:
        names = [name for name, module in model.named_modules() if isinstance(module, Leaf)]
        assert places is not None
        chosen = {
            name: places[index % len(places)] % num_partitions for index, name in enumerate(names)
        }
        # Every partition needs something; the layers before and after make sure of it.
        return {"0": 0, "2": num_partitions - 1, **chosen}

    name = f"{tree} at {places}"
    build = lambda: make_model(tree)  # noqa: E731
    if places is None:
        return Subject(name, build)
    return Subject(name, build, pins=pins)


cases = st.builds(
    Case, st.sampled_from([1, 2, 3, 5]), st.sampled_from(["interleaved", "simple"]), st.just(())
)
few = settings(max_examples=15, suppress_health_check=list(HealthCheck))


@few
@given(trees, st.lists(st.integers(0, 1), min_size=1, max_size=6), cases)
def test_random_placement_on_two_ranks(tree: Tree, places: list[int], case: Case) -> None:
    check(subject_of(tree, places), 2, [case])


@few
@given(trees, st.lists(st.integers(0, 2), min_size=1, max_size=6), cases)
def test_random_placement_on_three_ranks(tree: Tree, places: list[int], case: Case) -> None:
    check(subject_of(tree, [1, *places]), 3, [case])


@few
@given(trees, cases)
def test_planned_placement_on_two_ranks(tree: Tree, case: Case) -> None:
    check(subject_of(tree, None), 2, [case])
