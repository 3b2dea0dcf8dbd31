"""Trains a subject in one plain process and on the ranks of a pipeline, and compares what came out.

What one process computes is the definition: the loss of a step is the mean of the losses of its
microbatches, taken one after the other, and its gradients are those of that mean.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import smp_runtime as smp
from tests.subjects import Batch, Subject
from tests.worlds import run_world

SEED = 7
NUM_STEPS = 3
TIMEOUT = 15.0

# Losses are held to a relative 1e-6, the rest to what sums in another order may differ by.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
PARAMETER_TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


class Case(NamedTuple):
    """How a pipeline runs a subject."""

    microbatches: int = 1
    pipeline: str = "interleaved"
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass
class Outcome:
    """What came out of the training of a subject, as one process or rank sees it.

    Attributes:
        losses: by step and microbatch.
        gradients: after the first step; names that share a parameter share a gradient.
        parameters: after the last step.
        buffers: after the last step.
        initial: the parameters before the first step.
        shared: the sets of names that mean one parameter.
    """

    losses: list[list[float]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    shared: list[set[str]] = field(default_factory=list)


def build(subject: Subject) -> nn.Module:
    """Makes the subject's model; always the same."""
    torch.manual_seed(SEED)
    return subject.build()


def make_batch(subject: Subject, num_microbatches: int, step: int) -> Batch:
    """Makes the batch of a step; always the same."""
    torch.manual_seed(1000 * SEED + step)
    return subject.make_batch(subject.samples * num_microbatches)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Makes an AdamW that does not blow the rounding of a gradient near zero up to a whole step."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def microbatch_of(batch: Any, num_microbatches: int, index: int) -> Any:
    """Returns one slice of a batch along its first dimension."""
    if isinstance(batch, Tensor):
        return batch.chunk(num_microbatches)[index]
    if isinstance(batch, dict):
        return {key: microbatch_of(item, num_microbatches, index) for key, item in batch.items()}
    return batch


def copies(tensors: Any) -> dict[str, Any]:
    """Returns clones of named tensors."""
    return {name: None if held is None else held.detach().clone() for name, held in tensors}


@functools.cache
def plain(subject: Subject, num_microbatches: int) -> Outcome:
    """Trains a subject in this process, without the runtime."""
    model = build(subject)
    optimizer = make_optimizer(model.parameters())
    outcome = Outcome(initial=copies(model.named_parameters(remove_duplicate=False)))
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = make_batch(subject, num_microbatches, step)
        losses = []
        for index in range(num_microbatches):
            loss = subject.loss(model, microbatch_of(batch, num_microbatches, index))
            torch.autograd.backward(loss / num_microbatches)
            losses.append(loss.item())
        outcome.losses.append(losses)
        if step == 0:
            named = model.named_parameters(remove_duplicate=False)
            outcome.gradients = copies((name, held.grad) for name, held in named)
        optimizer.step()
    outcome.parameters = copies(model.named_parameters(remove_duplicate=False))
    outcome.buffers = copies(model.named_buffers(remove_duplicate=False))
    outcome.shared = shared_names(model)
    return outcome


def shared_names(model: nn.Module) -> list[set[str]]:
    """Returns for each parameter and buffer the set of its names."""
    names: dict[int, set[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), set()).add(name)
    return list(names.values())


def start(subject: Subject, degree: int, case: Case) -> Any:
    """Starts the runtime and returns the subject's model, wrapped and placed."""
    pins = subject.pins(build(subject), degree)
    manual = {"auto_partition": False, "default_partition": 0} if pins else {}
    smp.init(
        {
            "pipeline_parallel_degree": degree,
            "microbatches": case.microbatches,
            "pipeline": case.pipeline,
            "timeout": TIMEOUT,
            **manual,
            **dict(case.settings),
        }
    )
    model = smp.DistributedModel(build(subject))
    for path, partition in pins.items():
        smp.set_partition(model.get_module().get_submodule(path), partition)
    return model


def partitioned(subject: Subject, degree: int, case: Case) -> Outcome:
    """Trains a subject on this rank of a pipeline. Only pipeline rank 0 has the data."""

    @smp.step
    def train_step(model: Any, batch: Batch) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    model = start(subject, degree, case)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    outcome = Outcome()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = make_batch(subject, case.microbatches, step) if smp.pp_rank() == 0 else {}
        result = train_step(model, batch)
        outcome.losses.append([loss.item() for loss in result.outputs])
        if step == 0:
            named = model.local_named_parameters()
            outcome.gradients = copies((name, held.grad) for name, held in named)
        optimizer.step()
    outcome.parameters = copies(model.local_named_parameters())
    outcome.buffers = copies(model.local_named_buffers())
    smp.shutdown()
    return outcome


def train_on_ranks(
    subject: Subject, degree: int, cases: Sequence[Case], timeout: float = 50.0
) -> list[list[Outcome]]:
    """Trains a subject on the ranks of one world, one case after the other.

    Returns:
        For each case what each rank saw.
    """
    by_rank = run_world(
        degree, _each, [functools.partial(partitioned, subject, degree, case) for case in cases],
        timeout=timeout,
    )  # fmt: skip
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def _each(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    results = []
    for run in runs:
        try:
            results.append(run())
        except BaseException as error:
            error.add_note(f"In {run}")
            raise
    return results


def check(subject: Subject, degree: int, cases: Sequence[Case]) -> None:
    """Asserts that ranks train a subject as one plain process does, in each of the cases."""
    expected = [plain(subject, case.microbatches) for case in cases]
    for case, reference, outcomes in zip(
        cases, expected, train_on_ranks(subject, degree, cases), strict=True
    ):
        compare(f"{subject} on {degree} ranks, {case}", reference, outcomes)


def compare(where: str, reference: Outcome, outcomes: Sequence[Outcome]) -> None:
    """Asserts that what the ranks of a pipeline saw together is what one process saw."""
    for rank, outcome in enumerate(outcomes):
        what = f"{where}: rank {rank}"
        assert outcome.losses == outcomes[0].losses, f"{what} returned other losses than rank 0"
        losses, expected = torch.tensor(outcome.losses), torch.tensor(reference.losses)
        torch.testing.assert_close(
            losses, expected, rtol=LOSS_TOLERANCE, atol=1e-9, msg=_prefix(f"{what}, losses")
        )
        for kind, tolerance in (
            ("gradients", GRADIENT_TOLERANCE),
            ("parameters", PARAMETER_TOLERANCE),
            ("buffers", PARAMETER_TOLERANCE),
        ):
            compare_named(f"{what}, {kind}", getattr(reference, kind), getattr(outcome, kind),
                          tolerance)  # fmt: skip
    check_held_once(where, reference, outcomes)


def compare_named(
    what: str,
    expected: dict[str, Tensor | None],
    found: dict[str, Tensor | None],
    tolerance: dict[str, float],
) -> None:
    """Asserts that the tensors found are those expected of the same names."""
    unknown = found.keys() - expected.keys()
    assert not unknown, f"{what}: unknown names {sorted(unknown)}"
    for name, tensor in found.items():
        wanted = expected[name]
        if tensor is None or wanted is None:
            assert tensor is wanted, f"{what}: {name} is {tensor}, but should be {wanted}"
        else:
            torch.testing.assert_close(tensor, wanted, **tolerance, msg=_prefix(f"{what}: {name}"))


def _prefix(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {message}"


def check_held_once(where: str, reference: Outcome, outcomes: Sequence[Outcome]) -> None:
    """Asserts that each parameter is on one rank, a shared one on at least one, as are buffers."""
    for group in reference.shared:
        holders = [
            rank
            for rank, seen in enumerate(outcomes)
            if group & (seen.parameters.keys() | seen.buffers.keys())
        ]
        assert holders, f"{where}: no rank holds {sorted(group)}"
        if group & reference.parameters.keys():
            assert len(holders) <= len(group), f"{where}: ranks {holders} all hold {sorted(group)}"
