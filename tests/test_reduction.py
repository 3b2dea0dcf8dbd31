"""Buckets are reduced once each, while the backward pass goes on, whatever gets a gradient when."""

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smp_runtime as smp
from smp_runtime.errors import UsageError
from smp_runtime.messages import shared_memory, wire
from smp_runtime.messages.wire import Stream
from smp_runtime.replication import staged_reduction
from smp_runtime.replication.staged_reduction import StagedReduction
from tests.replica_subjects import CHAIN
from tests.replicated_chain import (
    assert_close,
    batch,
    evaluate,
    gradients,
    mean_gradients,
    start,
    train,
)
from tests.subjects import WIDTH
from tests.transparency import build
from tests.worlds import run_world, run_world_expecting_failure


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connects ranks by sockets whatever `--wire` says: only these can hand over memory."""
    monkeypatch.setattr(wire, "Stream", Stream)


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_each_bucket_is_reduced_once_in_a_step(degree: int) -> None:
    def body() -> Any:
        model = start(degree, m=4)
        calls: list[tuple[int, bool]] = []

        def hook(state: str, bucket: Any) -> torch.futures.Future[Tensor]:
            assert state == "mine"
            calls.append((bucket.index(), bucket.is_last()))
            assert bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
            return default_hooks.allreduce_hook(smp.get_dp_process_group(), bucket)

        model.register_comm_hook("mine", hook)
        for step in range(3):
            model.zero_grad()
            with torch.no_grad():
                evaluate(model, batch(9))
            train(model, batch(smp.dp_rank() + step))
        return calls, gradients(model)

    for calls, found in run_world(2 * degree, body):
        one_step = calls[: len(calls) // 3]
        assert len(one_step) > 2
        assert calls == one_step * 3
        assert [index for index, _ in one_step] == list(range(len(one_step)))
        assert [is_last for _, is_last in one_step] == [False] * (len(one_step) - 1) + [True]
        assert_close(found, mean_gradients(1.0, 2, 3))


@pytest.mark.world
def test_buckets_start_while_the_backward_pass_goes_on() -> None:
    def body() -> Any:
        log: list[str] = []

        class Slow(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                x.register_hook(lambda _: log.append("backward") if x.requires_grad else None)
                return super().forward(x)

        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Slow(WIDTH, WIDTH) for _ in range(3)])
        model = start(m=2, module=module, bucket_cap_mb=1e-4)

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            log.append("reduce")
            return default_hooks.allreduce_hook(smp.get_dp_process_group(), bucket)

        model.register_comm_hook(None, hook)
        logs = []
        for _ in range(2):
            train(model, batch(smp.dp_rank()))
            logs.append(list(log))
            log.clear()
        report = model.step_report()
        assert len(report.reductions) == logs[0].count("reduce")
        assert all(0 < begin < end for begin, end in report.reductions)
        assert report.reductions[0][0] < report.wall
        return logs

    for first, second in run_world(2, body):
        # The first step learns what comes when. The second one's first microbatch reduces nothing.
        assert first == ["backward"] * 6 + ["reduce"] * 8
        assert second[:3] == ["backward"] * 3
        reduced_after = [second[: second.index("reduce")].count("backward")]
        assert reduced_after == [3] or reduced_after == [4]
        assert second[-1] == "reduce"
        assert second.count("reduce") == 8
        assert second != first


class Moody(nn.Module):
    """Uses its layers as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(1, 1, bias=False) for _ in range(3))
        for layer in (self.a, self.b, self.c):
            nn.init.constant_(layer.weight, 1.0)
        self.used = "a"

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for name in self.used:
            total = total + getattr(self, name)(x).sum()
        return total


@pytest.mark.world
def test_absent_gradients_count_as_zero_and_late_ones_are_added() -> None:
    @smp.step
    def train_twice(model: Any, x: Tensor, times: int) -> Tensor:
        for _ in range(times):  # one backward pass after the other
            loss = model(x)
            model.backward(loss)
        return loss

    def body() -> Any:
        module = Moody()
        model = start(m=1, module=module, bucket_cap_mb=1e-6)
        rank = smp.dp_rank()
        found = []
        for used, times in (
            (("a", "a"), (1, 1)),
            (("ab", "a"), (1, 1)),  # b on replica 0 only
            (("a", "a"), (2, 1)),  # more often than ever before, on replica 0 only
            (("ab", "ba"), (2, 2)),
            (("a", "b"), (1, 1)),
        ):
            module.used = used[rank]
            model.zero_grad()
            train_twice(model, torch.ones(1, 1) * (rank + 1), times[rank])
            found.append([None if p.grad is None else p.grad.item() for p in module.parameters()])
        return found

    expected = [
        [1.5, None, None],
        [1.5, 0.5, None],
        [2.0, None, None],
        [3.0, 3.0, None],
        [0.5, 1.0, None],
    ]
    assert run_world(2, body) == [expected] * 2


@pytest.mark.world
def test_steps_accumulate() -> None:
    def body() -> Any:
        model = start(m=2)
        rank = smp.dp_rank()
        found = []
        for _ in range(3):  # k steps without zeroing: k times the gradient
            train(model, batch(rank))
            found.append(gradients(model))
        model.zero_grad()
        with model.no_sync():
            train(model, batch(rank))
            own = gradients(model)
        train(model, batch(rank))
        return found, own, gradients(model)

    (first, own, total), (second, other, same) = run_world(2, body)
    assert first == second
    assert total == same
    assert own != other
    for k, found in enumerate(first, start=1):
        assert_close(found, mean_gradients(k, 0, 1))
    assert_close(own, mean_gradients(1.0, 0))
    assert_close(total, mean_gradients(2.0, 0, 1))


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_backward_passes_per_step(degree: int) -> None:
    def body() -> Any:
        model = start(degree, backward_passes_per_step=2)
        counts = []

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            counts[-1] += 1
            return default_hooks.allreduce_hook(smp.get_dp_process_group(), bucket)

        model.register_comm_hook(None, hook)
        rank = smp.dp_rank()
        for _ in range(2):
            model.zero_grad()
            for seed in (rank, rank + 2):
                counts.append(0)
                train(model, batch(seed))
        return counts, gradients(model)

    for counts, found in run_world(2 * degree, body):
        assert counts[0] == counts[2] == 0
        assert counts[1] == counts[3] > 1
        assert_close(found, mean_gradients(2.0, 0, 1, 2, 3))


@pytest.mark.world
def test_microbatches_may_be_summed() -> None:
    def body() -> Any:
        model = start(2, m=2, average_grads_across_microbatches=False)
        train(model, batch(smp.dp_rank()))
        return gradients(model)

    for found in run_world(4, body):
        assert_close(found, mean_gradients(2.0, 0, 1))


@pytest.mark.world
def test_a_plain_backward_outside_steps_is_reduced() -> None:
    def body() -> Any:
        model = start(m=1)
        found = []
        for step in range(2):
            model.zero_grad()
            torch.autograd.backward(model(batch(smp.dp_rank() + step)).square().mean())
            found.append(gradients(model))
        model.zero_grad()
        with model.no_sync():
            torch.autograd.backward(model(batch(smp.dp_rank())).square().mean())
        found.append(gradients(model))
        return found

    first, second = run_world(2, body)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    for step in range(2):
        assert_close(first[step], mean_gradients(1.0, step, step + 1))


@pytest.mark.world
def test_a_module_may_outlive_its_runtime() -> None:
    def body() -> Any:
        module = build(CHAIN)
        found = []
        for seed in range(2):
            model = start(m=1, module=module)
            for _ in range(2):
                model.zero_grad()
                torch.autograd.backward(model(batch(smp.dp_rank() + seed)).square().mean())
            found.append(gradients(model))
            smp.shutdown()
        module.zero_grad()
        torch.autograd.backward(module(batch(dist.get_rank())).square().mean())
        return found, {name: p.grad.tolist() for name, p in module.named_parameters()}

    for rank, (found, own) in enumerate(run_world(2, body)):
        for seed in range(2):
            assert_close(found[seed], mean_gradients(1.0, seed, seed + 1))
        assert_close(own, mean_gradients(1.0, rank))  # nobody averages it any more


@pytest.mark.world
def test_gradients_that_nobody_would_average_are_told() -> None:
    @smp.step
    def train_plainly(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        torch.autograd.backward(loss)
        return loss

    def body() -> None:
        model = start(m=1)
        with model.no_sync():
            train_plainly(model, batch(0))  # one's own business
        with pytest.raises(UsageError, match=r"call model.backward\(loss\) in the step"):
            train_plainly(model, batch(0))

    run_world(2, body)


@pytest.mark.world
def test_a_plain_backward_is_reduced_after_one_that_raised() -> None:
    def body() -> Any:
        model = start(m=1)

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("in the middle")

        for raises in (True, False):
            model.zero_grad()
            x = batch(smp.dp_rank())
            if raises:
                x.requires_grad_().register_hook(fail)  # after all parameters
            loss = model(x).square().mean()
            with pytest.raises(ArithmeticError) if raises else nullcontext():
                torch.autograd.backward(loss)
        return gradients(model)

    for found in run_world(2, body):
        assert_close(found, mean_gradients(1.0, 0, 1))


@pytest.mark.world
def test_parameters_may_be_frozen_and_thawed_between_steps() -> None:
    def body() -> Any:
        model = start(m=1)
        first = model.get_module()[0].layer.weight
        found = []
        for thawed in (True, False, True):
            first.requires_grad_(thawed)
            model.zero_grad()
            train(model, batch(smp.dp_rank()))
            found.append(gradients(model))
        return found

    by_rank = run_world(2, body)
    assert by_rank[0] == by_rank[1]
    expected = mean_gradients(1.0, 0, 1)
    assert by_rank[0][1].pop("0.layer.weight") is None
    for found in by_rank[0]:
        assert_close(found, expected)


@pytest.mark.world
def test_replicas_that_train_different_parameters_are_told() -> None:
    def body() -> None:
        model = start(m=1)
        if smp.dp_rank() == 1:
            model.get_module()[0].layer.weight.requires_grad_(False)
        train(model, batch(0))

    for outcome in run_world_expecting_failure(2, body):
        assert "replicas 0 and 1 train different parameters" in outcome.stderr_text


@pytest.mark.usefixtures("sockets")
@pytest.mark.world
@pytest.mark.parametrize("place", ["one machine", "two machines", "little memory"])
def test_replicas_on_one_machine_add_up_in_shared_memory(place: str) -> None:
    def body() -> Any:
        if place == "two machines":
            wire._machine = lambda: f"machine of rank {dist.get_rank()}"
        if place == "little memory" and dist.get_rank() == 1:
            shared_memory._map = lambda file, num_bytes: None
        model = start(2, m=2, gradient_as_bucket_view=True)
        found, sizes = [], []
        real = dist.all_reduce

        def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sizes.extend([tensor.numel()] if tensor.is_floating_point() else [])
            return real(tensor, *args, **kwargs)

        dist.all_reduce = count
        for step in range(3):
            model.zero_grad()
            train(model, batch(smp.dp_rank() + step))
            found.append(gradients(model))
        return sum(sizes), sum(p.numel() for p in model.local_parameters()), found

    by_rank = run_world(4, body)
    for rank, (reduced, held, found) in enumerate(by_rank):
        assert held > 0
        assert reduced == (
            0 if place == "one machine" or rank % 2 == 0 and place == "little memory" else 3 * held
        )
        assert found == by_rank[(rank + 2) % 4][2]  # bit for bit, its replica's
        for step in range(3):
            assert_close(found[step], mean_gradients(1.0, step, step + 1))


class Shifted(nn.Module):
    """Adds views of parameters, whose gradients autograd hands out without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.shifts = nn.ParameterList([torch.ones(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)  # first here, and so last in the backward pass
        first, second = (shift.view(1, WIDTH) for shift in self.shifts)
        return out + (first + second)


@pytest.mark.world
def test_gradients_that_the_backward_pass_still_reads_are_not_averaged_in_place() -> None:
    def body() -> Any:
        staged_reduction._PATIENCE = 1.0  # so that all is averaged at once
        torch.manual_seed(0)
        module = Shifted()
        model = start(1, m=1, module=module, bucket_cap_mb=1e-5)
        for _ in range(2):  # the first one learns what comes when
            model.zero_grad()
            train(model, batch(smp.dp_rank(), 1))
        found = gradients(model)
        expected: dict[str, Any] = dict.fromkeys(found, 0)
        for seed in range(2):
            # None shares memory with another one here.
            loss = module(batch(seed, 1)).square().mean() / 2
            own = torch.autograd.grad(loss, list(module.parameters()))
            expected = {name: expected[name] + g for name, g in zip(found, own, strict=True)}
        return found, expected

    (found, expected), (same, _) = run_world(2, body)
    assert_close(found, expected)
    assert found == same


@pytest.mark.world
def test_a_hook_takes_over_from_shared_memory() -> None:
    def body() -> Any:
        model = start(1, m=1, gradient_as_bucket_view=True)
        found, calls = [], []

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            calls.append(bucket.index())
            return default_hooks.allreduce_hook(smp.get_dp_process_group(), bucket)

        for step in range(3):
            if step == 2:
                model.register_comm_hook(None, hook)
            model.zero_grad()
            train(model, batch(smp.dp_rank()))
            found.append(gradients(model))
        return len(calls), found

    for num_calls, found in run_world(2, body):
        assert num_calls > 2
        assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("sockets")
@pytest.mark.world
def test_a_replica_that_is_gone_is_named_by_those_that_need_its_gradients() -> None:
    def body() -> None:
        model = start(1, m=1)
        for step in range(3):
            if step == 2 and smp.dp_rank() == 1:
                StagedReduction.launch = lambda self, index: os._exit(3)
            train(model, batch(smp.dp_rank()))

    first, second = run_world_expecting_failure(2, body)
    assert second.exit_code == 3
    assert "PeerError: rank 1 is gone without a word: it was killed or stopped" in first.stderr_text
    assert "rank 1 closed its connection to rank 0, which needs its gradients" in first.stderr_text


@pytest.mark.usefixtures("sockets")
@pytest.mark.world
def test_a_replica_that_ends_early_is_named() -> None:
    def body() -> None:
        model = start(1, m=1)
        for _ in range(3 - smp.dp_rank()):
            train(model, batch(smp.dp_rank()))

    first, second = run_world_expecting_failure(2, body)
    line = first.stderr_text.partition("\n")[0]
    assert "PeerError: rank 1 ended its program after step 2, but this rank needs it" in line
    assert second.exit_code == 1  # which hears of it while it takes its leave


@pytest.mark.world
def test_collectives_of_the_script_do_not_mix_with_the_reduction() -> None:
    @smp.step
    def train_and_sum(model: Any, x: Tensor) -> tuple[Tensor, float]:
        loss = model(x).square().mean()
        model.backward(loss)
        total = torch.ones(3) * (smp.dp_rank() + 1)
        dist.all_reduce(total, group=smp.get_dp_process_group())
        return loss, total.sum().item()

    def body() -> Any:
        model = start(m=2)
        for _ in range(3):
            model.zero_grad()
            _, sums = train_and_sum(model, batch(smp.dp_rank()))
            assert sums == [9.0, 9.0]
        return gradients(model)

    for found in run_world(2, body):
        assert_close(found, mean_gradients(1.0, 0, 1))


@pytest.mark.world
def test_replicas_in_different_steps_are_told() -> None:
    @smp.step
    def sometimes(model: Any, x: Tensor, backward: bool) -> Tensor:
        loss = model(x).square().mean()
        if backward:
            model.backward(loss)
        return loss

    def body() -> None:
        model = start(m=1)
        with torch.no_grad():  # evaluations are one's own business
            for _ in range(smp.dp_rank()):
                evaluate(model, batch(0))
        train(model, batch(0))
        for step in range(2):
            sometimes(model, batch(0), step == 1 or smp.dp_rank() == 0)

    for outcome in run_world_expecting_failure(2, body):
        assert "one of training step 3, another one of 2" in outcome.stderr_text
