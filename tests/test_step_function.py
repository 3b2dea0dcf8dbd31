"""`@smp.step`: the decorator, and one step from its arguments to its results."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.errors import MicrobatchError, PeerError, UsageError
from smp_runtime.step_function import StepFunction
from tests.worlds import run_world

WIDTH = 4


def chain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def start(**config: Any) -> Any:
    smp.init({"pipeline_parallel_degree": torch.distributed.get_world_size(), **config})
    return smp.DistributedModel(chain())


# -- the decorator ----------------------------------------------------------------------------


def test_it_works_with_and_without_parentheses() -> None:
    def body(model: Any, x: Tensor) -> None:
        """Trains."""

    for made in (smp.step(body), smp.step()(body), smp.step(detach_outputs=False)(body)):
        assert isinstance(made, StepFunction)
        assert (made.__name__, made.__doc__) == ("body", "Trains.")  # type: ignore[attr-defined]
        assert made.__wrapped__ is body  # type: ignore[attr-defined]


def test_names_that_are_no_arguments_raise_at_once() -> None:
    with pytest.raises(MicrobatchError, match=r"no argument 'musk'; its arguments are x, mask"):

        @smp.step(non_split_inputs=["musk"])
        def first(x: Tensor, mask: Tensor) -> None:
            """Never runs."""

    with pytest.raises(ValueError, match="no argument 'y'"):
        smp.step(input_split_axes={"y": 1})(lambda x: None)


def test_in_a_class_without_self_it_binds_nothing() -> None:
    class Trainer:
        train = smp.step(lambda x: x)

    assert Trainer().train is Trainer.train


def test_without_a_runtime_it_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"call smp\.init\(\) first"):
        smp.step(lambda x: x)(torch.zeros(1))


# -- a step -----------------------------------------------------------------------------------


class Doubling:
    """A trainer with steps for methods; its state is each rank's own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.factor = 2.0 + smp.pp_rank()
        self.seen: list[float] = []

    @smp.step(non_split_inputs=["bias"], loss_weight=lambda self, x, bias: self.factor * len(x))
    def train(self, x: Tensor, bias: Tensor) -> Tensor:
        """Trains."""
        self.seen.append(self.factor)
        loss = self.model(x).mean() + bias.sum()
        self.model.backward(loss)
        return loss

    @classmethod
    @smp.step
    def name(cls, x: Tensor) -> str:
        """Returns the name of the class."""
        return f"{cls.__name__} {len(x)}"


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_a_method_is_a_step_of_its_instance(size: int, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> Any:
        trainer = Doubling(start(microbatches=2))
        x, bias = torch.ones(4, WIDTH), torch.zeros(3)
        losses = [trainer.train(x, bias=bias).concat() for _ in range(2)]
        assert trainer.train.__doc__ == "Trains."
        assert "Non-splittable" not in caplog.text
        return losses, trainer.seen, trainer.name(x)

    expected = chain()(torch.ones(2, WIDTH)).mean().expand(2)
    for rank, (losses, seen, names) in enumerate(run_world(size, body)):
        torch.testing.assert_close(losses, [expected.detach()] * 2)
        assert seen == [2.0 + rank] * 4
        assert names == ["Doubling 2"] * 2


class Shifting(nn.Module):
    """Changes its input in place, and saves it for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.sub_(0.5))
        return out


def shifted_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Changes the targets in place as well."""
    y[y < 0] = 0.0
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_arguments_may_be_changed_in_place(size: int) -> None:
    def data() -> list[Tensor]:
        torch.manual_seed(2)
        return [torch.randn(4, WIDTH), torch.randn(4, WIDTH)]

    def body() -> Any:
        smp.init({"pipeline_parallel_degree": size, "microbatches": 2})
        model = smp.DistributedModel(Shifting())

        @smp.step
        def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = shifted_loss(model, x, y)
            model.backward(loss)
            return loss

        losses = step(model, *data()).concat()
        return losses, {name: p.grad for name, p in model.local_named_parameters()}

    plain = Shifting()
    losses = []
    for x, y in zip(*(tensor.chunk(2) for tensor in data()), strict=True):
        losses.append(shifted_loss(plain, x.clone(), y.clone()))
        (losses[-1] / 2).backward()
    gradients: dict[str, Tensor] = {}
    for rank_losses, rank_gradients in run_world(size, body):
        torch.testing.assert_close(rank_losses, torch.stack(losses).detach())
        gradients |= rank_gradients
    torch.testing.assert_close(gradients, {n: p.grad for n, p in plain.named_parameters()})


@pytest.mark.world
def test_a_step_may_return_shapes() -> None:
    def body() -> Any:
        step = smp.step(lambda model, x: (model(x).shape, {"shape": x.shape}))
        return step(start(microbatches=2), torch.ones(4, WIDTH))

    shapes = [torch.Size([2, WIDTH])] * 2
    assert run_world(2, body) == [(shapes, {"shape": shapes})] * 2


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_arguments_are_split_and_results_joined(size: int) -> None:
    def body() -> Any:
        model = start(microbatches=2)

        @smp.step(non_split_inputs=["mask"], input_split_axes={"positions": 1})
        def step(model: Any, x: Tensor, positions: Tensor, mask: Tensor, name: str) -> Any:
            out = model(x)
            return out, {"shapes": [list(positions.shape), list(mask.shape)], "name": name}

        is_first = smp.pp_rank() == 0
        x = torch.ones(4, WIDTH) if is_first else torch.zeros(4, 0)
        positions = torch.zeros(3, 4) if is_first else torch.zeros(0)
        mask = torch.ones(1, 1, 7, 7) if is_first else torch.zeros(1)
        out, rest = step(model, x, positions, mask=mask, name="a" if is_first else "b")
        assert isinstance(out, smp.StepOutput)
        assert not out.outputs[0].requires_grad
        return out.concat(), rest

    expected = chain()(torch.ones(4, WIDTH)).detach()
    for out, rest in run_world(size, body):
        torch.testing.assert_close(out, expected)
        shapes = [[[3, 2], [3, 2]], [[1, 1, 7, 7], [1, 1, 7, 7]]]
        assert [parts_of(rest["shapes"][0]), parts_of(rest["shapes"][1])] == shapes
        assert rest["name"] == ["a", "a"]


def parts_of(numbers: list[list[int]]) -> list[list[int]]:
    """Turns a list of joined numbers into one list for each microbatch."""
    return [list(part) for part in zip(*numbers, strict=True)]


class Batch(dict[str, Any]):
    """A dict of a type of its own."""


@pytest.mark.world
def test_models_and_optimizers_are_each_ranks_own_and_containers_keep_their_types() -> None:
    def body() -> Any:
        model = start(microbatches=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []

        @smp.step
        def step(model: Any, batch: Any, extra: Any) -> None:
            seen.append([model, extra[0], type(batch).__name__, batch["x"].shape])

        step(model, Batch(x=torch.ones(2, WIDTH)), [optimizer])
        return [(given is model, other is optimizer, *rest) for given, other, *rest in seen]

    assert run_world(2, body) == [[(True, True, "Batch", (1, WIDTH))] * 2] * 2


@pytest.mark.world
def test_every_rank_may_feed_its_own_data_without_the_broadcast() -> None:
    def body() -> Any:
        model = start(microbatches=2, broadcast_inputs=False)
        sent: list[Any] = []

        @smp.step
        def step(model: Any, x: Tensor) -> Tensor:
            sent.append(x.data_ptr())
            return model(x).sum()

        x = torch.ones(2, WIDTH)
        result = step(model, x).reduce_sum().item()
        return result, sent[0] == x.data_ptr()

    expected = chain()(torch.ones(2, WIDTH)).sum().item()
    assert run_world(2, body) == [(pytest.approx(expected), True)] * 2


@pytest.mark.world
def test_seeds_agree_over_a_pipeline_and_differ_over_replicas() -> None:
    def drawn(**config: Any) -> list[float]:
        smp.init({"microbatches": 2, **config})
        torch.manual_seed(100 + smp.rank())
        smp.DistributedModel(chain())
        step = smp.step(lambda x: torch.rand(()))
        numbers = [each.item() for each in step(torch.zeros(2)).outputs]
        smp.shutdown()
        return numbers

    def body() -> list[list[float]]:
        return [
            drawn(pipeline_parallel_degree=2),
            drawn(pipeline_parallel_degree=2, seed=5),
            drawn(pipeline_parallel_degree=2, seed=5),
            drawn(ddp=True, seed=5),
        ]

    first, second = run_world(2, body)
    assert first[:3] == second[:3]
    assert first[1] == first[2] != first[0]
    assert first[3] == first[1]
    assert second[3] != first[3]


@pytest.mark.world
def test_results_may_keep_their_graphs() -> None:
    def body() -> bool:
        model = start()

        @smp.step(detach_outputs=False)
        def step(model: Any, x: Tensor) -> Tensor:
            return model(x)

        out = step(model, torch.ones(2, WIDTH)).outputs[0]
        if out.requires_grad:
            out.sum().backward()
        return out.requires_grad

    assert run_world(2, body) == [False, True]


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 3])
def test_a_batch_that_does_not_divide_raises_on_every_rank(size: int) -> None:
    def body() -> str:
        model = start(microbatches=2)
        step = smp.step(lambda model, x: model(x).sum())
        with pytest.raises((MicrobatchError, PeerError)) as caught:
            step(model, torch.ones(5, WIDTH))
        return f"{caught.value}"

    for message in run_world(size, body):
        assert "a batch of 5 (x (5, 4)) does not divide into 2 microbatches" in message


@pytest.mark.world
def test_wrong_arguments_raise_before_anything_runs() -> None:
    def body() -> Any:
        model = start(microbatches=2)
        ran: list[int] = []
        step = smp.step(lambda model, x, *, labels: ran.append(1))
        with pytest.raises((TypeError, PeerError), match="missing a required argument: 'labels'"):
            step(model, torch.ones(2, WIDTH))
        return ran

    assert run_world(2, body) == [[], []]


@pytest.mark.world
def test_a_step_without_a_model_runs_everywhere() -> None:
    def body() -> float:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 3})
        step = smp.step(lambda x: (x * 2).sum())
        return step(torch.arange(6.0) + 100 * smp.pp_rank()).reduce_sum().item()

    assert run_world(2, body) == [30.0, 30.0]


@pytest.mark.world
def test_the_loss_of_a_microbatch_counts_its_share() -> None:
    def gradients(averages: bool) -> list[float]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
        model = smp.DistributedModel(chain(), average_grads_across_microbatches=averages)

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x).mean())

        step(model, torch.ones(4, WIDTH))
        sums = [p.grad.sum().item() for p in model.local_parameters()]
        smp.shutdown()
        return sums

    def body() -> list[list[float]]:
        return [gradients(True), gradients(False)]

    for mean, total in run_world(2, body):
        assert total == pytest.approx([4 * value for value in mean], rel=1e-5)
        assert any(abs(value) > 0 for value in mean)
