"""LayerKvCache: one sequence, one layer, f32 rows behind one lock."""

import copy
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_state import machine_settings

import lazykv as lk
from lazykv.errors import StorageTornError

SMALL = lk.KVCacheConfig(max_tokens_per_seq=8, num_heads=2, hidden_dim_per_head=3)
WIDTH = 6


def row(value: float, width: int = WIDTH) -> np.ndarray:
    return np.full(width, value, np.float32)


def make(*values: float, config: lk.KVCacheConfig = SMALL) -> lk.LayerKvCache:
    """Token i holds keys ``values[i]`` and values 100 more."""
    cache = lk.LayerKvCache(config)
    if values:
        cache.initialize(1)
        cache.write_kv_batch([(i, row(x), row(x + 100)) for i, x in enumerate(values)])
    return cache


def state(cache: lk.LayerKvCache) -> object:
    storage = cache._shared.storage
    if storage is None:
        return (cache.len(), cache.config)
    return (cache.len(), cache.config, storage.id, storage.version, storage.array.tobytes())


def refused(cache: lk.LayerKvCache, error: type[BaseException], words: str, call: Callable) -> None:
    before = state(cache)
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert state(cache) == before


def run_threads(*functions: Callable[[], None], timeout: float = 30) -> None:
    failures: list[BaseException] = []

    def guarded(f: Callable[[], None]) -> None:
        try:
            f()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout)
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if failures:
        raise failures[0]


# Configuration and construction


def test_the_documented_defaults():
    config = lk.LayerKvCache().config
    assert (config.max_tokens_per_seq, config.num_heads, config.hidden_dim_per_head) == (
        8192,
        4,
        64,
    )
    assert config.token_width == 256
    assert SMALL.token_width == WIDTH
    assert config == lk.KVCacheConfig()


@pytest.mark.parametrize("name", ["max_tokens_per_seq", "num_heads", "hidden_dim_per_head"])
@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None, "8"])
def test_sizes_are_whole_and_positive(name, bad):
    with pytest.raises(lk.RangeError, match=f"got {name} {bad!r}, need an integer >= 1"):
        lk.KVCacheConfig(**{name: bad})


def test_the_configuration_is_fixed():
    cache = make(1)
    with pytest.raises(AttributeError):
        cache.config = lk.KVCacheConfig()
    with pytest.raises(AttributeError):
        cache.config.num_heads = 7
    with pytest.raises(lk.BindingError, match="got int as config, need a KVCacheConfig"):
        lk.LayerKvCache(8)


def test_nothing_is_allocated_before_initialize():
    before = lk.stats().allocations
    cache = make()
    assert (cache.len(), len(cache), cache.is_empty(), bool(cache)) == (0, 0, True, True)
    for verb, call in {
        "write_kv": lambda: cache.write_kv(0, row(1), row(1)),
        "with_read_kv": lambda: cache.with_read_kv(0, print),
        "with_read_range": lambda: cache.with_read_range(0, 0, print),
        "read_range_into": lambda: cache.read_range_into(0, 0, row(0), row(0)),
    }.items():
        refused(cache, lk.GraphError, f"LayerKvCache.{verb}: got no buffer, need initialize", call)
    cache.write_kv_batch([])
    assert lk.stats().allocations == before
    cache.initialize(2)
    assert lk.stats().allocations == before + 1


def test_initialize_allocates_once_for_the_maximum():
    cache = make()
    cache.initialize(3)
    storage = cache._shared.storage
    assert (storage.shape, storage.dtype) == ((2, 8, WIDTH), lk.f32)
    assert (cache.len(), cache.is_empty()) == (3, False)
    assert not cache.read_range(0, 3)[0].any()
    before = lk.stats().allocations
    cache.write_kv(2, row(5), row(6))
    for n, length in ((1, 3), (5, 5), (np.int64(4), 5), (100, 8), (2, 8)):
        cache.initialize(n)
        assert cache.len() == length
    assert cache._shared.storage is storage
    assert lk.stats().allocations == before
    assert cache.read_kv(2)[0].tolist() == [5] * WIDTH


def test_more_tokens_than_fit_are_marked_up_to_the_maximum():
    cache = make()
    cache.initialize(9)
    assert cache.len() == 8


@pytest.mark.parametrize(
    ("n", "error", "words"),
    [
        (0, lk.RangeError, "got seq_len 0"),
        (-1, lk.RangeError, "got seq_len -1"),
        (2.0, lk.DTypeError, "got seq_len 2.0"),
        (None, lk.DTypeError, "got seq_len None"),
        (True, lk.DTypeError, "got seq_len True"),
    ],
)
def test_bad_lengths_are_refused(n, error, words):
    for cache in (make(), make(1, 2)):
        call = partial(cache.initialize, n)
        refused(cache, error, f"LayerKvCache.initialize: {words}", call)


def test_a_maximum_that_no_memory_holds_is_refused():
    cache = make(config=lk.KVCacheConfig(2**44, 4, 64))
    refused(cache, lk.OutOfMemory, str(2**55), lambda: cache.initialize(1))


# Writing


def test_a_write_extends_the_length():
    cache = make(1)
    cache.write_kv(np.int32(4), row(5), row(105))
    assert cache.len() == 5
    cache.write_kv(2, row(3), row(103))
    assert cache.len() == 5
    keys, values = cache.read_range(0, 5)
    assert keys[:, 0].tolist() == [1, 0, 3, 0, 5]
    assert values[:, 0].tolist() == [101, 0, 103, 0, 105]


def test_a_batch_is_one_write():
    cache = make(1)
    version = cache._shared.storage.version
    cache.write_kv_batch([(3, row(4), row(104)), (1, row(2), row(102)), (3, row(9), row(109))])
    assert (cache.len(), cache._shared.storage.version) == (4, version + 1)
    assert cache.read_range(0, 4)[0][:, 0].tolist() == [1, 2, 0, 9]  # a later entry wins
    before = state(cache)
    cache.write_kv_batch([])
    assert state(cache) == before


def test_what_the_caller_does_afterwards_is_not_seen_p4():
    cache, mine = make(1), row(7)
    cache.write_kv(0, mine, mine)
    mine.fill(-1)
    keys, _ = cache.read_kv(0)
    keys.fill(-2)
    assert cache.read_kv(0)[0].tolist() == [7] * WIDTH


def test_rows_come_in_every_form():
    cache = make(1)
    wide = np.arange(2 * WIDTH, dtype=np.float32)
    read_only = wide[:WIDTH].copy()
    read_only.flags.writeable = False
    storage = lk.Storage.from_array(wide[:WIDTH])
    for value in (wide[:WIDTH], read_only, storage, memoryview(read_only), list(range(WIDTH)),
                  tuple(float(x) for x in range(WIDTH)), wide[:WIDTH].astype(">f4"),
                  np.repeat(wide[:WIDTH], 2)[::2]):  # fmt: skip
        cache.write_kv(0, row(0), row(0))
        cache.write_kv(0, value, value)
        assert [part.tolist() for part in cache.read_kv(0)] == [list(range(WIDTH))] * 2


BAD_ENTRIES = [
    ((8, row(1), row(1)), lk.RangeError, "got token 8, need 0 <= token < 8"),
    ((-1, row(1), row(1)), lk.RangeError, "got token -1"),
    ((1.0, row(1), row(1)), lk.DTypeError, "got token 1.0"),
    ((2**70, row(1), row(1)), lk.RangeError, f"got token {2**70}"),
    ((0, row(1, 5), row(1)), lk.ShapeError, "got keys f32[5], need f32[6]"),
    ((0, row(1), row(1, 7)), lk.ShapeError, "got values f32[7], need f32[6]"),
    ((0, row(1, 1), row(1)), lk.ShapeError, "got keys f32[1]"),
    ((0, row(1)[None], row(1)), lk.ShapeError, "got keys f32[1,6]"),
    ((0, 1.0, row(1)), lk.ShapeError, "got keys"),
    ((0, row(1).astype(np.float64), row(1)), lk.DTypeError, "got keys f64[6], need f32"),
    ((0, row(1), row(1).astype(np.float16)), lk.DTypeError, "got values f16[6], need f32"),
    ((0, row(1).astype(np.int32), row(1)), lk.DTypeError, "got keys i32[6]"),
    ((0, memoryview(np.zeros(6)), row(1)), lk.DTypeError, "got keys f64[6]"),
    ((0, [None] * 6, row(1)), lk.DTypeError, "dtype('O')"),
    ((0, ["1"] * 6, row(1)), lk.DTypeError, "U1"),
    ((0, "123456", row(1)), lk.DTypeError, "U6"),
    ((0, [1, [2]], row(1)), lk.ShapeError, "need a rectangular one"),
    ((0, None, row(1)), lk.DTypeError, "dtype('O')"),
]
NO_ENTRIES = [
    (5, lk.DTypeError, "got entry 5, need (token, keys, values)"),
    (None, lk.DTypeError, "got entry None, need (token, keys, values)"),
    (row(1), lk.DTypeError, "got entry "),
    ((1,), lk.ShapeError, "got an entry of 1 parts, need 3: (token, keys, values)"),
    ((1, row(1), row(1), 0), lk.ShapeError, "got an entry of 4 parts, need 3"),
]


@pytest.mark.parametrize(("entry", "error", "words"), BAD_ENTRIES + NO_ENTRIES)
def test_a_bad_entry_anywhere_writes_nothing(entry, error, words):
    cache = make(1, 2, 3)
    good = [(0, row(7), row(8)), (5, row(9), row(10))]
    if isinstance(entry, tuple) and len(entry) == 3:
        refused(cache, error, words, lambda: cache.write_kv(*entry))
    for place in range(3):
        entries = [*good[:place], entry, *good[place:]]
        refused(cache, error, words, lambda e=entries: cache.write_kv_batch(e))


@pytest.mark.parametrize("entries", [None, 5, np.array(5)])
def test_a_batch_is_a_sequence(entries):
    cache = make(1, 2, 3)
    words = f"LayerKvCache.write_kv_batch: got {type(entries).__name__}, need a sequence of (token,"
    refused(cache, lk.DTypeError, words, lambda: cache.write_kv_batch(entries))


def test_an_interrupted_write_is_torn():
    """Entries are checked first, so only an interrupt can end a batch midway."""
    cache = make(1, 2, 3)

    class Stopping:
        def __setitem__(self, i, value):
            raise KeyboardInterrupt

    real = cache._shared.storage.array
    cache._shared.storage.array = (real[0], Stopping())  # keys land, values do not
    with pytest.raises(KeyboardInterrupt):
        cache.write_kv(0, row(5), row(6))
    cache._shared.storage.array = real
    for call in (lambda: cache.read_kv(1), lambda: cache.write_kv(1, row(1), row(1))):
        with pytest.raises(StorageTornError, match="need a new cache"):
            call()
    assert cache.len() == 3  # and the lock is free


# Reading


def test_views_are_read_only_and_hold_the_rows():
    cache = make(1, 2, 3)

    def look(keys, values):
        assert (keys.shape, values.shape) == ((WIDTH,), (WIDTH,))
        assert np.shares_memory(keys, cache._shared.storage.array)
        for part in (keys, values):
            with pytest.raises(ValueError, match="read-only"):
                part[0] = 9
            with pytest.raises(ValueError, match="WRITEABLE"):
                part.setflags(write=True)
        return float(keys[0]), float(values[0])

    assert cache.with_read_kv(1, look) == (2, 102)
    assert cache.with_read_range(1, 3, lambda s: s.keys[:, 0].tolist()) == [2, 3]


def test_a_span_lives_inside_its_call():
    cache = make(1, 2, 3)
    kept = []

    def look(span):
        assert (span.start, span.end, len(span)) == (1, 3, 2)
        assert span.keys.shape == span.values.shape == (2, WIDTH)
        assert not span.keys.flags.writeable
        assert not span.values.flags.writeable
        assert np.shares_memory(span.values, cache._shared.storage.array)
        for part in (span.keys, span.values):
            with pytest.raises(ValueError, match="WRITEABLE"):
                part.setflags(write=True)
        kept.append(span)
        return span.values[:, 0].tolist()

    assert cache.with_read_range(1, 3, look) == [102, 103]
    for part in ("keys", "values"):
        with pytest.raises(lk.GraphError, match=r"KVSpan\(1\.\.3\): got a use after its call"):
            getattr(kept[0], part)

    def fail(span):
        kept.append(span)
        raise KeyError

    with pytest.raises(KeyError):
        cache.with_read_range(0, 1, fail)
    with pytest.raises(lk.GraphError, match="after its call"):
        kept[1].keys  # noqa: B018
    cache.write_kv(0, row(1), row(1))  # a failed reader holds no lock


def test_copies_are_the_callers_own():
    cache = make(1, 2, 3)
    keys, values = cache.read_range(0, 2)
    assert (keys.shape, keys.dtype, values.shape) == ((2, WIDTH), np.float32, (2, WIDTH))
    assert not np.shares_memory(keys, cache._shared.storage.array)
    cache.write_kv(0, row(9), row(9))
    assert (keys[:, 0].tolist(), values[:, 0].tolist()) == ([1, 2], [101, 102])
    assert [part.tolist() for part in cache.read_kv(0)] == [[9] * WIDTH] * 2


def test_an_empty_range_is_a_range_d5():
    cache = make(1, 2, 3)
    for at in (0, 2, 3):
        keys, values = cache.read_range(at, at)
        assert keys.shape == values.shape == (0, WIDTH)
        cache.read_range_into(at, at, np.empty(0, np.float32), np.empty(0, np.float32))


READS = {
    "with_read_range": lambda c, a, b: c.with_read_range(a, b, lambda span: 1),
    "read_range_into": lambda c, a, b: c.read_range_into(a, b, row(0, 99), row(0, 99)),
}


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize(
    ("start", "end", "error", "words"),
    [
        (0, 4, lk.RangeError, "got tokens 0..4, need 0 <= start <= end <= length 3"),
        (4, 4, lk.RangeError, "got tokens 4..4"),
        (2, 1, lk.RangeError, "got tokens 2..1"),
        (0, 8, lk.RangeError, "got tokens 0..8"),
        (-1, 2, lk.RangeError, "got start -1"),
        (0, -1, lk.RangeError, "got end -1"),
        (0.0, 1, lk.DTypeError, "got start 0.0"),
        (0, None, lk.DTypeError, "got end None"),
    ],
)
def test_bad_ranges_are_refused(verb, start, end, error, words):
    cache = make(1, 2, 3)
    call = READS[verb]
    refused(cache, error, f"LayerKvCache.{verb}: {words}", lambda: call(cache, start, end))


@pytest.mark.parametrize(
    ("token", "error", "words"),
    [(3, lk.RangeError, "got tokens 3..4"), (-1, lk.RangeError, "got token -1"),
     ("0", lk.DTypeError, "got token '0'")],
)  # fmt: skip
def test_bad_tokens_are_refused(token, error, words):
    cache = make(1, 2, 3)
    refused(cache, error, words, lambda: cache.with_read_kv(token, lambda k, v: 1))
    refused(cache, error, words, lambda: cache.read_kv(token))


@pytest.mark.parametrize("f", [None, 5, "read"])
def test_what_reads_is_a_function(f):
    cache = make(1, 2, 3)
    words = f"got {type(f).__name__} as f, need a function"
    refused(
        cache, lk.DTypeError, f"LayerKvCache.with_read_kv: {words}",
        lambda: cache.with_read_kv(0, f),
    )  # fmt: skip
    refused(
        cache, lk.DTypeError, f"LayerKvCache.with_read_range: {words}",
        lambda: cache.with_read_range(0, 1, f),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(2 * WIDTH,), (2, WIDTH), (3, WIDTH), (50,)])
def test_outputs_may_be_larger_than_needed(shape):
    cache = make(1, 2, 3)
    outs = [np.full(shape, -1, np.float32) for _ in range(2)]
    cache.read_range_into(1, 3, *outs)
    for out, first in zip(outs, (2, 102), strict=True):
        line = out.reshape(-1)
        assert line[: 2 * WIDTH].tolist() == [first] * WIDTH + [first + 1] * WIDTH
        assert (line[2 * WIDTH :] == -1).all()


def wide(*shape: int) -> np.ndarray:
    return np.full(shape, -1, np.float32)


def bad_outputs() -> list[tuple[object, object, type[lk.LazyKvError], str]]:
    good, read_only, both = row(-1, 12), row(-1, 12), row(-1, 20)
    read_only.flags.writeable = False
    return [
        (row(-1, 11), good, lk.ShapeError, "keys_out of 11 elements, need at least 12"),
        (good, row(-1, 11), lk.ShapeError, "values_out of 11 elements"),
        (good.astype(np.float64), good, lk.DTypeError, "keys_out of float64"),
        (good, [0.0] * 12, lk.DTypeError, "values_out of list"),
        (good, None, lk.DTypeError, "values_out of NoneType"),
        (good, read_only, lk.ShapeError, "values_out that is read-only"),
        (row(-1, 24)[::2], good, lk.ShapeError, "keys_out that is read-only or not contiguous"),
        (good, np.full((WIDTH, 2), -1, np.float32).T, lk.ShapeError, "not contiguous"),
        (wide(4, 3), good, lk.ShapeError, "keys_out [4, 3], need [m,6] with m >= 2, or a flat one"),
        (good, wide(2, 8), lk.ShapeError, "values_out [2, 8], need [m,6] with m >= 2"),
        (wide(1, WIDTH), good, lk.ShapeError, "keys_out [1, 6], need [m,6]"),
        (wide(WIDTH, 2), good, lk.ShapeError, "keys_out [6, 2], need [m,6]"),
        (wide(1, 2, WIDTH), good, lk.ShapeError, "keys_out [1, 2, 6], need [m,6]"),
        (wide(), good, lk.ShapeError, "keys_out [], need [m,6]"),
        (good, good, lk.BindingError, "that share memory"),
        (both[:12], both[8:], lk.BindingError, "that share memory"),
    ]


@pytest.mark.parametrize("case", range(len(bad_outputs())))
def test_bad_outputs_are_refused_before_any_copy(case):
    cache = make(1, 2, 3)
    keys, values, error, words = bad_outputs()[case]
    refused(cache, error, words, lambda: cache.read_range_into(1, 3, keys, values))
    for out in (keys, values):
        if isinstance(out, np.ndarray):
            assert (out == -1).all()


# Sharing, texts, memory


def test_a_copy_is_another_handle_to_the_same_rows():
    cache = make()
    other = copy.copy(cache)
    cache.initialize(2)
    assert (other.len(), other.config) == (2, cache.config)
    other.write_kv(3, row(7), row(8))
    assert cache.len() == 4
    assert cache.read_kv(3)[1].tolist() == [8] * WIDTH
    assert copy.copy(other)._shared is cache._shared


def test_texts_never_print_buffers():
    cache = make(1, 2, 3)
    texts = [repr(cache), str(cache), cache.with_read_range(0, 2, repr), repr(cache.config)]
    assert texts[0] == texts[1] == "LayerKvCache(3 of 8 tokens x 6)"
    assert texts[2] == "KVSpan(0..2)"
    assert all(len(t) < 100 and "array" not in t for t in texts)


def test_view_paths_and_writes_allocate_no_buffer():
    """Rows of 2 MiB: none is copied by a view, a write, or a read into the caller's arrays."""
    config = lk.KVCacheConfig(max_tokens_per_seq=4, num_heads=1, hidden_dim_per_head=1 << 19)
    cache, one = lk.LayerKvCache(config), row(1, 1 << 19)
    cache.initialize(4)
    outs = [np.empty((2, 1 << 19), np.float32) for _ in range(2)]
    entries = [(i, one, one) for i in range(4)]

    def paths():
        cache.write_kv(1, one, one)
        cache.write_kv_batch(entries)
        cache.with_read_kv(2, lambda k, v: k[0] + v[0])
        cache.with_read_range(0, 4, lambda span: span.keys[0, 0] + span.values[3, 0])
        cache.read_range_into(1, 3, *outs)

    paths()
    before = lk.stats().allocations
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        paths()
        peak = tracemalloc.get_traced_memory()[1] - base
        cache.read_kv(0)
        copied = tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10 < one.nbytes <= copied
    assert lk.stats().allocations == before


# Threads


def test_readers_run_side_by_side():
    cache = make(1, 2)
    together = threading.Barrier(4, timeout=10)

    def read():
        cache.with_read_kv(0, lambda k, v: together.wait())
        cache.with_read_range(0, 2, lambda span: together.wait())

    run_threads(*[read] * 4)


def test_a_writer_is_not_starved_and_no_batch_is_half_seen_p3():
    cache = make(*[0] * 8)
    stop, reads, half = threading.Event(), [0] * 4, []

    def read(me: int) -> None:
        def look(span):
            reads[me] += 1
            if len(np.unique(span.keys)) != 1 or (span.values != span.keys + 100).any():
                half.append(span.keys[:, 0].tolist())

        while not stop.is_set():
            cache.with_read_range(0, 8, look)

    def write() -> None:
        try:
            while not all(reads):  # everyone reads by now
                time.sleep(0)
            for value in range(1, 101):
                cache.write_kv_batch([(i, row(value), row(value + 100)) for i in range(8)])
        finally:
            stop.set()

    run_threads(write, *(lambda me=me: read(me) for me in range(4)))
    assert not half
    assert cache.read_kv(7)[0].tolist() == [100] * WIDTH


def test_writers_of_two_handles_take_turns():
    cache = make(*[0] * 8)

    def write(me: int) -> None:
        mine = copy.copy(cache)
        for n in range(200):
            value = 1000 * me + n
            mine.write_kv_batch([(i, row(value), row(value)) for i in range(8)])

    run_threads(*(lambda me=me: write(me) for me in (1, 2)))
    assert len(np.unique(cache.read_range(0, 8)[0])) == 1


def test_writing_from_inside_a_read_is_refused_p2():
    cache = make(1, 2)
    one = row(5)

    def all_writes(*_):
        for call in (
            lambda: cache.write_kv(0, one, one),
            lambda: copy.copy(cache).write_kv_batch([(0, one, one)]),
            lambda: cache.initialize(5),
        ):
            with pytest.raises(lk.StorageLockError, match=r"LayerKvCache.*read to end first"):
                call()
        return cache.read_kv(1)[0][0]  # reads nest

    def work():
        assert cache.with_read_range(0, 1, all_writes) == 2
        assert cache.with_read_kv(0, all_writes) == 2

    run_threads(work, timeout=5)
    assert (cache.len(), cache.read_kv(0)[0][0]) == (2, 1)
    cache.write_kv(0, one, one)


def test_a_reader_waits_for_the_writer():
    cache, order = make(1), []
    inside, go = threading.Event(), threading.Event()

    def read_long():
        def look(k, v):
            inside.set()
            go.wait(10)
            order.append("reader left")

        cache.with_read_kv(0, look)

    def write():
        inside.wait(10)
        threading.Timer(0.05, go.set).start()
        cache.write_kv(0, row(2), row(2))
        order.append("written")

    run_threads(read_long, write)
    assert order == ["reader left", "written"]


FORK = """
import os, threading, sys
import numpy as np
import lazykv as lk
from lazykv.errors import StorageTornError

def cache():
    made = lk.LayerKvCache(lk.KVCacheConfig(4, 1, 2))
    made.initialize(1)
    return made

read, written, free = cache(), cache(), cache()
row = np.ones(2, np.float32)
inside, go = [threading.Event() for _ in range(2)], threading.Event()

def hold_read():
    read.with_read_kv(0, lambda k, v: (inside[0].set(), go.wait(60)))

def hold_write():
    with written._writing("write_kv"):
        inside[1].set()
        go.wait(60)

for f in (hold_read, hold_write):
    threading.Thread(target=f, daemon=True).start()
for event in inside:
    event.wait(60)
child = os.fork()
if child == 0:
    for c in (read, free):
        c.write_kv(0, row, row)
        assert c.read_kv(0)[0].tolist() == [1, 1]
    try:
        written.read_kv(0)
    except StorageTornError:
        os._exit(0)
    os._exit(5)
_, status = os.waitpid(child, 0)
go.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_not_held_up_by_threads_that_it_has_not_p6():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK], timeout=60, check=False
    )
    assert done.returncode == 0


# Against plain lists


class LayerMachine(RuleBasedStateMachine):
    """Keys of a token are ``n`` and its values ``n + 0.5``; the model is one list of numbers."""

    @initialize()
    def build(self) -> None:
        self.cache = make()
        self.handles = [self.cache, copy.copy(self.cache)]
        self.rows: list[float] | None = None
        self.length = 0
        self.next_value = 0.0

    def value(self) -> float:
        self.next_value += 1
        return self.next_value

    def call(self, bad: bool, action: Callable[[], object]) -> bool:
        if not bad:
            action()
            return True
        before = state(self.cache)
        with pytest.raises(lk.LazyKvError):
            action()
        assert state(self.cache) == before
        return False

    @rule(n=st.integers(-1, 10), handle=st.integers(0, 1))
    def grow(self, n: int, handle: int) -> None:
        if self.call(n < 1, lambda: self.handles[handle].initialize(n)):
            self.rows = self.rows or [0.0] * 8
            self.length = max(self.length, min(n, 8))

    @rule(
        tokens=st.lists(st.integers(-1, 8), max_size=4), width=st.sampled_from([6, 6, 6, 5]),
        handle=st.integers(0, 1),
    )  # fmt: skip
    def write(self, tokens: list[int], width: int, handle: int) -> None:
        numbers = [self.value() for _ in tokens]
        entries = [(t, row(n, width), row(n + 0.5)) for t, n in zip(tokens, numbers, strict=True)]
        bad = bool(tokens) and (
            self.rows is None or width != 6 or min(tokens) < 0 or max(tokens) > 7
        )
        if self.call(bad, lambda: self.handles[handle].write_kv_batch(entries)):
            for t, n in zip(tokens, numbers, strict=True):
                self.rows[t] = n
                self.length = max(self.length, t + 1)

    @rule(start=st.integers(0, 9), end=st.integers(0, 9), handle=st.integers(0, 1))
    def read(self, start: int, end: int, handle: int) -> None:
        bad = self.rows is None or not start <= end <= self.length
        cache = self.handles[handle]
        outs = [row(-1, 9 * WIDTH) for _ in range(2)]
        if not self.call(bad, lambda: cache.read_range_into(start, end, *outs)):
            self.call(True, lambda: cache.read_range(start, end))
            return
        keys = [x for x in self.rows[start:end] for _ in range(WIDTH)]
        rest = [-1] * (9 * WIDTH - len(keys))
        assert outs[0].tolist() == keys + rest
        assert outs[1].tolist() == [x and x + 0.5 for x in keys] + rest

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        for cache in self.handles:
            assert (cache.len(), len(cache), cache.is_empty()) == (
                self.length, self.length, self.length == 0
            )  # fmt: skip
        if self.rows is not None:
            keys, values = self.cache._shared.storage.to_numpy()
            assert keys.tolist() == [[x] * WIDTH for x in self.rows]
            assert (values[keys > 0] == keys[keys > 0] + 0.5).all()


LayerMachine.TestCase.settings = machine_settings()
TestLayerMachine = LayerMachine.TestCase
