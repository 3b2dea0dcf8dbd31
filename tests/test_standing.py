"""Ranks are stuck when each needs another one of them and no message is under way."""

from smp_runtime.messages.standing import Standing, stuck_ranks


def standing(*needs: tuple[int, ...], sent: dict[int, int], received: dict[int, int]) -> Standing:
    return Standing(needs, sent, received, "waits")


def test_two_ranks_that_wait_for_each_other_are_stuck() -> None:
    first = standing((1,), sent={1: 3}, received={1: 2})
    second = standing((0,), sent={0: 2}, received={0: 3})
    assert stuck_ranks({0: first, 1: second}) == [0, 1]


def test_a_message_under_way_may_let_them_go_on() -> None:
    first = standing((1,), sent={1: 3}, received={1: 2})
    second = standing((0,), sent={0: 2}, received={0: 2})
    assert stuck_ranks({0: first, 1: second}) == []


def test_a_word_from_before_going_on_proves_nothing() -> None:
    before = standing((0,), sent={}, received={})
    now = standing((1,), sent={1: 1}, received={})  # it has sent since what 1 waited for
    assert stuck_ranks({0: now, 1: before}) == []


def test_a_rank_that_has_not_spoken_may_go_on() -> None:
    first = standing((2,), sent={}, received={})
    second = standing((0,), sent={}, received={})
    assert stuck_ranks({0: first, 1: second}) == []


def test_one_way_to_go_on_is_enough() -> None:
    first = standing((1,), (2,), sent={}, received={})
    second = standing((0,), sent={}, received={})
    assert stuck_ranks({0: first, 1: second}) == []
    ready = standing((1,), (), sent={}, received={})
    assert stuck_ranks({0: ready, 1: second}) == []


def test_a_way_that_lacks_one_message_is_closed() -> None:
    first = standing((1, 2), sent={}, received={})
    second = standing((0,), sent={}, received={})
    assert stuck_ranks({0: first, 1: second}) == [0, 1]


def test_a_cycle_of_three_and_one_that_waits_for_it() -> None:
    cycle = {rank: standing(((rank + 1) % 3,), sent={}, received={}) for rank in range(3)}
    assert stuck_ranks({**cycle, 3: standing((1,), sent={}, received={})}) == [0, 1, 2, 3]
