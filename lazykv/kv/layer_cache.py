"""LayerKvCache: one sequence, one layer, f32 rows in one shared, locked buffer."""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from lazykv import config as settings
from lazykv.device import HostArray
from lazykv.dtypes import dtype, f32
from lazykv.errors import (
    BindingError,
    DTypeError,
    GraphError,
    RangeError,
    ShapeError,
    StorageTornError,
)
from lazykv.interchange import host_array, read_only
from lazykv.kv.rows import count
from lazykv.locks import ReadWriteLock, new_hold
from lazykv.ops.rounding import nearest
from lazykv.poison import RowLog
from lazykv.spec import Spec
from lazykv.storage import Storage

R = TypeVar("R")
Row = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The size of one layer's cache; a row holds all heads side by side."""

    max_tokens_per_seq: int = 8192
    num_heads: int = 4
    hidden_dim_per_head: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RangeError(f"KVCacheConfig: got {name} {value!r}, need an integer >= 1")

    @property
    def token_width(self) -> int:
        """Elements of one token's keys (and of its values)."""
        return self.num_heads * self.hidden_dim_per_head


class KVSpan:
    """Rows ``start..end`` of a cache: `keys` and `values` are read-only views ``[n, width]``.

    The views are under the cache's read lock and valid only inside the call that handed them out.
    """

    __slots__ = ("_keys", "_values", "end", "start")

    def __init__(self, keys: Row, values: Row, start: int, end: int) -> None:
        self._keys: Row | None = keys
        self._values: Row | None = values
        self.start = start
        self.end = end

    @property
    def keys(self) -> Row:
        return self._open(self._keys)

    @property
    def values(self) -> Row:
        return self._open(self._values)

    def _open(self, rows: Row | None) -> Row:
        if rows is None:
            raise GraphError(
                f"{self!r}: got a use after its call, need it inside; copy what you keep"
            )
        return rows

    def close(self) -> None:
        """End the span's life; its views are refused from now on."""
        self._keys = self._values = None

    def __len__(self) -> int:
        return self.end - self.start

    def __repr__(self) -> str:
        return f"KVSpan({self.start}..{self.end})"


class _Shared:
    """What every handle of one cache shares: the buffer ``[2, max, width]``, also as readers get
    it, length and lock."""

    __slots__ = ("__weakref__", "length", "lock", "rows", "storage")

    def __init__(self) -> None:
        self.storage: Storage | None = None
        self.rows: HostArray = np.empty((2, 0, 0), np.float32)
        self.length = 0
        self.lock = ReadWriteLock()
        _all_shared.add(self)


_all_shared: weakref.WeakSet[_Shared] = weakref.WeakSet()


def _after_fork() -> None:
    for shared in _all_shared:
        if shared.lock.after_fork() and shared.storage is not None:
            shared.storage.torn = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class LayerKvCache:
    """Keys and values of one layer for one sequence; `config` says how large.

    A `copy.copy` is another handle to the same rows.

    Nothing is allocated before `initialize`. Many threads may read while none writes; a writer
    waits for readers to leave and goes before later ones. Writing from inside a read is refused.
    """

    __slots__ = ("_config", "_shared")

    def __init__(self, config: KVCacheConfig | None = None) -> None:
        config = KVCacheConfig() if config is None else config
        if not isinstance(config, KVCacheConfig):
            got = type(config).__name__
            raise BindingError(f"LayerKvCache: got {got} as config, need a KVCacheConfig")
        self._config = config
        self._shared = _Shared()

    def __copy__(self) -> "LayerKvCache":
        other = LayerKvCache(self.config)
        other._shared = self._shared
        return other

    @property
    def config(self) -> KVCacheConfig:
        return self._config

    # Writing

    def initialize(self, seq_len: SupportsIndex) -> None:
        """Allocate once for the maximum (zeros), and mark ``min(seq_len, max)`` tokens valid.

        Called again it never loses data and never shrinks. `seq_len` 0 is an error.
        """
        n = count("LayerKvCache.initialize", "seq_len", seq_len, 1)
        rows = self.config.max_tokens_per_seq
        with self._writing("initialize"):
            if self._shared.storage is None:
                storage = Storage.allocate((2, rows, self.config.token_width), f32)
                storage.array.fill(0)
                if settings.POISON:
                    storage.row_log = RowLog("LayerKvCache", 1, rows)
                self._shared.rows = read_only(storage.array)
                self._shared.storage = storage
            self._shared.length = max(self._shared.length, min(n, rows))
            log = self._buffer("initialize").row_log
            if log is not None:  # tokens declared valid count as written, with zeros
                log.note(0, min(n, rows))

    def write_kv(self, token_idx: SupportsIndex, keys: object, values: object) -> None:
        """One token's keys and values ``[width]``; the length grows to ``token_idx + 1``."""
        self.write_kv_batch([(token_idx, keys, values)])

    def write_kv_batch(self, entries: Sequence[tuple[SupportsIndex, Any, Any]]) -> None:
        """Several tokens under one lock acquisition. A bad entry anywhere writes nothing."""
        try:
            given = list(entries)
        except TypeError:
            got = type(entries).__name__
            raise DTypeError(
                f"LayerKvCache.write_kv_batch: got {got}, need a sequence of (token, keys, values)"
            ) from None
        checked = [self._entry(entry) for entry in given]
        if not checked:
            return
        with self._writing("write_kv"):
            storage = self._buffer("write_kv")
            keys, values = storage.array
            try:
                for i, k, v in checked:
                    keys[i] = k
                    values[i] = v
            except BaseException:  # all entries fit, so only an interrupt ends this midway
                storage.torn = True
                raise
            if storage.row_log is not None:
                for i, _, _ in checked:
                    storage.row_log.note(i, i + 1)
            self._shared.length = max(self._shared.length, *(i + 1 for i, _, _ in checked))
            storage.version += 1

    def _entry(self, entry: tuple[SupportsIndex, Any, Any]) -> tuple[int, Row, Row]:
        if not isinstance(entry, tuple | list):
            raise DTypeError(
                f"LayerKvCache.write_kv: got entry {entry!r:.40}, need (token, keys, values)"
            )
        if len(entry) != 3:
            raise ShapeError(
                f"LayerKvCache.write_kv: got an entry of {len(entry)} parts, need 3: (token, keys, "
                "values)"
            )
        token_idx, keys, values = entry
        i = count("LayerKvCache.write_kv", "token", token_idx)
        if i >= self.config.max_tokens_per_seq:
            raise RangeError(
                f"LayerKvCache.write_kv: got token {i}, need 0 <= token < "
                f"{self.config.max_tokens_per_seq}"
            )
        self._buffer("write_kv")
        return i, self._row("keys", keys), self._row("values", values)

    def _row(self, what: str, value: object) -> Row:
        array = host_array(value)
        if isinstance(value, list | tuple) and array.dtype.kind in "iuf":
            array = nearest(array, f32)  # Python numbers have no dtype that could differ
        spec = Spec(array.shape, dtype(array.dtype))
        if array.shape != (self.config.token_width,):
            need = Spec((self.config.token_width,), f32)
            raise ShapeError(f"LayerKvCache.write_kv: got {what} {spec}, need {need}")
        if spec.dtype is not f32:
            raise DTypeError(
                f"LayerKvCache.write_kv: got {what} {spec}, need f32; convert them first"
            )
        return array

    # Reading

    def with_read_kv(self, token_idx: SupportsIndex, f: Callable[[Row, Row], R]) -> R:
        """``f(keys, values)`` on read-only views ``[width]`` of one token, under the read lock."""
        i = count("LayerKvCache.with_read_kv", "token", token_idx)
        _check_function("with_read_kv", f)
        with self._reading("with_read_kv", i, i + 1) as (keys, values):
            return f(keys[0], values[0])

    def with_read_range(
        self, start: SupportsIndex, end: SupportsIndex, f: Callable[[KVSpan], R]
    ) -> R:
        """``f(span)`` on read-only views ``[end - start, width]``, under the read lock."""
        first, last = _range("with_read_range", start, end)
        _check_function("with_read_range", f)
        with self._reading("with_read_range", first, last) as (keys, values):
            span = KVSpan(keys, values, first, last)
            try:
                return f(span)
            finally:
                span.close()

    def read_kv(self, token_idx: SupportsIndex) -> tuple[Row, Row]:
        """Copies ``[width]`` of one token's keys and values."""
        return self.with_read_kv(token_idx, lambda k, v: (k.copy(), v.copy()))

    def read_range(self, start: SupportsIndex, end: SupportsIndex) -> tuple[Row, Row]:
        """Copies ``[end - start, width]`` of keys and values."""
        return self.with_read_range(start, end, lambda span: (span.keys.copy(), span.values.copy()))

    def read_range_into(
        self, start: SupportsIndex, end: SupportsIndex, keys_out: HostArray, values_out: HostArray
    ) -> None:
        """Copy n = ``end - start`` rows into the beginning of two contiguous f32 arrays.

        Each is ``[m, width]`` with m >= n, or flat with at least ``n * width`` elements; any other
        shape is refused before anything is copied.
        """
        first, last = _range("read_range_into", start, end)
        n, width = max(0, last - first), self.config.token_width
        given = (("keys", keys_out), ("values", values_out))
        outs = [_output(what, out, n, width) for what, out in given]
        if np.shares_memory(outs[0], outs[1]):
            raise BindingError(
                "LayerKvCache.read_range_into: got keys_out and values_out that share memory, need "
                "two arrays"
            )
        with self._reading("read_range_into", first, last) as rows:
            for out, part in zip(outs, rows, strict=True):
                out.reshape(part.shape)[...] = part

    def len(self) -> int:
        """Valid tokens."""
        return self._shared.length

    __len__ = len

    def is_empty(self) -> bool:
        return self._shared.length == 0

    def __bool__(self) -> bool:
        return True

    # The lock, and the checks under it

    def _buffer(self, who: str) -> Storage:
        if self._shared.storage is None:
            raise GraphError(f"LayerKvCache.{who}: got no buffer, need initialize(seq_len) first")
        if self._shared.storage.torn:
            raise StorageTornError(
                f"LayerKvCache.{who}: got rows whose writer failed midway, need a new cache"
            )
        return self._shared.storage

    @contextmanager
    def _writing(self, who: str) -> Iterator[None]:
        hold = new_hold()
        try:
            self._shared.lock.acquire_write(hold, f"LayerKvCache.{who}")
            yield
        finally:
            self._shared.lock.release(hold)

    @contextmanager
    def _reading(self, who: str, start: int, end: int) -> Iterator[tuple[Row, Row]]:
        hold = new_hold()
        try:
            self._shared.lock.acquire_read(hold)
            storage, length = self._buffer(who), self._shared.length
            if not start <= end <= length:
                raise RangeError(
                    f"LayerKvCache.{who}: got tokens {start}..{end}, need 0 <= start <= end <= "
                    f"length {length}"
                )
            if storage.row_log is not None:
                storage.row_log.check(f"LayerKvCache.{who}", slice(start, end))
            rows = self._shared.rows[:, start:end]
            yield rows[0], rows[1]
        finally:
            self._shared.lock.release(hold)

    def __repr__(self) -> str:
        c, n = self.config, self._shared.length
        return f"LayerKvCache({n} of {c.max_tokens_per_seq} tokens x {c.token_width})"


def _range(who: str, start: SupportsIndex, end: SupportsIndex) -> tuple[int, int]:
    who = f"LayerKvCache.{who}"
    return count(who, "start", start), count(who, "end", end)


def _check_function(who: str, f: object) -> None:
    if not callable(f):
        raise DTypeError(f"LayerKvCache.{who}: got {type(f).__name__} as f, need a function")


def _output(what: str, out: HostArray, n: int, width: int) -> HostArray:
    """The first n rows of a caller's array, as one line of its memory."""
    who = f"LayerKvCache.read_range_into: got {what}_out"
    if not isinstance(out, np.ndarray) or out.dtype != np.float32:
        raise DTypeError(f"{who} of {getattr(out, 'dtype', type(out).__name__)}, need an f32 array")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ShapeError(
            f"{who} that is read-only or not contiguous, need writable, contiguous memory"
        )
    if out.ndim == 1 and out.size < n * width:
        raise ShapeError(f"{who} of {out.size} elements, need at least {n * width}")
    if out.ndim != 1 and (out.ndim != 2 or len(out) < n or out.shape[1] != width):
        raise ShapeError(f"{who} {list(out.shape)}, need [m,{width}] with m >= {n}, or a flat one")
    return np.asarray(out).reshape(-1)[: n * width]
