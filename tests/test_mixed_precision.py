"""16-bit training: float32 masters and sums, scaled losses, and one mind about overflow."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import smp_runtime as smp
from smp_runtime.config import Config
from smp_runtime.errors import ConfigError, NotSupportedError
from smp_runtime.optimization.precision import Precision
from smp_runtime.planning.partitioning import partition
from smp_runtime.tracing.trace import trace_model
from tests.sixteen_bit import BF16, FP16, needs_float32_sums
from tests.subjects import WIDTH, Block, Subject, TiedHead, chain, token_prediction, tokens
from tests.transparency import build, make_batch, microbatch_of
from tests.worlds import run_world

CHAIN = Subject("chain", chain)
TIED = Subject("tied", TiedHead, tokens, token_prediction)
STEPS = 4
MICROBATCHES = 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Rotary(nn.Module):
    """Frequencies without parameters, as of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([1.0, 1 / 3]))


def test_parameters_become_16_bit_and_delicate_parts_do_not() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Rotary(), nn.Embedding(2, 2))
    module[0].register_buffer("scale", torch.ones(1))
    module[0].register_buffer("count", torch.ones(1, dtype=torch.int64))
    before = list(module.parameters())
    Precision(Config(bf16=True)).convert(module)
    assert [a is b for a, b in zip(module.parameters(), before, strict=True)] == [True] * 5
    kinds = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert kinds == {
        "0.weight": torch.bfloat16,
        "0.bias": torch.bfloat16,
        "0.scale": torch.bfloat16,
        "0.count": torch.int64,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
        "1.running_mean": torch.float32,
        "1.running_var": torch.float32,
        "1.num_batches_tracked": torch.int64,
        "2.frequencies": torch.float32,
        "3.weight": torch.bfloat16,
    }


def test_float32_is_left_alone() -> None:
    precision = Precision(Config())
    module = nn.Linear(2, 2)
    precision.convert(module)
    assert precision.dtype is None
    assert module.weight.dtype == torch.float32
    given = [torch.ones(1, dtype=torch.bfloat16), 3]
    assert precision.to_model(given) is given
    assert precision.from_model(given) is given


@pytest.mark.parametrize(
    ("in_float32", "expected"),
    [pytest.param(True, 1 + 64 / 512, marks=needs_float32_sums), (False, 1.0)],
)
def test_gradients_of_microbatches_add_up_in_float32(in_float32: bool, expected: float) -> None:
    """In bfloat16 a sum of 1 and many times 1/512 stays 1."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    precision = Precision(Config(bf16=True, fp32_grad_accumulation=in_float32))
    precision.prepare_gradients([parameter])
    for scale in [1.0] + [1 / 512] * 64:
        torch.autograd.backward((parameter * scale).sum())
    assert parameter.grad is not None
    assert parameter.grad.item() == expected
    assert parameter.grad.dtype == (torch.float32 if in_float32 else torch.bfloat16)


class OldParameter(nn.Parameter):
    """One of torch 2.9, whose gradient can't be of another type."""

    @property
    def grad_dtype(self) -> torch.dtype:
        raise AttributeError


def test_a_torch_that_can_not_is_told_what_to_do() -> None:
    old = OldParameter(torch.zeros(1, dtype=torch.bfloat16))
    with pytest.raises(NotSupportedError, match="or set fp32_grad_accumulation to False"):
        Precision(Config(bf16=True)).prepare_gradients([old])
    Precision(Config(bf16=True, fp32_grad_accumulation=False)).prepare_gradients([old])


@needs_float32_sums
def test_the_plan_counts_sums_and_masters() -> None:
    found = []
    for settings in ({}, {"bf16": True}):
        module = nn.Linear(10, 10, bias=False)
        precision = Precision(Config(**settings))
        precision.convert(module)
        precision.prepare_gradients(module.parameters())
        trace = trace_model(module, (torch.ones(1, 10, dtype=precision.dtype),), {})
        share = partition(trace.root, 1).ranks[0]
        found.append((share.parameter_bytes, share.gradient_bytes, share.optimizer_bytes))
    assert found == [(400, 400, 800), (200, 400, 1200)]


# -- against a hand-written reference -----------------------------------------------------------


@functools.cache
def by_hand(
    subject: Subject, kind: str, num_replicas: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in one process: a 16-bit model, float32 sums of gradients, float32 masters."""
    dtype = DTYPES[kind]
    model = build(subject).to(dtype)
    masters = {p: p.detach().float() for p in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, eps=1e-3)
    losses = []
    parts = MICROBATCHES * num_replicas
    for step in range(STEPS):
        total = 0.0
        for index in range(parts):
            batch = microbatch_of(make_batch(subject, parts, step), parts, index)
            batch = {
                key: value.to(dtype) if key == "x" and value.is_floating_point() else value
                for key, value in batch.items()
            }
            loss = subject.loss(lambda x: model(x).float(), batch)
            total += loss.item() / parts
            gradients = torch.autograd.grad(loss / parts, list(masters))
            for master, gradient in zip(masters.values(), gradients, strict=True):
                mine = gradient.float()
                master.grad = mine if master.grad is None else master.grad + mine
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    named = dict(model.named_parameters(remove_duplicate=False))
    return losses, {name: masters[held] for name, held in named.items()}


def on_ranks(subject: Subject, kind: str, degree: int, settings: Any = None, **scale: Any) -> Any:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": MICROBATCHES, "ddp": True,
              "timeout": 15.0, kind: True, **(settings or {})})  # fmt: skip
    model = smp.DistributedModel(build(subject), bucket_cap_mb=0.0005)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), **scale
    )

    @smp.step
    def train(model: Any, batch: Any) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        whole = make_batch(subject, MICROBATCHES * smp.dp_size(), step)
        output = train(model, microbatch_of(whole, smp.dp_size(), smp.dp_rank()))
        assert output.outputs[0].dtype == torch.float32
        losses.append(output.reduce_mean().item())
        assert all(p.grad.dtype == torch.float32 for p in model.local_parameters())
        optimizer.step()
        assert not optimizer.overflow
    assert all(p.dtype == DTYPES[kind] for p in model.local_parameters())
    states = optimizer.named_local_state()
    masters = {name: state["master"] for name, state in states.items()}
    parameters = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    smp.shutdown()
    return losses, masters, parameters


@pytest.mark.world
@needs_float32_sums
@pytest.mark.parametrize(("degree", "num_replicas"), [(1, 1), (2, 1), (2, 2)])
def test_masters_are_those_of_one_process(degree: int, num_replicas: int) -> None:
    cases: list[tuple[Subject, str, dict[str, Any]]] = [
        (CHAIN, "bf16", {}),
        (CHAIN, "fp16", {"static_loss_scale": 1024.0}),
        (TIED, "bf16", {}),
    ]
    results = run_world(
        degree * num_replicas,
        lambda: [on_ranks(s, kind, degree, **scale) for s, kind, scale in cases],
    )
    for index, (subject, kind, _) in enumerate(cases):
        losses, masters = by_hand(subject, kind, num_replicas)
        found = [by_case[index] for by_case in results]
        for step in range(STEPS):
            mean = sum({each[0][step] for each in found}) / len({each[0][step] for each in found})
            assert mean == pytest.approx(losses[step], rel=2e-2)
        for _, mine, parameters in found:
            for name, tensor in mine.items():
                torch.testing.assert_close(tensor, masters[name], rtol=1e-3, atol=1e-4)
                assert torch.equal(parameters[name], tensor.to(DTYPES[kind]))
        held = {name for each in found for name in each[1]}
        assert len(held) >= len(dict(build(subject).named_parameters()))


# -- overflow -----------------------------------------------------------------------------------


class Exploding(nn.Module):
    """A stack in which one layer's gradients overflow when it is told to."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.place = place

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.place:
                x = x * factor.mean()
        return x


@smp.step
def train_exploding(model: Any, x: Tensor, factor: Tensor) -> Tensor:
    loss = model(x, factor).square().mean()
    model.backward(loss)
    return loss


def exploding_run(factors: list[float], **scale: Any) -> Any:
    smp.init({"pipeline_parallel_degree": 2, **FP16, "ddp": True, "timeout": 15.0,
              "tied_weights": "auto"})  # fmt: skip
    torch.manual_seed(0)
    model = smp.DistributedModel(Exploding(1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **scale)
    scheduler = StepLR(optimizer.optimizer, step_size=1, gamma=0.5)
    seen = []
    for step, factor in enumerate(factors):
        optimizer.zero_grad()
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = train_exploding(model, x, torch.full((2, 1), factor)).reduce_mean()
        norm = optimizer.clip_master_grads(100.0)
        optimizer.step()
        if not optimizer.overflow:
            scheduler.step()
        seen.append((optimizer.overflow, optimizer.loss_scale, norm.item(), math.isfinite(loss)))
    parameters = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    smp.shutdown()
    return seen, parameters


@pytest.mark.world
def test_all_ranks_skip_a_step_that_overflows_and_go_on() -> None:
    settings = {"init_scale": 1024.0, "scale_window": 2}
    scale: dict[str, Any] = {"dynamic_loss_scale": True, "static_loss_scale": None,
                             "dynamic_loss_args": settings}  # fmt: skip

    def body() -> Any:
        return (exploding_run([1.0, 1e30, 1.0, 1.0], **scale),
                exploding_run([1.0, 1e30, 1.0, 1.0], static_loss_scale=8.0),
                exploding_run([1.0, 1.0, 1.0]))  # fmt: skip

    results = run_world(4, body)
    for (seen, parameters), (static, same), (plain, _) in results:
        assert [overflow for overflow, *_ in seen] == [False, True, False, False]
        assert [scale for _, scale, *_ in seen] == [1024, 512, 512, 1024]
        assert seen[1][2] == -1.0
        assert [s[1] for s in static] == [8.0] * 4
        assert not any(overflow for overflow, *_ in plain)
        # Norms are unscaled.
        assert seen[0][2] == pytest.approx(plain[0][2], rel=1e-2)
        for name, tensor in parameters.items():
            torch.testing.assert_close(tensor, same[name], rtol=1e-2, atol=1e-3)
    assert results[0][0][0] == results[2][0][0] or results[0][0][0] == results[1][0][0]
    by_stage = {tuple(sorted(r[0][1])): [] for r in results}
    for result in results:
        by_stage[tuple(sorted(result[0][1]))].append(result[0][1])
    for first, second in by_stage.values():
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.world
def test_scaled_gradients_are_never_seen() -> None:
    """Gradients read, clipped or accumulated by the script are those of the loss."""

    def run(loss_scale: float) -> Any:
        smp.init({"pipeline_parallel_degree": 2, **FP16, "timeout": 15.0})
        model = smp.DistributedModel(build(CHAIN))
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=loss_scale
        )
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
        norms = []
        for _ in range(2):  # accumulates
            train_chain(model, x)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        with torch.no_grad():
            train_chain(model, x, backward=False)
        train_chain(model, x, backward=False)
        norms.append(model.clip_grad_norm_(1e9).item())
        optimizer.step()
        smp.shutdown()
        return norms

    for found in run_world(2, lambda: [run(1.0), run(64.0)]):
        plain, scaled = found
        assert plain[1] == pytest.approx(2 * plain[0], rel=1e-2)
        assert scaled == pytest.approx(plain, rel=1e-2)


@smp.step
def train_chain(model: Any, x: Tensor, backward: bool = True) -> Tensor:
    loss = model(x).square().mean()
    if backward:
        model.backward(loss)
    return loss


@pytest.mark.world
def test_masters_follow_what_is_loaded_into_parameters() -> None:
    def body() -> Any:
        smp.init(BF16)
        model = smp.DistributedModel(nn.Linear(2, 2, bias=False))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
        x = torch.ones(1, 2)
        train_chain(model, x)
        optimizer.step()
        model.load_state_dict({"weight": torch.full((2, 2), 3.0)})
        optimizer.zero_grad()
        train_chain(model, x)
        optimizer.step()
        master = optimizer.named_local_state
        return model.get_module().weight.tolist(), list(master())

    weight, names = run_world(1, body)[0]
    assert weight == [[3.0, 3.0], [3.0, 3.0]]  # the step is below the last digit
    assert names == []  # SGD has no state without momentum


@pytest.mark.world
def test_small_steps_add_up_in_masters() -> None:
    def body() -> Any:
        smp.init(BF16)
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

        @smp.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).sum()
            model.backward(loss)
            return loss

        for _ in range(20):
            optimizer.zero_grad()
            train(model, torch.ones(1, 1))
            optimizer.step()
        return module.weight.item()

    assert run_world(1, body)[0] == pytest.approx(0.98, abs=4e-3)


@pytest.mark.world
def test_the_optimizer_has_smps_members() -> None:
    def body() -> None:
        smp.init(FP16)
        model = smp.DistributedModel(nn.Linear(2, 2))
        given = torch.optim.AdamW(model.parameters(), lr=1.0)
        with pytest.raises(ConfigError, match="scale_window=0"):
            smp.DistributedOptimizer(
                torch.optim.SGD(model.parameters()), dynamic_loss_scale=True, scale_window=0
            )
        optimizer = smp.DistributedOptimizer(given, static_loss_scale=4.0)
        assert optimizer is given
        assert optimizer.optimizer is optimizer
        assert isinstance(optimizer, torch.optim.AdamW)
        assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale == 4.0
        assert optimizer.overflow is False
        assert optimizer.step(lambda: 7.0) == 7.0

    run_world(1, body)
