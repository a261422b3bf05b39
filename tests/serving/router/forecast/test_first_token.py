# SPDX-License-Identifier: Apache-2.0
"""The forecast of the time to the first token, its learner, and the trust in it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.forecast.first_token import (
    FADES,
    LEAST,
    LOOKED_AT,
    MEMORY_S,
    RATIOS,
    Accuracy,
    FirstToken,
)

TOKENS = st.integers(0, 10**6)


def teach(it: FirstToken, tokens: float, seconds: float, now: float) -> float | None:
    return it.learn(it.awaited(tokens, now - seconds), now)


@given(
    st.floats(0.001, 10),
    st.floats(0, 0.01),
    st.lists(TOKENS, min_size=LEAST, max_size=60).filter(lambda it: max(it) > 2 * min(it) + 10),
    TOKENS,
)
def test_it_learns_base_and_rate(base, rate, tokens, asked):
    it = FirstToken()
    for count in tokens:
        teach(it, count, base + rate * count, 0.0)
    assert it.forecast(asked, 0.0) == pytest.approx(base + rate * asked, rel=0.01)


@given(st.lists(st.tuples(TOKENS, st.floats(0, 1000)), min_size=LEAST, max_size=60), TOKENS)
def test_whatever_comes_a_forecast_is_no_negative_time_and_grows_with_the_tokens(answers, asked):
    it = FirstToken()
    for tokens, seconds in answers:
        teach(it, tokens, seconds, 0.0)
    few, more = (it.forecast(count, 0.0) for count in (asked, asked + 1000))
    assert few is not None
    assert more is not None
    assert 0 <= few <= more < math.inf


def test_too_few_or_too_old_answers_give_no_forecast():
    it = FirstToken()
    for count in range(LEAST):
        assert it.forecast(100, float(count)) is None
        assert teach(it, 100 + count, 0.5, float(count)) is None
    assert it.forecast(100, LEAST + MEMORY_S - 1) is not None
    assert it.forecast(100, LEAST + MEMORY_S + 1) is None


def test_a_replica_that_was_avoided_is_learnt_anew():
    it = FirstToken()
    for now in range(LEAST):
        teach(it, 100 + now, 20.0, float(now))
    later = 2 * MEMORY_S
    for now in range(LEAST):
        assert it.forecast(100, later + now) is None
        teach(it, 100 + now, 0.5, later + now)
    assert it.forecast(100, later + LEAST) == pytest.approx(0.5, rel=0.01)


def test_it_follows_a_replica_that_becomes_slower():
    it = FirstToken()
    ratios = [teach(it, 100 + now % 7, 0.1, float(now)) for now in range(200)]
    assert ratios[-1] == pytest.approx(1, rel=0.01)
    ratios = [teach(it, 100 + now % 7, 0.4, 200.0 + now) for now in range(200)]
    assert ratios[0] == pytest.approx(0.25, rel=0.01)
    assert ratios[-1] == pytest.approx(1, rel=0.05)


def test_it_keeps_sums_and_no_answers():
    """A sum cannot outgrow 1 / (1 - FADES) answers."""
    it = FirstToken()
    for now in range(2000):
        teach(it, 1000, 1.0, float(now))
    assert not hasattr(it, "__dict__")
    assert it._n <= 1.001 / (1 - FADES)


def test_forecasts_are_trusted_by_enough_of_them_and_their_quartiles():
    it = Accuracy()
    for _ in range(RATIOS // 2 - 1):
        it.add(1.0)
        assert not it.trusted
    it.add(1.0)
    assert it.trusted
    for _ in range(RATIOS // 4 + 2 * LOOKED_AT):
        it.add(1.5)
    assert it.quartiles == (1.0, 1.0, 1.5)
    assert not it.trusted
    for _ in range(RATIOS + LOOKED_AT):
        it.add(0.75)
    assert it.quartiles == (0.75, 0.75, 0.75)
    assert it.trusted


@pytest.mark.parametrize(
    ("ratio", "trusted"), [(0.69, False), (0.7, True), (1.4, True), (1.41, False)]
)
def test_the_bounds_of_trust(ratio, trusted):
    it = Accuracy()
    for _ in range(RATIOS):
        it.add(ratio)
    assert it.trusted == trusted
