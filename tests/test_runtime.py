"""The one process-wide object: its beginning and end, ranks, sizes, groups and barriers."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp_runtime as smp
from smp_runtime.errors import ConfigError, UsageError
from smp_runtime.runtime import current
from tests.worlds import run_world, run_world_expecting_failure

AXES = ("pp", "tp", "rdp", "dp", "mp")


def test_before_init_everything_says_what_to_call() -> None:
    assert not smp.is_initialized()
    functions = [smp.rank, smp.size, smp.barrier, smp.get_world_process_group]
    for axis in AXES:
        for name in (f"{axis}_rank", f"{axis}_size", f"get_{axis}_group"):
            functions.append(getattr(smp, name))
    for function in functions:
        with pytest.raises(UsageError, match=r"call smp\.init\(\) first"):
            function()


def test_local_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (smp.local_rank(), smp.local_size()) == (0, 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (smp.local_rank(), smp.local_size()) == (3, 8)


def test_shutdown_without_init_is_harmless() -> None:
    smp.shutdown()


def places() -> list[tuple[int, list[int]]]:
    return [(getattr(smp, f"{axis}_rank")(), getattr(smp, f"get_{axis}_group")()) for axis in AXES]


@pytest.mark.world
def test_ranks_sizes_and_groups_of_two_replicas_of_two_stages() -> None:
    def body() -> Any:
        seen = []
        for strategy in ("cluster", "spread"):
            smp.init({"pipeline_parallel_degree": 2, "ddp": True, "placement_strategy": strategy})
            assert smp.is_initialized()
            assert (smp.rank(), smp.size()) == (dist.get_rank(), 4)
            assert (smp.local_rank(), smp.local_size()) == (dist.get_rank(), 4)
            assert [getattr(smp, f"{axis}_size")() for axis in AXES] == [2, 1, 2, 2, 2]
            for axis in AXES:
                group = getattr(smp, f"get_{axis}_process_group")()
                members = getattr(smp, f"get_{axis}_group")()
                assert dist.get_process_group_ranks(group) == members
            assert dist.get_process_group_ranks(smp.get_world_process_group()) == [0, 1, 2, 3]
            seen.append(places())
            smp.shutdown()
            assert not smp.is_initialized()
        return seen

    results = run_world(4, body)
    assert [cluster for cluster, _ in results] == [
        [(0, [0, 1]), (0, [0]), (0, [0, 2]), (0, [0, 2]), (0, [0, 1])],
        [(1, [0, 1]), (0, [1]), (0, [1, 3]), (0, [1, 3]), (1, [0, 1])],
        [(0, [2, 3]), (0, [2]), (1, [0, 2]), (1, [0, 2]), (0, [2, 3])],
        [(1, [2, 3]), (0, [3]), (1, [1, 3]), (1, [1, 3]), (1, [2, 3])],
    ]
    assert [spread for _, spread in results] == [
        [(0, [0, 2]), (0, [0]), (0, [0, 1]), (0, [0, 1]), (0, [0, 2])],
        [(0, [1, 3]), (0, [1]), (1, [0, 1]), (1, [0, 1]), (0, [1, 3])],
        [(1, [0, 2]), (0, [2]), (0, [2, 3]), (0, [2, 3]), (1, [0, 2])],
        [(1, [1, 3]), (0, [3]), (1, [2, 3]), (1, [2, 3]), (1, [1, 3])],
    ]


@pytest.mark.world
def test_process_groups_can_be_used() -> None:
    def body() -> list[float]:
        smp.init({"pipeline_parallel_degree": 2, "ddp": True})
        sums = []
        for name in ("world", *AXES):
            total = torch.tensor(float(10 ** smp.rank()))
            dist.all_reduce(total, group=getattr(smp, f"get_{name}_process_group")())
            sums.append(total.item())
        return sums

    assert run_world(4, body) == [
        [1111.0, 11.0, 1.0, 101.0, 101.0, 11.0],
        [1111.0, 11.0, 10.0, 1010.0, 1010.0, 11.0],
        [1111.0, 1100.0, 100.0, 101.0, 101.0, 1100.0],
        [1111.0, 1100.0, 1000.0, 1010.0, 1010.0, 1100.0],
    ]


@pytest.mark.world
def test_barriers_wait_for_their_group_only() -> None:
    def body() -> list[bool]:
        smp.init({"pipeline_parallel_degree": 2, "ddp": True})
        store = dist.distributed_c10d._get_default_store()
        has_waited = []
        for axis in ("world", "pp", "dp", "mp"):
            name = "barrier" if axis == "world" else f"{axis}_barrier"
            group = getattr(smp, f"get_{axis}_process_group")()
            is_with_3 = 3 in dist.get_process_group_ranks(group)
            if smp.rank() == 3:
                # Whoever waits for rank 3 without need keeps it waiting here for ever.
                others = set(range(3)) - set(dist.get_process_group_ranks(group))
                store.wait([f"{name} passed by {other}" for other in others])
                store.set(f"{name} reached by 3", "")
            getattr(smp, name)()
            store.set(f"{name} passed by {smp.rank()}", "")
            has_waited.append(not is_with_3 or store.check([f"{name} reached by 3"]))
        return has_waited

    assert run_world(4, body) == [[True] * 4] * 4


@pytest.mark.world
def test_a_second_init_is_ignored_with_a_warning() -> None:
    def body() -> bool:
        smp.init({"microbatches": 2})
        first = current()
        smp.init({"microbatches": 4})
        return current() is first and current().config.microbatches == 2

    assert run_world(1, body) == [True]

    def twice_and_fail() -> None:
        smp.init({})
        smp.init({})
        raise SystemExit(3)

    (outcome,) = run_world_expecting_failure(1, twice_and_fail)
    assert "smp is initialized already. Ignoring this call of smp.init" in outcome.stderr_text


@pytest.mark.world
def test_settings_that_do_not_fit_the_world_raise_and_leave_nothing_behind() -> None:
    def body() -> list[str]:
        messages = []
        for config in ({"pipeline_parallel_degree": 4}, {"pipeline_parallel_degree": 1}):
            with pytest.raises(ConfigError) as caught:
                smp.init(config)
            messages.append(str(caught.value))
            assert not smp.is_initialized()
        smp.init({"pipeline_parallel_degree": 2})
        return messages

    first, second = run_world(2, body)
    assert first == second
    assert "4" in first[0]
    assert "2" in first[0]
    assert "set ddp to True" in first[1]


@pytest.mark.world
def test_the_environment_goes_before_the_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"microbatches": 8}')

    def body() -> int:
        smp.init({"microbatches": 2})
        return current().config.microbatches

    assert run_world(1, body) == [8]


@pytest.mark.world
def test_a_world_can_be_left_and_entered_again_quickly() -> None:
    def body() -> float:
        begun = time.monotonic()
        for _ in range(3):
            smp.init({"pipeline_parallel_degree": 2})
            smp.pp_barrier()
            smp.shutdown()
        return time.monotonic() - begun

    assert max(run_world(2, body)) < 4.0
