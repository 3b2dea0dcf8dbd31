"""Glue: all Python and tensor operations of a step outside placed modules.

Inside the step, outside placed modules, a function mode sees every tensor operation. One on
replicated tensors runs on every rank. One with an owned operand runs on one rank: the owner;
where several owners meet, the side with more bytes, and of equal ones the later rank. The other
ranks get stand-ins of the results. A question for data (`.item()`, `bool()`, `print`) is answered
by the owner to all.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import device
from ..errors import NotSupportedError, PathMismatchError, UsageError
from ..messages.transport import Topic
from ..tensors import METADATA_FUNCTIONS, TensorMeta, meta_of, version_of
from ..trees import freeze, iter_tensors, map_tensors, thaw
from .analysis import Effect, New, Same, fill
from .body import Body, current_body
from .rng import draws
from .values import Operand, Value

_log = logging.getLogger("smp_runtime")

_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_IS_LEAF = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_GRAD_FN = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_FREEZING = frozenset(
    [torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__]  # type: ignore[attr-defined]
)
_DEVICE: Callable[..., Any] = torch.Tensor.device.__get__
_IS_META: Callable[..., Any] = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_GRAD: Callable[..., Any] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_AUTOGRAD = frozenset([_REQUIRES_GRAD, _IS_LEAF, _GRAD_FN])
_MIRRORED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.lt: torch.Tensor.gt,
    torch.Tensor.le: torch.Tensor.ge,
    torch.Tensor.__lt__: torch.Tensor.gt,
    torch.Tensor.__le__: torch.Tensor.ge,
}


_SUMS = frozenset(
    [torch.Tensor.add_, torch.Tensor.__iadd__, torch.Tensor.sub_, torch.Tensor.__isub__]
)


class _Elsewhere:
    """What `grad_fn` is where a tensor's history is on another rank.

    Args:
        value: the tensor, as its owner knows it.
    """

    def __init__(self, value: Value) -> None:
        self._origin = value.origin
        self._owner = value.owner

    def __getattr__(self, name: str) -> Any:
        """Refuses to tell anything of the history.

        Raises:
            NotSupportedError: always, but for names that Python itself looks for.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSupportedError(
            f"the history (grad_fn) of {self._origin} is on rank {self._owner} of the pipeline "
            f"only, so its {name!r} cannot be had on others. A full backward hook needs it: "
            "register the hook on modules that live on one rank each, or on a tensor "
            "(`h.register_hook(...)`)"
        )


class GlueMode(TorchFunctionMode):
    """Watches the operations of one body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.is_active = False

    def __enter__(self) -> GlueMode:
        """Begins to watch this thread."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self.is_active = True
        return self

    def __exit__(self, *exception: Any) -> None:
        """Ends watching."""
        self.is_active = False
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stops watching for a while: inside a placed module everything runs natively."""
        if not self.is_active:
            yield
            return
        num_above = self.suspend()
        try:
            yield
        finally:
            self.resume(num_above)

    def suspend(self) -> int:
        """Stops watching until `resume`; returns how many modes the user put above this one."""
        above = []
        while (mode := torch._C._pop_torch_function_stack()) is not self:
            above.append(mode)
        _push(above)
        self.is_active = False
        return len(above)

    def resume(self, num_above: int) -> None:
        """Watches again, below as many of the user's modes as before."""
        above = [torch._C._pop_torch_function_stack() for _ in range(num_above)]
        torch._C._push_on_torch_function_stack(self)
        self.is_active = True
        _push(above)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Watches again where it was suspended: for a hook that runs inside a module."""
        if self.is_active:
            yield
            return
        torch._C._push_on_torch_function_stack(self)
        self.is_active = True
        try:
            yield
        finally:
            torch._C._pop_torch_function_stack()
            self.is_active = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation, wherever it belongs."""
        self.is_active = False  # torch takes the mode off the stack for as long
        try:
            return self.run(func, args, kwargs or {})
        finally:
            self.is_active = True

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one operation while this mode is off the stack."""
        if func in METADATA_FUNCTIONS:
            return func(*args, **kwargs)
        if func in (_DEVICE, _IS_META):
            return self._whereabouts(func, args[0])
        if func in _MIRRORED and len(args) == 2 and isinstance(args[1], torch.Tensor):
            # Python asks a stand-in on the right first, as its type is a subclass, for the
            # mirrored comparison; the owner has none there. All ranks must see one function.
            func, args = _MIRRORED[func], (args[1], args[0])
        tensors = list(iter_tensors((args, kwargs)))
        values = [self.body.value_of(tensor) for tensor in tensors]
        if not any(values):
            if draws(func):
                with self.body.streams.draw():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        operands = [Operand(*item) for item in zip(tensors, values, strict=True)]
        if func in _AUTOGRAD:
            return self._autograd(func, operands[0])
        if func == _GRAD:
            return self._gradient(operands[0])
        if func in _FREEZING and isinstance(operands[0].tensor, torch.nn.Parameter):
            # Every rank keeps the flag of every parameter.
            self.body.forget(operands[0].tensor)
            return func(*args, **kwargs)
        return self._owned(func, args, kwargs, operands)

    def _whereabouts(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """Answers for a parameter of another rank as for one's own: the device of this rank."""
        found = func(tensor)
        if tensor.is_meta and self.body.engine.ownership.owner_of(tensor) is not None:
            return device.current_device() if func == _DEVICE else False
        return found

    def _gradient(self, operand: Operand) -> Any:
        """Returns the gradient of a leaf; that of another tensor is on its owner only."""
        value = operand.value
        assert value is not None
        is_leaf = value.is_leaf or isinstance(operand.tensor, torch.nn.Parameter)
        if is_leaf or not value.meta.requires_grad:
            return operand.tensor.grad
        raise NotSupportedError(
            f"the gradient of {value.origin} is on rank {value.owner} of the pipeline only; read "
            "it in a hook (`h.register_hook(...)`), or in a module that lives on one rank"
        )

    def _autograd(self, func: Callable[..., Any], operand: Operand) -> Any:
        """Answers what autograd knows of an owned tensor, alike on all ranks."""
        value = operand.value
        assert value is not None
        if value.is_leaf:  # every rank has the real one
            return func(operand.tensor)
        if func == _REQUIRES_GRAD:
            return value.meta.requires_grad
        if func == _IS_LEAF:
            return isinstance(operand.tensor, torch.nn.Parameter) or not value.meta.requires_grad
        if not value.meta.requires_grad:
            return None
        real = value.owner == self.body.rank
        return func(self.body.copies.base(operand.tensor, value)) if real else _Elsewhere(value)

    def _owned(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: list[Operand],
    ) -> Any:
        if func in (torch.Tensor.backward, torch.autograd.backward):
            raise UsageError("call model.backward(loss) inside an @smp.step function")
        if func is torch.autograd.grad:
            raise NotSupportedError(
                "torch.autograd.grad inside a step is not supported on a partitioned model"
            )
        if func == _SET_DATA:
            raise NotSupportedError(
                "h.data = ... on a tensor that a rank owns is not supported; use h.copy_(...) "
                "under torch.no_grad(), which the other ranks hear of"
            )
        if func is torch.Tensor.__deepcopy__:
            with self.resumed():
                return args[0].clone()
        if func is torch.Tensor.__iter__:
            with self.resumed():
                return iter(args[0].unbind(0))
        metas = [meta_of(tensor) if value is None else value.meta for tensor, value in operands]
        tensors = [tensor for tensor, _ in operands]
        effect = self.body.engine.analyser.effect(func, args, kwargs, tensors, metas)
        return _Operation(self.body, func, args, kwargs, operands, effect).run()


class _Operation:
    """One operation with at least one owned operand."""

    def __init__(
        self,
        body: Body,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: list[Operand],
        effect: Effect,
    ) -> None:
        self.body = body
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.operands = operands
        self.effect = effect
        self.origin = _name(func)
        self.versions: list[int] = []
        self.target = self._choose()
        self.depth = body.copies.depth_at(operands, self.target)

    def run(self) -> Any:
        """Moves the operands, runs the operation on its rank, and makes its results."""
        pending = self.body.copies.move(self.operands, self.target)
        is_here = self.target == self.body.rank
        used: list[torch.Tensor] = []
        out: Any = None
        if is_here:
            if pending:
                self.body.engine.wait(self.body, pending)
            used, out = self._compute()
        elif draws(self.func):
            self.body.streams.skip_draw()
        self._note_uses()
        if not self.effect.known:
            return self._ask(used, out)
        reals = list(iter_tensors(out)) if is_here else []
        self._note_changes(self.effect.changed, used)
        results = [
            self._result(index, outcome, reals) for index, outcome in enumerate(self.effect.results)
        ]
        return fill(self.effect.template, results.__getitem__)

    def _choose(self) -> int:
        for index, _ in self.effect.changed:
            value = self.operands[index].value
            if value is not None:
                return value.owner
        owners = {value.owner for _, value in self.operands if value is not None}
        if len(owners) == 1:
            return owners.pop()
        sizes: Counter[int] = Counter()
        seen: set[int] = set()
        for _, value in self.operands:
            if value is not None and value.number not in seen:
                seen.add(value.number)
                sizes[value.owner] += value.meta.num_bytes
        return max(sizes, key=lambda owner: (sizes[owner], owner))

    def _compute(self) -> tuple[list[torch.Tensor], Any]:
        body = self.body
        used = [body.copies.local(tensor, value, self.depth) for tensor, value in self.operands]
        self.versions = [version_of(tensor) for tensor in used]
        places = iter(used)
        args, kwargs = map_tensors(lambda _: next(places), (tuple(self.args), dict(self.kwargs)))
        with body.computing():
            if draws(self.func):
                with body.streams.draw():
                    return used, self.func(*args, **kwargs)
            return used, self.func(*args, **kwargs)

    def _note_uses(self) -> None:
        """Notes which parameters and buffers it took as they were; a sum has no order."""
        summed = {index for index, _ in self.effect.changed} if self.func in _SUMS else ()
        self.body.note_uses(each for i, each in enumerate(self.operands) if i not in summed)

    def _note_changes(
        self, changed: Sequence[tuple[int, TensorMeta]], used: list[torch.Tensor]
    ) -> None:
        for index, meta in changed:
            local = used[index] if used else None
            self.body.note_change(self.operands[index], meta, self.target, local, self.depth)

    def _result(self, index: int, outcome: New | Same, reals: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(outcome, Same):
            operand = self.operands[outcome.operand]
            if operand.value is None:
                operand = Operand(operand.tensor, self.body.value_of(operand.tensor))
            return operand.tensor
        real = reals[index] if reals else None
        if real is not None and (tuple(real.shape), real.dtype) != (
            outcome.meta.shape,
            outcome.meta.dtype,
        ):
            raise PathMismatchError(
                f"{self.origin} gave {meta_of(real).describe()} on rank {self.body.rank}, but "
                f"{outcome.meta.describe()} was foretold to the other ranks"
            )
        viewed = None if outcome.view_of is None else self.operands[outcome.view_of]
        return self.body.new_result(
            real, outcome.meta, self.target, self.depth, self.origin, viewed
        )

    def _ask(self, used: list[torch.Tensor], out: Any) -> Any:
        """Lets the owner tell all ranks what came out."""
        body = self.body
        number = body.next_number(self.origin)
        address = body.address(Topic.ANSWER, number, self.target)
        if body.rank == self.target:
            tensors: list[torch.Tensor] = []
            same = {id(tensor): index for index, tensor in reversed(list(enumerate(used)))}

            def refer(obj: Any) -> tuple[str, int] | None:
                if not isinstance(obj, torch.Tensor):
                    return None
                if id(obj) in same:
                    return "same", same[id(obj)]
                tensors.append(obj)
                return "new", len(tensors) - 1

            frozen = freeze(out, refer)
            metas = [meta_of(tensor) for tensor in tensors]
            changed = tuple(
                (same[id(tensor)], meta_of(tensor))
                for tensor, version in zip(used, self.versions, strict=True)
                if version_of(tensor) != version
            )
            for peer in body.engine.transport.peers:
                body.engine.transport.send(peer, address, (self.origin, frozen, metas, changed))
        else:
            _announce_question(self.origin)
            body.engine.wait(body, [address])
            origin, frozen, metas, changed = body.engine.receive(address).content
            if origin != self.origin:
                raise PathMismatchError(
                    f"rank {self.target} answers {origin}, but rank {body.rank} asked for "
                    f"{self.origin}; every rank must take the same path through the step"
                )
            tensors = []
        self._note_changes(tuple(dict(changed).items()), used)
        made = [
            body.new_result(
                tensors[index] if tensors else None, meta, self.target, self.depth, self.origin
            )
            for index, meta in enumerate(metas)
        ]
        return thaw(
            frozen,
            lambda pid: made[pid[1]] if pid[0] == "new" else self.operands[pid[1]].tensor,
        )


_native_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_native_backward = torch.autograd.backward


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    body = current_body()
    if body is None or not body.glue.is_active:
        return _native_apply(cls, *args, **kwargs)
    if not any(map(body.value_of, iter_tensors((args, kwargs)))):
        return _native_apply(cls, *args, **kwargs)  # watched inside: it may draw
    with body.glue.suspended():
        return body.glue.run(cls.apply, args, kwargs)


@wraps(_native_backward)
def _backward(*args: Any, **kwargs: Any) -> None:
    body = current_body()
    if body is None or not body.glue.is_active:
        _native_backward(*args, **kwargs)
        return
    with body.glue.suspended():
        body.glue.run(torch.autograd.backward, args, kwargs)


def watch_autograd() -> None:
    """Makes glue see user-defined autograd functions, and a backward pass, as one operation each.

    torch shows the functions to no function mode, and `torch.autograd.backward` not in every
    version, so these themselves have to be replaced. Outside glue the replacements call the
    originals.
    """
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
    torch.autograd.backward = _backward


def _push(modes: list[Any]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


def _name(func: Callable[..., Any]) -> str:
    function = getattr(func, "__self__", None)
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return function.__name__  # all share one `apply`
    name = getattr(func, "__qualname__", None) or repr(func)
    if name.endswith("__get__"):
        owner = getattr(func, "__self__", None)
        name = getattr(owner, "__name__", name)
    return name.removeprefix("_VariableFunctionsClass.").removeprefix("TensorBase.")


_announced: set[tuple[str, int]] = set()


def _announce_question(origin: str) -> None:
    """Says once per line of user code that it asks for a remote value."""
    frame = sys._getframe(1)
    ours = str(Path(__file__).parents[1])
    skipped = (ours, str(Path(torch.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno)
    if place not in _announced:
        _announced.add(place)
        _log.info(
            "%s:%d asks for a value of another pipeline rank (%s): this costs a wait in each "
            "microbatch",
            *place,
            origin,
        )
