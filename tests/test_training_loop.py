"""An ordinary training loop means the same on a pipeline as in one process."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from tests.subjects import (
    WIDTH,
    Batch,
    Block,
    ResNet,
    Subject,
    TiedHead,
    classification,
    images,
    token_prediction,
    tokens,
)
from tests.test_dropout import DropoutBetween
from tests.transformer_subjects import LLAMA, causal, tiny
from tests.transparency import (
    Case,
    build,
    check,
    compare_named,
    copies,
    make_batch,
    make_optimizer,
    plain,
    train_on_ranks,
)
from tests.worlds import run_world

pytestmark = pytest.mark.world

TIED = Subject("tied", TiedHead, tokens, token_prediction)
RESIDUAL = Subject("residual", ResNet, images, classification)
DROPOUT = Subject("dropout", DropoutBetween)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def start(subject: Subject, degree: int, **settings: Any) -> Any:
    """Starts the runtime and returns the subject's wrapped model."""
    smp.init({"pipeline_parallel_degree": degree, "timeout": 30.0, **settings})
    return smp.DistributedModel(build(subject))


def step_of(subject: Subject) -> Any:
    """Returns the subject's training step."""

    @smp.step
    def step(model: Any, batch: Batch) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    return step


def local_gradients(model: Any) -> dict[str, Any]:
    """Returns copies of the gradients on this rank."""
    return copies((name, held.grad) for name, held in model.local_named_parameters())


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_layers", [3, 5, 7])
def test_every_layer_is_somewhere(num_layers: int, degree: int) -> None:
    sizes = {**LLAMA, "num_hidden_layers": num_layers}
    subject = causal(f"llama_{num_layers}", tiny("Llama", **sizes))
    check(subject, degree, [Case(2)])


@pytest.mark.parametrize("degree", [2, 3])
def test_lengths_change_from_step_to_step(degree: int) -> None:
    lengths = (8, 6, 8, 10, 1)

    def batches() -> list[Tensor]:
        torch.manual_seed(1)
        return [torch.randint(16, (4, length)) for length in lengths]

    def body() -> tuple[list[float], dict[str, Any]]:
        model = start(TIED, degree, microbatches=2)
        step = step_of(TIED)
        losses = [step(model, {"x": x, "target": x}).reduce_mean().item() for x in batches()]
        return losses, local_gradients(model)

    model = build(TIED)
    expected = []
    for x in batches():
        parts = [token_prediction(model, {"x": part, "target": part}) for part in x.chunk(2)]
        loss = sum(parts) / 2
        torch.autograd.backward(loss)
        expected.append(loss.item())
    reference = copies((n, p.grad) for n, p in model.named_parameters(remove_duplicate=False))
    for losses, gradients in run_world(degree, body):
        assert losses == pytest.approx(expected, rel=1e-6)
        compare_named("accumulated over five lengths", reference, gradients, TOLERANCE)


def test_lengths_differ_between_microbatches() -> None:
    @smp.step
    def step(model: Any, x: Tensor, lengths: list[int]) -> Tensor:
        x = x[:, : int(lengths.max())]
        loss = token_prediction(model, {"x": x, "target": x})
        model.backward(loss)
        return loss

    x, lengths = torch.randint(16, (6, 9)), torch.tensor([3, 9, 5, 5, 2, 1])

    def body() -> tuple[list[float], dict[str, Any]]:
        model = start(TIED, 2, microbatches=3)
        losses = [loss.item() for loss in step(model, x, lengths).outputs]
        return losses, local_gradients(model)

    model = build(TIED)
    expected = []
    for part, length in zip(x.chunk(3), (9, 5, 2), strict=True):
        loss = token_prediction(model, {"x": part[:, :length], "target": part[:, :length]})
        torch.autograd.backward(loss / 3)
        expected.append(loss.item())
    reference = copies((n, p.grad) for n, p in model.named_parameters(remove_duplicate=False))
    for losses, gradients in run_world(2, body):
        assert losses == pytest.approx(expected, rel=1e-6)
        compare_named("three lengths at once", reference, gradients, TOLERANCE)


@pytest.mark.parametrize(
    "subject",
    [TIED, Subject("chain", lambda: nn.Sequential(*[Block() for _ in range(4)]))],
    ids=str,
)
def test_gradients_of_several_steps_add_up(subject: Subject) -> None:
    def body() -> list[dict[str, Any]]:
        model = start(subject, 2, microbatches=2)
        step, batch, seen = step_of(subject), make_batch(subject, 2, 0), []
        for _ in range(4):
            step(model, batch)
            seen.append(local_gradients(model))
        return seen

    for first, *later in run_world(2, body):
        for times, gradients in zip((2, 3, 4), later, strict=True):
            expected = {name: times * gradient for name, gradient in first.items()}
            compare_named(f"after {times} steps", expected, gradients, TOLERANCE)


def test_microbatches_count_equally_and_sums_can_be_had() -> None:
    subject, batch = TIED, make_batch(TIED, 2, 0)

    def gradients(**options: Any) -> dict[str, Any]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(build(subject), **options)
        step_of(subject)(model, batch)
        found = local_gradients(model)
        smp.shutdown()
        return found

    def body() -> list[dict[str, Any]]:
        return [gradients(), gradients(average_grads_across_microbatches=False)]

    for mean, total in run_world(2, body):
        compare_named("sum", {name: 2 * value for name, value in mean.items()}, total, TOLERANCE)


@pytest.mark.parametrize("subject", [RESIDUAL, DROPOUT], ids=str)
def test_evaluation_between_training_steps_changes_nothing(subject: Subject) -> None:
    @smp.step
    def evaluate(model: Any, batch: Batch) -> Tensor:
        return subject.loss(model, batch)

    def train(with_evaluation: bool) -> tuple[Any, ...]:
        model = start(subject, 2, microbatches=2, seed=5)
        step = step_of(subject)
        optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
        losses = []
        for index in range(3):
            if with_evaluation:
                before = local_gradients(model), copies(model.local_named_buffers())
                model.eval()
                with torch.no_grad():
                    loss = evaluate(model, make_batch(subject, 2, 9)).reduce_mean()
                assert not loss.requires_grad
                model.train()
                after = local_gradients(model), copies(model.local_named_buffers())
                for old, new in zip(before, after, strict=True):
                    compare_named("untouched", old, new, {"rtol": 0.0, "atol": 0.0})
            optimizer.zero_grad()
            losses.append(step(model, make_batch(subject, 2, index)).reduce_mean().item())
            optimizer.step()
        parameters = copies(model.local_named_parameters())
        smp.shutdown()
        return losses, parameters

    def body() -> list[tuple[Any, ...]]:
        return [train(False), train(True)]

    for (losses, parameters), (also_losses, also_parameters) in run_world(2, body):
        assert losses == also_losses
        compare_named("same", parameters, also_parameters, {"rtol": 0.0, "atol": 0.0})


def test_first_step_may_be_an_evaluation() -> None:
    @smp.step
    def evaluate(model: Any, batch: Batch) -> Any:
        return model(batch["x"])

    def body() -> tuple[Any, dict[str, Any]]:
        model = start(TIED, 2, microbatches=2)
        model.eval()
        with torch.no_grad():
            out = evaluate(model, make_batch(TIED, 2, 0)).concat()
        model.train()
        step_of(TIED)(model, make_batch(TIED, 2, 0))
        return out, local_gradients(model)

    expected = build(TIED).eval()(make_batch(TIED, 2, 0)["x"]).detach()
    for out, gradients in run_world(2, body):
        torch.testing.assert_close(out, expected)
        compare_named("gradients", plain(TIED, 2).gradients, gradients, TOLERANCE)


def test_initial_weights_do_not_depend_on_the_degree() -> None:
    def body(degree: int) -> dict[str, Any]:
        @smp.step
        def look(model: Any, batch: Batch) -> Tensor:
            return model(batch["x"]).sum()

        model = start(TIED, degree)
        look(model, make_batch(TIED, 1, 0))
        return copies(model.local_named_parameters())

    for degree in (1, 2, 4):
        for found in run_world(degree, body, degree):
            exact = {"rtol": 0.0, "atol": 0.0}
            compare_named(f"degree {degree}", plain(TIED, 1).initial, found, exact)


@pytest.mark.parametrize("subject", [TIED, RESIDUAL], ids=str)
def test_gradients_are_bit_equal_from_run_to_run_and_between_schedules(subject: Subject) -> None:
    cases = [Case(5, "interleaved"), Case(5, "interleaved"), Case(5, "simple")]
    first, *others = train_on_ranks(subject, 3, cases)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            exact = {"rtol": 0.0, "atol": 0.0}
            compare_named("gradients", mine.gradients, theirs.gradients, exact)
            compare_named("parameters", mine.parameters, theirs.parameters, exact)


def test_wrapper_shows_what_it_wraps() -> None:
    subject = causal("llama", tiny("Llama", **LLAMA))
    names = [name for name, _ in build(subject).named_parameters()]
    signature = inspect.signature(build(subject).forward)

    def body() -> list[str]:
        model = start(subject, 2, microbatches=2)
        assert inspect.signature(model.forward) == signature
        assert model.config.hidden_size == WIDTH * 2 and model.generation_config is not None
        assert [name for name, _ in model.named_parameters()] == names
        assert type(model.get_module()).__name__ == "LlamaForCausalLM"
        assert model.module.module is model.get_module() and not model.partitioned
        step_of(subject)(model, make_batch(subject, 2, 0))
        assert model.partitioned
        assert [name for name, _ in model.named_parameters()] == names
        assert type(model.get_module().model.layers[0]).__name__ == "LlamaDecoderLayer"
        return [name for name, _ in model.local_named_parameters()]

    first, second = run_world(2, body)
    assert sorted(first + second) == sorted(names)


@pytest.mark.parametrize("wraps_optimizer_first", [True, False])
def test_optimizer_may_be_built_before_or_after(wraps_optimizer_first: bool) -> None:
    def body() -> list[float]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        plain_model = build(TIED)
        if wraps_optimizer_first:
            optimizer = make_optimizer(plain_model.parameters())
            model = smp.DistributedModel(plain_model)
            optimizer = smp.DistributedOptimizer(optimizer)
        else:
            model = smp.DistributedModel(plain_model)
            optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        losses = []
        for index in range(3):
            optimizer.zero_grad()
            losses.append(step_of(TIED)(model, make_batch(TIED, 2, index)).reduce_mean().item())
            optimizer.step()
            scheduler.step()
        return losses

    expected = [sum(losses) / 2 for losses in plain(TIED, 2).losses]
    assert run_world(2, body) == [pytest.approx(expected, rel=1e-6)] * 2
