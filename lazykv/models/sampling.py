"""Choosing the next token from logits, and stopping at given strings."""

import math
from collections.abc import Iterable
from copy import deepcopy

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lazykv.errors import DTypeError, RangeError, ShapeError


class Sampler:
    """Picks a token id from one row of logits.

    `temperature` 0 takes the largest logit (the lowest id of equals). Above 0 it draws from
    softmax(logits / temperature), computed in float64, after keeping at most the `top_k` most
    probable tokens, and of those the fewest whose probability reaches `top_p`. `seed` fixes the
    sequence of draws; None takes fresh entropy.

    Raises RangeError or DTypeError for arguments outside these rules.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.temperature = _number("temperature", temperature)
        if not 0 <= self.temperature < math.inf:
            raise RangeError(f"Sampler: got temperature {temperature}, need 0 or more, finite")
        if top_k is not None and _whole("top_k", top_k) < 1:
            raise RangeError(f"Sampler: got top_k {top_k}, need at least 1; None keeps all")
        if top_p is not None and not 0 < _number("top_p", top_p) <= 1:
            raise RangeError(f"Sampler: got top_p {top_p}, need more than 0 and at most 1")
        if seed is not None and _whole("seed", seed) < 0:
            raise RangeError(f"Sampler: got seed {seed}, need 0 or more; None takes a fresh one")
        self.top_k = top_k
        self.top_p = top_p
        self._random = np.random.Generator(np.random.PCG64(seed))

    def __copy__(self) -> "Sampler":
        return deepcopy(self)  # sharing the source of numbers, each would skip the other's draws

    def __call__(self, logits: ArrayLike) -> int:
        """The id chosen from `logits` `[vocab]`; -inf rules a token out.

        Raises ShapeError if it is not one non-empty row, RangeError if the row has no largest
        finite value (NaN, +inf, or all -inf).
        """
        row, best = _row(logits)
        if self.temperature == 0:
            return best
        ids, weights = self._weighted(row, best)
        return int(ids[_draw(weights, self.uniform())])

    def distribution(self, logits: ArrayLike) -> NDArray[np.float64]:
        """The probabilities ``[vocab]`` that a call would draw from; one 1.0 if greedy."""
        row, best = _row(logits)
        out = np.zeros(row.size)
        if self.temperature == 0:
            out[best] = 1.0
        else:
            ids, weights = self._weighted(row, best)
            out[ids] = weights / weights.sum()
        return out

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        """An id drawn from ``[vocab]`` probabilities with this sampler's randomness."""
        row = _numbers("draw", "probabilities", probabilities)
        return _draw(row.astype(np.float64), self.uniform())

    def uniform(self) -> float:
        """The next random number in [0, 1)."""
        return float(self._random.random())

    def _weighted(
        self, row: NDArray[np.generic], best: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Ids in play and their weights, not normalized."""
        ids = self._candidates(row)
        weights = self._weights(row[ids], float(row[best]))
        return _nucleus(ids, weights, self.top_p) if self.top_p is not None else (ids, weights)

    def _candidates(self, row: NDArray[np.generic]) -> NDArray[np.intp]:
        """Ids in play, most probable first (the lowest id of equals) where an order is needed."""
        if self.top_k is not None and self.top_k < row.size:
            smallest = np.partition(row, row.size - self.top_k)[row.size - self.top_k]
            near = np.flatnonzero(row >= smallest)
        else:
            near = np.arange(row.size)
            if self.top_p is None:
                return near
        ordered = near[np.argsort(-row[near].astype(np.float64), kind="stable")]
        return ordered if self.top_k is None else ordered[: self.top_k]

    def _weights(self, logits: NDArray[np.generic], largest: float) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):  # a tiny temperature sends the rest to -inf, as it should
            return np.exp((logits.astype(np.float64) - largest) / self.temperature)


def _row(logits: ArrayLike) -> tuple[NDArray[np.generic], int]:
    """One checked row of logits, and the id of its largest."""
    row = _numbers("Sampler", "logits", logits)
    best = int(np.argmax(row))  # the first NaN if there is one, else the first largest
    if not math.isfinite(row[best]):
        raise RangeError(f"Sampler: got logit {row[best]} for token {best}, need finite ones")
    return row, best


def _numbers(who: str, name: str, values: ArrayLike) -> NDArray[np.generic]:
    """One non-empty row of real numbers."""
    row = np.asarray(values)
    if row.ndim != 1 or not row.size:
        raise ShapeError(f"{who}: got {name} of shape {list(row.shape)}, need [vocab]")
    if row.dtype.kind in "OSUTbcMm":
        raise DTypeError(f"{who}: got {name} of {row.dtype}, need real numbers")
    return row


def _nucleus(
    ids: NDArray[np.intp], weights: NDArray[np.float64], top_p: float
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    total = np.cumsum(weights)
    kept = int(np.searchsorted(total, top_p * total[-1], side="left")) + 1
    return ids[:kept], weights[:kept]


def _draw(weights: NDArray[np.float64], uniform: float) -> int:
    total = np.cumsum(weights)
    # `uniform` is below 1, but its product may round up to the total itself.
    target = min(uniform * total[-1], np.nextafter(total[-1], 0))
    return int(np.searchsorted(total, target, side="right"))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise DTypeError(f"Sampler: got {name} {value!r}, need a number")
    return float(value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DTypeError(f"Sampler: got {name} {value!r}, need a whole number")
    return int(value)


class StopStrings:
    """Lets text through until one of `stops` appears; neither it nor any of it is let out.

    The stop that ends first in the text counts, of those the longest, so the outcome does not
    depend on how the text is cut into pieces. `stopped` tells whether one was met.

    Raises DTypeError or RangeError if a stop is not a non-empty string.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        if not isinstance(stops, Iterable):
            raise DTypeError(f"StopStrings: got {type(stops).__name__}, need str or several")
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str):
                raise DTypeError(f"StopStrings: got {type(stop).__name__}, need str")
            if not stop:
                raise RangeError("StopStrings: got an empty stop string, need some text")
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What can be let out now that `text` has come; empty once stopped."""
        if not isinstance(text, str):
            raise DTypeError(f"StopStrings.push: got {type(text).__name__}, need str")
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = len(text) - self._may_begin_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string starts with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
