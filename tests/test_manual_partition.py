"""Manual placement: by a context around creation, or afterwards."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.errors import PartitionError, UsageError
from tests.worlds import run_world, run_world_expecting_failure

WIDTH = 4
X = torch.ones(2, WIDTH)
MANUAL = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        with smp.partition(1):
            self.b = nn.Sequential(linear(), linear())
            with smp.partition(0):
                self.c = linear()
            self.d = linear()
        self.e = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.e(self.d(self.c(self.b(self.a(x)))))


@smp.step
def evaluate(model: Any, x: Tensor) -> Tensor:
    return model(x)


def placed(model: Any) -> list[str]:
    """Runs a step and returns the names of the parameters on this rank, without `.weight`."""
    evaluate(model, X)
    names = [name.rpartition(".")[0] for name, _ in model.local_named_parameters()]
    return sorted(set(names))


def test_it_needs_a_runtime() -> None:
    with pytest.raises(UsageError, match=r"smp\.init\(\)"), smp.partition(0):
        pass
    with pytest.raises(UsageError, match=r"smp\.init\(\)"):
        smp.set_partition(nn.Linear(1, 1), 0)


@pytest.mark.world
def test_the_innermost_context_wins_and_the_rest_goes_to_the_default() -> None:
    def body() -> list[str]:
        smp.init(MANUAL)
        native = nn.Module.__init__
        torch.manual_seed(1)
        model = smp.DistributedModel(Nested())
        assert nn.Module.__init__ is native
        found = placed(model)
        torch.testing.assert_close(
            evaluate(model, X).outputs[0], plain_output(), msg="other numbers than in one process"
        )
        return found

    assert run_world(2, body) == [["a", "c", "e"], ["b.0", "b.1", "d"]]


def plain_output() -> Tensor:
    """Returns what the nested model gives, built without any placement."""
    torch.manual_seed(1)
    layers = [linear() for _ in range(6)]
    a, b0, b1, c, d, e = layers
    return e(d(c(b1(b0(a(X)))))).detach()


@pytest.mark.world
def test_set_partition_places_a_module_with_all_in_it_but_what_has_its_own_place() -> None:
    def body() -> list[str]:
        smp.init({**MANUAL, "default_partition": 1})
        model = smp.DistributedModel(nn.Sequential(nn.Sequential(linear(), linear()), linear()))
        inner = model.get_module()[0]
        smp.set_partition(inner, 0)
        smp.set_partition(inner[1], 1)
        smp.set_partition(model.get_module()[1], 0)
        smp.set_partition(model.get_module()[1], 1)  # the last word counts
        found = placed(model)
        with pytest.raises(PartitionError, match="after the first step"):
            smp.set_partition(inner, 1)
        return found

    assert run_world(2, body) == [["0.0"], ["0.1", "1"]]


@pytest.mark.world
def test_partitions_that_do_not_exist_are_named() -> None:
    def body() -> str:
        smp.init(MANUAL)
        expected = r"partition {} does not exist: pipeline_parallel_degree is 2, .* 0 to 1"
        with pytest.raises(PartitionError, match=expected.format(2)):
            smp.set_partition(linear(), 2)
        with pytest.raises(ValueError, match=expected.format(-1)), smp.partition(-1):
            pass
        return "named"

    assert run_world(2, body) == ["named"] * 2


@pytest.mark.world
def test_a_failing_context_places_nothing_more() -> None:
    def body() -> bool:
        smp.init(MANUAL)
        native = nn.Module.__init__
        with pytest.raises(KeyError), smp.partition(1):
            raise KeyError
        return nn.Module.__init__ is native

    assert run_world(2, body) == [True, True]


@pytest.mark.world
def test_an_empty_partition_is_an_error_on_every_rank() -> None:
    def body() -> None:
        smp.init(MANUAL)
        evaluate(smp.DistributedModel(nn.Sequential(linear(), linear())), X)

    for outcome in run_world_expecting_failure(2, body):
        assert outcome.exit_code == 1
        assert "partition 1 holds no module with parameters" in outcome.stderr_text


class Attentive(nn.Module):
    """Uses the weight of `attention.out_proj`, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = linear()

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None].expand(-1, 3, -1)
        return self.head(self.attention(h, h, h)[0]).mean()


@pytest.mark.world
@pytest.mark.parametrize("rank", [0, 1])
def test_a_partition_may_hold_only_what_is_never_called(rank: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    plain = Attentive()
    sum(plain(part) / 2 for part in x.chunk(2)).backward()

    @smp.step
    def train(model: Any, x: Tensor) -> None:
        model.backward(model(x))

    def body() -> dict[str, Tensor]:
        smp.init({**MANUAL, "default_partition": 1 - rank, "microbatches": 2})
        model = smp.DistributedModel(Attentive())
        smp.set_partition(model.module.attention.out_proj, rank)
        train(model, x)
        return {name: p.grad for name, p in model.local_named_parameters()}

    ranks = run_world(2, body)
    assert [name.rpartition(".")[0] for name in ranks[rank]] == ["attention.out_proj"] * 2
    torch.testing.assert_close(
        {**ranks[0], **ranks[1]}, {name: p.grad for name, p in plain.named_parameters()}
    )


@pytest.mark.world
def test_placement_is_ignored_with_one_warning_where_it_is_automatic() -> None:
    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                messages.append(record.getMessage())

    messages: list[str] = []

    def body() -> Any:
        logging.getLogger("smp_runtime").addHandler(Warnings())
        smp.init({"pipeline_parallel_degree": 2})
        module = nn.Sequential(linear(), linear())
        smp.set_partition(module[0], 1)
        smp.set_partition(module[1], 0)
        return messages, placed(smp.DistributedModel(module))

    (first, zero), (second, one) = run_world(2, body)
    assert first == second
    assert len(first) == 1
    assert first[0].startswith("manual placement is ignored because auto_partition is on")
    assert (zero, one) == (["0"], ["1"])
