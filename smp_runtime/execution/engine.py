"""Runs the bodies of a step in the order of the plan.

Each microbatch's body has a thread of its own, so that it can be suspended in the middle of the
user's Python with its autocast, grad mode and function modes, which torch keeps per thread; but
exactly one thread runs at a time. A body is suspended where it would enter a stage, where data
must come first, and before each segment of its backward pass. Then the engine resumes the body
whose turn it is (`turns`). The order of the plan never decides the result: messages are
addressed, so a body that takes another path than the traced one still computes the right thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import device
from ..errors import NotSupportedError, PeerError, SMPError, UsageError
from ..messages.transport import Address, Message, Transport
from ..planning.schedule import Action, Kind, Plan, Policy, plan
from ..recomputing.checkpointed_modules import checkpointed_stages
from ..recomputing.known_calls import Known
from ..recomputing.native_checkpoint import watch_checkpointing
from ..recomputing.recomputation import Recomputation
from ..trees import map_instances
from .analysis import Analyser
from .body import Body
from .body_threads import BodyThreads
from .clock import Clock
from .export import Exported, export, settle
from .failure import locate, report
from .glue import GlueMode, watch_autograd
from .ownership import Ownership
from .paths import Paths
from .reports import Reports
from .rng import RandomStreams, host_random_state, set_host_random_state
from .runs import Run, StepReport
from .turns import Turns
from .waits import MAX_AHEAD, Waits

_LEARNING_STEPS = 2
_EMULATED_PATIENCE = 30.0


class Engine:
    """Runs steps on one rank of a pipeline group.

    Args:
        transport: to the other ranks of the group.
        policy: which schedule.
        active: how many microbatches may be in flight.
        timeout: seconds that a wait may take.
        clock: the emulated clock.
        recompute_ahead: how many microbatches may be recomputed before their output gradients come.
        recompute_ahead_modules: how many checkpointed calls of each, from the last.

    Attributes:
        step: number of the current step.
        report: where the time of the last step went.
        plan: the plan of the last step, None before the model is partitioned.
        max_in_flight: how many microbatches held activations at once in the last step, at most.
        known: what checkpointed calls share.
        module_names: names of the model's modules by identity, for messages.
        waits: for messages of other ranks.
        runs: the bodies of the current step.
        is_in_step: a step has begun and not ended.
        last_report: what this rank told the others of its failure.
        debug: the setting of that name.
        find_cause: returns the failure of another rank that an error here follows from, if any.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        policy: Policy,
        active: int,
        timeout: float,
        clock: Clock,
        recompute_ahead: int = 1,
        recompute_ahead_modules: int = 1,
    ) -> None:
        if transport.size > 1:
            watch_autograd()
            watch_checkpointing()
        self.transport = transport
        self.clock = clock
        self.analyser = Analyser()
        self.reports = Reports()
        self.ownership = Ownership(transport.size)
        self.known = Known()
        self.step = 0
        self.report = StepReport()
        self.module_names: dict[int, str] = {}
        self.plan: Plan | None = None
        self.max_in_flight = 0
        self._policy: Policy = policy
        self._active = active
        self._recompute_ahead = recompute_ahead
        self._recompute_ahead_modules = recompute_ahead_modules
        self._recomputed_stages: frozenset[int] = frozenset()
        self._rank_of: tuple[int, ...] | None = None
        self._paths = Paths(transport)
        self.waits = Waits(transport, self._paths, timeout)
        self.runs: list[Run] = []
        self.is_in_step = False
        self.last_report = ""
        self.debug = False
        self.find_cause: Callable[[Exception], Exception] = lambda error: error
        self._turns = Turns(transport, self.runs)
        self._threads = BodyThreads(clock, self.reports)
        self._current: Run | None = None
        self._num_trainings = 0
        self._num_evaluations = 0

    # -- a step ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Numbers the next step; waits for ranks that are more than two steps behind.

        What this rank sends would pile up there.
        """
        if self.transport.is_closed:
            raise UsageError(
                "an earlier step failed, and the other ranks were told so; this job can't go on"
            )
        self.step += 1
        self.is_in_step = True
        self.waits.for_step(self.step)

    def run(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        loss_scales: Sequence[float],
        seed: int,
        detach: bool,
    ) -> list[Any]:
        """Runs the body once per microbatch and returns each one's result.

        Args:
            function: the step function's body.
            calls: its arguments for each microbatch.
            loss_scales: what each microbatch's loss counts.
            seed: seed of the random streams.
            detach: cut the results off their graphs.

        Raises:
            PeerError: another rank failed.
            WaitTimeoutError: a wait took too long.
            Exception: whatever a body raised, with a note that says where.
        """
        self._make_runs(loss_scales, seed)
        lives = [
            lambda run=run, call=call: self._live(run, function, call, detach)
            for run, call in zip(self.runs, calls, strict=True)
        ]
        saved = host_random_state(), device.random_state()
        begun = time.perf_counter()
        self.clock.start()
        self.report = StepReport(began=begun)
        recomputed = self.known.seconds
        try:
            if self.transport.size == 1:
                self._run_here(lives, begun)
            else:
                self._threads.make(self.runs, lives)
                self._drive(begun)
            results = [self._import(run) for run in self.runs]
            self._threads.restore(self.runs[-1])
        except BaseException as error:
            cause = self._abort(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            set_host_random_state(saved[0])
            device.set_random_state(saved[1])
            self.report.wall = time.perf_counter() - begun
            self.report.clock = self.clock.now - self.clock.started
            self.report.compute = sum(run.body.compute_seconds for run in self.runs)
            self.report.recomputed = self.known.seconds - recomputed
            self.report.saved_bytes = 0 if self.known.meter is None else self.known.meter.peak
            self.max_in_flight = self._turns.max_in_flight
        return results

    def end_step(self) -> None:
        """Tells the other ranks that nothing more comes in this step, and what path it took."""
        self.transport.check()
        self._paths.tell(self.step, self.runs)
        self._paths.forget(self.step - MAX_AHEAD)
        self.transport.drop_step(self.step - MAX_AHEAD)
        self.runs.clear()
        self.is_in_step = False

    def set_stages(self, rank_of: tuple[int, ...]) -> None:
        """Tells the engine the stages, once the model is partitioned."""
        self._rank_of = rank_of
        self._make_plan()
        if self._current is not None:  # only now it is known which modules are glue
            self._threads.watch(self._current)

    def _make_runs(self, loss_scales: Sequence[float], seed: int) -> None:
        name = self._name_step()
        self.runs.clear()
        for i, loss_scale in enumerate(loss_scales):
            body = Body(self, i, loss_scale, RandomStreams(seed, name, i))
            body.glue = GlueMode(body)
            self.runs.append(Run(body))
        patience = _EMULATED_PATIENCE if self.clock.is_on else self._turns.patience
        self._turns = Turns(
            self.transport, self.runs, patience, self._active, self._recompute_ahead
        )
        self._make_plan()

    def _name_step(self) -> str:
        """Names the step for its random streams: evaluations don't change those of training."""
        if torch.is_grad_enabled():
            self._num_trainings += 1
            self._num_evaluations = 0
        else:
            self._num_evaluations += 1
        return f"{self._num_trainings}.{self._num_evaluations}"

    def _make_plan(self) -> None:
        m = len(self.runs)
        if self._rank_of is None or not m:
            return
        stages = checkpointed_stages(self.ownership.placed.values()) | self.known.stages
        if (
            self.plan is None
            or self.plan.num_microbatches != m
            or self._recomputed_stages != stages
        ):
            self._recomputed_stages = stages
            self.plan = plan(
                self._rank_of,
                m,
                active=min(self._active, m),
                policy=self._policy,
                recomputed=stages,
                recompute_ahead=self._recompute_ahead,
            )
        self._turns.follow(self.plan)

    # -- called by bodies, in their threads --------------------------------------------------

    def wait(self, body: Body, addresses: Sequence[Address]) -> None:
        """Suspends the body until all messages are there."""
        if not all(self.transport.has(address) for address in addresses):
            if body.hook:
                raise NotSupportedError(
                    f"a forward hook inside {body.hook} uses a tensor of another pipeline rank "
                    f"(after {body.last_origin}), which comes to this hook only after the call; "
                    "collect the module's tensors in the hook, and combine them after the call"
                )
            run = self.runs[body.microbatch]
            self._turns.leave_stage(run)
            self._suspend(run, None, addresses)

    def enter_stage(self, body: Body, stage: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run modules of `stage` and all messages are there."""
        run = self.runs[body.microbatch]
        run.is_entering = True
        if run.stage != stage:
            run.stage, run.addresses = stage, addresses
            action = Action(stage, Kind.FORWARD, body.microbatch)
            self._turns.arrive(run, action)
            if not self._turns.may_begin(run, action):
                self._suspend(run, action, addresses)
        elif self._turns.overtakes(run):
            self._suspend(run, None, addresses)
        else:
            self.wait(body, addresses)
        run.is_entering = False
        self._turns.admit(run)

    def enter_backward(self, body: Body, depth: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run a segment's backward and all messages are there."""
        run = self.runs[body.microbatch]
        body.backward_depth = depth
        stage = body.stage_at(depth)
        action = None if stage is None else Action(stage, Kind.BACKWARD, body.microbatch)
        if action is not None:
            self._turns.arrive(run, action)
        run.addresses = addresses
        if not self._turns.may_begin(run, action):
            self._suspend(run, action, addresses)
        run.has_recomputed = False

    def recompute_ahead(
        self,
        body: Body,
        depth: int,
        addresses: Sequence[Address],
        recomputations: Sequence[Recomputation],
    ) -> None:
        """Recomputes what a segment's backward needs first, while its messages are not there.

        Returns without, where they are there in time: then the backward recomputes call by call.
        """
        run = self.runs[body.microbatch]
        body.backward_depth = depth
        run.addresses = addresses
        if not self._recompute_ahead or self._turns.is_ready(run):
            return
        stage = body.stage_at(depth)
        action = None if stage is None else Action(stage, Kind.RECOMPUTE, body.microbatch)
        if action is not None:
            self._turns.arrive(run, action)
        run.is_before_recomputation = True
        self._suspend(run, action, addresses)
        run.is_before_recomputation = False
        if not self._turns.is_ready(run):
            run.has_recomputed = True
            before = self.known.seconds
            with body.computing():
                for recomputation in reversed(recomputations[-self._recompute_ahead_modules :]):
                    recomputation.recompute()
            self.report.recomputed_ahead += self.known.seconds - before

    def receive(self, address: Address) -> Message:
        """Takes a message that is there."""
        message = self.transport.take(address)
        self.clock.receive(message.clock, message.num_bytes)
        return message

    def _suspend(self, run: Run, action: Action | None, addresses: Sequence[Address]) -> None:
        run.action, run.addresses = action, addresses
        if self.step <= _LEARNING_STEPS:
            self.reports.look_around(self.ownership.placed.values())
        self._threads.suspend(run)

    def _live(
        self,
        run: Run,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        detach: bool,
    ) -> None:
        """What a body does, in its thread."""
        body = run.body
        body.streams.begin()
        if body.microbatch:  # go on from where the microbatch before is
            self._threads.restore(self.runs[body.microbatch - 1])
        self._threads.watch(run)
        with self.known.counting(), body.glue:
            result = function(*call[0], **call[1])
        body.check_caught()
        run.result, run.addresses = export(body, result, detach)
        run.unsettled = settle(body)
        self._threads.note(run)
        following = self.runs[body.microbatch + 1 : body.microbatch + 2]
        if any(each.state != "new" for each in following):
            self._threads.forget(run)
        run.num_done = len(run.path)

    # -- the main thread ---------------------------------------------------------------------

    def _drive(self, begun: float) -> None:
        while any(run.state != "done" for run in self.runs):
            run = self._turns.choose()
            if run is None:
                self.waits.for_news(self._turns, self.runs)
                continue
            self._current = run
            started, label = time.perf_counter(), str(run.action or "")
            self._threads.resume(run)
            self._note_span(label, started, begun)
            if run.error is not None:
                raise run.error
            self._current = None

    def _run_here(self, lives: Sequence[Callable[[], None]], begun: float) -> None:
        """Runs the bodies to their ends in the calling thread: without a pipeline none waits."""
        for run, live in zip(self.runs, lives, strict=True):
            self._current = run
            started = time.perf_counter()
            self._threads.run(run, live)
            self._note_span("", started, begun)
            if run.error is not None:
                raise run.error
            self._current = None

    def _note_span(self, label: str, started: float, begun: float) -> None:
        ended = time.perf_counter()
        self.report.busy += ended - started
        self.report.spans.append((label, started - begun, ended - begun))

    def _import(self, run: Run) -> Any:
        """Puts the tensors that other ranks send into a body's result."""
        for address in run.addresses:
            self.waits.for_message(address)

        def bring(exported: Exported) -> torch.Tensor:
            received = self.receive(exported.address).tensors[0]
            return received.to(device.local(exported.device))

        for tensor, address in run.unsettled:
            for data in self.fetch(address).tensors:
                tensor.data.copy_(data)
        return map_instances(Exported, bring, run.result)

    # -- outside the bodies ------------------------------------------------------------------

    @property
    def num_steps(self) -> tuple[int, int]:
        """How many steps there were with gradients, and since the last of them without.

        Random streams are keyed by them, so a resumed job goes on from those that were saved.
        """
        return self._num_trainings, self._num_evaluations

    @num_steps.setter
    def num_steps(self, numbers: tuple[int, int]) -> None:
        self._num_trainings, self._num_evaluations = numbers

    def next_exchange(self, call: str = "state_dict") -> int:
        """Numbers a collective outside the steps; every rank of the group makes the same `call`."""
        return self._paths.next_exchange(call)

    def fetch(self, address: Address) -> Message:
        """Waits for a message outside the bodies and takes it.

        Raises:
            PeerError: another rank failed or left.
            WaitTimeoutError: it did not come within the setting `timeout`.
        """
        self.waits.for_message(address)
        return self.receive(address)

    # -- failure -----------------------------------------------------------------------------

    def present(self) -> Run | None:
        """Returns the body that is of interest now: the one that runs, or the first that waits."""
        waiting = (run for run in list(self.runs) if run.state == "waiting")
        return self._current or next(waiting, None)

    def fail(self, error: BaseException) -> None:
        """Tells all ranks of a failure here, and notes on the error where it happened.

        What another rank told is no news to the others.
        """
        step = f"step {self.step}" if self.is_in_step else f"after step {self.step}"
        self.is_in_step = False
        if isinstance(error, PeerError) and error.is_told:
            return
        transport = self.transport
        run = self._current
        if run is None and isinstance(error, SMPError):
            run = self.present()
        name = transport.name(transport.rank)
        place = locate(error, run, self.plan, transport.rank, name, step, self.module_names)
        self.last_report = report(error, place)
        transport.fail(self.last_report)
        error.add_note(place)

    def _abort(self, error: BaseException) -> BaseException:
        """Tells the other ranks, then unwinds the suspended bodies; returns what to raise."""
        cause = self.find_cause(error) if isinstance(error, Exception) else error
        self.fail(cause)
        self._threads.abandon(self.runs)
        return cause
