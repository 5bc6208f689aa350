"""The bytes of a pool: blocks, copies on write, eviction and restoring."""

import numpy as np
import pytest

from lazykv.testing import reference
from lazykv.testing.compare import check_bits, check_close
from lazykv.testing.golden import STORED, random_of
from lazykv.testing.paging import block_bytes, fill_block
from lazykv.testing.target import Target


@pytest.mark.parametrize("dtype", STORED)
def test_a_block_holds_what_is_written_and_no_other_changes(target: Target, dtype: str) -> None:
    pool = target.pool(blocks=5, dtype=dtype)
    want = {b: fill_block(pool, b, "first") for b in range(5)}
    want[2] = fill_block(pool, 2, "second")
    for block, data in want.items():
        assert block_bytes(pool, block) == data, f"block {block} of {dtype}"


def test_a_new_pool_is_zeroed(target: Target) -> None:
    pool = target.pool(blocks=3)
    for layer in range(2):
        for slot in (0, 1):
            store = pool.slot_storage(layer, slot)
            assert store is not None
            check_bits("a new pool", store.to_numpy(), np.zeros(pool.pool_shape, np.float32))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8_e5m2"])
def test_a_shared_block_is_copied_before_it_is_written(target: Target, dtype: str) -> None:
    pool = target.pool(dtype=dtype)
    a = pool.open()
    pool.append(a, 6)
    full, tail = pool.session_block_table(a)
    assert full is not None
    assert tail is not None
    before = {block: fill_block(pool, block, "shared") for block in (full, tail)}
    b = pool.fork(a)
    own = pool.ensure_writable_block(b, 1)
    assert own != tail
    assert block_bytes(pool, own) == before[tail], "the copy differs from its source"
    changed = fill_block(pool, own, "changed")
    assert block_bytes(pool, own) == changed
    for block, data in before.items():
        assert block_bytes(pool, block) == data, "a write into the copy changed a shared block"
    pool.check()


@pytest.mark.parametrize("dtype", STORED)
def test_evicted_blocks_come_back_bit_for_bit(target: Target, dtype: str) -> None:
    pool = target.pool(dtype=dtype, blocks=6)
    a = pool.open()
    pool.append(a, 11)
    kept = [fill_block(pool, b, "kept") for b in pool.session_block_table(a) if b is not None]
    report = pool.evict_range(a, 0, 2)
    assert report.freed == [0, 1]
    other = pool.open()
    pool.append(other, 12)  # takes the blocks that were freed
    for block in pool.session_block_table(other):
        fill_block(pool, int(block or 0), "other")
    pool.discard(other)
    pool.restore(a, report.handle)
    for i, block in enumerate(pool.session_block_table(a)):
        assert block is not None
        assert block_bytes(pool, block) == kept[i], f"block {i} of {dtype} after a restore"
    pool.check()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_moved_prefix_has_its_keys_rotated(target: Target, dtype: str, interleaved: bool) -> None:
    pool = target.pool(dtype=dtype)
    rng, frequencies = random_of("moved"), np.array([1.0, 0.01])
    source, dest = pool.open(), pool.open()
    pool.append(source, 4)
    pool.append(dest, 8)
    (block,) = pool.session_block_table(source)
    assert block is not None
    rows = {}
    for layer in range(2):
        for slot in (0, 1):
            rows[layer, slot] = rng.standard_normal((4, 2, 4)).astype(pool.dtype.numpy)
            pool.write_block(layer, slot, block, rows[layer, slot])
    pool.mark_written(source)
    moved = pool.splice_prefix_shifted(
        pool.register_prefix(source, 1), dest, frequencies, interleaved
    )
    assert moved == 4
    there = pool.session_block_table(dest)[2]
    assert there is not None
    cos, sin = (np.tile(f(frequencies * 8), (4, 1)) for f in (np.cos, np.sin))
    for (layer, slot), data in rows.items():
        got = pool.read_block(layer, slot, there)
        if slot:
            check_bits(f"values of layer {layer}", got, data)
            continue
        x = np.moveaxis(data.astype(np.float64), 1, 0)[None]
        want = np.moveaxis(reference.rope(x, cos, sin, interleaved)[0], 0, 1)
        check_close(f"keys of layer {layer}", got, want)
        check_bits("the keys that were moved", pool.read_block(layer, slot, block), data)
