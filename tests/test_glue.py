"""Operations outside placed modules: who runs them, and what the others hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smp_runtime.errors import NotSupportedError, PathMismatchError, UsageError
from smp_runtime.execution.body import current_body
from smp_runtime.execution.glue import watch_autograd
from smp_runtime.execution.values import StandIn, tag_of
from tests.glue_pieces import PIECES, WIDTH, Glue, Two
from tests.local_ranks import LocalRank, backward, run_ranks

PINS = {"first": 0, "last": 1}


def run(
    glue: Glue, num_microbatches: int = 1, look: Callable[[Any], Any] = lambda result: result
) -> list[Any]:
    """Runs a piece of glue on two ranks and returns what `look` saw of its result on each."""
    model, x = make()

    def body(rank: LocalRank) -> Any:
        mine = rank.place(model, PINS, x)
        seen: list[Any] = []

        def step(x: Tensor) -> None:
            result = glue(mine, x)  # type: ignore[arg-type]
            body = current_body()
            assert body is not None
            with body.glue.suspended():
                seen.append(look(result))

        rank.step(step, [x] * num_microbatches)
        return seen[0]

    return run_ranks(2, body)


def make() -> tuple[Two, Tensor]:
    torch.manual_seed(1)
    return Two(), torch.randn(2, WIDTH)


def check(glue: Glue) -> None:
    """Asserts that glue gives the result and the gradients that it gives in one process."""
    model, x = make()

    def body(rank: LocalRank) -> Any:
        mine = rank.place(model, PINS, x)

        def step(x: Tensor) -> Tensor:
            result: Tensor = glue(mine, x)  # type: ignore[arg-type]
            if result.requires_grad:
                backward(result.square().mean())
            return result

        (result,) = rank.step(step, [x])
        return result, {name: p.grad for name, p in mine.named_parameters() if rank.part and
                        rank.part.is_local(p)}  # fmt: skip

    (one, grads), (other, more) = run_ranks(2, body)
    expected = glue(model, x)
    if expected.requires_grad:
        expected.square().mean().backward()
    torch.testing.assert_close(one, expected.detach())
    assert torch.equal(one, other)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close({**grads, **more}[name], parameter.grad)


def owner_of(result: Tensor) -> tuple[int | None, bool]:
    value = tag_of(result)
    return None if value is None else value.owner, isinstance(result, StandIn)


def test_replicated_tensors_are_computed_everywhere() -> None:
    assert run(lambda model, x: (x * 2).sum(), look=owner_of) == [(None, False)] * 2


def test_an_operation_on_an_owned_tensor_runs_where_it_is() -> None:
    assert run(lambda model, x: model.first(x) * 2, look=owner_of) == [(0, False), (0, True)]
    assert run(lambda model, x: model.last(x) * 2, look=owner_of) == [(1, True), (1, False)]


def test_where_owners_meet_the_larger_side_stays_and_then_the_later_rank() -> None:
    def owner(glue: Glue) -> int:
        (first, _), (second, _) = run(glue, look=owner_of)
        assert first == second
        return first

    assert owner(lambda model, x: model.first(x) + model.last(x)) == 1
    assert owner(lambda model, x: model.first(x) + model.last(x)[0]) == 0
    assert owner(lambda model, x: model.first(x)[0] + model.last(x)) == 1


def test_a_stand_in_tells_what_any_rank_can_know() -> None:
    def facts(model: Two, x: Tensor) -> Any:
        h = model.first(x).t()
        return (
            tuple(h.shape), h.stride(), h.dtype, h.device, h.dim(), len(h), h.numel(), h.size(0),
            h.is_contiguous(), h.requires_grad, h.detach().requires_grad, h.is_floating_point(),
            h.shape[0] * 2, isinstance(h, Tensor),
        )  # fmt: skip

    one, other = run(facts)
    assert one == other
    assert one[:2] == ((WIDTH, 2), (1, WIDTH))
    assert one[8:11] == (False, True, False)


@pytest.mark.parametrize("glue", PIECES, ids=lambda glue: glue.__name__)
def test_glue_computes_as_in_one_process(glue: Glue) -> None:
    native, native_backward = vars(torch.autograd.Function)["apply"], torch.autograd.backward
    watch_autograd()
    try:
        check(glue)
    finally:
        torch.autograd.Function.apply = native  # type: ignore[method-assign]
        torch.autograd.backward = native_backward


def test_a_question_is_answered_alike_on_every_rank() -> None:
    def ask(model: Two, x: Tensor) -> Any:
        h, out = model.first(x), model.last(x)
        return h.sum().item(), bool(out.sum() > 0), out.tolist(), int(h.argmax()), h.numpy(
            force=True).shape  # fmt: skip

    model, x = make()
    expected = ask(model, x)
    for found in run(ask):
        assert found[1:2] + found[3:] == expected[1:2] + expected[3:]
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[2], expected[2])


def test_a_view_of_a_copy_can_be_changed_only_after_a_clone() -> None:
    def change(model: Two, x: Tensor) -> Tensor:
        big, small = model.last(torch.cat([x, x])), model.first(x)
        moved = torch.where(torch.ones(4, 1).bool(), small[:1], big)
        return moved.add_(1)

    check(change)


def test_an_error_of_an_operation_is_that_of_torch() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(lambda model, x: model.first(x) @ model.first(x))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda loss: loss.backward(),
        lambda loss: torch.autograd.backward(loss),
        lambda loss: torch.autograd.backward([loss]),
    ],
)
def test_backward_on_the_loss_says_what_to_call(differentiate: Any) -> None:
    with pytest.raises(UsageError, match=r"call model\.backward\(loss\)"):
        run(lambda model, x: differentiate(model(x).sum()))


def test_autograd_grad_is_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"torch\.autograd\.grad"):
        run(lambda model, x: torch.autograd.grad(model(x).sum(), [x]))


def test_of_the_history_others_know_only_whether_there_is_one() -> None:
    assert run(lambda model, x: model(x).grad_fn is None) == [False, False]
    with pytest.raises(NotSupportedError, match=r"history .* is on rank 1 .*'next_functions'"):
        run(lambda model, x: model(x).grad_fn.next_functions)


def test_ranks_that_ask_different_questions_are_told() -> None:
    model, x = make()

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, PINS, x)

        def step(x: Tensor) -> None:
            h = mine.first(x).sum()  # type: ignore[operator]
            h.item() if rank.index == 0 else h.tolist()

        rank.step(step, [x])

    with pytest.raises(PathMismatchError, match="same path"):
        run_ranks(2, body)


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_function_modes_of_the_user_go_on_above_the_glue() -> None:
    def glue(model: Two, x: Tensor) -> list[str]:
        with Recorder() as recorder:
            torch.relu(model.first(x))
            model.last(x)
        return recorder.names

    one, other = run(glue)
    assert "relu" in one
    assert "relu" in other


def test_glue_stops_inside_modules_and_resumes_after() -> None:
    def glue(model: Two, x: Tensor) -> list[bool]:
        body = current_body()
        assert body is not None
        seen = [body.glue.is_active]
        with body.glue.suspended():
            seen.append(body.glue.is_active)
            with body.glue.resumed():
                seen.append(body.glue.is_active)
            seen.append(body.glue.is_active)
        return [*seen, body.glue.is_active]

    assert run(glue) == [[True, False, True, False, True]] * 2


def test_the_gradient_of_an_activation_is_refused() -> None:
    def glue(model: Any, x: Tensor) -> Any:
        h = model.first(x)
        h.retain_grad()
        return h.grad

    with pytest.raises(NotSupportedError, match="the gradient of the output of first is on rank 0"):
        run(glue)


def test_gradients_of_leaves_and_of_what_needs_none_are_read() -> None:
    def glue(model: Any, x: Tensor) -> Any:
        return x.grad, model.first(x).detach().grad, next(model.first.parameters()).grad

    assert run(glue) == [(None, None, None)] * 2


def test_what_computes_unseen_is_refused() -> None:
    function = torch.func.vmap(torch.sin)
    with pytest.raises((UsageError, NotSupportedError), match=r"torch.jit.script, torch.func.vmap"):
        run(lambda model, x: function(model.first(x)))
