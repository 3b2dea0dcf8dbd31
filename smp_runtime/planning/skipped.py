"""Assumes for modules that the trace skipped when they are called and what they cost then.

A model may leave layers out at random or by a flag. Those must be placed as if they ran: a later
step may call them. So each gets calls next to its siblings, in the order of definition, and all
calls are numbered anew. Where an equal module was called, the skipped one is taken to do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from .module_tree import ModuleNode, OwnCost, ParameterFact

__all__ = ["with_skipped_modules"]

SECONDS_PER_ELEMENT = 4e-8
"""Assumed forward and backward per parameter element where no module with parameters was called."""

Place = tuple[int, int, int]
"""Sorts calls: the traced call, then whether before (-1), at (0) or after it (1), then in turn."""


def with_skipped_modules(root: ModuleNode) -> ModuleNode:
    """Returns the tree in which every module that holds parameters of its own use is called.

    Modules that only lend their parameters to others stay uncalled.
    """
    skipped = _skipped(root)
    if not skipped:
        return root
    assumed = _Assumed(root)
    for node, before in skipped.values():
        assumed.add(node, before)
    places = sorted([*assumed.traced, *assumed.places.values()])
    return _Numbering(assumed, {place: number for number, place in enumerate(places)}).tree(root)


def _skipped(root: ModuleNode) -> dict[str, tuple[ModuleNode, tuple[int, int]]]:
    """Returns the largest modules without any call, by path, and where they belong."""
    called = [node for node in root.walk() if node.num_calls]
    used = {fact.group for node in called for fact in node.own_parameters}
    found: dict[str, tuple[ModuleNode, tuple[int, int]]] = {}

    def visit(node: ModuleNode) -> None:
        for index, child in enumerate(node.children):
            if _is_called(child):
                visit(child)
            elif any(_is_missing(fact, used) for _, fact in child.facts()):
                found[child.path] = child, _beside(node, index)

    if _is_called(root):
        visit(root)
    return found


def _is_called(node: ModuleNode) -> bool:
    return any(below.num_calls for below in node.walk())


def _is_missing(fact: ParameterFact, used: set[int]) -> bool:
    """Whether nobody used a parameter; otherwise its module only lends it out."""
    return fact.first_use is None and fact.group not in used


def _beside(parent: ModuleNode, index: int) -> tuple[int, int]:
    """Returns the traced call that the child at `index` comes after (1) or before (-1)."""
    for sibling in reversed(parent.children[:index]):
        if _is_called(sibling):
            return _last_call(sibling), 1
    for sibling in parent.children[index + 1 :]:
        if _is_called(sibling):
            return min(call for node in sibling.walk() for call in node.calls), -1
    return parent.calls[0], 1


def _last_call(node: ModuleNode) -> int:
    """Returns the last call in a subtree before the module is called a second time."""
    calls = [call for below in node.walk() for call in below.calls]
    return max(call for call in calls if node.num_calls < 2 or call < node.calls[1])


@dataclass(slots=True)
class _Assumed:
    """What is assumed about the modules below the skipped ones, by path."""

    root: ModuleNode
    places: dict[str, Place] = field(default_factory=dict)
    models: dict[str, tuple[ModuleNode, Mapping[int, str]]] = field(default_factory=dict)
    own_seconds: dict[str, float] = field(default_factory=dict)
    rate: float = field(init=False)
    traced: tuple[Place, ...] = field(init=False)
    _equal: dict[object, list[ModuleNode]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        calls = [call for node in self.root.walk() for call in node.calls]
        self.traced = tuple((call, 0, 0) for call in sorted(set(calls)))
        called = [node for node in self.root.walk() if node.num_calls and node.own_parameters]
        for node in self.root.walk():
            if node.num_calls and node.holds_parameters:
                self._equal.setdefault(_shape(node), []).append(node)
        seconds = sum(node.compute for node in called)
        elements = sum(_num_elements(node) for node in called)
        self.rate = seconds / elements if seconds and elements else SECONDS_PER_ELEMENT

    def add(self, node: ModuleNode, beside: tuple[int, int]) -> None:
        """Assumes calls and costs for a skipped module and all below it."""
        model = self._model_of(node)
        if model is not None:
            self._like(node, model, beside)
            return
        if node.is_callable:
            self._call(node.path, beside)
        self.own_seconds[node.path] = self.rate * _num_elements(node)
        for child in node.children:
            self.add(child, beside)

    def _model_of(self, node: ModuleNode) -> ModuleNode | None:
        """Returns a called module of the same type and size: a sibling, if there is one.

        The last one: the first module of a model is cheaper, as its input needs no gradient.
        """
        equal = self._equal.get(_shape(node), []) if node.is_callable else []
        parent = node.path.rpartition(".")[0]
        siblings = [other for other in equal if other.path.rpartition(".")[0] == parent]
        return next(reversed([*equal, *siblings]), None)

    def _like(self, node: ModuleNode, model: ModuleNode, beside: tuple[int, int]) -> None:
        """Assumes that a module does what an equal one did."""
        pairs = list(zip(node.walk(), model.walk(), strict=True))
        path_of = {call: own.path for own, other in pairs for call in other.calls}
        in_order = sorted((other.calls[0], own.path) for own, other in pairs if other.calls)
        for _, path in in_order:
            self._call(path, beside)
        for own, other in pairs:
            self.models[own.path] = other, path_of

    def _call(self, path: str, beside: tuple[int, int]) -> None:
        self.places[path] = (*beside, len(self.places))


def _shape(node: ModuleNode) -> object:
    """Returns what is equal for modules that may be taken to cost the same."""
    top = len(node.path)
    return tuple((below.path[top:], below.type_name, tuple(_sizes(below))) for below in node.walk())


def _sizes(node: ModuleNode) -> Iterator[tuple[str, int, bool]]:
    for fact in node.own_parameters:
        yield fact.name, fact.num_elements, fact.requires_grad


def _num_elements(node: ModuleNode) -> int:
    return sum(fact.num_elements for fact in node.own_parameters if not fact.is_buffer)


@dataclass(frozen=True, slots=True)
class _Numbering:
    """Writes the assumed calls and costs into the tree and numbers all calls in order."""

    assumed: _Assumed
    number_of: Mapping[Place, int]

    def tree(self, node: ModuleNode) -> ModuleNode:
        """Returns a node and all below it with the new numbers."""
        made = replace(
            node,
            own_parameters=tuple(map(self._fact, node.own_parameters)),
            children=tuple(map(self.tree, node.children)),
            calls=tuple(map(self._traced, node.calls)),
            own_costs=tuple(
                replace(cost, origin=self._traced(cost.origin)) for cost in node.own_costs
            ),
        )
        if node.path in self.assumed.places:
            made = replace(made, calls=(self._assumed(node.path),), is_assumed=True)
        if node.path in self.assumed.models:
            return self._like(made, *self.assumed.models[node.path])
        seconds = self.assumed.own_seconds.get(node.path)
        return replace(made, own_costs=(OwnCost(made.order or 0, seconds),)) if seconds else made

    def _like(self, node: ModuleNode, model: ModuleNode, path_of: Mapping[int, str]) -> ModuleNode:
        """Returns a node with the costs of `model`; its calls are those of the module's parts."""
        origins = [
            self._assumed(path_of[cost.origin])
            if cost.origin in path_of
            else self._traced(cost.origin)
            for cost in model.own_costs
        ]
        return replace(
            node,
            own_costs=tuple(
                replace(cost, origin=origin)
                for cost, origin in zip(model.own_costs, origins, strict=True)
            ),
            output_bytes=model.output_bytes,
            is_closed=model.is_closed,
            is_opaque=model.is_opaque,
            is_indivisible=model.is_indivisible,
        )

    def _fact(self, fact: ParameterFact) -> ParameterFact:
        if not fact.first_use:
            return fact
        traced = self.assumed.traced
        before = traced[min(fact.first_use, len(traced)) - 1]
        return replace(fact, first_use=self.number_of[before] + 1)

    def _traced(self, call: int) -> int:
        return self.number_of[call, 0, 0] if call >= 0 else -1

    def _assumed(self, path: str) -> int:
        return self.number_of[self.assumed.places[path]]
