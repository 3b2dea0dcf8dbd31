"""Whose turn it is: the plan read against what the bodies wait for.

The plan names the next action; its body runs when its messages are there. Three rules hold beside
the plan. A body in the middle of an action goes on first. Modules see the microbatches in their
order, and so do the sums of gradients, whatever the schedule. A rank that would be idle lets a
body recompute what it will need for its backward. And if the planned action does not become
possible for long, because the step takes another path than the traced one, the first body that
could run does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..messages.transport import Transport
from ..planning.schedule import Action, Kind, Plan
from .runs import Run

_log = logging.getLogger("smp_runtime")

_PATIENCE = 1.0
_NO_PATIENCE = 0.001


class Turns:
    """The order of one step on this rank.

    Args:
        transport: knows which messages are there.
        runs: the bodies, by microbatch.
        patience: seconds to wait for the planned action before another may pass.
        active: the setting `active_microbatches`.
        recompute_ahead: how many bodies may hold what they recomputed before their output
            gradients have come.

    Attributes:
        plan: the plan of the step, None until the model is partitioned.
        max_in_flight: how many microbatches held activations at once, at most.
    """

    def __init__(
        self,
        transport: Transport,
        runs: Sequence[Run],
        patience: float = _PATIENCE,
        active: int = 1,
        recompute_ahead: int = 1,
    ) -> None:
        self.plan: Plan | None = None
        self.patience = patience
        self.max_in_flight = 0
        self._transport = transport
        self._runs = runs
        self._active = active
        self._recompute_ahead = recompute_ahead
        self._next = 0

    def follow(self, plan: Plan) -> None:
        """Follows a plan from its beginning."""
        self.plan = plan
        self._next = 0
        actions = plan.actions(self._transport.rank)
        for run in self._runs:
            run.path = tuple(a for a in actions if a.microbatch == run.body.microbatch)

    def next_action(self) -> Action | None:
        """Returns the first action of the plan that is not over."""
        actions = () if self.plan is None else self.plan.actions(self._transport.rank)
        while self._next < len(actions):
            action = actions[self._next]
            run = self._runs[action.microbatch]
            if run.num_done <= run.path.index(action):
                return action
            self._next += 1
        return None

    def may_begin(self, run: Run, action: Action | None) -> bool:
        """Says whether a running body may begin an action without being suspended first."""
        return self.next_action() in (action, None) and self.is_ready(run)

    def arrive(self, run: Run, action: Action) -> None:
        """Notes that a body has come to an action: those before it are over."""
        if action in run.path:
            run.num_done = max(run.num_done, run.path.index(action))

    def leave_stage(self, run: Run) -> None:
        """Notes that a body waits for something beyond its stage: the plan may go on."""
        if run.stage is not None and run.num_done < len(run.path):
            current = run.path[run.num_done]
            if current.kind is Kind.FORWARD and current.stage == run.stage:
                run.num_done += 1

    def admit(self, run: Run) -> None:
        """Notes that a body computes from now on."""
        if not run.is_admitted:
            run.is_admitted = True
            self.max_in_flight = max(self.max_in_flight, self._num_in_flight())

    def choose(self) -> Run | None:
        """Picks the body to run now, None if every one must wait."""
        for run in self._runs:
            if run.state == "waiting" and run.action is None and self.is_ready(run):
                return run
        action = self.next_action()
        if action is not None:
            run = self._runs[action.microbatch]
            if run.state == "waiting" and (self.is_ready(run) or self._may_recompute(run)):
                return run
        new = self._next_new(action)
        return next(filter(self._may_recompute, self._runs), None) if new is None else new

    def let_pass(self) -> bool:
        """Lets the first ready body run although it is not its turn; False if there is none."""
        for run in self._runs:
            if self.may_pass(run):
                if self.patience != _NO_PATIENCE:
                    _log.info("the step takes another path than planned; going by readiness")
                self.patience = _NO_PATIENCE
                run.action = None
                return True
        return False

    def may_pass(self, run: Run) -> bool:
        """Says whether a body could run if it were its turn."""
        is_within = run.is_admitted or self._num_in_flight() < self._cap()
        return run.state == "waiting" and is_within and self.is_ready(run)

    def is_ready(self, run: Run) -> bool:
        """Says whether a body has what it waits for, and overtakes none."""
        if not all(self._transport.has(address) for address in run.addresses):
            return False
        if run.is_entering:
            return not self.overtakes(run)
        depth = run.body.backward_depth
        if depth < 0 or run.body.num_backwards == 0:
            return True
        return all(
            earlier.body.backward_depth < depth for earlier in self._runs[: run.body.microbatch]
        )

    def overtakes(self, run: Run) -> bool:
        """Says whether an earlier microbatch has not come as far yet."""
        body = run.body
        return any(
            earlier.state != "done"
            and earlier.body.num_backwards <= body.num_backwards
            and earlier.body.number <= body.number
            for earlier in self._runs[: body.microbatch]
        )

    def _may_recompute(self, run: Run) -> bool:
        num_held = sum(each.has_recomputed for each in self._runs)
        return run.is_before_recomputation and num_held < self._recompute_ahead

    def _next_new(self, action: Action | None) -> Run | None:
        """The next new body, if it may run its glue up to its first stage.

        This rank would idle otherwise, so the glue costs nothing, and a body holds no activations
        before its first stage. Still, what glue makes needs memory: no more are begun than twice
        the setting `active_microbatches`.
        """
        num_waiting = sum(run.state == "waiting" for run in self._runs)
        if self.plan is None and num_waiting:
            return None  # the first body partitions the model before any other starts
        for run in self._runs:
            if run.state == "new":
                is_due = action is None or action.microbatch >= run.body.microbatch
                return run if is_due or num_waiting < self._max_begun() else None
        return None

    def _max_begun(self) -> int:
        return 1 if self.plan is None else max(self._cap() + 1, 2 * self._active)

    def _cap(self) -> int:
        if self.plan is None:
            return 1
        return max(1, self.plan.peak_in_flight(self._transport.rank))

    def _num_in_flight(self) -> int:
        return sum(run.is_admitted and run.state != "done" for run in self._runs)
