"""What a plan moves: the sends and receives between its actions, in an order that cannot hang.

A plan says what to compute. An action whose source is on another rank also needs a transfer. The
sender places it: right after the action that makes the value, the send goes on the rank's own list
and the receive on the peer's. So both ends name the transfers between them in the same order, and
a backend that knows no tags, and matches in order, matches them right.

Nor can the lists hang, not even if no message is buffered and a send ends only when the peer has
come to its receive. Both ends of a transfer are placed at once, so the earliest placed step that
has not ended is always at the head of every list it is on, and can end. `check_unbuffered` shows
it for the lists of a given plan, or for any others.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from smp_runtime.errors import ScheduleError
from smp_runtime.planning.schedule import Action, Plan, starts


class Verb(StrEnum):
    """Which end of a transfer a rank holds."""

    SEND = "send"
    RECV = "recv"


class Transfer(NamedTuple):
    """One end of a transfer, named by the action that made the value: ``send 0F2 to rank 1``.

    A forward's value is an activation, a backward's the gradient of its input.
    """

    verb: Verb
    action: Action
    peer: int

    def __str__(self) -> str:
        preposition = "to" if self.verb is Verb.SEND else "from"
        return f"{self.verb} {self.action} {preposition} rank {self.peer}"


Step = Action | Transfer


def with_transfers(plan: Plan) -> tuple[tuple[Step, ...], ...]:
    """Returns for each rank its actions with the sends and receives among them, in order."""
    steps: list[list[Step]] = [[] for _ in plan.orders]
    target = {plan.source(action): action for order in plan.orders for action in order}
    clocks = starts(plan, lambda _: 1)
    for action in sorted(clocks, key=clocks.__getitem__):
        rank = plan.rank_of[action.stage]
        steps[rank].append(action)
        if action in target and (peer := plan.rank_of[target[action].stage]) != rank:
            steps[rank].append(Transfer(Verb.SEND, action, peer))
            steps[peer].append(Transfer(Verb.RECV, action, rank))
    return tuple(map(tuple, steps))


def check_unbuffered(plan: Plan, steps: Sequence[Sequence[Step]] | None = None) -> None:
    """Proves that the ranks come to the end of their lists if no message is buffered.

    Every rank takes one step after the other. An action computes from what its rank computed or
    received before. A send ends together with the peer's receive. Activations and gradients have
    a channel each between two ranks, on which both ends must be at the same value.

    Args:
        plan: the plan that the lists belong to.
        steps: the list of each rank, by default those of `with_transfers`.

    Raises:
        ScheduleError: ranks wait in a cycle, a channel's ends differ in their order, or an action's
            source is missing. Says what each rank is stuck at.
    """
    steps = with_transfers(plan) if steps is None else steps
    position = [0] * len(steps)
    held: list[set[Action]] = [set() for _ in steps]
    runnable = set(range(len(steps)))
    while runnable:
        rank = runnable.pop()
        while (step := _head(steps, position, rank)) is not None:
            if isinstance(step, Action):
                source = plan.source(step)
                if source is not None and source not in held[rank]:
                    raise ScheduleError(f"rank {rank} reaches {step} without the value of {source}")
                held[rank].add(step)
            else:
                other = _head(steps, position, step.peer)
                if not _meet(rank, step, other):
                    break
                receiver = rank if step.verb is Verb.RECV else step.peer
                held[receiver].add(step.action)
                position[step.peer] += 1
                runnable.add(step.peer)
            position[rank] += 1
    stuck = [
        f"rank {rank} at {step}"
        for rank in range(len(steps))
        if (step := _head(steps, position, rank)) is not None
    ]
    if stuck:
        raise ScheduleError(f"the ranks wait for each other for ever: {', '.join(stuck)}")


def _head(steps: Sequence[Sequence[Step]], position: Sequence[int], rank: int) -> Step | None:
    """Returns the step a rank is at, None at the end of its list."""
    return steps[rank][position[rank]] if position[rank] < len(steps[rank]) else None


def _meet(rank: int, step: Transfer, other: Step | None) -> bool:
    """Whether `other`, the step the peer of `rank` is at, is the other end of `step`.

    Raises:
        ScheduleError: it is the other end of the channel, but of another value.
    """
    if not isinstance(other, Transfer) or other.peer != rank or other.verb is step.verb:
        return False
    if other.action.kind is not step.action.kind:
        return False
    if other.action != step.action:
        raise ScheduleError(f"rank {rank} is at {step}, its peer at {other}: not the same value")
    return True
