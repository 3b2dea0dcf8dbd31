"""The tree of module costs that a trace yields and the partitioning divides.

Pure facts, no tensors: the tree can be made by a trace, from a configuration, or by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ModuleNode", "OwnCost", "ParameterFact", "ancestors", "is_below", "join_path"]


def join_path(path: str, name: str) -> str:
    """Returns the dotted path of `name` inside the module at `path` (``""`` is the root)."""
    return f"{path}.{name}" if path else name


def ancestors(path: str) -> list[str]:
    """Returns the paths of the modules around `path`, the root included."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts))]


def is_below(path: str, top: str) -> bool:
    """Says whether a path is that of the module at `top` or of one inside it."""
    return path == top or not top or path.startswith(top + ".")


@dataclass(frozen=True, slots=True)
class ParameterFact:
    """A parameter or persistent buffer, seen from one module that holds it directly.

    Args:
        name: its name inside the module, e.g. ``weight``.
        group: equal for all facts about the same tensor, so it tells shared parameters.
        num_elements: number of elements.
        bytes: size of the tensor itself.
        requires_grad: whether it is trained.
        is_buffer: whether it is a persistent buffer.
        first_use: number of module calls before it is first used; None where unknown.
        summed_bytes: size of its gradient, where that has another type than the tensor.
    """

    name: str
    group: int
    num_elements: int
    bytes: int
    requires_grad: bool = True
    is_buffer: bool = False
    first_use: int | None = None
    summed_bytes: int | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient, 0 if it is not trained."""
        if not self.requires_grad:
            return 0
        return self.bytes if self.summed_bytes is None else self.summed_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of Adam's two moments, and of the master of what is narrower than its gradient."""
        return self.gradient_bytes * (3 if self.gradient_bytes > self.bytes else 2)

    @property
    def state_bytes(self) -> int:
        """Bytes held while training: with gradient and Adam state where it is trained."""
        return self.bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class OwnCost:
    """A part of what a module computes itself, outside its children.

    Args:
        origin: the module call whose result the operations work on, as an index into the
            execution order; -1 where they depend on the inputs of the step only. If the module
            is not placed as a whole, these operations run where that call runs.
        compute: cost of forward and backward of one microbatch.
        activation_bytes: bytes saved for backward.
    """

    origin: int
    compute: float
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """One module: what it holds, what it costs, when it is called.

    Args:
        path: dotted as in ``named_modules``, ``""`` for the root.
        type_name: name of its class.
        calls: the index in the execution order of each of its calls. Calls are numbered as
            they begin, over the whole model.
        own_parameters: parameters and persistent buffers that it holds directly.
        own_costs: what it computes itself, without its children.
        output_bytes: bytes of its result.
        input_bytes: bytes of the largest tensor among its arguments.
        children: its child modules, in the order in which they were registered.
        is_closed: whether a call of it uses nothing outside its subtree, and nothing inside is
            called from outside. Only then can it be placed as a whole.
        is_repeated_container: whether it only lists its children (``ModuleList``) or calls
            them in turn (``Sequential``).
        is_opaque: whether its forward uses parameters of its children without calling them.
        is_indivisible: whether a user-defined autograd function calls what is in it.
        is_callable: whether it has a forward; a ``ModuleList`` has none.
        is_assumed: whether its calls and costs are assumed, as the trace did not call it.
    """

    path: str
    type_name: str
    calls: tuple[int, ...] = ()
    own_parameters: tuple[ParameterFact, ...] = ()
    own_costs: tuple[OwnCost, ...] = ()
    output_bytes: int = 0
    input_bytes: int = 0
    children: tuple[ModuleNode, ...] = ()
    is_closed: bool = True
    is_repeated_container: bool = False
    is_opaque: bool = False
    is_indivisible: bool = False
    is_callable: bool = True
    is_assumed: bool = False

    @property
    def order(self) -> int | None:
        """Index of its first call in the execution order; None if it is never called."""
        return self.calls[0] if self.calls else None

    @property
    def num_calls(self) -> int:
        """How often it is called in one step body."""
        return len(self.calls)

    @property
    def compute(self) -> float:
        """Its own cost, without its children."""
        return sum(cost.compute for cost in self.own_costs)

    @property
    def activation_bytes(self) -> int:
        """Bytes that it saves for backward itself, without its children."""
        return sum(cost.activation_bytes for cost in self.own_costs)

    def walk(self) -> Iterator[ModuleNode]:
        """Yields the node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def holds_parameters(self) -> bool:
        """Whether its subtree has a parameter or persistent buffer; otherwise it is glue."""
        return bool(self.own_parameters) or any(child.holds_parameters for child in self.children)

    def facts(self) -> Iterator[tuple[str, ParameterFact]]:
        """Yields every parameter and persistent buffer of the subtree with its full name."""
        for node in self.walk():
            for fact in node.own_parameters:
                yield join_path(node.path, fact.name), fact
