"""`@smp.step`: one forward and backward pass over all microbatches of a batch."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, overload

import torch

from . import device
from .errors import UsageError
from .execution import rng
from .execution.body import current_body
from .execution.step_inputs import Call, check_equal, share_inputs
from .microbatch import Splitter, join
from .runtime import Runtime, current
from .trees import map_tensors

Weigh = Callable[..., float | torch.Tensor]


class StepFunction:
    """A decorated function. Calling it runs the body once per microbatch, on every rank.

    As a method it binds the instance if its first argument is named `self` or `cls`. SMP's bound
    nothing, so scripts written for it have steps without `self` in classes; those stay unbound.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str],
        input_split_axes: Mapping[str, int],
        detach_outputs: bool,
        loss_weight: Weigh | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._splitter = Splitter(function, non_split_inputs, input_split_axes)
        self._detach = detach_outputs
        self._loss_weight = loss_weight

    def __get__(self, instance: object, owner: type | None = None) -> StepFunction:
        """Returns the step of an instance, which each rank takes from its own; see the class."""
        if instance is None or self._splitter.first_name not in ("self", "cls"):
            return self
        # Bound here and not an argument of the call: those are sent from rank 0, and split.
        bound = copy.copy(self)
        bound._function = MethodType(self._function, instance)
        bound._splitter = self._splitter.without_first()
        if self._loss_weight is not None:
            bound._loss_weight = functools.partial(self._loss_weight, instance)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step.

        Returns:
            What the body returned, with a `StepOutput` for each tensor and a list with one entry
            per microbatch for any other leaf; the same on all ranks of the pipeline group.

        Raises:
            UsageError: called inside another step function.
            MicrobatchError: the arguments can't be split; raised before anything ran, on the rank
                that they come from. The other ranks raise a PeerError that says the same.
            PeerError: another rank failed; says how.
        """
        runtime = current()
        if current_body() is not None:
            raise UsageError("a step function was called inside another one; call it outside")
        engine = runtime.engine
        engine.begin_step()
        try:
            calls, seed = self._prepare(runtime, (args, kwargs))
        except Exception as error:
            engine.fail(error)
            raise
        model = runtime.model
        loss_scales = [1.0] * len(calls)
        if model is not None:
            with runtime.collective(""):
                loss_scales = model.begin_step(len(calls), self._weigh(calls))
        results = engine.run(
            self._function, calls, loss_scales=loss_scales, seed=seed, detach=self._detach
        )
        if model is not None:
            with runtime.collective(""):
                model.end_step()
        engine.end_step()
        return join(results)

    def _weigh(self, calls: Sequence[Call]) -> list[float] | None:
        """Returns what each microbatch's loss weighs, None if all weigh the same."""
        if self._loss_weight is None or not torch.is_grad_enabled():
            return None
        weights = [float(self._loss_weight(*args, **kwargs)) for args, kwargs in calls]
        if not all(0 <= weight < math.inf for weight in weights):
            raise UsageError(
                f"loss_weight gave {weights} for the microbatches of a step: return the number of "
                "tokens, or of whatever the loss is the mean over"
            )
        return weights

    def _prepare(self, runtime: Runtime, call: Call) -> tuple[list[Call], int]:
        config = runtime.config
        seed = config.seed if config.seed is not None else rng.initial_seed()
        is_leader = runtime.engine.transport.rank == 0
        if is_leader or not config.broadcast_inputs:
            # A wrong batch must fail before anything is sent.
            self._splitter.split(*call, self.num_microbatches(call))
        if runtime.engine.transport.size > 1 and config.broadcast_inputs:
            call, seed = share_inputs(runtime.engine, call, seed)
        elif config.debug:
            check_equal(runtime.engine, call)
        target = device.current_device()
        args, kwargs = map_tensors(
            lambda tensor: tensor if tensor.device.type == target.type else tensor.to(target), call
        )
        # Replicas differ in their dropout; the ranks of one pipeline group agree.
        m = self.num_microbatches((args, kwargs))
        return self._splitter.split(args, kwargs, m), seed + runtime.here.dp_rank

    def num_microbatches(self, call: Call) -> int:
        """Returns into how many microbatches the arguments of a call are cut."""
        return current().config.microbatches


@overload
def step(function: Callable[..., Any], /) -> StepFunction: ...


@overload
def step(
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    loss_weight: Weigh | None = None,
) -> Callable[[Callable[..., Any]], StepFunction]: ...


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    loss_weight: Weigh | None = None,
) -> StepFunction | Callable[[Callable[..., Any]], StepFunction]:
    """Makes a function one step of training or evaluation; ``@smp.step`` and ``@smp.step()``.

    Args:
        function: the body: forward, loss, and `model.backward(loss)` where gradients are wanted.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch dimension by argument name; 0 where nothing is said.
        detach_outputs: cut returned tensors off their graphs. False keeps the graphs alive on
            the rank that owns them, and costs their memory.
        loss_weight: takes the body's arguments (a method's `self`, too) and returns how many tokens
            the microbatch's loss is the mean over, a tensor or a number. Gradients are then those
            of the mean over all tokens of all microbatches and replicas, however unevenly they are
            spread; a microbatch of weight 0 has no backward pass. None: all microbatches count
            the same.

    Raises:
        MicrobatchError: a name is not an argument of the function.
    """

    def decorate(body: Callable[..., Any]) -> StepFunction:
        return StepFunction(
            body, non_split_inputs, input_split_axes or {}, detach_outputs, loss_weight
        )

    return decorate if function is None else decorate(function)
