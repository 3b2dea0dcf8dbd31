"""Whose turn it is, with bodies that only say how far they are."""

from types import SimpleNamespace
from typing import Any

import pytest

from smp_runtime.execution.runs import Run
from smp_runtime.execution.turns import Turns
from smp_runtime.messages.transport import Address, Topic
from smp_runtime.planning.schedule import Action, Kind, plan

MESSAGE = Address(Topic.DATA, 1, 0, 1, 1)
OTHER = Address(Topic.DATA, 1, 1, 1, 1)


class Table:
    """The turns of one rank of a chain of two, over bodies without threads."""

    def __init__(self, num_microbatches: int = 3, rank: int = 0, planned: bool = True) -> None:
        self.there: set[Address] = set()
        transport: Any = SimpleNamespace(rank=rank, has=lambda address: address in self.there)
        self.runs = [Run(self.body(i)) for i in range(num_microbatches)]
        self.turns = Turns(transport, self.runs)
        self.rank = rank
        if planned:
            self.turns.follow(
                plan((0, 1), num_microbatches, active=num_microbatches, policy="interleaved")
            )

    @staticmethod
    def body(microbatch: int) -> Any:
        return SimpleNamespace(
            microbatch=microbatch, backward_depth=10**6, num_backwards=0, number=0
        )

    def action(self, kind: Kind, microbatch: int) -> Action:
        return Action(self.rank, kind, microbatch)

    def wait_for(self, i: int, action: Action | None = None, *addresses: Address) -> Run:
        run = self.runs[i]
        run.state, run.action, run.addresses = "waiting", action, addresses
        if action is not None:
            self.turns.arrive(run, action)
        return run

    def finish(self, i: int) -> None:
        self.runs[i].state = "done"
        self.runs[i].num_done = len(self.runs[i].path)


def test_a_plan_is_shared_out_to_the_bodies() -> None:
    table = Table()
    assert [[str(action) for action in run.path] for run in table.runs] == [
        ["0F0", "0B0"],
        ["0F1", "0B1"],
        ["0F2", "0B2"],
    ]
    assert str(table.turns.next_action()) == "0F0"


def test_bodies_begin_in_their_order() -> None:
    table = Table()
    assert table.turns.choose() is table.runs[0]
    table.wait_for(0, table.action(Kind.BACKWARD, 0), MESSAGE)
    assert table.turns.choose() is table.runs[1]


def test_before_there_is_a_plan_only_the_first_body_begins() -> None:
    table = Table(planned=False)
    assert table.turns.next_action() is None
    assert table.turns.choose() is table.runs[0]
    table.wait_for(0, None, MESSAGE)
    assert table.turns.choose() is None


def test_no_more_bodies_begin_than_may_be_in_flight() -> None:
    table = Table(num_microbatches=5)
    for i in (0, 1):
        table.wait_for(i, table.action(Kind.BACKWARD, i), MESSAGE)
    begun = 0
    while (run := table.turns.choose()) is not None:
        begun += 1
        table.wait_for(run.body.microbatch, None, MESSAGE)
    assert begun < 3


def test_a_body_in_the_middle_of_an_action_goes_on_first() -> None:
    table = Table()
    table.wait_for(0, table.action(Kind.BACKWARD, 0))
    middle = table.wait_for(1, None, OTHER)
    assert table.turns.choose() is not middle
    table.there.add(OTHER)
    assert table.turns.choose() is middle


def test_the_planned_action_is_next_and_no_other_however_ready() -> None:
    table = Table()
    first = table.wait_for(0, table.action(Kind.BACKWARD, 0), MESSAGE)
    table.wait_for(1, table.action(Kind.BACKWARD, 1))
    table.wait_for(2, table.action(Kind.FORWARD, 2))
    assert str(table.turns.next_action()) == "0B0"
    assert table.turns.choose() is None
    table.there.add(MESSAGE)
    assert table.turns.choose() is first


def test_what_was_passed_is_over() -> None:
    table = Table()
    table.turns.arrive(table.runs[0], table.action(Kind.BACKWARD, 0))
    assert str(table.turns.next_action()) == "0F1"
    table.finish(0)
    table.finish(1)
    assert str(table.turns.next_action()) == "0F2"
    table.finish(2)
    assert table.turns.next_action() is None


def test_a_body_that_waits_beyond_its_stage_lets_the_plan_go_on() -> None:
    table = Table()
    run = table.runs[0]
    run.stage = 0
    table.turns.leave_stage(run)
    assert str(table.turns.next_action()) == "0F1"
    table.turns.leave_stage(run)  # in the backward already: nothing changes
    assert run.num_done == 1


def test_may_begin_where_it_is_ones_turn_and_all_is_there() -> None:
    table = Table()
    run = table.runs[0]
    assert table.turns.may_begin(run, table.action(Kind.FORWARD, 0))
    assert not table.turns.may_begin(table.runs[1], table.action(Kind.FORWARD, 1))
    run.addresses = (MESSAGE,)
    assert not table.turns.may_begin(run, table.action(Kind.FORWARD, 0))


def test_another_body_may_pass_and_from_then_on_readiness_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = Table()
    table.wait_for(0, table.action(Kind.BACKWARD, 0), MESSAGE)
    second = table.wait_for(1, table.action(Kind.BACKWARD, 1))
    assert table.turns.patience == 1.0
    assert table.turns.let_pass()
    assert second.action is None
    assert table.turns.choose() is second
    assert table.turns.patience == 0.001


def test_none_passes_where_none_is_ready_or_memory_is_full() -> None:
    table = Table()
    for run in table.runs[:2]:
        table.turns.admit(run)
    table.wait_for(0, table.action(Kind.BACKWARD, 0), MESSAGE)
    table.wait_for(1, table.action(Kind.BACKWARD, 1), OTHER)
    table.wait_for(2, table.action(Kind.FORWARD, 2))
    assert not table.turns.let_pass()


def test_modules_see_the_microbatches_in_their_order() -> None:
    table = Table()
    first, second = table.runs[:2]
    first.body.number, second.body.number = 5, 6
    second.is_entering = True
    assert table.turns.overtakes(second)
    assert not table.turns.is_ready(second)
    first.body.number = 7
    assert not table.turns.overtakes(second)
    assert table.turns.is_ready(second)
    first.body.number = 0
    first.body.num_backwards = 1  # behind in numbers, but a pass further
    assert not table.turns.overtakes(second)
    first.body.num_backwards = 0
    first.state = "done"
    assert not table.turns.overtakes(second)
    assert not table.turns.overtakes(first)


def test_gradients_are_summed_in_the_order_of_the_microbatches() -> None:
    table = Table()
    first, second = table.runs[:2]
    second.body.num_backwards = first.body.num_backwards = 1
    first.body.backward_depth, second.body.backward_depth = 2, 2
    assert table.turns.is_ready(first)
    assert not table.turns.is_ready(second)
    first.body.backward_depth = 1
    assert table.turns.is_ready(second)


def test_in_flight_are_counted_at_their_most() -> None:
    table = Table()
    table.turns.admit(table.runs[0])
    table.turns.admit(table.runs[1])
    table.turns.admit(table.runs[1])
    table.finish(0)
    table.turns.admit(table.runs[2])
    assert table.turns.max_in_flight == 2
