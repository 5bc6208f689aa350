"""Sampler and StopStrings."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lazykv.errors import DTypeError, RangeError, ShapeError
from lazykv.models.sampling import Sampler, StopStrings

LOGITS = np.array([0.0, 3.0, 1.0, 3.0, -np.inf, 2.0], np.float32)


def frequencies(sampler, n=20000):
    return np.bincount([sampler(LOGITS) for _ in range(n)], minlength=6) / n


def softmax(logits, temperature=1.0):
    weights = np.exp(np.asarray(logits, np.float64) / temperature)
    return weights / weights.sum()


def test_greedy_takes_the_lowest_of_equals():
    assert Sampler()(LOGITS) == 1
    assert Sampler()([1, 1]) == 0
    assert type(Sampler()(LOGITS)) is int


def test_seeded_draws_repeat():
    first, second, other = (Sampler(1.0, seed=seed) for seed in (7, 7, 8))
    draws = [[sampler(LOGITS) for _ in range(50)] for sampler in (first, second, other)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_softmax(temperature):
    found = frequencies(Sampler(temperature, seed=1))
    np.testing.assert_allclose(found, softmax(LOGITS, temperature), atol=0.015)
    assert found[4] == 0


def test_top_k_keeps_the_k_largest_lowest_ids_first():
    assert set(np.flatnonzero(frequencies(Sampler(1.0, top_k=1, seed=1), 100))) == {1}
    found = frequencies(Sampler(1.0, top_k=3, seed=1))
    expected = softmax(np.where(np.isin(np.arange(6), [1, 3, 5]), LOGITS, -np.inf))
    np.testing.assert_allclose(found, expected, atol=0.015)
    assert set(np.flatnonzero(frequencies(Sampler(1.0, top_k=99, seed=1)))) == {0, 1, 2, 3, 5}


def test_top_p_keeps_the_fewest_that_reach_it():
    probabilities = softmax(LOGITS)
    largest = probabilities[1]
    for top_p, kept in [(largest * 0.99, {1}), (largest * 1.01, {1, 3}), (1.0, {0, 1, 2, 3, 5})]:
        assert set(np.flatnonzero(frequencies(Sampler(1.0, top_p=top_p, seed=1)))) == kept


def test_top_k_goes_before_top_p():
    # Of the two kept by top_k each has half of the probability, which is enough for top_p.
    found = frequencies(Sampler(1.0, top_k=2, top_p=0.5, seed=1), 200)
    assert set(np.flatnonzero(found)) == {1}


def test_of_many_equals_the_lowest_ids_are_kept():
    logits = np.tile([0.0, 1.0], 500)
    each = softmax(logits)[1]
    for options in ({"top_k": 5}, {"top_p": 4.5 * each}):
        sampler = Sampler(1.0, seed=1, **options)
        assert {sampler(logits) for _ in range(200)} == {1, 3, 5, 7, 9}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-53, 2)])
def test_the_ends_of_the_draw_never_take_a_token_that_is_ruled_out(uniform, token):
    sampler = Sampler(1.0)
    sampler._random = SimpleNamespace(random=lambda: uniform)
    assert sampler([-np.inf, 0.0, 0.1, -np.inf]) == token


def test_a_tiny_temperature_is_greedy_without_overflow():
    assert {Sampler(1e-300, seed=seed)([0.0, 1.0, -1e30]) for seed in range(20)} == {1}


@pytest.mark.parametrize(
    "logits", [[0.0, np.nan, 9.0], [np.inf, 0.0], [-np.inf, -np.inf], [np.nan]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_largest_are_refused(logits, temperature):
    with pytest.raises(RangeError, match="Sampler: got logit"):
        Sampler(temperature)(logits)


@pytest.mark.parametrize("logits", [[], [[1.0]], 3.0])
def test_logits_of_another_shape_are_refused(logits):
    with pytest.raises(ShapeError, match="need \\[vocab\\]"):
        Sampler()(logits)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1}, RangeError),
        ({"temperature": float("nan")}, RangeError),
        ({"temperature": float("inf")}, RangeError),
        ({"temperature": "hot"}, DTypeError),
        ({"temperature": True}, DTypeError),
        ({"top_k": 0}, RangeError),
        ({"top_k": 1.5}, DTypeError),
        ({"top_p": 0.0}, RangeError),
        ({"top_p": 1.1}, RangeError),
        ({"top_p": float("nan")}, RangeError),
        ({"seed": -1}, RangeError),
        ({"seed": "x"}, DTypeError),
    ],
)
def test_arguments_are_checked(options, error):
    with pytest.raises(error, match=next(iter(options))):
        Sampler(**options)


def run(stops, pieces):
    matcher = StopStrings(stops)
    out = "".join([*(matcher.push(piece) for piece in pieces), matcher.finish()])
    return out, matcher.stopped


def by_hand(stops, text):
    """The shortest beginning of the text that ends with a stop, without it."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=8)


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3), PIECES)
@example(["abc", "b"], ["abc"])
@example(["aab"], ["a", "a", "a", "b"])
def test_stops_do_not_depend_on_the_pieces(stops, pieces):
    assert run(stops, pieces) == by_hand(stops, "".join(pieces))


def test_text_is_held_back_only_while_it_may_begin_a_stop():
    matcher = StopStrings(["<end>"])
    assert [matcher.push(piece) for piece in ("a<", "en", "x<e", "nd", ">z")] == [
        "a", "", "<enx", "", "",
    ]  # fmt: skip
    assert matcher.stopped
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_no_stops_holds_nothing_back():
    assert StopStrings().push("abc") == "abc"
    assert StopStrings("abc").push("zab") == "z"  # a single string is one stop


@pytest.mark.parametrize(("stops", "error"), [([""], RangeError), ([1], DTypeError)])
def test_stops_are_checked(stops, error):
    with pytest.raises(error, match="StopStrings"):
        StopStrings(stops)
