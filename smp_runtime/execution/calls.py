"""One call of a placed module: it runs on the owner and tells the other ranks what came out.

A call may hand out more than its return value. Forward hooks inside it run on the owner when
they fire and on the other ranks afterwards, in the same order, on stand-ins; tensors left in
module attributes, arguments changed in place and lists that were filled are part of the report
as well. So what a hook collects has the same length on every rank.

The report is sent once for each new signature of a call and kept on every rank. A report with
plain Python values in it may be another one next time: such calls report each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from ..errors import NotSupportedError, PathMismatchError
from ..messages.transport import Address, Topic
from ..tensors import TensorMeta, meta_of, version_of
from ..trees import freeze, iter_tensors, thaw
from .analysis import NO_TEMPLATE, Slot, autocast_state, fill, template_of
from .arguments import (
    Arguments,
    apply_change,
    change_of,
    contents,
    holds_values,
    mutable_arguments,
    opaque_arguments,
)
from .body import Body
from .ownership import PlacedModule
from .reports import HookCall, Report, differences
from .values import StandIn


class Call:
    """One call of a placed module in one body.

    Args:
        body: the microbatch.
        placed: the module.
        native: runs the module on its owner.
        args: positional arguments, with stand-ins for what this rank does not own.
        kwargs: keyword arguments likewise.
    """

    def __init__(
        self,
        body: Body,
        placed: PlacedModule,
        native: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.body = body
        self.placed = placed
        self.native = native
        self.arguments = Arguments(args, kwargs)
        self.operands = body.operands(self.arguments.tensors)
        self.depth = body.copies.depth_at(self.operands, placed.owner)
        self.table: list[torch.Tensor] = []
        self.num_numbered = 0
        self.watched_hooks = body.engine.reports.hooks(placed)
        self.hooks: list[HookCall] = []
        self.used: list[torch.Tensor] = []
        self.same: dict[int, int] = {}

    def run(self) -> Any:
        """Runs the call on its rank and hands out the same things on every rank."""
        body, placed = self.body, self.placed
        pending = body.copies.move(self.operands, placed.owner)
        body.note_uses(self.operands)
        number = body.next_number(placed.path)
        key = self._key()
        if placed.owner != body.rank:
            single = body.engine.reports.single(key)
            if single is not None:
                return self._number(None, single)
            return self._hand_out(self._await(key, number))
        body.engine.enter_stage(body, placed.stage, pending)
        body.note_stage(self.depth, placed.stage)
        return self._compute(key, number)

    def _key(self) -> Any:
        return (
            self.placed.path,
            self.arguments.signature,
            tuple(
                [
                    meta_of(tensor) if value is None else value.meta
                    for tensor, value in self.operands
                ]
            ),
            torch.is_grad_enabled(),
            autocast_state(),
            self.placed.modules[0][1].training,
            self.placed.kinds_of_parameters(),
            tuple([(name, kind) for name, _, kind, _, _ in self.watched_hooks]),
        )

    @property
    def opaque(self) -> list[Any]:
        """The arguments that each rank has an object of its own for."""
        if self.arguments.is_plain:
            return []
        return opaque_arguments((self.arguments.args, self.arguments.kwargs))

    # -- on the owner ------------------------------------------------------------------------

    def _compute(self, key: Any, number: int) -> Any:
        body, engine = self.body, self.body.engine
        engine.ownership.note_call(self.placed, body.step, body.microbatch)
        self.used = [
            body.copies.local(tensor, value, self.depth) for tensor, value in self.operands
        ]
        self.same = {id(tensor): i for i, tensor in reversed(list(enumerate(self.used)))}
        versions = [version_of(tensor) for tensor in self.used]
        args, kwargs = self.arguments.with_tensors(self.used)
        before: list[tuple[Any, Any]] = []
        if not self.arguments.is_plain:
            given = (*args, *kwargs.values())
            before = [(mutable, contents(mutable)) for mutable in mutable_arguments(given)]
        body.call_depth = self.depth
        with body.computing():
            output = self._run_watched(args, kwargs)
        if self.placed.has_hooks:
            engine.reports.note_own_hooks(self.placed, self.watched_hooks)
        single = engine.reports.single(key)
        if single is not None and self._is_single(output, single, versions):
            return self._number(output, single)
        report = self._report(output, versions, before)
        self._announce(key, number, report)
        return self._finish(report)

    def _run_watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.watched_hooks:
            return self.native(*args, **kwargs)
        with ExitStack() as stack:
            for position, watched in enumerate(self.watched_hooks):
                self._watch_hook(stack, position, *watched)
            return self.native(*args, **kwargs)

    def _is_single(self, output: Any, meta: TensorMeta, versions: list[int]) -> bool:
        """Says whether the report would be that of one new tensor again, without making one."""
        return (
            self.arguments.is_plain
            and not self.hooks
            and isinstance(output, torch.Tensor)
            and id(output) not in self.same
            and [version_of(tensor) for tensor in self.used] == versions
            and meta_of(output) == meta
            and not self.body.engine.reports.look_at(self.placed)
        )

    def _report(self, output: Any, versions: list[int], before: list[tuple[Any, Any]]) -> Report:
        changed = tuple(
            [
                (index, meta_of(tensor))
                for index, (tensor, version) in enumerate(zip(self.used, versions, strict=True))
                if version_of(tensor) != version and self.same[id(tensor)] == index
            ]
        )
        returned = template_of(output, self._slot)
        varies = False
        if returned is NO_TEMPLATE:
            returned = self._freeze(output)
            varies = holds_values(output, self.opaque)
        attributes = tuple(
            [
                (name, attribute, self._freeze(held))
                for name, attribute, held in self.body.engine.reports.look_at(self.placed)
            ]
        )
        mutated: list[tuple[int, bytes]] = []
        for position, (mutable, content) in enumerate(before):
            change = change_of(position, mutable, content)
            if change is not None:
                mutated.append((position, self._freeze(change.content)))
                varies = varies or holds_values(change.content, self.opaque)
        metas = tuple([meta_of(tensor) for tensor in self.table])
        return Report(
            returned, metas, tuple(self.hooks), attributes, changed, tuple(mutated), varies
        )

    def _slot(self, tensor: torch.Tensor) -> Slot:
        """Finds or makes a tensor's place in the report; arguments count from -1 downwards."""
        if id(tensor) in self.same:
            return Slot(-1 - self.same[id(tensor)])
        for index, known in enumerate(self.table):
            if known is tensor:
                return Slot(index)
        self.table.append(tensor)
        return Slot(len(self.table) - 1)

    def _freeze(self, obj: Any) -> bytes:
        """Pickles something that came out, with references to what every rank has."""
        known = {id(tensor): index for index, tensor in enumerate(self.table)}
        opaque = self.opaque

        def refer(item: Any) -> tuple[str, Any] | None:
            if isinstance(item, torch.Tensor):
                if id(item) in self.same:
                    return "argument", self.same[id(item)]
                if id(item) not in known:
                    known[id(item)] = len(self.table)
                    self.table.append(item)
                return "new", known[id(item)]
            if isinstance(item, nn.Module):
                for name, module in self.placed.modules:
                    if module is item:
                        return "module", name
            for index, argument in enumerate(opaque):
                if argument is item:
                    return "object", index
            return None

        try:
            return freeze(obj, refer)
        except Exception as error:
            raise NotSupportedError(
                f"{self.placed.path} handed out something that can't be sent to other ranks: "
                f"{error}"
            ) from error

    def _announce(self, key: Any, number: int, report: Report) -> None:
        body, engine = self.body, self.body.engine
        known = engine.reports.get(key)
        if known is None:
            engine.reports.learn(key, report)
            for peer in engine.transport.peers:
                place = (body.step, body.microbatch, number, self.placed.path)
                engine.transport.send(peer, _key_address(key, body.rank), (report, place))
        elif not known.varies and report != known:
            raise PathMismatchError(
                f"{self.placed.path} gave another structure for the same kind of arguments than "
                f"before ({differences(known, report)}), and the other ranks went on with the "
                "old one. Results that change with the data must contain a plain number, or stay "
                "inside one module"
            )
        if (known or report).varies:
            address = body.address(Topic.STRUCTURE, number, body.rank)
            for peer in engine.transport.peers:
                engine.transport.send(peer, address, report)

    def _watch_hook(
        self, stack: ExitStack, position: int, name: str, module: nn.Module, *where: Any
    ) -> None:
        kind, identity, hook = where
        hooks = getattr(module, kind)
        hooks[identity] = functools.partial(self._fire, name, position, hook)
        stack.callback(_put_back, hooks, identity, hook)

    def _fire(
        self,
        name: str,
        position: int,
        hook: Callable[..., Any],
        module: nn.Module,
        *arguments: Any,
    ) -> Any:
        first = len(self.table)
        frozen = self._freeze(arguments)
        self.hooks.append(HookCall(position, frozen, first, len(self.table)))
        for index in range(first, len(self.table)):
            self.table[index] = self._number(self.table[index], meta_of(self.table[index]))
        self.num_numbered = len(self.table)
        # What the hook sees must carry tags, as it does on the other ranks.
        tagged = thaw(frozen, self._resolve)
        self.body.hook = f"{self.placed.path}.{name}".strip(".")
        with self.body.glue.resumed():
            answer = hook(module, *tagged)
        self.body.hook = ""
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
            report, _ = engine.transport.look(address).content
            assert isinstance(report, Report)
            engine.reports.learn(key, report)
        if report.varies:
            address = body.address(Topic.STRUCTURE, number, self.placed.owner)
            engine.wait(body, [address])
            report = engine.receive(address).content
            assert isinstance(report, Report)
        return report

    def _hand_out(self, report: Report) -> Any:
        for hook_call in report.hooks:
            for meta in report.metas[hook_call.first : hook_call.end]:
                self.table.append(self._number(None, meta))
            self.num_numbered = len(self.table)
            _, module, _, _, hook = self.watched_hooks[hook_call.position]
            arguments = thaw(hook_call.arguments, self._resolve)
            with self.body.glue.resumed():
                hook(module, *arguments)
        return self._finish(report)

    # -- on every rank -----------------------------------------------------------------------

    def _number(self, real: torch.Tensor | None, meta: TensorMeta) -> torch.Tensor:
        return self.body.new_result(real, meta, self.placed.owner, self.depth, self.placed.origin)

    def _finish(self, report: Report) -> Any:
        body = self.body
        is_here = self.placed.owner == body.rank
        for index, meta in report.changed:
            used = self.used[index] if is_here else None
            body.note_change(self.operands[index], meta, self.placed.owner, used, self.depth)
        for index in range(self.num_numbered, len(report.metas)):
            made = self._number(self.table[index] if is_here else None, report.metas[index])
            if is_here:
                self.table[index] = made
            else:
                self.table.append(made)
        if report.attributes:
            modules = dict(self.placed.modules)
            for name, attribute, frozen in report.attributes:
                body.engine.reports.note_attribute(modules[name], attribute)
                vars(modules[name])[attribute] = thaw(frozen, self._resolve)
        if report.mutated:
            args, kwargs = self.arguments.args, self.arguments.kwargs
            mutable = list(mutable_arguments((*args, *kwargs.values())))
            for position, content in report.mutated:
                apply_change(mutable[position], thaw(content, self._resolve))
        if isinstance(report.output, bytes):
            return thaw(report.output, self._resolve)
        return fill(report.output, self._at)

    def _at(self, index: int) -> torch.Tensor:
        return self.table[index] if index >= 0 else self.operands[-1 - index].tensor

    def _resolve(self, reference: tuple[str, Any]) -> Any:
        kind, where = reference
        if kind == "new":
            return self.table[where]
        if kind == "argument":
            return self.operands[where].tensor
        if kind == "module":
            return dict(self.placed.modules)[where]
        return self.opaque[where]


def _put_back(hooks: dict[int, Any], identity: int, hook: Any) -> None:
    if identity in hooks:  # a hook may remove itself
        hooks[identity] = hook


def _key_address(key: Any, owner: int) -> Address:
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return Address(Topic.STRUCTURE, -1, -1, int.from_bytes(digest, "big", signed=True), owner)
