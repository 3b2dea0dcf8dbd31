"""Placed modules: a call runs on the owner and tells the other ranks what came out.

A placed module is intercepted outside its own `__call__`, by a subclass made for its class that
keeps the class's name, so that `isinstance`, forward hooks and whatever a class does in
`__call__` stay as they are. Inside, interception is off.

A call may hand out more than its return value. Forward hooks inside it run on the owner when
they fire and on the other ranks afterwards, in the same order, on stand-ins; tensors left in
module attributes and arguments changed in place are part of the report as well. So a list that a
hook fills has the same length on every rank.

The report is sent once for each new signature of a call and kept on every rank. A report with
plain Python values in it may be another one next time: such calls report each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import nn

from .analysis import autocast_state, signature
from .body import Body, current_body
from .errors import NotSupportedError, PathMismatchError
from .ownership import PlacedModule
from .tensors import TensorMeta, meta_of
from .transport import Address, Topic
from .trees import freeze, is_container, iter_tensors, map_tensors, thaw
from .values import StandIn

_PLACED = "_smp_placed"


class HookCall(NamedTuple):
    """A forward hook that fired inside a placed module.

    Attributes:
        module: name of the module inside the placed one.
        kind: `_forward_hooks` or `_forward_pre_hooks`.
        position: place among the module's hooks of that kind.
        arguments: frozen arguments of the hook after the module itself.
        first: position of the first tensor of the report that came out through this hook.
        end: position after the last one.
    """

    module: str
    kind: str
    position: int
    arguments: bytes
    first: int
    end: int


class Report(NamedTuple):
    """What a call of a placed module handed out.

    Attributes:
        output: the frozen return value.
        metas: tensors that did not exist before, in the order in which they came out.
        hooks: hooks that fired.
        attributes: tensors that modules keep in attributes: module, name, frozen value.
        changed: arguments changed in place, with their metas afterwards.
        varies: the output holds plain values, so another call may give other ones.
    """

    output: bytes
    metas: tuple[TensorMeta, ...]
    hooks: tuple[HookCall, ...]
    attributes: tuple[tuple[str, str, bytes], ...]
    changed: tuple[tuple[int, TensorMeta], ...]
    varies: bool


class Reports:
    """The reports known on this rank, by signature of the call."""

    def __init__(self) -> None:
        self._kept: dict[Any, Report] = {}
        self._seen: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
        self._reported: dict[str, set[tuple[str, str]]] = {}

    def get(self, key: Any) -> Report | None:
        """Returns what is known of calls with this signature."""
        return self._kept.get(key)

    def keep(self, key: Any, report: Report) -> None:
        """Remembers a report."""
        self._kept[key] = report

    def look_at(self, placed: PlacedModule) -> list[tuple[str, str, torch.Tensor]]:
        """Finds tensors that a placed module's own code put into attributes since it was placed.

        An attribute that was found once is found ever after, so that reports stay alike.
        """
        reported = self._reported.setdefault(placed.path, set())
        is_first = placed.path not in self._seen
        seen = self._seen.setdefault(placed.path, {})
        found = []
        for name, module in placed.modules:
            for attribute, held in vars(module).items():
                if isinstance(held, torch.Tensor):
                    if seen.get((name, attribute)) is not held:
                        seen[name, attribute] = held
                        if not is_first:
                            reported.add((name, attribute))
                    if (name, attribute) in reported:
                        found.append((name, attribute, held))
        return found


def place(module: nn.Module, placed: PlacedModule) -> None:
    """Intercepts a module's calls from glue.

    Raises:
        NotSupportedError: the module is a ScriptModule, whose class can't be extended.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise NotSupportedError(f"{placed.path} is a ScriptModule; partition the Python module")
    module.__dict__[_PLACED] = placed
    cls: Any = type(module)
    module.__class__ = _intercepting(cls)


@functools.cache
def _intercepting(cls: type[Any]) -> type[Any]:
    def intercept(name: str) -> Callable[..., Any]:
        native = getattr(cls, name)

        @functools.wraps(native)
        def entry(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            body = current_body()
            if body is None or not body.glue.is_active:
                return native(self, *args, **kwargs)
            placed = self.__dict__[_PLACED]
            with body.glue.suspended():
                return _Call(body, placed, functools.partial(native, self), args, kwargs).run()

        return entry

    return type(
        cls.__name__,
        (cls,),
        {
            "__call__": intercept("__call__"),
            "forward": intercept("forward"),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        },
    )


class _Call:
    """One call of a placed module in one body."""

    def __init__(
        self,
        body: Body,
        placed: PlacedModule,
        native: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.body = body
        self.placed = placed
        self.native = native
        self.args = args
        self.kwargs = kwargs
        self.origin = f"the output of {placed.path or 'the model'}"
        self.operands = body.operands((args, kwargs))
        self.depth = body.depth_at(self.operands, placed.owner)
        self.table: list[torch.Tensor] = []
        self.num_numbered = 0
        self.hooks: list[HookCall] = []

    def run(self) -> Any:
        """Runs the call on its rank and hands out the same things on every rank."""
        body, placed = self.body, self.placed
        pending = body.move(self.operands, placed.owner)
        number = body.next_number(placed.path)
        key = self._key()
        if placed.owner != body.rank:
            return self._hand_out(self._await(key, number))
        body.engine.enter_stage(body, placed.stage, pending)
        body.note_stage(self.depth, placed.stage)
        return self._compute(key, number)

    def _key(self) -> Any:
        positions: dict[int, int] = {}
        metas = []
        for tensor, value in self.operands:
            if id(tensor) not in positions:
                positions[id(tensor)] = len(positions)
                metas.append(meta_of(tensor) if value is None else value.meta)
        hooks = tuple(
            (name, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in self.placed.modules
            if module._forward_hooks or module._forward_pre_hooks
        )
        return (
            self.placed.path,
            signature((self.args, self.kwargs), positions, _type_of_opaque),
            tuple(metas),
            torch.is_grad_enabled(),
            autocast_state(),
            self.placed.modules[0][1].training,
            hooks,
        )

    # -- on the owner ------------------------------------------------------------------------

    def _compute(self, key: Any, number: int) -> Any:
        body = self.body
        used = [body.local(tensor, value, self.depth) for tensor, value in self.operands]
        versions = [_version(tensor) for tensor in used]
        same = {id(tensor): index for index, tensor in reversed(list(enumerate(used)))}
        places = iter(used)
        args, kwargs = map_tensors(lambda _: next(places), (self.args, dict(self.kwargs)))
        with ExitStack() as stack:
            for name, module in self.placed.modules:
                self._watch_hooks(stack, name, module, same)
            output = self.native(*args, **kwargs)
        changed = tuple(
            (index, meta_of(tensor))
            for index, (tensor, version) in enumerate(zip(used, versions, strict=True))
            if same[id(tensor)] == index and _version(tensor) != version
        )
        frozen = self._freeze(output, same)
        attributes = tuple(
            (name, attribute, self._freeze(held, same))
            for name, attribute, held in body.engine.reports.look_at(self.placed)
        )
        metas = tuple(meta_of(tensor) for tensor in self.table)
        varies = _holds_values(output, _opaque_arguments((self.args, dict(self.kwargs))))
        report = Report(frozen, metas, tuple(self.hooks), attributes, changed, varies)
        self._announce(key, number, report)
        return self._finish(report, used)

    def _freeze(self, obj: Any, same: Mapping[int, int]) -> bytes:
        known = {id(tensor): index for index, tensor in enumerate(self.table)}
        arguments = _opaque_arguments((self.args, dict(self.kwargs)))

        def refer(item: Any) -> tuple[str, Any] | None:
            if isinstance(item, torch.Tensor):
                if id(item) in same:
                    return "argument", same[id(item)]
                if id(item) not in known:
                    known[id(item)] = len(self.table)
                    self.table.append(item)
                return "new", known[id(item)]
            if isinstance(item, nn.Module):
                for name, module in self.placed.modules:
                    if module is item:
                        return "module", name
            for index, argument in enumerate(arguments):
                if argument is item:
                    return "object", index
            return None

        try:
            return freeze(obj, refer)
        except Exception as error:
            raise NotSupportedError(
                f"{self.placed.path} returned something that can't be sent to other ranks: {error}"
            ) from error

    def _announce(self, key: Any, number: int, report: Report) -> None:
        body, engine = self.body, self.body.engine
        known = engine.reports.get(key)
        if known is None:
            engine.reports.keep(key, report)
            for peer in engine.transport.peers:
                engine.transport.send(peer, _key_address(key, body.rank), report)
        elif not report.varies and report != known:
            raise PathMismatchError(
                f"{self.placed.path} gave another structure for the same kind of arguments than "
                f"before ({_differences(known, report)}), and the other ranks went on with the "
                "old one. Results that change with the data must contain a plain number, or stay "
                "inside one module"
            )
        if report.varies:
            address = body.address(Topic.STRUCTURE, number, body.rank)
            for peer in engine.transport.peers:
                engine.transport.send(peer, address, report)

    def _watch_hooks(
        self, stack: ExitStack, name: str, module: nn.Module, same: Mapping[int, int]
    ) -> None:
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = getattr(module, kind)
            for position, (identity, hook) in enumerate(list(hooks.items())):
                hooks[identity] = functools.partial(self._fire, name, kind, position, hook, same)
                stack.callback(_put_back, hooks, identity, hook)

    def _fire(
        self,
        name: str,
        kind: str,
        position: int,
        hook: Callable[..., Any],
        same: Mapping[int, int],
        module: nn.Module,
        *arguments: Any,
    ) -> Any:
        first = len(self.table)
        frozen = self._freeze(arguments, same)
        self.hooks.append(HookCall(name, kind, position, frozen, first, len(self.table)))
        for index in range(first, len(self.table)):
            self.table[index] = self._number(self.table[index], meta_of(self.table[index]))
        self.num_numbered = len(self.table)
        with self.body.glue.resumed():
            # What the hook sees must carry tags, as it does on the other ranks.
            answer = hook(module, *thaw(frozen, self._resolve))
        if any(isinstance(tensor, StandIn) for tensor in iter_tensors(answer)):
            raise NotSupportedError(
                f"a forward hook of {self.placed.path}.{name} returned a tensor of another rank"
            )
        return answer

    # -- on the others -----------------------------------------------------------------------

    def _await(self, key: Any, number: int) -> Report:
        body, engine = self.body, self.body.engine
        report = engine.reports.get(key)
        if report is None:
            # Left in the mailbox: bodies of several microbatches may wait for the same news.
            address = _key_address(key, self.placed.owner)
            engine.wait(body, [address])
            report = engine.transport.look(address).content
            assert isinstance(report, Report)
            engine.reports.keep(key, report)
        if report.varies:
            address = body.address(Topic.STRUCTURE, number, self.placed.owner)
            engine.wait(body, [address])
            report = engine.receive(address).content
            assert isinstance(report, Report)
        return report

    def _hand_out(self, report: Report) -> Any:
        modules = dict(self.placed.modules)
        for hook_call in report.hooks:
            for meta in report.metas[hook_call.first : hook_call.end]:
                self.table.append(self._number(None, meta))
            self.num_numbered = len(self.table)
            module = modules[hook_call.module]
            hook = list(getattr(module, hook_call.kind).values())[hook_call.position]
            arguments = thaw(hook_call.arguments, self._resolve)
            with self.body.glue.resumed():
                hook(module, *arguments)
        return self._finish(report, [])

    # -- on every rank -----------------------------------------------------------------------

    def _number(self, real: torch.Tensor | None, meta: TensorMeta) -> torch.Tensor:
        return self.body.new_result(real, meta, self.placed.owner, self.depth, self.origin)

    def _finish(self, report: Report, used: list[torch.Tensor]) -> Any:
        body = self.body
        for index, meta in report.changed:
            body.note_change(
                self.operands[index],
                meta,
                self.placed.owner,
                used[index] if used else None,
                self.depth,
            )
        is_here = self.placed.owner == body.rank
        for index in range(self.num_numbered, len(report.metas)):
            made = self._number(self.table[index] if is_here else None, report.metas[index])
            if is_here:
                self.table[index] = made
            else:
                self.table.append(made)
        if not is_here:
            modules = dict(self.placed.modules)
            for name, attribute, frozen in report.attributes:
                vars(modules[name])[attribute] = thaw(frozen, self._resolve)
        return thaw(report.output, self._resolve)

    def _resolve(self, reference: tuple[str, Any]) -> Any:
        kind, where = reference
        if kind == "new":
            return self.table[where]
        if kind == "argument":
            return self.operands[where].tensor
        if kind == "module":
            return dict(self.placed.modules)[where]
        return _opaque_arguments((self.args, dict(self.kwargs)))[where]


def _put_back(hooks: dict[int, Any], identity: int, hook: Any) -> None:
    if identity in hooks:  # a hook may remove itself
        hooks[identity] = hook


def _key_address(key: Any, owner: int) -> Address:
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return Address(Topic.STRUCTURE, -1, -1, int.from_bytes(digest, "big"), owner)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def _type_of_opaque(leaf: Any) -> Any:
    """Objects differ from rank to rank and from call to call; their type does not."""
    if isinstance(leaf, _PLAIN):
        return leaf
    return type(leaf).__module__, type(leaf).__qualname__


def _opaque_arguments(obj: Any) -> list[Any]:
    """The arguments, or parts of them, that each rank has an object of its own for."""
    if isinstance(obj, (torch.Tensor, *_PLAIN)):
        return []
    if isinstance(obj, dict):
        obj = list(obj.values())
    if isinstance(obj, (tuple, list)):
        return [leaf for item in obj for leaf in _opaque_arguments(item)]
    return [] if is_container(obj) else [obj]


def _holds_values(obj: Any, arguments: list[Any]) -> bool:
    """Says whether a result has parts that are neither tensors nor None nor arguments."""
    if obj is None or isinstance(obj, torch.Tensor):
        return False
    if isinstance(obj, dict):
        return any(_holds_values(item, arguments) for item in obj.values())
    if isinstance(obj, (tuple, list)):
        return any(_holds_values(item, arguments) for item in obj)
    if is_container(obj) and not isinstance(obj, (set, slice)):
        return any(_holds_values(item, arguments) for item in vars(obj).values())
    return not any(obj is argument for argument in arguments)


def _differences(known: Report, report: Report) -> str:
    """Names the parts of two reports that differ."""
    return ", ".join(
        f"{name}: {old!r} before, {new!r} now"
        for name, old, new in zip(Report._fields, known, report, strict=True)
        if old != new
    )
