"""Shared parameters: together or copied, they train as one; and a norm counts them once."""

from typing import Any

import pytest
import torch
from torch import Tensor

import smp_runtime as smp
from tests.subjects import (
    Batch,
    CalledTwice,
    Subject,
    TiedHead,
    token_prediction,
    tokens,
    two_parents,
)
from tests.transformer_subjects import GPT2, LLAMA, T5, causal, own_loss, tiny, translation
from tests.transparency import (
    NUM_STEPS,
    Case,
    build,
    check,
    compare_named,
    copies,
    make_batch,
    make_optimizer,
    microbatch_of,
    train_on_ranks,
)
from tests.worlds import run_world

pytestmark = pytest.mark.world

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
TIED = Subject("tied_head", TiedHead, tokens, token_prediction)
UNTIED = causal("llama", tiny("Llama", **LLAMA))
SUBJECTS = (
    TIED,
    Subject("two_parents", two_parents),
    causal("gpt2", tiny("GPT2", "LMHeadModel", **GPT2)),
    causal("llama_tied", tiny("Llama", **LLAMA, tie_word_embeddings=True)),
    Subject("t5", tiny("T5", "ForConditionalGeneration", **T5), translation, own_loss),
)


@pytest.mark.parametrize("tied_weights", ["together", "copy"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_trains_as_one_process_does(subject: Subject, tied_weights: str) -> None:
    settings = (("tied_weights", tied_weights),)
    check(subject, 3, [Case(2, "interleaved", settings), Case(3, "simple", settings)])


def test_together_means_on_one_rank() -> None:
    settings = (("tied_weights", "together"),)
    (ranks,) = train_on_ranks(TIED, 2, [Case(2, settings=settings)])
    names = {"embedding.weight", "head.weight"}
    assert [bool(names & outcome.parameters.keys()) for outcome in ranks].count(True) == 1


@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
def test_copies_stay_bit_equal(clipped: bool) -> None:
    def body() -> list[Tensor]:
        smp.init({"pipeline_parallel_degree": 3, "microbatches": 2, "tied_weights": "copy"})
        model = smp.DistributedModel(build(TIED))
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

        @smp.step
        def step(model: Any, batch: Batch) -> None:
            model.backward(TIED.loss(model, batch))

        for index in range(6):
            step(model, make_batch(TIED, 2, index))
            if index % 2:  # two steps add up to one update
                if clipped:
                    model.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
        held = dict(model.local_named_parameters())
        return [held[name].detach() for name in ("embedding.weight", "head.weight") if name in held]

    copies_held = [weight for weights in run_world(3, body) for weight in weights]
    assert len(copies_held) == 2
    assert torch.equal(*copies_held)
    assert not torch.equal(copies_held[0], build(TIED).embedding.weight)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("subject", [TIED, UNTIED, SUBJECTS[1]], ids=str)
def test_clipping_uses_the_norm_of_the_whole_model(
    subject: Subject, degree: int, norm_type: float
) -> None:
    max_norm = 0.05

    def body() -> tuple[float, dict[str, Any]]:
        smp.init({"pipeline_parallel_degree": degree, "microbatches": 2})
        model = smp.DistributedModel(build(subject))

        @smp.step
        def step(model: Any, batch: Batch) -> None:
            model.backward(subject.loss(model, batch))

        step(model, make_batch(subject, 2, 0))
        norm = model.clip_grad_norm_(max_norm, norm_type=norm_type)
        return norm.item(), copies((n, p.grad) for n, p in model.local_named_parameters())

    model, batch = build(subject), make_batch(subject, 2, 0)
    for index in range(2):
        torch.autograd.backward(subject.loss(model, microbatch_of(batch, 2, index)) / 2)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item()
    named = model.named_parameters(remove_duplicate=False)
    reference = copies((name, parameter.grad) for name, parameter in named)
    for norm, gradients in run_world(degree, body):
        assert norm == pytest.approx(expected, rel=1e-5)
        compare_named("clipped", reference, gradients, TOLERANCE)


def test_clipping_by_torch_is_not_silently_local() -> None:
    def body() -> str:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(build(UNTIED))

        @smp.step
        def step(model: Any, batch: Batch) -> None:
            model.backward(UNTIED.loss(model, batch))

        step(model, make_batch(UNTIED, 2, 0))
        try:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        except Exception as error:
            return str(error)
        return f"{norm.item():.6f}"

    model, batch = build(UNTIED), make_batch(UNTIED, 2, 0)
    for index in range(2):
        torch.autograd.backward(UNTIED.loss(model, microbatch_of(batch, 2, index)) / 2)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for answer in run_world(2, body):
        assert "clip_grad_norm_" in answer or float(answer) == pytest.approx(expected, rel=1e-5)


def test_frozen_tied_weight() -> None:
    def frozen() -> TiedHead:
        model = TiedHead()
        model.embedding.weight.requires_grad_(False)
        return model

    subject = Subject("frozen", frozen, tokens, token_prediction)
    for tied_weights in ("together", "copy"):
        check(subject, 2, [Case(2, settings=(("tied_weights", tied_weights),))])


@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
def test_replicas_of_a_pipeline_average_their_gradients(schedule: str) -> None:
    def body() -> tuple[int, list[float], dict[str, Any]]:
        smp.init(
            {
                "pipeline_parallel_degree": 2,
                "microbatches": 4,
                "pipeline": schedule,
                "ddp": True,
                "tied_weights": "copy",
            }
        )
        model = smp.DistributedModel(build(TIED))
        optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

        @smp.step
        def step(model: Any, batch: Batch) -> Tensor:
            loss = TIED.loss(model, batch)
            model.backward(loss)
            return loss

        losses = []
        for index in range(NUM_STEPS):
            optimizer.zero_grad()
            batch = make_batch(TIED, 4, 10 * smp.dp_rank() + index)
            losses.append(step(model, batch).reduce_mean().item())
            optimizer.step()
        return smp.dp_rank(), losses, copies(model.local_named_parameters())

    expected, reference = two_plain_replicas()
    for replica, losses, parameters in run_world(4, body):
        assert losses == pytest.approx(expected[replica], rel=1e-6)
        compare_named(f"replica {replica}", reference, parameters, TOLERANCE)


def two_plain_replicas() -> tuple[list[list[float]], dict[str, Any]]:
    """Returns the losses of two replicas that train as one, and the parameters at the end."""
    model = build(TIED)
    optimizer = make_optimizer(model.parameters())
    losses: list[list[float]] = [[], []]
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        for replica in range(2):
            batch = make_batch(TIED, 4, 10 * replica + index)
            loss = sum(TIED.loss(model, microbatch_of(batch, 4, i)) for i in range(4)) / 4
            torch.autograd.backward(loss / 2)
            losses[replica].append(loss.item())
        optimizer.step()
    return losses, copies(model.named_parameters(remove_duplicate=False))


def test_one_module_called_at_two_depths_is_no_copy() -> None:
    check(Subject("called_twice", CalledTwice), 2, [Case(3, settings=(("tied_weights", "copy"),))])
