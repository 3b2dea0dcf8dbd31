"""Gradient norms are those of the whole model, whatever is where (UR-16)."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_before

import smp_runtime as smp
from smp_runtime.errors import UsageError
from smp_runtime.optimization.norms import clip_gradients
from tests.subjects import Subject, TiedHead, chain, token_prediction, tokens
from tests.transparency import build, copies, make_batch, microbatch_of
from tests.worlds import run_world, run_world_expecting_failure

ALONE: Any = None  # without a partition no runtime is needed


def parameters(*gradients: list[float] | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        made.append(parameter)
    return made


def clip(given: list[nn.Parameter], max_norm: float, *args: Any) -> float:
    return clip_gradients(given, None, ALONE, max_norm, *args).item()


def test_the_norm_is_over_all_and_all_are_scaled() -> None:
    given = parameters([3.0, 0.0], None, [0.0, 4.0])
    assert clip(given, 1.0) == 5.0
    assert given[0].grad is not None
    assert given[1].grad is None
    assert given[0].grad.tolist() == pytest.approx([0.6, 0.0])


def test_small_gradients_stay_as_they_are() -> None:
    given = parameters([3.0, 4.0])
    assert clip(given, 6.0) == 5.0
    assert given[0].grad is not None
    assert given[0].grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("kind", "norm"), [(1.0, 10.0), (2.0, math.sqrt(42)), (math.inf, 5.0)])
def test_other_norms(kind: float, norm: float) -> None:
    assert clip(parameters([5.0, -1.0], [0.0, 4.0]), 1.0, kind) == pytest.approx(norm)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip(parameters(None, None), 1.0) == 0.0
    assert clip([], 1.0) == 0.0


def test_norms_that_are_not_finite_raise_if_asked_to() -> None:
    given = parameters([math.inf, 1.0])
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 for gradients is inf"):
        clip(given, 1.0, 2.0, True)
    assert clip(given, 1.0) == math.inf


@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
def test_it_is_bit_equal_to_torchs(kind: float) -> None:
    mine, theirs = nn.Linear(30, 30), nn.Linear(30, 30)
    for first, second in zip(mine.parameters(), theirs.parameters(), strict=True):
        first.grad = torch.randn_like(first)
        second.grad = first.grad.clone()
    expected = imported_before(theirs.parameters(), 0.1, kind)
    assert clip(list(mine.parameters()), 0.1, kind) == expected.item()
    for first, second in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]


# -- a partitioned model ------------------------------------------------------------------------

MAX_NORM = 0.05
UNTIED = Subject("untied", chain)
TIED = Subject("tied", TiedHead, tokens, token_prediction)
CASES = ((UNTIED, "auto"), (TIED, "copy"), (TIED, "together"))

Result = tuple[list[float], dict[str, Any]]


@functools.cache
def reference(subject: Subject) -> Result:
    model = build(subject)
    for index in range(2):
        loss = subject.loss(model, microbatch_of(make_batch(subject, 2, 0), 2, index))
        torch.autograd.backward(loss / 2)
    norms = [imported_before(model.parameters(), limit).item() for limit in (MAX_NORM, 1e-3)]
    named = model.named_parameters(remove_duplicate=False)
    return norms, copies((name, held.grad) for name, held in named)


def clipped(subject: Subject, tied: str) -> Result:
    """Trains for a step, clips by the model's method and then by torch's function."""
    smp.init({"pipeline_parallel_degree": smp_degree(), "microbatches": 2, "tied_weights": tied})
    model = smp.DistributedModel(build(subject))

    @smp.step
    def step(model: Any, batch: Any) -> None:
        model.backward(subject.loss(model, batch))

    step(model, make_batch(subject, 2, 0))
    with pytest.raises(UsageError, match=r"model\.clip_grad_norm_"):
        imported_before(model.parameters(), 1.0)
    norms = [
        model.clip_grad_norm_(MAX_NORM).item(),
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item(),
    ]
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.tensor([2.0])
    assert torch.nn.utils.clip_grad_norm_(other, 1.0).item() == 2.0
    gradients = copies((name, held.grad) for name, held in model.local_named_parameters())
    smp.shutdown()
    return norms, gradients


def smp_degree() -> int:
    return torch.distributed.get_world_size()


@pytest.mark.world
@pytest.mark.parametrize("degree", [2, 4])
def test_a_pipelines_norm_and_gradients_are_those_of_one_process(degree: int) -> None:
    results = run_world(degree, lambda: [clipped(*case) for case in CASES])
    for index, (subject, tied) in enumerate(CASES):
        norms, gradients = reference(subject)
        for by_case in results:
            found, mine = by_case[index]
            assert found == pytest.approx(norms, rel=1e-5), (subject.name, tied)
            for name, gradient in mine.items():
                assert isinstance(gradient, Tensor)
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-9)
        assert len({tuple(by_case[index][0]) for by_case in results}) == 1


def clipped_as_held() -> tuple[list[float], float]:
    """Clips what the optimizer's groups hold, and then what this rank holds."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(build(UNTIED))
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)
    )

    @smp.step
    def step(model: Any, batch: Any) -> None:
        model.backward(UNTIED.loss(model, batch))

    step(model, make_batch(UNTIED, 2, 0))
    groups = [group["params"] for group in optimizer.param_groups]
    # One rank holds none of the last.
    groups.append([p for p in model.local_parameters() if p is next(iter(model.parameters()))])
    norms = [torch.nn.utils.clip_grad_norm_(group, 1e9).item() for group in groups]
    norms.append(torch.nn.utils.clip_grad_norm_(model.local_parameters(), MAX_NORM).item())
    after = model.clip_grad_norm_(1e9).item()
    smp.shutdown()
    return norms, after


@pytest.mark.world
def test_lists_of_what_each_rank_holds_give_norms_over_all_ranks() -> None:
    model = build(UNTIED)
    for index in range(2):
        loss = UNTIED.loss(model, microbatch_of(make_batch(UNTIED, 2, 0), 2, index))
        torch.autograd.backward(loss / 2)
    given = list(model.parameters())
    groups = [[p for p in given if p.ndim > 1], [p for p in given if p.ndim == 1], given[:1], given]
    expected = [imported_before(group, 1e9).item() for group in groups]
    for norms, after in run_world(2, clipped_as_held):
        assert norms == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(MAX_NORM, rel=1e-4)


def gradients_in_the_body() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(build(UNTIED))

    @smp.step
    def step(model: Any, batch: Any) -> Any:
        model.backward(UNTIED.loss(model, batch))
        return sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)

    step(model, make_batch(UNTIED, 2, 0))


@pytest.mark.world
def test_a_norm_of_this_ranks_gradients_is_refused_in_the_body_too() -> None:
    for rank in run_world_expecting_failure(2, gradients_in_the_body):
        assert "UsageError" in rank.exception_text
        assert "For norms call model.clip_grad_norm_(max_norm)" in rank.exception_text
