"""Random streams that do not depend on which rank draws.

Dropout must give the same masks at every pipeline degree. So every drawing operation gets a
stream of its own, keyed by (seed, step, microbatch, module path, call of that module, draw
within the call). Which modules draw is known from the trace. A draw in such a module is seeded
just before it happens, in a placed module (`SeededDraws`) as in glue (`glue.GlueMode`), so the
numbers are those of the key, wherever and in whatever order the microbatches run.

Activation checkpointing runs a forward again, and it must draw the same numbers again. It saves
the state of torch's generator before the forward and puts it back before the recomputation. So
the state between draws is used as a bookmark: it says how many seeds were given out so far, and
whoever finds an old bookmark there gets the seeds of that time again.

Python's `random` and NumPy cannot be watched draw by draw: they are seeded when a drawing module
is entered. What the user's own script draws outside the step is left alone.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from .. import device

# `_apply` is that of user-defined autograd functions with owned operands (`glue`), whose inside is
# not seen.
_DRAWING_NAMES = """
alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d
dropout3d dropout_ exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout
feature_dropout_ fractional_max_pool2d fractional_max_pool3d geometric_ gru gumbel_softmax
_apply _sample_dirichlet _standard_gamma log_normal_ lstm multi_head_attention_forward multinomial
native_dropout normal normal_ poisson
rand rand_like randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu
rrelu_ scaled_dot_product_attention uniform_
"""
DRAWING_FUNCTIONS = frozenset(_DRAWING_NAMES.split())


_MT19937_BYTES = 4 * (624 + 1)
"""The words of the generator's key, and its position in them."""

_MOST_SEEDS = (1 << 24) - 1


def draws(function: Callable[..., Any]) -> bool:
    """Says whether a torch function may use the generator."""
    return getattr(function, "__name__", None) in DRAWING_FUNCTIONS


class _Frame:
    """One call of a module that draws, or the body itself (path None)."""

    __slots__ = ("call", "num_draws", "path")

    def __init__(self, path: str | None, call: int) -> None:
        self.path = path
        self.call = call
        self.num_draws = 0


class RandomStreams:
    """The random streams of one microbatch of one step.

    Args:
        seed: the job's seed.
        step: a name for the step.
        microbatch: its position in the step.

    Attributes:
        is_watched: a `SeededDraws` is active; a second one would count draws twice.
    """

    def __init__(self, seed: int, step: str, microbatch: int) -> None:
        self._key = (seed, step, microbatch)
        self._calls: dict[str, int] = {}
        self._frames = [_Frame(None, 0)]
        self._given: list[int] = []
        self._bookmark = self._seed_of(_Frame("bookmark", 0)) & ~_MOST_SEEDS
        self.is_watched = False

    @property
    def has_drawn(self) -> bool:
        """Says whether anything was drawn yet."""
        return bool(self._given)

    def begin(self) -> None:
        """Takes over torch's, Python's and NumPy's generators for the body."""
        HostRandomState.seeded(self._seed_of(self._frames[0]))
        device.seed_generators(self._bookmark)

    @contextmanager
    def module(self, path: str, *, with_host: bool) -> Iterator[None]:
        """Makes what is drawn inside belong to the next call of the module at `path`.

        Args:
            path: the module's name in the user's model.
            with_host: also seed Python's and NumPy's generators, which costs 0.1 ms; torch's own
                modules don't need it.
        """
        call = self._calls.get(path, 0)
        if self._position() == len(self._given):  # not a recomputation, which is no new call
            self._calls[path] = call + 1
        frame = _Frame(path, call)
        self._frames.append(frame)
        saved = HostRandomState.now() if with_host else None
        if with_host:
            seed_host(self._next_seed(frame))
        try:
            yield
        finally:
            self._frames.pop()
            if saved is not None:
                saved.restore()

    @contextmanager
    def draw(self) -> Iterator[None]:
        """Gives the one operation inside its own stream."""
        frame = self._frames[-1]
        if self._position() == len(self._given):
            frame.num_draws += 1
        seed = self._next_seed(frame)
        bookmark = device.bookmark()
        device.seed_generators(seed)
        try:
            yield
        finally:
            device.seed_generators(bookmark)

    def skip_draw(self) -> None:
        """Counts an operation that draws on another rank."""
        self._frames[-1].num_draws += 1

    def _next_seed(self, frame: _Frame) -> int:
        """Gives out a seed, or again the one that was given out at this place before."""
        position = self._position()
        if position == len(self._given):
            self._given.append(self._seed_of(frame))
        device.seed_generators(self._bookmark + position + 1)
        return self._given[position]

    def _position(self) -> int:
        """The number of seeds given out at the time of the bookmark that is found now."""
        position = device.bookmark() - self._bookmark
        # A state that is no bookmark is of the user's making, in the middle of the body.
        return position if 0 <= position < len(self._given) else len(self._given)

    def _seed_of(self, frame: _Frame) -> int:
        text = repr((*self._key, frame.path, frame.call, frame.num_draws))
        # 63 bits: torch refuses seeds that do not fit a signed integer.
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class SeededDraws(TorchFunctionMode):
    """Seeds each drawing function that runs under it; for code that is not glue."""

    def __init__(self, streams: RandomStreams) -> None:
        super().__init__()
        self._streams = streams

    def __enter__(self) -> SeededDraws:
        """Begins to watch."""
        self._streams.is_watched = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Ends watching."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._streams.is_watched = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `func`, in its own random stream if it draws."""
        if draws(func):
            with self._streams.draw():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def host_random_state() -> tuple[Any, Any]:
    """Returns the states of Python's and, where it is loaded, NumPy's generator."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def set_host_random_state(state: tuple[Any, Any]) -> None:
    """Restores what `host_random_state` returned."""
    HostRandomState._latest = None
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


class HostRandomState:
    """The states of Python's and NumPy's generator at one moment, cheap to take again.

    NumPy copies its state in some 40 us, so the memory of its generator is compared instead. That
    memory lacks the second one of a pair of normal numbers, which waits to be drawn: a state with
    one is never taken for another. From a state without one, any draw changes the memory.
    NumPy also takes longer to put a state back than to be seeded again, so a state that is that of
    a seed remembers the seed.
    """

    __slots__ = ("_memory", "_seed", "_states")

    _latest: ClassVar[HostRandomState | None] = None

    def __init__(
        self, states: tuple[Any, Any], memory: bytes | None, seed: int | None = None
    ) -> None:
        self._states = states
        self._memory = memory
        self._seed = seed

    @classmethod
    def seeded(cls, seed: int) -> HostRandomState:
        """Seeds the generators and returns the state that they are in then."""
        seed_host(seed)
        latest = cls._latest = cls((random.getstate(), None), _numpy_memory(), seed)
        return latest

    @classmethod
    def now(cls) -> HostRandomState:
        """Returns the states of this moment: the same object for as long as nothing is drawn."""
        latest = cls._latest
        if latest is None or not latest.is_current():
            memory = _numpy_memory()
            latest = cls._latest = cls(host_random_state(), memory)
        return latest

    def is_current(self) -> bool:
        """Says whether nothing was drawn since; False also where that can't be said."""
        return (
            (self._memory is not None or "numpy" not in sys.modules)
            and (self._states[1] is None or not self._states[1][3])
            and self._memory == _numpy_memory()
            and self._states[0] == random.getstate()
        )

    def restore(self) -> None:
        """Puts the states in place."""
        if self._seed is None:
            set_host_random_state(self._states)
        else:
            seed_host(self._seed)
        HostRandomState._latest = self


def _numpy_memory() -> bytes | None:
    """Returns a copy of the memory of NumPy's generator, None if that is not the usual one."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def seed_host(seed: int) -> None:
    """Seeds Python's and, where it is loaded, NumPy's generator."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def initial_seed() -> int:
    """Returns the seed that the user gave to torch, or torch's own."""
    return torch.initial_seed()
