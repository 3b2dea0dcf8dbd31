"""Random streams: the key decides what is drawn, and nobody else notices."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from smp_runtime.execution import rng
from smp_runtime.execution.rng import (
    DRAWING_FUNCTIONS,
    HostRandomState,
    RandomStreams,
    SeededDraws,
    draws,
)

Numbers = list[float]


def draw(streams: RandomStreams) -> Numbers:
    with streams.draw():
        return torch.rand(3).tolist()


def draw_in(streams: RandomStreams, path: str) -> Numbers:
    with streams.module(path, with_host=False):
        return draw(streams)


def test_functions_that_draw_are_known() -> None:
    assert draws(F.dropout)
    assert draws(torch.Tensor.bernoulli_)
    assert draws(torch.randn_like)
    assert draws(F.scaled_dot_product_attention)
    assert not draws(torch.add)
    assert "uniform_" in DRAWING_FUNCTIONS


def test_equal_keys_give_equal_numbers() -> None:
    assert draw(RandomStreams(1, "2", 3)) == draw(RandomStreams(1, "2", 3))


def test_seed_step_microbatch_module_call_and_draw_are_all_part_of_the_key() -> None:
    one = RandomStreams(1, "2", 3)
    drawn = [
        draw(one),
        draw(one),
        draw_in(one, "a"),
        draw_in(one, "a"),
        draw_in(one, "b"),
        draw(RandomStreams(9, "2", 3)),
        draw(RandomStreams(1, "9", 3)),
        draw(RandomStreams(1, "2", 9)),
    ]
    assert len({tuple(numbers) for numbers in drawn}) == len(drawn)


def test_the_order_of_modules_does_not_matter() -> None:
    forth, back = RandomStreams(1, "1", 1), RandomStreams(1, "1", 1)
    a, b = draw_in(forth, "a"), draw_in(forth, "b")
    assert (draw_in(back, "b"), draw_in(back, "a")) == (b, a)


def test_calls_are_counted_by_module_and_draws_by_call() -> None:
    streams, again = RandomStreams(1, "1", 1), RandomStreams(1, "1", 1)
    with streams.module("a", with_host=False):
        first = [draw(streams), draw(streams)]
    second = draw_in(streams, "a")
    with again.module("a", with_host=False):
        pass
    assert draw_in(again, "a") == second
    assert second not in first


def test_a_skipped_draw_counts() -> None:
    here, elsewhere = RandomStreams(1, "1", 1), RandomStreams(1, "1", 1)
    draw(here)
    elsewhere.skip_draw()
    assert draw(here) == draw(elsewhere)


def test_a_module_inside_another_has_the_frame() -> None:
    streams, other = RandomStreams(1, "1", 1), RandomStreams(1, "1", 1)
    with streams.module("outer", with_host=False):
        inner = draw_in(streams, "outer.inner")
        after = draw(streams)
    assert draw_in(other, "outer.inner") == inner
    assert draw_in(other, "outer") == after


def test_nobody_elses_draws_matter() -> None:
    first, second = RandomStreams(1, "1", 1), RandomStreams(1, "1", 1)
    expected = [draw(first), draw_in(first, "a"), draw(first)]
    torch.manual_seed(5)
    found = []
    for path in (None, "a", None):
        found.append(draw(second) if path is None else draw_in(second, path))
        torch.rand(7)
    assert found == expected


def test_a_draw_that_fails_counts_and_harms_nothing() -> None:
    streams, other = RandomStreams(1, "1", 1), RandomStreams(1, "1", 1)
    with pytest.raises(ValueError, match="no"), streams.draw():
        torch.rand(2)
        raise ValueError("no")
    draw(other)
    assert draw(streams) == draw(other)


def forward(streams: RandomStreams) -> list[Numbers]:
    """Draws in a module, twice in another one, and outside."""
    with streams.module("b", with_host=True):
        inside = [draw(streams), draw(streams), [random.random()]]
    return [draw_in(streams, "a"), *inside, draw(streams)]


def test_a_recomputation_draws_the_same_again_and_leaves_the_rest_as_it_was() -> None:
    streams, other = RandomStreams(1, "1", 1), RandomStreams(1, "1", 1)
    streams.begin()
    draw(streams)
    before = torch.get_rng_state()
    first = forward(streams)
    middle = torch.get_rng_state()
    second = forward(streams)
    after = torch.get_rng_state()
    assert second != first
    torch.set_rng_state(before)
    assert forward(streams) == first
    torch.set_rng_state(middle)
    assert forward(streams) == second
    torch.set_rng_state(after)
    third = forward(streams)
    other.begin()
    draw(other)
    assert [forward(other) for _ in range(3)] == [first, second, third]


def host_numbers() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_python_and_numpy_are_seeded_in_a_module_and_restored_after() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = host_numbers()
    random.seed(1)
    np.random.seed(1)
    with RandomStreams(1, "1", 1).module("a", with_host=True):
        first = host_numbers()
    assert host_numbers() == expected
    with RandomStreams(1, "1", 1).module("a", with_host=True):
        assert host_numbers() == first
    assert first != expected


def test_python_and_numpy_go_on_in_modules_of_torch() -> None:
    random.seed(1)
    expected = [random.random(), random.random()]
    random.seed(1)
    before = random.random()
    with RandomStreams(1, "1", 1).module("a", with_host=False):
        assert [before, random.random()] == expected


def test_body_is_seeded_by_its_key() -> None:
    def numbers(*key: Any) -> Any:
        RandomStreams(*key).begin()
        return host_numbers(), torch.rand(2).tolist()

    assert numbers(1, "2", 3) == numbers(1, "2", 3)
    assert numbers(1, "2", 3)[0] != numbers(1, "2", 4)[0]


def test_it_is_known_whether_anything_was_drawn() -> None:
    streams = RandomStreams(1, "1", 1)
    streams.begin()
    assert not streams.has_drawn
    draw(streams)
    assert streams.has_drawn


def test_watched_code_draws_from_the_streams() -> None:
    streams = RandomStreams(1, "1", 1)
    assert not streams.is_watched
    with SeededDraws(streams):
        assert streams.is_watched
        watched = [torch.rand(3).tolist(), torch.add(1, torch.rand(3)).tolist()]
    assert not streams.is_watched
    by_hand = RandomStreams(1, "1", 1)
    assert watched[0] == draw(by_hand)
    assert watched[1] == (torch.tensor(draw(by_hand)) + 1).tolist()


def test_watched_dropout_is_the_same_whatever_was_drawn_before() -> None:
    def masked() -> list[float]:
        with SeededDraws(RandomStreams(1, "1", 1)):
            return F.dropout(torch.ones(16)).tolist()

    torch.manual_seed(1)
    first = masked()
    torch.rand(100)
    assert masked() == first
    assert set(first) == {0.0, 2.0}


def test_seeds_fit_a_signed_integer() -> None:
    for step in range(200):
        draw(RandomStreams(2**62, str(step), 0))


def test_host_state_goes_around() -> None:
    state = rng.host_random_state()
    first = host_numbers()
    rng.set_host_random_state(state)
    assert host_numbers() == first
    rng.seed_host(2**63 - 1)
    first = host_numbers()
    rng.seed_host(2**63 - 1)
    assert host_numbers() == first


def test_initial_seed_is_the_users() -> None:
    torch.manual_seed(77)
    assert rng.initial_seed() == 77


@pytest.mark.parametrize(
    "draw", [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn]
)
def test_a_host_state_is_shared_until_something_is_drawn(draw: Callable[[], float]) -> None:
    random.seed(1)
    np.random.seed(1)
    states = []
    expected = []
    for _ in range(5):  # normal numbers are made in pairs: the second one moves no generator
        states.append(HostRandomState.now())
        expected.append(draw())
        assert not states[-1].is_current()
    assert len(set(map(id, states))) == 5
    for state, value in reversed(list(zip(states, expected, strict=True))):
        state.restore()
        assert draw() == value
    np.random.seed(1)
    assert HostRandomState.now() is HostRandomState.now()


@pytest.mark.parametrize(
    "draw", [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn]
)
def test_the_state_of_a_seed_is_that_of_seeding(draw: Callable[[], float]) -> None:
    rng.seed_host(5)
    expected = [draw(), draw(), draw()]
    seeded = HostRandomState.seeded(5)
    assert HostRandomState.now() is seeded
    assert draw() == expected[0]
    assert HostRandomState.now() is not seeded
    later = HostRandomState.now()
    for _ in range(2):
        assert [draw(), draw()] == expected[1:]
        seeded.restore()
        assert HostRandomState.now() is seeded
        assert [draw(), draw(), draw()] == expected
        later.restore()


@pytest.mark.filterwarnings("ignore:get_state and legacy:RuntimeWarning")
def test_another_kind_of_numpy_generator_is_never_taken_for_unchanged() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        state = HostRandomState.now()
        assert not state.is_current()
        expected = np.random.rand()
        state.restore()
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(usual)
