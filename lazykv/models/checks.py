"""What callers hand to models, checked before anything runs or changes."""

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from lazykv.dtypes import DType, DTypeLike, bf16, dtype, f16, f32
from lazykv.errors import DTypeError, GraphError, RangeError
from lazykv.kv.pairs import KvPairCache
from lazykv.sessions.context import InferenceContext
from lazykv.spec import whole

T = TypeVar("T")

ROW_DTYPES = (f32, f16, bf16)
"""What the rows of a model's cache may be: its arithmetic is f32, and attention takes 16-bit rows
under f32 queries."""


class Unique:
    """Base of what cannot be copied: it has an identity, or plans and rows that a copy would move
    on as well."""

    instead: ClassVar[str]
    """What to make instead of a copy, for messages."""

    def __reduce__(self) -> NoReturn:
        # Also what copy.copy asks for.
        raise GraphError(
            f"{type(self).__name__}: got a copy or a pickle, need a new one; {self.instead}"
        )


def of_kind(who: str, value: Any, kind: type[T], need: str) -> T:
    """An argument that must be of one class."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise DTypeError(f"{who}: got {got}, need {need}")
    return value


def row_dtype(who: str, given: DTypeLike | None) -> DType:
    """The dtype for a new cache's rows; f32 unless told otherwise."""
    dt = f32 if given is None else dtype(given)
    if dt not in ROW_DTYPES:
        raise DTypeError(f"{who}: got rows of {dt}, need f32, f16 or bf16")
    return dt


def token_ids(who: str, ids: Iterable[SupportsIndex], vocab_size: int) -> NDArray[np.int64]:
    """Token ids as i64 ``[n]``, all of them in the vocabulary."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        got = "text" if isinstance(ids, str | bytes) else type(ids).__name__
        raise DTypeError(f"{who}: got {got}, need token ids; use tokenizer.encode")
    tokens = [whole(who, "token", i) for i in ids]
    for t in tokens:
        if not 0 <= t < vocab_size:
            raise RangeError(f"{who}: got token {t}, need 0 <= token < {vocab_size}")
    return np.asarray(tokens, np.int64)


def check_cache(who: str, cache: object) -> None:
    """Refuse what is no cache of keys and values per head."""
    of_kind(who, cache, KvPairCache, "a KvCache or SlidingKvCache; use new_cache")


def check_context(who: str, ctx: object) -> None:
    """Refuse what is neither a context nor None."""
    if ctx is not None:
        of_kind(who, ctx, InferenceContext, "an InferenceContext or None")


def no_storage(who: str, cleared: bool) -> GraphError:
    """What to raise for a cache whose layers have no storage."""
    if cleared:
        return GraphError(
            f"{who}: got a cleared cache, need one with storage; reset() rewinds and keeps it, "
            "new_cache makes a new one"
        )
    return GraphError(f"{who}: got a cache without storage, need one made by new_cache")
