"""The scale of the loss in float16: static, or as large as gradients let it be.

The dynamic scale grows by a factor after a window of steps without overflow, and shrinks by it on
overflow. Names of settings are SMP's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import ConfigError


class LossScale(Protocol):
    """What multiplies the loss before the backward pass."""

    loss_scale: float

    def update(self, overflow: bool) -> None:
        """Learns whether gradients overflowed in a step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what is to be saved: plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned."""


class StaticLossScale:
    """A scale that never changes.

    Args:
        loss_scale: the scale, above 0.

    Raises:
        ConfigError: it is not above 0.
    """

    def __init__(self, loss_scale: float) -> None:
        if not loss_scale > 0:
            raise ConfigError(f"static_loss_scale={loss_scale} must be above 0")
        self.loss_scale = float(loss_scale)

    def update(self, overflow: bool) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the scale."""
        self.loss_scale = float(state["loss_scale"])


class DynamicLossScale:
    """A scale that follows the gradients.

    Args:
        init_scale: the first scale.
        scale_factor: what it grows and shrinks by.
        scale_window: steps without overflow before it grows.
        min_scale: the smallest scale.
        delayed_shift: overflows before it shrinks.
        consecutive_hysteresis: a step without overflow makes it forget earlier overflows; else
            only a growth does.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        if init_scale <= 0 or min_scale <= 0 or scale_factor <= 1:
            raise ConfigError(
                f"init_scale={init_scale}, min_scale={min_scale}, scale_factor={scale_factor}: "
                "scales must be above 0 and the factor above 1"
            )
        if scale_window < 1 or delayed_shift < 1:
            raise ConfigError(
                f"scale_window={scale_window} and delayed_shift={delayed_shift} must be at least 1"
            )
        self.loss_scale = float(init_scale)
        self._factor = scale_factor
        self._window = scale_window
        self._smallest = min_scale
        self._patience = delayed_shift
        self._is_forgetful = consecutive_hysteresis
        self._num_tolerated = delayed_shift
        self._num_good = 0

    def update(self, overflow: bool) -> None:
        """Shrinks on overflow, grows after a window without."""
        if overflow:
            self._num_good = 0
            self._num_tolerated -= 1
            if self._num_tolerated < 1:
                self._num_tolerated = 1
                self.loss_scale = max(self.loss_scale / self._factor, self._smallest)
            return
        self._num_good += 1
        is_time = self._num_good % self._window == 0
        if self._is_forgetful or is_time:
            self._num_tolerated = self._patience
        if is_time:
            self.loss_scale *= self._factor

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and the counts."""
        return {
            "loss_scale": self.loss_scale,
            "num_good": self._num_good,
            "num_tolerated": self._num_tolerated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the scale, and the counts where there are some."""
        self.loss_scale = float(state["loss_scale"])
        self._num_good = int(state.get("num_good", 0))
        self._num_tolerated = int(state.get("num_tolerated", self._patience))


def make_loss_scale(static: float | None, dynamic: bool, settings: Mapping[str, Any]) -> LossScale:
    """Makes the scale that `DistributedOptimizer` was asked for.

    Args:
        static: the static scale; None for 1.
        dynamic: whether a dynamic scale is wanted instead.
        settings: of the dynamic scale, each by its name, or all in a dict `dynamic_loss_args`.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    given = dict(settings)
    given = {**(given.pop("dynamic_loss_args", None) or {}), **given}
    known = DynamicLossScale.__init__.__annotations__.keys() - {"return"}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            f"unknown settings of the dynamic loss scale: {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known))}"
        )
    return (
        DynamicLossScale(**given) if dynamic else StaticLossScale(1.0 if static is None else static)
    )
