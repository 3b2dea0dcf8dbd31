"""Runs the bodies of a step in the order of the plan.

Each microbatch's body has a thread of its own, so that it can be suspended in the middle of the
user's Python with its autocast, grad mode and function modes, which torch keeps per thread; but
exactly one thread runs at a time. A body is suspended where it would enter a stage, where data
must come first, and before each segment of its backward pass. The engine then resumes the body
whose turn it is by the plan. If the plan's next action can't happen for long, because the step
takes another path than the traced one, whatever is ready runs instead: the plan decides the
order, never the result.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import device
from .analysis import Analyser
from .body import Body, Exported, set_current_body
from .clock import Clock
from .errors import PathMismatchError, PeerError, SMPError, WaitTimeoutError
from .glue import GlueMode
from .ownership import Ownership
from .reports import Reports
from .rng import RandomStreams, host_random_state, set_host_random_state
from .schedule import Action, Kind, Plan, Policy, draw, plan
from .thread_state import ThreadState
from .transport import Address, Message, Topic, Transport
from .trees import is_dict

_log = logging.getLogger("smp_runtime")

_PATIENCE = 1.0
_SUSPICION = 0.2
_MAX_AHEAD = 2


class _Abandoned(BaseException):
    """Unwinds a suspended body whose step failed elsewhere. Not an Exception: users catch those."""


@dataclass
class Run:
    """One body and its thread.

    Attributes:
        body: the microbatch's state.
        thread: runs the body.
        path: the plan's actions for this microbatch on this rank, in order.
        num_done: how many of them are over.
        action: what the body waits to begin; None in the middle of an action.
        addresses: the messages that must be there first.
        stage: the stage it is in.
        is_admitted: it has begun to compute, so it holds activations.
        is_entering: it is about to run a module of this rank.
        state: `new`, `running`, `waiting` or `done`.
    """

    body: Body
    thread: threading.Thread | None = None
    path: tuple[Action, ...] = ()
    num_done: int = 0
    action: Action | None = None
    addresses: Sequence[Address] = ()
    stage: int | None = None
    is_admitted: bool = False
    is_entering: bool = False
    state: str = "new"
    result: Any = None
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass
class StepReport:
    """Where the time of the last step went on this rank, in seconds.

    Attributes:
        wall: from the first body's start to the last result.
        busy: bodies were running.
        clock: the same as `wall` on the emulated clock, 0 unless `emulate_clock` is on.
        spans: begin and end of each stretch of running, relative to the start, with its action.
    """

    wall: float = 0.0
    busy: float = 0.0
    clock: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def bubble(self) -> float:
        """The share of the step in which this rank waited."""
        return 1.0 - self.busy / self.wall if self.wall else 0.0


class Engine:
    """Runs steps on one rank of a pipeline group.

    Args:
        transport: to the other ranks of the group.
        policy: which schedule.
        active: how many microbatches may be in flight.
        timeout: seconds that a wait may take.
        clock: the emulated clock.
    """

    def __init__(
        self, transport: Transport, *, policy: Policy, active: int, timeout: float, clock: Clock
    ) -> None:
        self.transport = transport
        self.policy: Policy = policy
        self.active = active
        self.timeout = timeout
        self.clock = clock
        self.analyser = Analyser()
        self.reports = Reports()
        self.ownership = Ownership(transport.size)
        self.step = 0
        self.report = StepReport()
        self.module_names: dict[int, str] = {}
        self.max_in_flight = 0
        self.swaps_numpy = False
        self._rank_of: tuple[int, ...] | None = None
        self._plan: Plan | None = None
        self._runs: list[Run] = []
        self._current: Run | None = None
        self._next = 0
        self._idle = threading.Semaphore(0)
        self._is_aborted = False
        self._patience = _PATIENCE
        self._digests: dict[int, Any] = {}
        self._num_exchanges = 0
        self._num_trainings = 0
        self._num_evaluations = 0

    # -- a step ------------------------------------------------------------------------------

    def begin_step(self) -> int:
        """Numbers the next step; every rank of the group calls it."""
        self.step += 1
        self._await_peers(self.step - _MAX_AHEAD)
        return self.step

    def _await_peers(self, step: int) -> None:
        """Waits until every peer has ended a step, so that no rank runs far ahead.

        What a rank sends piles up at a slower one.
        """
        deadline = time.monotonic() + self.timeout
        transport = self.transport
        for peer in transport.peers:
            with transport.arrived:
                while transport.ended.get(peer, 0) < step:
                    transport.check()
                    if peer in transport.gone:
                        raise PeerError(
                            f"rank {peer} ended its program, but rank {transport.rank} begins "
                            f"step {self.step}; every rank must call the step equally often",
                            rank=peer,
                        )
                    if time.monotonic() > deadline:
                        raise WaitTimeoutError(
                            f"rank {transport.rank} waited {self.timeout:g} s (setting `timeout`) "
                            f"for rank {peer} to end step {step}"
                        )
                    transport.arrived.wait(0.5)

    def run(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        loss_scale: float,
        seed: int,
        detach: bool,
    ) -> list[Any]:
        """Runs the body once per microbatch and returns each one's result.

        Args:
            function: the step function's body.
            calls: its arguments for each microbatch.
            loss_scale: what each microbatch's loss counts.
            seed: seed of the random streams.
            detach: cut the results off their graphs.

        Raises:
            PeerError: another rank failed.
            WaitTimeoutError: a wait took too long.
            Exception: whatever a body raised, with a note that says where.
        """
        state = ThreadState.current()
        context = contextvars.copy_context()
        self._runs = []
        name = self._name_step()
        for i in range(len(calls)):
            streams = RandomStreams(seed, name, i)
            body = Body(self, i, loss_scale, streams)
            body.glue = GlueMode(body)
            self._runs.append(Run(body))
        self._is_aborted = False
        self._make_plan()
        saved = host_random_state()
        begun = time.perf_counter()
        self.clock.start()
        self.report = StepReport()
        for run, (args, kwargs) in zip(self._runs, calls, strict=True):
            run.thread = threading.Thread(
                target=context.copy().run,
                args=(self._live, run, state, function, args, kwargs, detach),
                daemon=True,
                name=f"smp-body-{run.body.microbatch}",
            )
        try:
            if self.transport.size == 1:
                for run, (args, kwargs) in zip(self._runs, calls, strict=True):
                    self._run_here(run, function, args, kwargs, detach)
            else:
                self._drive(begun)
            results = [self._import(run) for run in self._runs]
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            set_host_random_state(saved)
            self.report.wall = time.perf_counter() - begun
            self.report.clock = self.clock.now - self.clock.started
        return results

    def _name_step(self) -> str:
        """Names the step for its random streams: evaluations don't change those of training."""
        if torch.is_grad_enabled():
            self._num_trainings += 1
            self._num_evaluations = 0
        else:
            self._num_evaluations += 1
        return f"{self._num_trainings}.{self._num_evaluations}"

    def set_stages(self, rank_of: tuple[int, ...]) -> None:
        """Tells the engine the stages, once the model is partitioned."""
        self._rank_of = rank_of
        self._make_plan()

    @property
    def plan(self) -> Plan | None:
        """The plan of the current or last step, None before the model is partitioned."""
        return self._plan

    def _make_plan(self) -> None:
        self._next = 0
        if self._rank_of is None:
            return
        m = len(self._runs)
        if self._plan is None or self._plan.num_microbatches != m:
            self._plan = plan(self._rank_of, m, active=min(self.active, m), policy=self.policy)
        rank = self.transport.rank
        for run in self._runs:
            i = run.body.microbatch
            run.path = tuple(a for a in self._plan.actions(rank) if a.microbatch == i)

    # -- called by bodies, in their threads --------------------------------------------------

    def wait(self, body: Body, addresses: Sequence[Address]) -> None:
        """Suspends the body until all messages are there."""
        if all(self.transport.has(address) for address in addresses):
            return
        run = self._runs[body.microbatch]
        # What it waits for lies beyond its stage: the plan may go on with another microbatch.
        if run.path and run.stage is not None and run.num_done < len(run.path):
            current = run.path[run.num_done]
            if current.kind is Kind.FORWARD and current.stage == run.stage:
                run.num_done += 1
        self._suspend(run, None, addresses)

    def enter_stage(self, body: Body, stage: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run modules of `stage` and all messages are there."""
        run = self._runs[body.microbatch]
        run.is_entering = True
        if run.stage == stage:
            if self._overtakes(run):
                self._suspend(run, None, addresses)
            else:
                self.wait(body, addresses)
        else:
            run.stage = stage
            run.addresses = addresses
            action = Action(stage, Kind.FORWARD, body.microbatch)
            self._advance(run, action)
            is_turn = self._plan is None or self._planned() in (action, None)
            if not is_turn or not self._is_ready(run):
                self._suspend(run, action, addresses)
        run.is_entering = False
        run.is_admitted = True
        in_flight = sum(run.is_admitted and run.state != "done" for run in self._runs)
        self.max_in_flight = max(self.max_in_flight, in_flight)

    def enter_backward(self, body: Body, depth: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run a segment's backward and all messages are there."""
        run = self._runs[body.microbatch]
        body.backward_depth = depth
        stage = body.stage_at(depth)
        action = None if stage is None else Action(stage, Kind.BACKWARD, body.microbatch)
        if action is not None:
            self._advance(run, action)
        run.addresses = addresses
        is_ready = self._is_ready(run)
        if not is_ready or (self._plan is not None and self._planned() not in (action, None)):
            self._suspend(run, action, addresses)

    def receive(self, address: Address) -> Message:
        """Takes a message that is there."""
        message = self.transport.take(address)
        self.clock.receive(message.clock, message.num_bytes)
        return message

    def _advance(self, run: Run, action: Action) -> None:
        if action in run.path:
            run.num_done = max(run.num_done, run.path.index(action))

    def _suspend(self, run: Run, action: Action | None, addresses: Sequence[Address]) -> None:
        run.action, run.addresses, run.state = action, addresses, "waiting"
        saved = host_random_state(with_numpy=self.swaps_numpy)
        attributes = self.reports.kept_attributes()
        self.clock.pause()
        self._idle.release()
        run.go.acquire()
        if self._is_aborted:
            raise _Abandoned
        self.clock.resume()
        # Another body ran meanwhile: this one must find the world as it left it.
        set_host_random_state(saved)
        for module, name, kept in attributes:
            vars(module)[name] = kept
        run.state = "running"

    def _live(
        self,
        run: Run,
        state: ThreadState | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        detach: bool,
    ) -> None:
        """The life of a body, in its thread; `state` is what the thread takes over."""
        body = run.body
        set_current_body(body)
        self.clock.resume()
        try:
            with contextlib.nullcontext() if state is None else state.restored():
                if self._is_aborted:
                    return
                body.streams.seed_body()
                with body.glue:
                    result = function(*args, **kwargs)
                run.result, run.addresses = body.export(result, detach)
            run.num_done = len(run.path)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - carried to the main thread
            run.error = error
        finally:
            run.state = "done"
            body.backward_depth = -1
            set_current_body(None)
            self.clock.pause()
            self._idle.release()

    # -- the main thread ---------------------------------------------------------------------

    def _drive(self, begun: float) -> None:
        while any(run.state != "done" for run in self._runs):
            run = self._choose()
            if run is None:
                self._wait_for_news()
                continue
            started = time.perf_counter()
            label = str(run.action or "")
            self._current = run
            if run.state == "new":
                assert run.thread is not None
                run.state = "running"
                run.thread.start()
            else:
                run.go.release()
            self._idle.acquire()
            self._current = None
            ended = time.perf_counter()
            self.report.busy += ended - started
            self.report.spans.append((label, started - begun, ended - begun))
            if run.error is not None:
                raise run.error

    def _run_here(
        self,
        run: Run,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        detach: bool,
    ) -> None:
        """Runs a body to its end in the calling thread; without a pipeline nothing waits."""
        self._current = run
        run.state = "running"
        started = time.perf_counter()
        self._live(run, None, function, args, kwargs, detach)
        self.report.busy += time.perf_counter() - started
        self._current = None
        if run.error is not None:
            raise run.error

    def _planned(self) -> Action | None:
        """The first action of the plan that is not over."""
        if self._plan is None:
            return None
        actions = self._plan.actions(self.transport.rank)
        while self._next < len(actions):
            action = actions[self._next]
            run = self._runs[action.microbatch]
            if run.num_done <= run.path.index(action):
                return action
            self._next += 1
        return None

    def _choose(self) -> Run | None:
        """Picks the body to run now, None if every one must wait."""
        for run in self._runs:  # in the middle of an action: go on with it
            if run.state == "waiting" and run.action is None and self._is_ready(run):
                return run
        action = self._planned()
        if action is not None:
            run = self._runs[action.microbatch]
            if run.state == "waiting" and self._is_ready(run):
                return run
        return self._startable(action)

    def _startable(self, action: Action | None) -> Run | None:
        """The next new body, if it may run its glue up to the first stage."""
        if self._rank_of is None and any(run.state == "waiting" for run in self._runs):
            return None  # the first body partitions the model before any other starts
        alive = sum(run.state == "waiting" for run in self._runs)
        cap = 1 if self._plan is None else self._plan.peak_in_flight(self.transport.rank)
        for run in self._runs:
            if run.state == "new":
                is_planned = action is not None and action.microbatch >= run.body.microbatch
                return run if alive <= max(cap, 1) or is_planned or action is None else None
        return None

    def _is_ready(self, run: Run) -> bool:
        if not all(self.transport.has(address) for address in run.addresses):
            return False
        if run.is_entering:
            return not self._overtakes(run)
        depth = run.body.backward_depth
        if depth < 0 or run.body.num_backwards == 0:
            return True
        # Gradients are summed in the order of the microbatches, whatever the schedule.
        return all(
            earlier.body.backward_depth < depth for earlier in self._runs[: run.body.microbatch]
        )

    def _overtakes(self, run: Run) -> bool:
        """Says whether an earlier microbatch has not come as far yet.

        Modules that keep state, such as batch norm, must see the microbatches in their order.
        """
        body = run.body
        return any(
            earlier.state != "done"
            and earlier.body.num_backwards <= body.num_backwards
            and earlier.body.number <= body.number
            for earlier in self._runs[: body.microbatch]
        )

    def _wait_for_news(self) -> None:
        """Waits for a message; after a while lets ready bodies run out of turn."""
        begun = time.monotonic()
        while True:
            waiting = [run for run in self._runs if run.state == "waiting"]
            needed = [
                address
                for run in waiting
                for address in run.addresses
                if not self.transport.has(address)
            ]
            if needed:
                self._check_ended(needed)
                if time.monotonic() - begun > _SUSPICION:
                    for run in waiting:
                        self._check_path(run)
                self.transport.wait_any(needed, 0.05)
            if self._choose() is not None:
                return
            waited = time.monotonic() - begun
            if waited > self._patience or not needed:
                if self._let_pass(waiting):
                    return
                if not needed:
                    raise SMPError("no body can run and none waits for another rank")
            if waited > self.timeout:
                raise WaitTimeoutError(self._explain_wait(needed))

    def _let_pass(self, waiting: list[Run]) -> bool:
        """Lets the first ready body run although it is not its turn."""
        cap = 1 if self._plan is None else self._plan.peak_in_flight(self.transport.rank)
        in_flight = sum(run.is_admitted and run.state != "done" for run in self._runs)
        for run in waiting:
            if self._is_ready(run) and (run.is_admitted or in_flight < cap):
                if self._patience == _PATIENCE:
                    _log.info("the step takes another path than planned; going by readiness")
                self._patience = 0.001
                run.action = None
                return True
        return False

    def _import(self, run: Run) -> Any:
        """Puts the tensors that other ranks send into a body's result."""
        for address in run.addresses:
            self._await(address)
        return _replace_exported(run.result, self._fetch_exported)

    def _fetch_exported(self, exported: Exported) -> torch.Tensor:
        return self.receive(exported.address).tensors[0].to(device.local(exported.device))

    def next_exchange(self) -> int:
        """Numbers a collective outside the steps; every rank of the group calls it."""
        self._num_exchanges += 1
        return self._num_exchanges

    def fetch(self, address: Address) -> Message:
        """Waits for a message outside the bodies and takes it.

        Raises:
            PeerError: another rank failed or left.
            WaitTimeoutError: it did not come within the setting `timeout`.
        """
        self._await(address)
        return self.receive(address)

    def _await(self, address: Address) -> None:
        deadline = time.monotonic() + self.timeout
        while not self.transport.wait_any([address], 0.5):
            self._check_ended([address])
            if time.monotonic() > deadline:
                raise WaitTimeoutError(self._explain_wait([address]))

    # -- the end of a step -------------------------------------------------------------------

    def end_step(self) -> None:
        """Tells the other ranks that nothing more comes in this step, and what path it took."""
        self.transport.check()
        digest = [(run.body.digest, run.body.last_origin) for run in self._runs]
        address = Address(Topic.END, self.step, -1, 0, self.transport.rank)
        for peer in self.transport.peers:
            self.transport.send(peer, address, digest)
        self._digests[self.step] = digest
        for step in sorted(self._digests):
            self._compare_digests(step)
        self.transport.drop_step(self.step - _MAX_AHEAD)
        self._digests.pop(self.step - _MAX_AHEAD, None)
        self._runs = []

    def _compare_digests(self, step: int) -> None:
        """Compares the path of a step with those peers whose word has come."""
        for peer in self.transport.peers:
            address = Address(Topic.END, step, -1, 0, peer)
            if not self.transport.has(address):
                continue
            theirs = self.transport.take(address).content
            mine = self._digests[step]
            for i, (ours, other) in enumerate(zip(mine, theirs, strict=False)):
                if ours[0] != other[0]:
                    raise PathMismatchError(
                        f"step {step}, microbatch {i}: ranks {self.transport.rank} and {peer} "
                        "took different paths through the step. Look for a branch that depends "
                        "on the rank, on time, or on random numbers drawn outside the step"
                    )

    def _check_path(self, run: Run) -> None:
        """Looks for messages that prove that another rank took another path than this body.

        A body takes its data in the order of their numbers, and a peer sends it in that order.
        """
        topics = (Topic.DATA, Topic.ANSWER)
        needed = [a for a in run.addresses if a.topic in topics and not self.transport.has(a)]
        if not needed:
            return
        body = run.body
        for address, message in self.transport.arrived_for(body.step, body.microbatch):
            if address.topic not in topics or address in run.addresses:
                continue
            is_orphan = address.number < min(a.number for a in needed)
            has_passed = any(
                a.source == address.source and a.number < address.number for a in needed
            )
            if is_orphan or has_passed:
                raise PathMismatchError(
                    f"rank {address.source} sent {_describe(address)} ({message.content}), while "
                    f"rank {self.transport.rank} waits for {_describe(needed[0])} after "
                    f"{body.last_origin}. Every rank must take the same path through the step; "
                    "look for a branch that depends on the rank, on time, or on random numbers "
                    "drawn outside the step"
                )

    def _check_ended(self, needed: Sequence[Address]) -> None:
        self.transport.check()
        for address in needed:
            ended = self.transport.ended.get(address.source, -1)
            if 0 <= address.step <= ended and not self.transport.has(address):
                raise PathMismatchError(
                    f"rank {address.source} ended step {address.step} without sending "
                    f"{_describe(address)}, for which rank {self.transport.rank} waits. Every "
                    "rank must take the same path through the step"
                )
            if address.source in self.transport.gone:
                raise PeerError(
                    f"rank {address.source} ended its program while rank {self.transport.rank} "
                    f"waits for {_describe(address)}; every rank must call the step equally often",
                    rank=address.source,
                )

    def _abort(self, error: BaseException) -> None:
        """Tells the other ranks, then unwinds the suspended bodies."""
        run = self._current
        for candidate in self._runs:
            if candidate.error is error:
                run = candidate
        if not isinstance(error, PeerError):
            report = self._locate(error, run)
            trace = "".join(traceback.format_exception(error))
            self.transport.fail(f"{report}\n{trace}")
            error.add_note(report)
        self._is_aborted = True
        for other in self._runs:
            if other.state == "waiting":
                other.go.release()
        self._runs = []

    def _locate(self, error: BaseException, run: Run | None) -> str:
        lines = [f"rank {self.transport.rank}, step {self.step}"]
        if run is not None:
            lines[0] += f", microbatch {run.body.microbatch}"
            path = self._module_path(error) or run.body.last_origin
            lines[0] += f", at {path}"
            lines.append(self._drawn(run))
        return "\n".join(line for line in lines if line)

    def _module_path(self, error: BaseException) -> str | None:
        path = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            path = self.module_names.get(id(module), path)
        return path

    def _drawn(self, run: Run | None) -> str:
        if self._plan is None or run is None or not run.path:
            return ""
        action = run.path[min(run.num_done, len(run.path) - 1)]
        if len(run.path) * len(self._runs) > 200:
            return f"at action {action} of the schedule"
        with contextlib.suppress(Exception):  # drawing must not cover the failure
            return draw(self._plan, mark=(self.transport.rank, action))
        return ""

    def _explain_wait(self, needed: Sequence[Address]) -> str:
        run = next((run for run in self._runs if run.state == "waiting"), None)
        waits = ", ".join(sorted({_describe(address) for address in needed}))
        return (
            f"rank {self.transport.rank} waited {self.timeout:g} s (setting `timeout`) for {waits}"
            f"\n{self._drawn(run)}"
        )


def _describe(address: Address) -> str:
    what = address.topic.name.lower()
    if address.microbatch < 0:
        return f"{what} from rank {address.source}"
    return (
        f"{what} {address.number} of step {address.step}, microbatch {address.microbatch} "
        f"from rank {address.source}"
    )


def _replace_exported(obj: Any, fetch: Callable[[Exported], torch.Tensor]) -> Any:
    if isinstance(obj, Exported):
        return fetch(obj)
    if is_dict(obj):
        for key, value in list(obj.items()):
            obj[key] = _replace_exported(value, fetch)
        return obj
    if isinstance(obj, list):
        return [_replace_exported(item, fetch) for item in obj]
    if isinstance(obj, tuple):
        items = [_replace_exported(item, fetch) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    return obj
