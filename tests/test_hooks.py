"""Forward hooks inside placed modules fire on every rank, and see the same there."""

from typing import Any

import pytest
from torch import Tensor

from smp_runtime.errors import NotSupportedError
from tests.local_ranks import backward
from tests.test_calls import WIDTH, X, layer, owners, run


def test_hooks_fire_once_on_every_rank_and_see_the_same() -> None:
    def hook(module: Any, args: Any, output: Any) -> None:
        module.seen.append((len(args), tuple(output.shape), owners([output])))

    def watch(model: Any) -> None:
        model.part.layer.seen = []
        model.part.layer.register_forward_hook(hook)

    def glue(model: Any, x: Tensor) -> Any:
        model.part(x)
        return list(model.part.layer.seen)

    fired = (1, (2, WIDTH), [1])
    assert run(layer, glue, (X, X), watch) == [[[fired], [fired] * 2]] * 2


def test_pre_hooks_fire_on_every_rank() -> None:
    def watch(model: Any) -> None:
        model.seen = []
        model.part.register_forward_pre_hook(
            lambda module, args: model.seen.append(tuple(args[0].shape))
        )

    def glue(model: Any, x: Tensor) -> Any:
        model.part(x)
        return list(model.seen)

    assert run(layer, glue, prepare=watch) == [[[(2, WIDTH)]]] * 2


def test_what_a_hook_collects_can_be_computed_with() -> None:
    def watch(model: Any) -> None:
        model.collected = []
        model.part.layer.register_forward_hook(
            lambda module, args, output: model.collected.append(output)
        )

    def glue(model: Any, x: Tensor) -> Any:
        out = model.part(x)
        total = (model.collected[0] - out).sum()
        backward(total.square() + out.sum())
        return total.item()

    assert run(layer, glue, prepare=watch) == [[0.0]] * 2


def test_a_hook_may_change_the_output() -> None:
    def watch(model: Any) -> None:
        model.part.register_forward_hook(lambda module, args, output: output * 0)

    def glue(model: Any, x: Tensor) -> Any:
        return model.part(x).abs().sum().item()

    assert run(layer, glue, prepare=watch) == [[0.0]] * 2


def test_a_hook_that_removes_itself_is_gone() -> None:
    def watch(model: Any) -> None:
        model.count = 0

        def once(module: Any, args: Any, output: Any) -> None:
            model.count += 1
            handle.remove()

        handle = model.part.register_forward_hook(once)

    def glue(model: Any, x: Tensor) -> Any:
        model.part(x)
        return model.count

    assert run(layer, glue, (X, X), watch) == [[1, 1]] * 2


def full_backward_hook(module: Any, grad_inputs: Any, grad_outputs: Any) -> None:
    module.seen = [*getattr(module, "seen", []), tuple(grad_outputs[0].shape)]


def trained(model: Any, x: Tensor) -> list[Any]:
    """Returns what the hook of the part on rank 1 saw."""
    backward(model(x).sum())
    return list(getattr(model.part, "seen", []))


def test_a_full_backward_hook_fires_where_its_module_lives() -> None:
    def watch(model: Any) -> None:
        model.part.register_full_backward_hook(full_backward_hook)

    assert run(layer, trained, prepare=watch) == [[[]], [[(2, WIDTH)]]]


# The rank that has the history may be the first, and torch warns there: no input is trained.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_a_full_backward_hook_on_more_than_one_rank_is_refused_by_its_cause(kind: str) -> None:
    def watch(model: Any) -> None:
        getattr(model, f"register_full_backward_{kind}")(lambda *args: None)

    cause = (
        r"history \(grad_fn\) of BackwardHookFunction is on rank 1 .*'name'.* full backward hook"
    )
    with pytest.raises(NotSupportedError, match=cause):
        run(layer, trained, prepare=watch)
