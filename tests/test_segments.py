"""The backward pass in pieces: each runs once, deepest first, and no gradient is news as well."""

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from smp_runtime.errors import UsageError
from smp_runtime.execution.segments import Segments, _owner_of, run_backward
from tests.local_ranks import LocalRank, backward, run_ranks


def run(segments: Segments, depth: int, gradients: list[Tensor]) -> list[Tensor | None]:
    """Runs one segment's backward and returns the gradients of its leaves."""
    segment = segments.pop(depth)
    run_backward([root.edge for root in segment.roots], gradients)
    return [leaf.gradient for leaf in segment.leaves]


def test_depths_are_named_from_the_deepest() -> None:
    segments = Segments()
    for depth in (1, 3, 0):
        segments.add_leaf(depth, torch.zeros(1), 0, 0)
    assert segments.depths() == [3, 1, 0]
    segments.pop(3)
    assert segments.depths() == [1, 0]


def test_a_segment_where_nothing_crossed_is_empty() -> None:
    segment = Segments().pop(7)
    assert (segment.roots, segment.leaves) == ([], [])


def test_gradients_go_from_roots_to_leaves() -> None:
    segments = Segments()
    received = segments.add_leaf(1, torch.tensor([1.0, 2.0]), 11, 0)
    assert received.requires_grad
    segments.add_root(1, received * 3, 12, 2)
    segment = segments.pop(1)
    assert [(root.transfer, root.user) for root in segment.roots] == [(12, 2)]
    assert [(leaf.transfer, leaf.source) for leaf in segment.leaves] == [(11, 0)]
    run_backward([segment.roots[0].edge], [torch.tensor([1.0, 10.0])])
    assert segment.leaves[0].gradient is not None
    assert segment.leaves[0].gradient.tolist() == [3.0, 30.0]


def test_a_received_tensor_may_be_changed_in_place() -> None:
    segments = Segments()
    received = segments.add_leaf(1, torch.tensor([1.0]), 0, 0)
    received *= 5
    received[0] += 1
    segments.add_root(1, received * received, 1, 0)
    assert received.item() == 6.0
    (gradient,) = run(segments, 1, [torch.tensor([1.0])])
    assert gradient is not None
    assert gradient.item() == 60.0


def test_a_leaf_that_nothing_depends_on_gets_no_gradient() -> None:
    segments = Segments()
    used = segments.add_leaf(0, torch.ones(1), 0, 0)
    segments.add_leaf(0, torch.ones(1), 1, 0)
    segments.add_root(0, used * 2, 2, 0)
    first, second = run(segments, 0, [torch.ones(1)])
    assert first is not None
    assert second is None


def test_without_gradients_nothing_runs() -> None:
    run_backward([], [])


def test_a_leaf_can_be_made_under_no_grad() -> None:
    with torch.no_grad():
        received = Segments().add_leaf(0, torch.ones(1), 0, 0)
    assert received.requires_grad


def test_a_root_does_not_keep_data_alive() -> None:
    segments = Segments()
    weight = torch.ones(4, requires_grad=True)
    sent = weight + 1
    segments.add_root(0, sent, 0, 1)
    ghost = weakref.ref(sent)
    del sent
    gc.collect()
    assert ghost() is None
    run(segments, 0, [torch.full((4,), 2.0)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4


def test_the_shared_part_of_a_graph_runs_once_where_it_is_cut() -> None:
    runs: list[str] = []
    weight = torch.ones(1, requires_grad=True)
    shared = weight * 2
    shared.register_hook(lambda gradient: runs.append("shared"))
    segments = Segments()
    cut = segments.add_leaf(1, shared.data, -1, 0)
    segments.add_root(0, shared, -1, 0)
    segments.add_root(1, cut * 3, 5, 1)
    segments.add_root(0, shared * 4, 6, 1)
    (gradient,) = run(segments, 1, [torch.ones(1)])
    assert gradient is not None
    run(segments, 0, [gradient, torch.ones(1)])
    assert runs == ["shared"]
    assert weight.grad is not None
    assert weight.grad.item() == 14.0


# -- segments of bodies on several ranks -------------------------------------------------------


class Zigzag(nn.Module):
    """Goes to rank 1 and back three times, and uses early results late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        h = first
        for _ in range(3):
            h = torch.tanh(self.b(self.a(h)))
        return h + first + self.b(first)


ZIGZAG = {"a": 0, "b": 1, "unused": 1}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_local_gradients(
    model: nn.Module, results: list[dict[str, Tensor | None]], pins: dict[str, int]
) -> None:
    for name, parameter in model.named_parameters():
        found = results[pins[name.split(".")[0]]][name]
        if parameter.grad is None:
            assert found is None, name
        else:
            assert found is not None, name
            torch.testing.assert_close(found, parameter.grad)


def test_a_microbatch_may_have_many_segments() -> None:
    model, x = Zigzag(), torch.randn(3, 4)

    def body(rank: LocalRank) -> dict[str, Tensor | None]:
        mine = rank.place(model, ZIGZAG, x)

        def step(x: Tensor) -> Tensor:
            loss = mine(x).square().mean()
            backward(loss)
            return loss

        losses = rank.step(step, [x, -x])
        assert losses == [pytest.approx(model(x).square().mean().item()),
                          pytest.approx(model(-x).square().mean().item())]  # fmt: skip
        return gradients_of(mine)

    results = run_ranks(2, body)
    (model(x).square().mean() + model(-x).square().mean()).backward()
    check_local_gradients(model, results, ZIGZAG)


def test_news_of_no_gradient_travels() -> None:
    model, x = Zigzag(), torch.randn(3, 4)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        crossed = model.b(model.a(x)).detach()  # type: ignore[operator]
        return model.b(x + crossed).square().mean()  # type: ignore[operator]

    def body(rank: LocalRank) -> dict[str, Tensor | None]:
        mine = rank.place(model, ZIGZAG, x)

        def step(x: Tensor) -> None:
            backward(forward(mine, x))

        rank.step(step, [x])
        return gradients_of(mine)

    results = run_ranks(2, body)
    forward(model, x).backward()
    assert results[0]["a.weight"] is None
    check_local_gradients(model, results, ZIGZAG)


def test_two_backward_passes_over_separate_graphs_add_up() -> None:
    model, x = Zigzag(), torch.randn(3, 4)

    def body(rank: LocalRank) -> dict[str, Tensor | None]:
        mine = rank.place(model, ZIGZAG, x)

        def step(x: Tensor) -> None:
            backward(mine(x).square().mean())
            backward(mine(2 * x).abs().mean())

        rank.step(step, [x, -x])
        return gradients_of(mine)

    results = run_ranks(2, body)
    for part in (x, -x):
        (model(part).square().mean() + model(2 * part).abs().mean()).backward()
    check_local_gradients(model, results, ZIGZAG)


def test_several_losses_may_be_differentiated_at_once() -> None:
    model, x = Zigzag(), torch.randn(3, 4)

    def body(rank: LocalRank) -> dict[str, Tensor | None]:
        mine = rank.place(model, ZIGZAG, x)

        def step(x: Tensor) -> None:
            early = mine.a(x)  # type: ignore[operator]
            backward(early.square().mean(), mine.b(early).abs().mean())  # type: ignore[operator]

        rank.step(step, [x])
        return gradients_of(mine)

    results = run_ranks(2, body)
    early = model.a(x)
    (early.square().mean() + model.b(early).abs().mean()).backward()
    check_local_gradients(model, results, ZIGZAG)


def test_a_second_backward_through_the_same_graph_is_refused() -> None:
    model, x = Zigzag(), torch.randn(3, 4)

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, ZIGZAG, x)

        def step(x: Tensor) -> None:
            loss = mine(x).square().mean()
            backward(loss)
            backward(loss)

        rank.step(step, [x])

    with pytest.raises(UsageError, match="was called before for this microbatch"):
        run_ranks(2, body)


def test_a_loss_without_parameters_is_refused() -> None:
    model, x = Zigzag(), torch.randn(3, 4)

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, ZIGZAG, x)

        def step(x: Tensor) -> None:
            mine(x)
            backward(x.sum())

        rank.step(step, [x])

    with pytest.raises(UsageError, match="does not depend on any parameter"):
        run_ranks(2, body)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class OldEdge(NamedTuple):
    """What torch 2.7 gives: the Python object of a function does not keep the function."""

    node: Any
    output_nr: int


def test_an_edge_that_keeps_no_graph_gets_an_owner_of_it() -> None:
    x = torch.ones(2, requires_grad=True)
    doubled: Tensor = Doubled.apply(x)
    owner: Any = _owner_of(doubled, OldEdge(doubled.grad_fn, 0))
    assert owner.next_functions[0][0] is doubled.grad_fn
    native = x * 2
    assert _owner_of(native, OldEdge(native.grad_fn, 0)) is None
    edge = torch.autograd.graph.get_gradient_edge(doubled)
    assert (_owner_of(doubled, edge) is None) == hasattr(edge, "ownership_token")
