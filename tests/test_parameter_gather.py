"""Parameters are gathered during the next forward: when, in which order, and with equal numbers."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import smp_runtime as smp
from smp_runtime.optimization import parameter_gather
from smp_runtime.optimization.awaited_parameters import AwaitedParameter
from tests.replica_subjects import CheckpointedTwice
from tests.sixteen_bit import BF16, FP16
from tests.subjects import WIDTH, Block, Subject, TiedHead, linear, token_prediction, tokens
from tests.transparency import build, make_batch, microbatch_of
from tests.worlds import run_world, run_world_expecting_failure

STEPS = 3
SHARDED = {"ddp": True, "shard_optimizer_state": True, "timeout": 15.0}
OVERLAPPED = {**SHARDED, "overlap_parameter_gather": True}


class UsesOthersParameters(nn.Module):
    """A parent that uses parameters of its own and of its children without calling those."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.unused = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.blocks[2].layer.weight) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.attention(x, x, x)[0]


def checkpointed() -> nn.Module:
    """Returns a stack with a checkpointed layer that is used twice."""
    return nn.Sequential(linear(), CheckpointedTwice(False), Block(), linear())


OTHERS = Subject("uses_others_parameters", UsesOthersParameters)
TIED = Subject("tied", TiedHead, tokens, token_prediction)
CASES: tuple[tuple[Subject, dict[str, Any]], ...] = (
    (OTHERS, {}),
    (OTHERS, BF16),
    (TIED, {"tied_weights": "copy"}),
    (TIED, {"tied_weights": "together", **FP16}),
    (Subject("checkpointed", checkpointed), {}),
)


def stack() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[linear() for _ in range(4)])


def by_decay(model: Any) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@contextmanager
def buckets_of(num_bytes: int) -> Iterator[None]:
    before, parameter_gather.BUCKET_BYTES = parameter_gather.BUCKET_BYTES, num_bytes
    try:
        yield
    finally:
        parameter_gather.BUCKET_BYTES = before


def awaited(model: Any) -> list[str]:
    named = model.local_named_parameters()
    return [name for name, p in named if type(p) is AwaitedParameter]


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_each_layer_waits_for_its_own_parameters_only(degree: int) -> None:
    def body() -> Any:
        smp.init({**OVERLAPPED, "pipeline_parallel_degree": degree})
        model = smp.DistributedModel(stack())
        optimizer = smp.DistributedOptimizer(by_decay(model))
        with buckets_of(8):  # a bucket for each parameter
            train(model, torch.ones(2, WIDTH))
            optimizer.step()
        here = [name for name, _ in model.local_named_parameters()]
        assert awaited(model) == here
        assert optimizer.state_dict()["param_groups"]
        optimizer.zero_grad()
        seen = []
        for name, layer in model.local_named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(
                    lambda *_, name=name: seen.append((name, awaited(model)))
                )
        train(model, torch.ones(2, WIDTH))
        model.state_dict()
        assert awaited(model) == []
        return here, seen

    for here, seen in run_world(2 * degree, body):
        assert len(here) == 8 // degree
        for name, left in seen:
            layers = sorted({other.split(".")[0] for other in here})
            assert left == [
                f"{n}.{kind}" for n in layers if n > name for kind in ("weight", "bias")
            ]


@pytest.mark.world
def test_a_step_returns_before_the_other_replicas_have_stepped() -> None:
    def body() -> Any:
        smp.init(OVERLAPPED)
        model = smp.DistributedModel(stack())
        optimizer = smp.DistributedOptimizer(by_decay(model))
        word = torch.zeros(1)
        losses = []
        for _ in range(2):
            losses.append(train(model, torch.ones(2, WIDTH)).reduce_mean().item())
            if smp.dp_rank() == 1:
                dist.recv(word, 0)  # replica 0 sends it only when its step has returned
            optimizer.step()
            if smp.dp_rank() == 0:
                dist.send(word, 1)
            optimizer.zero_grad()
        return losses, {name: p.tolist() for name, p in model.named_parameters()}

    first, second = run_world(2, body)
    assert first == second
    model = stack()
    optimizer = by_decay(model)
    for loss in first[0]:
        optimizer.zero_grad()
        found = model(torch.ones(2, WIDTH)).square().mean()
        found.backward()
        optimizer.step()
        assert loss == pytest.approx(found.item(), rel=1e-6)


def trained(subject: Subject, settings: dict[str, Any]) -> list[Any]:
    """Returns all numbers that a script may see on its way."""
    smp.init({"microbatches": 2, **settings})
    model = smp.DistributedModel(build(subject))
    for module in model.get_module().modules():
        if isinstance(module, Block) and subject.name != "tied":
            smp.set_activation_checkpointing(module)
    optimizer = smp.DistributedOptimizer(by_decay(model))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)

    @smp.step
    def step(model: Any, batch: Any) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(model: Any, batch: Any) -> Tensor:
        return subject.loss(model, batch)

    seen: list[Any] = []
    for index in range(STEPS):
        optimizer.zero_grad()
        whole = make_batch(subject, 2 * smp.dp_size(), index)
        mine = microbatch_of(whole, smp.dp_size(), smp.dp_rank())
        seen.append(step(model, mine).reduce_mean())
        seen.append(model.clip_grad_norm_(0.5))
        optimizer.step()
        scheduler.step()
        if settings.get("overlap_parameter_gather"):
            assert awaited(model) == [name for name, _ in model.local_named_parameters()]
        if index == 0:
            seen += copy.deepcopy(model.state_dict()).values()
        if index == 1:
            model.eval()
            with torch.no_grad():
                seen.append(evaluate(model, mine).reduce_mean())
            model.train()
    smp.shutdown()
    seen += [p.detach().clone() for _, p in model.local_named_parameters()]
    return seen


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_numbers_are_the_same_bit_for_bit(degree: int) -> None:
    def body() -> None:
        for subject, more in CASES:
            if degree == 1 and more.get("tied_weights") == "copy":
                continue  # there is one rank to hold it
            settings = {"pipeline_parallel_degree": degree, **SHARDED, **more}
            with buckets_of(256):
                found = trained(subject, {**settings, "overlap_parameter_gather": True})
            expected = trained(subject, settings)
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs), (subject.name, more)

    run_world(2 * degree, body)


@pytest.mark.world
def test_compiled_modules_are_given_their_parameters_at_once() -> None:
    def body() -> None:
        smp.init(OVERLAPPED)
        with warnings.catch_warnings():
            # Newer versions of torch say that it is deprecated.
            warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
            scripted = torch.jit.script(linear())  # type: ignore[no-untyped-call]
        model = smp.DistributedModel(nn.Sequential(linear(), scripted))
        optimizer = smp.DistributedOptimizer(by_decay(model))
        with buckets_of(8):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        assert awaited(model) == ["0.weight", "0.bias"]

    run_world(2, body)


@pytest.mark.world
def test_a_script_may_end_right_after_a_step_or_wait() -> None:
    def body() -> Any:
        smp.init(OVERLAPPED)
        model = smp.DistributedModel(stack())
        optimizer = smp.DistributedOptimizer(by_decay(model))
        view = model.get_module()[0].weight.view(-1)
        train(model, torch.ones(2, WIDTH))
        optimizer.step()
        model.wait_for_parameters()
        assert awaited(model) == []
        values = view.tolist()  # a view is not seen, but new by now
        optimizer.step()
        return values  # and ends, with parameters under way

    first, second = run_world(2, body)
    assert first == second


@pytest.mark.world
def test_a_replica_that_fails_before_its_step_is_named_by_those_that_wait_for_it() -> None:
    def body() -> None:
        smp.init({**OVERLAPPED, "timeout": 30.0})
        model = smp.DistributedModel(stack())
        optimizer = smp.DistributedOptimizer(by_decay(model))
        for step in range(2):
            train(model, torch.ones(2, WIDTH))
            if step == 1 and smp.dp_rank() == 0:
                raise ValueError("the loader broke")
            optimizer.step()
            optimizer.zero_grad()
        train(model, torch.ones(2, WIDTH))

    for outcome in run_world_expecting_failure(2, body):
        assert outcome.exit_code
        assert "the loader broke" in outcome.stderr_text
        assert outcome.seconds < 20


@pytest.mark.world
def test_a_replica_that_fails_is_named_by_one_that_ends() -> None:
    def body() -> None:
        smp.init({**OVERLAPPED, "timeout": 30.0})
        model = smp.DistributedModel(stack())
        optimizer = smp.DistributedOptimizer(by_decay(model))
        train(model, torch.ones(2, WIDTH))
        if smp.dp_rank() == 0:
            raise ValueError("the disk is full")
        optimizer.step()

    for outcome in run_world_expecting_failure(2, body):
        assert outcome.exit_code == 1
        assert "the disk is full" in outcome.stderr_text
        assert outcome.seconds < 20


@pytest.mark.world
def test_a_replica_that_leaves_out_a_step_is_no_hang() -> None:
    def body() -> None:
        smp.init({**OVERLAPPED, "timeout": 1.0})
        model = smp.DistributedModel(stack())
        optimizer = smp.DistributedOptimizer(by_decay(model))
        train(model, torch.ones(2, WIDTH))
        if smp.dp_rank() == 0:
            optimizer.step()
        train(model, torch.ones(2, WIDTH))

    for outcome in run_world_expecting_failure(2, body):
        assert outcome.exit_code
        assert outcome.seconds < 20
