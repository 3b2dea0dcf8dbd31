"""Transfers: both ends agree on their order, and no shape of pipeline can hang unbuffered."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_runtime.errors import ScheduleError
from smp_runtime.planning.schedule import Action, Kind, Plan, Policy, plan
from smp_runtime.planning.transfers import Step, Transfer, Verb, check_unbuffered, with_transfers

POLICIES: tuple[Policy, ...] = ("interleaved", "simple")


def two_ranks(m: int) -> Plan:
    return plan((0, 1), m, active=m, policy="interleaved")


def check_channels(p: Plan) -> None:
    """Every crossing value is sent and received once, in one order on each channel."""
    ends: dict[tuple[int, int, Kind, Verb], list[Action]] = {}
    for rank, steps in enumerate(with_transfers(p)):
        assert tuple(step for step in steps if isinstance(step, Action)) == p.actions(rank)
        for step in steps:
            if isinstance(step, Transfer):
                edge = (rank, step.peer) if step.verb is Verb.SEND else (step.peer, rank)
                ends.setdefault((*edge, step.action.kind, step.verb), []).append(step.action)
    for (source, target, kind, _), values in ends.items():
        assert source != target
        assert ends[source, target, kind, Verb.SEND] == values
        assert ends[source, target, kind, Verb.RECV] == values
    crossings = sum(a != b for a, b in itertools.pairwise(p.rank_of))
    assert sum(map(len, ends.values())) == 2 * 2 * crossings * p.num_microbatches


def test_a_send_follows_its_action_and_a_receive_comes_before_its_use() -> None:
    assert [[str(step) for step in steps] for steps in with_transfers(two_ranks(1))] == [
        ["0F0", "send 0F0 to rank 1", "recv 1B0 from rank 1", "0B0"],
        ["recv 0F0 from rank 0", "1F0", "1B0", "send 1B0 to rank 0"],
    ]


def test_neighbouring_stages_on_one_rank_need_no_transfer() -> None:
    p = plan((0, 0), 2, active=2, policy="interleaved")
    assert with_transfers(p) == p.orders


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", range(1, 7))
def test_no_shape_up_to_6_by_12_hangs_unbuffered(n: int, policy: Policy) -> None:
    for m in range(1, 13):
        maps = (tuple(range(n)), (*range(n), 0), tuple(range(n)) * 2)
        for rank_of, active in itertools.product(maps, (2, n + 2, 12)):
            p = plan(rank_of, m, active=active, policy=policy)
            check_unbuffered(p)
            check_channels(p)


@settings(max_examples=150, deadline=None)
@given(
    rank_of=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    m=st.integers(1, 9),
    active=st.integers(1, 10),
    policy=st.sampled_from(POLICIES),
)
def test_no_map_of_stages_to_ranks_hangs_unbuffered(
    rank_of: list[int], m: int, active: int, policy: Policy
) -> None:
    p = plan(rank_of, m, active=active, policy=policy)
    check_unbuffered(p)
    check_channels(p)
    check_unbuffered(plan(rank_of, m, active=active, policy=policy, forward_only=True))


# What the check finds: each case is a way in which others wrote their lists


def swapped(p: Plan, rank: int, first: str, second: str) -> list[list[Step]]:
    lists = [list(steps) for steps in with_transfers(p)]
    names = [str(step) for step in lists[rank]]
    i, j = names.index(first), names.index(second)
    lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]
    return lists


def test_receives_placed_by_the_receiver_are_found() -> None:
    # Each rank would receive right before it computes. But then rank 1 sends a gradient while
    # rank 0 still sends the next activation, and neither comes to its receive.
    lists = [list(steps) for steps in with_transfers(two_ranks(2))]
    names = [str(step) for step in lists[1]]
    receive = lists[1].pop(names.index("recv 0F1 from rank 0"))
    lists[1].insert(lists[1].index(Action(1, Kind.FORWARD, 1)), receive)
    stuck = "for ever: rank 0 at send 0F1 to rank 1, rank 1 at send 1B0 to rank 0$"
    with pytest.raises(ScheduleError, match=stuck):
        check_unbuffered(two_ranks(2), lists)


def test_ends_in_different_order_are_found() -> None:
    p = two_ranks(2)
    lists = swapped(p, 1, "recv 0F0 from rank 0", "recv 0F1 from rank 0")
    with pytest.raises(ScheduleError, match="not the same value"):
        check_unbuffered(p, lists)


def test_an_action_before_its_input_is_found() -> None:
    p = two_ranks(1)
    lists = swapped(p, 1, "recv 0F0 from rank 0", "1F0")
    with pytest.raises(ScheduleError, match="rank 1 reaches 1F0 without the value of 0F0"):
        check_unbuffered(p, lists)
