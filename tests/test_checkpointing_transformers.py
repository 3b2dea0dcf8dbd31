"""Hugging Face's own switch for activation checkpointing, on every architecture of the table."""

import warnings
from typing import Any

import pytest
from torch import Tensor

import smp_runtime as smp
from tests.checkpointing_cases import Run, assert_equal
from tests.subjects import Subject
from tests.transformer_subjects import TRANSFORMERS
from tests.transparency import GRADIENT_TOLERANCE, build, compare_named, make_batch
from tests.worlds import run_world

pytestmark = pytest.mark.world

SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {"use_reentrant": False, "preserve_rng_state": False},
    {"use_reentrant": True},
)


def train(subject: Subject, degree: int, before: Any, after: Any) -> Run:
    """Takes a step on this rank and returns what came out."""
    # Under its switch T5 takes no cache. Then another partition is best, and the last bit of its
    # loss is another one in a plain process as well.
    by_hand = {"auto_partition": False, "default_partition": 1} if subject.name == "t5" else {}
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "timeout": 20.0, **by_hand})
    plain = build(subject)
    before(plain)
    model = smp.DistributedModel(plain)
    if by_hand:
        smp.set_partition(plain.encoder, 0)
    after(model)

    @smp.step
    def step(model: Any, batch: dict[str, Any]) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    losses = [loss.item() for loss in step(model, make_batch(subject, 2, 0)).outputs]
    gradients = {
        name: held.grad.clone()
        for name, held in model.local_named_parameters()
        if held.grad is not None
    }
    listed = smp.list_activation_checkpointing()
    smp.shutdown()
    return Run(losses, gradients, {}, listed, 0.0)


def nothing(_: Any) -> None:
    """Leaves the model as it is."""


def switch_on(model: Any, **kwargs: Any) -> None:
    """Does what a script for transformers does."""
    name = "gradient_checkpointing_enable"
    if hasattr(model, "activation_checkpointing_enable"):
        name = "activation_checkpointing_enable"
    getattr(model, name)(kwargs or None)


def checkpoint_blocks(model: Any) -> None:
    """Uses this package's own switch instead."""
    smp.set_activation_checkpointing(model.module.module.module.transformer.seq_layers)


@pytest.mark.parametrize("number", range(len(TRANSFORMERS)), ids=lambda i: str(TRANSFORMERS[i]))
def test_no_switch_changes_a_bit(number: int) -> None:
    subject = TRANSFORMERS[number]
    kwargs = SWITCHES[number % len(SWITCHES)]

    def use(model: Any) -> None:
        switch_on(model, **kwargs)

    def body() -> None:
        warnings.simplefilter("error")
        expected = train(subject, 2, nothing, nothing)
        order = (use, nothing) if number % 2 else (nothing, use)
        found = train(subject, 2, *order)
        if subject.name == "t5":
            assert found.losses == pytest.approx(expected.losses, rel=1e-6)
            compare_named("t5", expected.gradients, found.gradients, GRADIENT_TOLERANCE)
        else:
            assert_equal(expected, found, f"{subject}, {kwargs}")
        if number % 2 == 0:
            found = train(subject, 2, nothing, checkpoint_blocks)
            assert found.checkpointed
            assert_equal(expected, found, f"{subject}, blocks")

    run_world(2, body)


def test_the_old_name_of_the_switch_works() -> None:
    subject = TRANSFORMERS[0]

    def use(model: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )

    def body() -> None:
        expected = train(subject, 2, nothing, nothing)
        assert_equal(expected, train(subject, 2, nothing, use))

    run_world(2, body)
