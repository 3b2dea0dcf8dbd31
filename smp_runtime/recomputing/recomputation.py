"""One checkpointed call: its forward saves nothing but its inputs, and runs again in the backward.

Built on saved-tensor hooks, as torch's non-reentrant checkpointing is, and not on an autograd
function of its own that runs the forward without a graph. With hooks the graph of the first run
is the real one; only the tensors that it saved are left out and filled in again. So everything
else is as without checkpointing: which parameters get a gradient and in which order gradients
are summed (they are equal bit for bit), inputs that need no gradient, nested results, values taken
from closures, hooks on tensors, a graph that leaves by a module's attribute. torch's own function
is not used because a recomputation here is an action of the schedule: it may happen before the
output gradient has come, and its tensors must last until then.

The recomputation stops at the last tensor that the first run saved: what comes after it, such as
the last matrix product of a block, has no part in the backward. A second run that saves other
tensors is an error: fewer, of another shape or type, or a parameter at another place.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import NotSupportedError, RecomputationError
from ..tensors import version_of
from ..trees import iter_tensors, map_tensors
from .attributes import NamedModules
from .forward_state import ForwardState
from .known_calls import Habits, Known

if TYPE_CHECKING:
    from .regions import Region
    from .saved_bytes import SavedBytes

_log = logging.getLogger("smp_runtime")

_Look = tuple[Any, ...]


class Slot:
    """The place of one saved tensor in the graph; empty until it is recomputed."""

    __slots__ = ("__weakref__", "counted", "tensor")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.counted: Any = None

    def fill(self, tensor: torch.Tensor, meter: SavedBytes | None) -> None:
        """Puts a tensor without history in; a history would make a circle."""
        self.tensor = tensor
        self.counted = None if meter is None else meter.count(tensor)

    def empty(self) -> None:
        """Lets the tensor go."""
        self.tensor = self.counted = None


class Recomputation:
    """One checkpointed call.

    Args:
        path: the name of what is called, for messages.
        run: runs it; called once by `forward` and once by each recomputation.
        modules: it and its submodules, the called one first.
        preserve_rng_state: whether the recomputation draws the same random numbers.
        known: what calls share.
        is_inner: whether it is made inside another checkpointed call.

    Attributes:
        num_runs: how often it was recomputed.
    """

    def __init__(
        self,
        path: str,
        run: Callable[..., Any],
        modules: NamedModules,
        preserve_rng_state: bool,
        known: Known,
        *,
        is_inner: bool = False,
    ) -> None:
        self.path = path
        self.num_runs = 0
        self._run = run
        self._modules = modules
        self._preserve = preserve_rng_state
        self._known = known
        self._is_inner = is_inner
        self._habits = known.habits.setdefault(id(modules[0][1]), Habits())
        self._is_held = not self._habits.is_known
        self._slots: list[weakref.ref[Slot]] = []
        self._looks: list[_Look] = []
        self._position = 0
        self._is_complete = False
        self._state: ForwardState | None = None
        self._inputs: Any = None
        self._parameters: frozenset[int] = frozenset()
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        hold: bool = False,
        region: Region | None = None,
    ) -> Any:
        """Runs the call and keeps its inputs only.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            hold: keep what it saves until `let_go`.
            region: keep what it saves until that region settles.

        Raises:
            NotSupportedError: it changed one of its inputs in place, which it did not before.
        """
        if not self._is_inner:
            self._known.let_go()
        arguments = (args, dict(kwargs))
        tensors = list(iter_tensors(arguments))
        self._arguments = arguments
        habits = self._habits
        self._state = ForwardState(
            self._modules, arguments, self._preserve, self._known.buffers, habits.attributes
        )
        attributes = self._state.attributes
        if attributes is not habits.attributes:
            habits.attributes = None if attributes.has_tensors() else attributes
        self._parameters = frozenset(map(_place, self._state.parameters))
        changes = habits.changes_inputs
        self._inputs = _keep([_copy(tensor) for tensor in tensors] if changes else tensors)
        versions = [version_of(tensor) for tensor in tensors]
        self._is_held = self._is_held or hold or region is not None
        with saved_tensors_hooks(self._pack, self._unpack), self._state.watching():
            output = self._run(*args, **kwargs)
        self._is_complete = True
        is_changed = any(
            version_of(tensor) != version for tensor, version in zip(tensors, versions, strict=True)
        )
        if is_changed and not changes:
            self._note_changed_inputs()
        elif region is not None:
            region.hold(self, is_last=hold)
        else:
            self.settle(hold=hold)
        self._habits.is_known = True
        return output

    def settle(self, *, hold: bool) -> None:
        """Frees what the call saved, at once or when `hold` ends."""
        if hold:
            self._known.hold(self)
        elif self._is_held:
            self.let_go()

    def keep(self) -> None:
        """Keeps what the call saved for good, and no inputs: it is not recomputed."""
        self._forget_first_run()

    def let_go(self) -> None:
        """Frees what the call saved; the backward recomputes it."""
        self._is_held = False
        for reference in self._slots:
            slot = reference()
            if slot is not None:
                slot.empty()

    @property
    def is_over(self) -> bool:
        """Whether it is recomputed no more: that was done, or what it saved is kept."""
        return self._state is None

    @property
    def is_pending(self) -> bool:
        """Whether a backward would have to recompute it first."""
        return any(
            slot.tensor is None for slot in (ref() for ref in self._slots) if slot is not None
        )

    def recompute(self) -> None:
        """Runs the call again and fills in what the first run saved.

        Raises:
            RecomputationError: the second run saved other tensors than the first one, or an input
                was changed in place since.
            NotSupportedError: what the call changed can't be undone.
        """
        assert self._state is not None, "recomputed twice"
        if not self._is_inner:
            self._known.let_go()
        self.num_runs += 1
        begun = time.perf_counter()
        args, kwargs = self._kept_arguments()
        self._position = 0
        try:
            with self._state.restored(), saved_tensors_hooks(self._refill, _same):
                self._run(*args, **kwargs)
        except _Done:
            pass
        except Exception as error:
            error.add_note(f"in the recomputation of {self.path} (activation checkpointing)")
            raise
        if self._position < len(self._slots):
            raise RecomputationError(
                f"the recomputation of {self.path} saved {self._position} tensors for its "
                f"backward, but its forward saved {len(self._slots)}; {_ADVICE}"
            )
        self._known.seconds += time.perf_counter() - begun
        if self._is_complete:
            self._forget_first_run()

    def _forget_first_run(self) -> None:
        self._state = self._inputs = None
        self._arguments = ((), {})

    def _note_changed_inputs(self) -> None:
        if self._habits.is_known:
            raise NotSupportedError(
                f"{self.path} changed one of its inputs in place, as no earlier call of it did; it "
                "can't be recomputed from that. Pass it a clone, or switch its activation "
                "checkpointing off"
            )
        self._habits.changes_inputs = True
        _log.info(
            "%s changes an input in place: its activation checkpointing keeps a copy of its inputs "
            "(from the next call on)",
            self.path,
        )

    def _kept_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            kept = self._inputs.grad_fn.saved_tensors[1:]
        except RuntimeError as error:
            raise RecomputationError(
                f"an input of {self.path} was changed in place after its call, so it can't be "
                f"recomputed; change a clone instead ({error})"
            ) from error
        places = iter(kept)
        is_changed = self._habits.changes_inputs

        def own(_: torch.Tensor) -> torch.Tensor:
            tensor: torch.Tensor = next(places)
            made = tensor.detach().requires_grad_(tensor.requires_grad)
            return made.clone() if is_changed else made

        with torch.enable_grad():
            found: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(own, self._arguments)
        return found

    # -- hooks -------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Slot:
        slot = Slot()
        self._slots.append(weakref.ref(slot))
        self._looks.append(self._look(tensor))
        if self._is_held:
            slot.fill(tensor.detach(), self._known.meter)
        return slot

    def _unpack(self, slot: Slot) -> torch.Tensor:
        if slot.tensor is None:
            self.recompute()
        tensor = slot.tensor
        assert tensor is not None
        return tensor

    def _refill(self, tensor: torch.Tensor) -> torch.Tensor:
        index, self._position = self._position, self._position + 1
        look = self._look(tensor)
        if look != self._looks[index]:
            raise RecomputationError(
                f"the recomputation of {self.path} saved {_describe(look)} as tensor {index} for "
                f"its backward, but its forward saved {_describe(self._looks[index])}; {_ADVICE}"
            )
        slot = self._slots[index]()
        tensor = tensor.detach()
        if slot is not None and slot.tensor is None:
            slot.fill(tensor, self._known.meter)
        if self._position == len(self._slots):
            raise _Done
        return tensor

    def _look(self, tensor: torch.Tensor) -> _Look:
        place = _place(tensor)
        return tensor.shape, tensor.dtype, tensor.device, place if place in self._parameters else 0


_ADVICE = (
    "both runs must do the same: look for what depends on time, on a counter, or on a random "
    "generator that is not torch's, Python's or NumPy's global one"
)


class _Done(BaseException):
    """Ends a recomputation. Not an Exception: users catch those."""


class _Keep(torch.autograd.Function):
    """Saves tensors as autograd does: with a check of their versions, and by the hooks around."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on it")


def _keep(tensors: list[torch.Tensor]) -> Any:
    """Returns a tensor whose history has these saved. Up to torch 2.9 it goes with the tensor."""
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        return _Keep.apply(anchor, *tensors)  # type: ignore[no-untyped-call]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _place(tensor: torch.Tensor) -> Any:
    """Returns where the memory of a tensor begins, however it is seen; storages are slow to ask."""
    return tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize


def _describe(look: _Look) -> str:
    shape, dtype, device, place = look
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    return f"a parameter, {text}" if place else text
