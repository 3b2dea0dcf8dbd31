"""The loss scale grows after good steps and shrinks on overflow, as its settings say."""

from typing import Any

import pytest

from smp_runtime.errors import ConfigError
from smp_runtime.optimization.loss_scale import DynamicLossScale, StaticLossScale, make_loss_scale


def scales(overflows: str, **settings: Any) -> list[float]:
    """Returns the scale after each step; `x` is one with overflow."""
    scale = DynamicLossScale(**{"init_scale": 16.0, "scale_window": 3, **settings})
    found = []
    for step in overflows:
        scale.update(step == "x")
        found.append(scale.loss_scale)
    return found


def test_it_grows_after_a_window_of_good_steps() -> None:
    assert scales("......") == [16, 16, 32, 32, 32, 64]
    assert scales("...", scale_factor=4.0) == [16, 16, 64]


def test_it_shrinks_on_overflow_and_counts_anew() -> None:
    assert scales("..x...") == [16, 16, 8, 8, 8, 16]
    assert scales("xxxxxx", min_scale=2.0) == [8, 4, 2, 2, 2, 2]


def test_overflows_may_be_tolerated() -> None:
    assert scales("xxx", delayed_shift=2) == [16, 8, 4]
    # A good step between them counts only if it is asked to.
    assert scales("x.x", delayed_shift=2) == [16, 16, 8]
    assert scales("x.x", delayed_shift=2, consecutive_hysteresis=True) == [16, 16, 16]
    assert scales("x...x", delayed_shift=2) == [16, 16, 16, 32, 32]


def test_a_static_scale_stays() -> None:
    scale = StaticLossScale(128)
    scale.update(True)
    scale.update(False)
    assert scale.loss_scale == 128.0


def test_its_state_goes_on_where_it_was() -> None:
    first = DynamicLossScale(init_scale=16.0, scale_window=3, delayed_shift=2)
    for overflow in (False, True, False, False):
        first.update(overflow)
    second = DynamicLossScale(scale_window=3, delayed_shift=2)
    second.load_state_dict(first.state_dict())
    for overflow in (False, True, True):
        first.update(overflow)
        second.update(overflow)
        assert first.loss_scale == second.loss_scale
    static = StaticLossScale(1.0)
    static.load_state_dict(first.state_dict())
    assert static.loss_scale == first.loss_scale


def test_it_is_made_as_scripts_ask_for_it() -> None:
    assert make_loss_scale(None, False, {}).loss_scale == 1.0
    assert make_loss_scale(64.0, False, {"init_scale": 2.0}).loss_scale == 64.0
    assert make_loss_scale(None, True, {}).loss_scale == 2.0**32
    assert make_loss_scale(None, True, {"init_scale": 8}).loss_scale == 8.0
    given = {"dynamic_loss_args": {"init_scale": 4, "scale_window": 1}}
    scale = make_loss_scale(1.0, True, given)
    scale.update(False)
    assert scale.loss_scale == 8.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, False, {}), "static_loss_scale=0.0 must be above 0"),
        ((None, True, {"init_scale": 0}), "init_scale=0"),
        ((None, True, {"scale_window": 0}), "scale_window=0"),
        ((None, True, {"window": 5}), "unknown settings of the dynamic loss scale: window"),
    ],
)
def test_wrong_settings_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loss_scale(*arguments)
