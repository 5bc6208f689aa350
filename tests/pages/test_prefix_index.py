"""Finding blocks by their tokens (POOL-5, POOL-8)."""

import numpy as np
import pytest
from pool_state import DictPool, found, published, refs, refused, session

import lazykv as lk

# What is found


def test_the_longest_beginning_is_found_in_whole_blocks():
    pool = DictPool(8, 2)
    published(pool, [1, 2, 3, 4, 5])
    assert [found(pool, [1, 2, 3, 4, 5, 6][:n]) for n in range(7)] == [0, 0, 2, 2, 4, 4, 4]
    assert found(pool, [1, 2, 9, 4]) == 2
    assert found(pool, [3, 4]) == found(pool, [1, 9, 3, 4]) == found(pool, [2, 1]) == 0


def test_a_branch_shares_the_blocks_before_it():
    pool = DictPool(8, 2)
    a = published(pool, [1, 2, 3, 4], keep=True)
    b = pool.open()
    with pool.lookup([1, 2, 5, 6]) as lease:
        assert (lease.tokens, lease.splice_into(b)) == (2, 2)
    pool.feed(b, [5, 6])
    assert pool.publish(b, [1, 2, 5, 6]) == 2
    assert found(pool, [1, 2, 5, 6]) == found(pool, [1, 2, 3, 4]) == 4
    pool.discard(a)
    pool.discard(b)
    assert pool.cached_blocks() == 3


def test_the_same_tokens_behind_others_are_another_block():
    pool = DictPool(8, 2)
    for tokens in ([3, 4], [1, 2, 3, 4], [5, 6, 3, 4]):
        published(pool, tokens)
    assert [found(pool, t) for t in ([1, 2, 3, 4], [5, 6, 3, 4], [9, 9, 3, 4])] == [4, 4, 0]


def test_equal_tokens_are_indexed_once_and_what_follows_builds_on_them():
    pool = DictPool(8, 2)
    a = published(pool, [1, 2], keep=True)
    b = published(pool, [1, 2, 3, 4], keep=True)
    with pool.lookup([1, 2, 3, 4]) as lease:
        assert lease.blocks == (0, 2)
    pool.discard(b)
    assert pool.cached_blocks() == 1
    pool.discard(a)
    assert pool.cached_blocks() == 2


def test_a_hash_is_never_trusted_l5():
    pool = DictPool(4, 4, digest=lambda data: b"x")
    s = published(pool, [1, 2, 3, 4], keep=True)
    assert (found(pool, [5, 6, 7, 8]), found(pool, [1, 2, 3, 4])) == (0, 4)
    assert found(pool, [1, 2, 3, 4], salt=b"s") == 0
    other = session(pool, 4, first=5)
    assert pool.publish(other, [5, 6, 7, 8]) == 0
    pool.feed(s, [1, 2, 3, 4])
    assert pool.publish(s, [1, 2, 3, 4, 1, 2, 3, 4]) == 1
    assert found(pool, [1, 2, 3, 4, 1, 2, 3, 4]) == 4
    pool.check()


def test_keys_are_whole_numbers_l6():
    pool = DictPool(4, 1)
    for token in (65, 321, 65601):
        published(pool, [token])
    assert [found(pool, [t]) for t in (65, 321, 65601)] == [1, 1, 1]
    assert [found(pool, [t]) for t in (65 + 2**32, 65 - 2**63, 66)] == [0, 0, 0]


def test_salts_and_pools_are_apart():
    pool = DictPool(8, 2)
    published(pool, [1, 2], salt=b"a")
    assert [found(pool, [1, 2], salt=s) for s in (b"a", b"b", b"", b"a'")] == [2, 0, 0, 0]
    assert found(DictPool(8, 2), [1, 2]) == 0


def test_a_block_is_indexed_once():
    """With another salt, or with other tokens before it, it would be two blocks."""
    pool = DictPool(8, 2)
    s = published(pool, [1, 2, 3, 4], keep=True)
    assert pool.publish(s, [1, 2, 3, 4], salt=b"a") == 0
    assert pool.publish(s, [1, 2, 3, 4]) == 2
    fork = pool.fork(s)
    pool.cow_break(fork, 0)
    pool.write(fork, 0, [7, 8])
    assert pool.publish(fork, [7, 8, 3, 4]) == 1
    assert [found(pool, [7, 8, 3, 4]), found(pool, [1, 2, 3, 4])] == [2, 4]
    pool.check()


# What may be published


def test_only_full_blocks_with_known_tokens_are_published():
    pool = DictPool(8, 2)
    s = session(pool, 5)
    assert [pool.publish(s, range(n)) for n in (0, 1, 3)] == [0, 0, 1]
    assert pool.publish(s, range(99)) == 2
    assert pool.publish(pool.open(), [1, 2]) == 0


def test_blocks_whose_bytes_are_not_there_end_the_chain():
    pool = DictPool(8, 2)
    s = session(pool, 6)
    pool.unready = {1}
    assert (pool.publish(s, range(6)), found(pool, range(6))) == (1, 2)
    pool.unready = set()
    assert (pool.publish(s, range(6)), found(pool, range(6))) == (3, 6)


def test_other_tokens_than_the_published_are_refused():
    pool = DictPool(8, 2)
    s = published(pool, [0, 1, 2, 3], keep=True)
    with refused(pool, lk.PoolError, "block index 1"):
        pool.publish(s, [0, 1, 2, 9])


def test_blocks_spliced_in_from_elsewhere_are_not_published():
    pool = DictPool(12, 2)
    a, b = session(pool, 4), session(pool, 2, first=50)
    pool.splice(a, b, 0, 1)
    pool.feed(b, [54, 55])
    tokens = [50, 51, 0, 1, 54, 55]
    end, child = pool.open(), pool.fork(b)
    pool.splice(a, end, 1, 2)
    prefix, c, d, e = pool.register_prefix(b, 3), pool.open(), pool.open(), session(pool, 2)
    pool.splice_prefix_from(prefix, c)
    pool.splice_prefix(b, d, 2)
    pool.splice(b, e, 0, 1)
    assert pool.publish(end, [2, 3]) == 0
    for s in (b, child, c, d):
        assert pool.publish(s, tokens) == 1
    assert pool.publish(e, [0, 1, 50, 51]) == 1
    assert pool.publish(a, range(4)) == 2
    assert (found(pool, tokens), found(pool, range(4))) == (2, 4)


def test_shifted_blocks_are_not_published_but_at_the_start():
    pool = DictPool(12, 2)
    a, b, c = session(pool, 4), session(pool, 2, first=50), pool.open()
    prefix = pool.register_prefix(a, 2)
    for s in (b, c):
        pool.alloc_shifted_prefix_slots(prefix, s)
    pool.write(c, 0, range(4))
    assert pool.publish(b, [50, 51, 0, 1, 2, 3]) == 1
    assert pool.publish(c, range(4)) == 2


def test_blocks_spliced_in_their_own_place_are_published():
    pool = DictPool(8, 2)
    a, b = session(pool, 6), pool.open()
    pool.splice(a, b, 0, 1)
    pool.splice(a, b, 1, 3)
    assert (pool.publish(b, range(6)), found(pool, range(6))) == (3, 6)


def test_what_replaces_spliced_blocks_is_published():
    pool = DictPool(8, 2)
    a, b = session(pool, 4), session(pool, 2, first=50)
    pool.splice(a, b, 0, 2)
    pool.truncate(b, 4)
    assert pool.publish(b, [50, 51, 0, 1]) == 1
    pool.truncate(b, 2)
    pool.feed(b, [0, 1])
    assert pool.publish(b, [50, 51, 0, 1]) == 2


# What is no longer found


@pytest.mark.parametrize("verb", ["append", "cow_break"])
def test_a_block_that_is_rewritten_is_found_no_more_nor_what_follows_it(verb):
    pool = DictPool(8, 2)
    s = published(pool, [1, 2, 3, 4, 5, 6], keep=True)
    other = published(pool, [1, 2, 3, 4, 7, 8], keep=True)
    if verb == "append":
        pool.truncate(s, 3)
        assert found(pool, [1, 2, 3, 4, 5, 6]) == 6
        assert pool.feed(s, [9]) == []
    else:
        assert pool.cow_break(s, 1) == 1
        pool.write(s, 3, [9])
    assert (found(pool, [1, 2, 3, 4, 5, 6]), found(pool, [1, 2, 3, 4, 7, 8])) == (2, 2)
    pool.check()
    pool.discard(other)
    pool.discard(s)
    assert pool.cached_blocks() == 1


def test_a_block_that_others_hold_is_copied_and_stays_found():
    pool = DictPool(8, 2)
    s = published(pool, [1, 2, 3, 4], keep=True)
    with pool.lookup([1, 2, 3, 4]):
        pool.truncate(s, 3)
        assert pool.feed(s, [9]) == [2]
    assert (found(pool, [1, 2, 3, 4]), pool.read(s)) == (4, [1, 2, 3, 9])
    assert pool.publish(s, [1, 2, 3, 9]) == 2


def test_the_last_token_of_a_prompt_found_whole_is_computed_into_a_copy_c3():
    pool = DictPool(8, 2)
    prompt = [1, 2, 3, 4]
    published(pool, prompt)
    s = pool.open()
    with pool.lookup(prompt) as lease:
        assert lease.splice_into(s) == 4
        pool.truncate(s, 3)
        assert (pool.append_required(s, 1), pool.feed(s, [4])) == (1, [2])
    assert (pool.read(s), found(pool, prompt)) == (prompt, 4)
    assert refs(pool)[:3] == [1, 0, 1]


def test_a_recycled_block_is_not_found_by_its_old_tokens_l7():
    pool = DictPool(1, 2)
    published(pool, [1, 2])
    published(pool, [3, 4])
    assert (found(pool, [1, 2]), found(pool, [3, 4])) == (0, 2)


def test_another_model_finds_nothing():
    pool = DictPool(8, 2)
    pool.use_model(("m", 1))
    s = published(pool, [1, 2, 3, 4], keep=True)
    published(pool, [5, 6])
    pool.use_model(("m", 1))
    assert found(pool, [1, 2, 3, 4]) == 4
    for key in (("m", True), ("m", 1.0), (("m", 1),), (), ("m", 0.0), ("m", -0.0), ("m", 1)):
        pool.use_model(key)
        assert (found(pool, [1, 2, 3, 4]), found(pool, [5, 6]), pool.cached_blocks()) == (0, 0, 0)
        assert pool.publish(s, [1, 2, 3, 4]) == 0
        published(pool, [5, 6])
    assert pool.free_blocks() == 6


def test_blocks_of_an_old_model_are_never_published():
    pool = DictPool(8, 2)
    s = session(pool, 3)
    shared = pool.fork(s)
    pool.use_model(("m", 1))
    pool.feed(s, [3, 4, 5])
    pool.feed(shared, [3])
    handle = pool.evict(s).handle
    pool.restore(s, handle)
    fresh = session(pool, 2)
    for old in (s, shared):
        assert pool.publish(old, range(6)) == 0
    assert (pool.publish(fresh, [0, 1]), found(pool, range(6))) == (1, 2)


@pytest.mark.parametrize("moved", ["copied", "restored"])
def test_a_block_keeps_its_age_when_it_moves(moved):
    pool = DictPool(8, 2)
    s = session(pool, 1)
    pool.use_model(("m", 1))
    if moved == "copied":
        pool.fork(s)
    else:
        pool.restore(s, pool.evict(s).handle)
    pool.feed(s, [1])
    assert pool.publish(s, [0, 1]) == 0


# Bad input


@pytest.mark.parametrize("verb", ["publish", "lookup"])
@pytest.mark.parametrize(
    "tokens",
    [5, None, "12", b"12", [1.0, 2], [1, "2"], [True, 1], [np.bool_(True)], [2**63], [-(2**63) - 1],
     [None], [[1, 2]], np.ones((2, 2), np.int64), np.ones(2, np.float32)],
    ids=repr,
)  # fmt: skip
def test_tokens_are_whole_numbers(verb, tokens):
    pool = DictPool(4, 2)
    s = published(pool, [1, 1], keep=True)
    with refused(pool, lk.DTypeError, verb):
        pool.lookup(tokens) if verb == "lookup" else pool.publish(s, tokens)


@pytest.mark.parametrize("kind", [
    list, tuple, iter, lambda t: np.array(t, np.int32), lambda t: np.array(t, np.uint64),
    lambda t: [np.int16(x) for x in t],
])  # fmt: skip
def test_any_whole_numbers_are_the_same_tokens(kind):
    pool = DictPool(4, 2)
    s = session(pool, 4)
    assert pool.publish(s, kind([0, 1, 2, 3])) == 2
    with pool.lookup(kind([0, 1, 2, 3])) as lease:
        assert lease.tokens == 4


def test_the_ends_of_i64_are_tokens():
    pool = DictPool(4, 2)
    published(pool, [2**63 - 1, -(2**63)])
    assert found(pool, [2**63 - 1, -(2**63)]) == 2


def test_salts_and_model_keys_are_plain_values():
    pool = DictPool(4, 2)
    s = session(pool, 2)
    for bad in ("a", None, 1):
        with refused(pool, lk.DTypeError, "salt"):
            pool.publish(s, [0, 1], salt=bad)
        with refused(pool, lk.DTypeError, "salt"):
            pool.lookup([0, 1], salt=bad)
    for bad in ("m", 1, ["m"], (object(),), ("m", ([1],)), (np.arange(3),)):
        with refused(pool, lk.DTypeError, "use_model"):
            pool.use_model(bad)
    pool.use_model((None, "m", b"x", 1, 1.5, True, (2, lk.ModelInstanceId())))
