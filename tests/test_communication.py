"""Objects between ranks: the groups that they reach, their order, and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp_runtime as smp
from smp_runtime.errors import PeerError, UsageError
from tests.worlds import run_world, run_world_expecting_failure


def start(degree: int, **settings: Any) -> None:
    smp.init({"pipeline_parallel_degree": degree, "ddp": True, "timeout": 15.0, **settings})


@pytest.mark.world
def test_groups_and_ranks_are_those_of_the_placement() -> None:
    def body() -> dict[str, Any]:
        start(2)
        if smp.rank() == 0:
            smp.broadcast({"lines": [1, 2]}, smp.WORLD)
            smp.broadcast("to my pipeline", smp.PP_GROUP)
            smp.send(torch.arange(3), 1, smp.RankType.DP_RANK)
            return {}
        got: dict[str, Any] = {"world": smp.recv_from(0, smp.RankType.WORLD_RANK)}
        if smp.rank() == 1:
            got["pp"] = smp.recv_from(0, smp.RankType.PP_RANK)
        if smp.rank() == 2:
            got["dp"] = smp.recv_from(0, smp.RankType.RDP_RANK).tolist()
        return got

    world = {"world": {"lines": [1, 2]}}
    first, second, third, fourth = run_world(4, body)
    assert (first, fourth) == ({}, world)
    assert second == world | {"pp": "to my pipeline"}
    assert third == world | {"dp": [0, 1, 2]}


@pytest.mark.world
def test_allgather_is_in_the_order_of_ranks_in_the_group() -> None:
    def body() -> list[list[int]]:
        start(2)
        groups = [*smp.CommGroup]
        return [[int(o) for o in smp.allgather(torch.tensor(smp.rank()), g)] for g in groups]

    by_rank = run_world(4, body)
    # WORLD, MP, DP, PP, TP, RDP of rank 3, whose replica is ranks 2 and 3
    assert by_rank[3] == [[0, 1, 2, 3], [2, 3], [1, 3], [2, 3], [3], [1, 3]]


@pytest.mark.world
def test_messages_of_one_sender_keep_their_order() -> None:
    def body() -> list[object]:
        start(2)
        if smp.pp_rank() == 0:
            for number in range(5):
                smp.send(number, 1, smp.RankType.PP_RANK)
            smp.broadcast(None, smp.MP_GROUP)
            return []
        return [smp.recv_from(0, smp.RankType.MP_RANK) for _ in range(6)]

    assert run_world(2, body)[1] == [0, 1, 2, 3, 4, None]


@pytest.mark.world
def test_alone_there_is_nobody_to_talk_to() -> None:
    def body() -> list[Any]:
        start(1)
        smp.broadcast("nobody hears this", smp.PP_GROUP)
        smp.barrier(smp.DP_GROUP)
        return smp.allgather("x", smp.WORLD)

    assert run_world(1, body) == [["x"]]


@pytest.mark.world
def test_wrong_calls_say_what_is_right() -> None:
    def body() -> None:
        start(2)
        with pytest.raises(UsageError, match=r"smp\.broadcast was given 'PP': .*CommGroup\.PP_GR"):
            smp.broadcast(1, "PP")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the PP_RANK 2: there are 0 to 1"):
            smp.send(1, 2, smp.RankType.PP_RANK)
        with pytest.raises(UsageError, match=f"own PP_RANK {smp.pp_rank()}"):
            smp.recv_from(smp.pp_rank(), smp.RankType.PP_RANK)
        with pytest.raises(UsageError, match="given <CommGroup.WORLD"):
            smp.recv_from(0, smp.WORLD)  # type: ignore[arg-type]

    run_world(2, body)


@pytest.mark.world
def test_inside_a_step_of_several_ranks_nobody_talks() -> None:
    def body() -> None:
        start(2)
        model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(),
                                                         torch.nn.Linear(2, 2)))  # fmt: skip

        @smp.step
        def step(model: Any, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = model(x)
            with pytest.raises(UsageError, match=r"smp\.allgather was called inside a step"):
                smp.allgather(1, smp.WORLD)
            return out

        step(model, torch.zeros(2, 2))

    run_world(2, body)


@pytest.mark.world
def test_a_peer_that_ended_is_named() -> None:
    def body() -> None:
        start(1)
        if dist.get_rank() == 1:
            raise SystemExit(3)
        smp.recv_from(1, smp.RankType.WORLD_RANK)

    outcome = run_world_expecting_failure(2, body)[0]
    assert PeerError.__name__ in outcome.exception_text
    assert "smp.recv_from did not reach rank 1" in outcome.exception_text
    assert outcome.seconds < 12
