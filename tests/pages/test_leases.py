"""What a lookup hands out, and what the index tells of itself (POOL-8)."""

import copy

import pytest
from pool_state import DictPool, published, refs, refused

import lazykv as lk
from lazykv.pages import journal

# Leases


def test_a_lease_pins_what_it_found():
    pool = DictPool(3, 2)
    published(pool, [1, 2, 3, 4])
    lease = pool.lookup([1, 2, 3, 4])
    assert (refs(pool), pool.free_blocks(), pool.cached_blocks()) == ([1, 1, 0], 1, 0)
    assert pool.kv_bytes_resident() == 2 * pool.geometry.block_bytes
    a, b = pool.open(), pool.open()
    with refused(pool, lk.OutOfBlocks):
        pool.append(a, 4)
    assert [lease.splice_into(s) for s in (a, b)] == [4, 4]
    with refused(pool, lk.PrefixTargetNotEmpty):
        lease.splice_into(a)
    assert refs(pool) == [3, 3, 0]
    lease.release()
    assert (refs(pool), pool.read(a)) == ([2, 2, 0], [1, 2, 3, 4])


def test_a_lease_ends_once_and_is_of_its_pool():
    pool, other = DictPool(4, 2), DictPool(4, 2)
    published(pool, [1, 2])
    lease, foreign, s = pool.lookup([1, 2]), other.lookup([]), pool.open()
    for bad in (foreign, None, (0,)):
        with refused(pool, lk.StaleHandle, "lease"):
            pool.release_lease(bad)
        with refused(pool, lk.StaleHandle, "lease"):
            pool.splice_lease(bad, s)
    with refused(pool, lk.UnknownSession):
        lease.splice_into(other.open())
    lease.release()
    for call in (lease.release, lambda: lease.splice_into(s)):
        with refused(pool, lk.StaleHandle, "released", keep=(lease,)):
            call()
    with pool.lookup([1, 2]) as inside:
        inside.release()
    assert (inside.is_open, refs(pool)) == (False, [0, 0, 0, 0])


def test_a_lease_is_one_however_many_names_it_has():
    pool = DictPool(4, 2)
    published(pool, [1, 2])
    lease = pool.lookup([1, 2])
    twin = copy.copy(lease)
    assert copy.deepcopy([lease])[0] is twin is lease
    twin.release()
    with refused(pool, lk.StaleHandle, "released"):
        lease.release()
    assert refs(pool) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("after", "error"), [("x", lk.DTypeError), (None, lk.DTypeError), (-1, lk.RangeError)]
)
def test_events_are_asked_for_by_number(after, error):
    with refused(DictPool(2, 2), error, "events: got after"):
        DictPool(2, 2).events(after)


def test_a_salt_is_bytes():
    pool = DictPool(2, 2)
    s = pool.open()
    for who, call in (
        ("lookup", pool.lookup),
        ("publish", lambda *a, **o: pool.publish(s, *a, **o)),
    ):
        with refused(pool, lk.DTypeError, f"{who}: got salt str, need bytes"):
            call([1, 2], salt="a")


def test_lookups_leave_no_holders_behind_l10():
    pool = DictPool(4, 2)
    published(pool, [1, 2])
    for n in range(100):
        try:
            with pool.lookup([1, 2]) as lease:
                assert (lease.tokens, refs(pool)) == (2, [1, 0, 0, 0])
                if n % 10 == 0:
                    raise KeyError(n)
        except KeyError:
            pass
    with refused(pool, lk.DTypeError):
        pool.lookup(iter([1, 2, "x"]))
    assert (refs(pool), pool.cached_blocks(), pool.kv_bytes_resident()) == ([0] * 4, 1, 0)
    assert len(pool.append(pool.open(), 8)) == 4
    assert pool.stats.lookups == 100
    assert pool.stats.tokens_found == 200


def test_a_lease_of_another_models_bytes_is_stale():
    pool = DictPool(4, 2)
    published(pool, [1, 2])
    lease, s = pool.lookup([1, 2]), pool.open()
    pool.use_model(("m", 1))
    with refused(pool, lk.StaleHandle, "other weights", keep=(lease,)):
        lease.splice_into(s)
    lease.release()


def test_a_pool_that_follows_a_model_notices_new_weights_by_itself():
    key = ["m", 0]
    pool = DictPool(6, 2)
    pool.use_model(lambda: tuple(key))
    held = published(pool, [1, 2], keep=True)
    prefix = pool.register_prefix(held, 1)
    with pool.lookup([1, 2]) as lease:
        assert lease.tokens == 2
        key[1] = 1
        with pytest.raises(lk.StaleHandle):
            lease.splice_into(pool.open())
    assert pool.lookup([1, 2]).tokens == 0
    assert pool.publish(held, [1, 2]) == 0
    with pytest.raises(lk.StaleHandle):
        pool.splice_prefix_from(prefix, pool.open())
    published(pool, [1, 2])
    assert pool.lookup([1, 2]).tokens == 2
    key[1] = 1  # the same key keeps what it has
    assert pool.lookup([1, 2]).tokens == 2
    assert [e.kind for e in pool.events()] == ["stored", "cleared", "stored"]


# Events


def test_events_are_numbered_and_tell_all_of_the_index():
    pool = DictPool(3, 2)
    s = published(pool, [1, 2, 3, 4], keep=True)
    pool.publish(s, [1, 2, 3, 4])
    published(pool, [1, 2])
    pool.truncate(s, 3)
    pool.append(s, 1)
    pool.use_model(("m",))
    pool.use_model(("n",))
    published(pool, [5, 6])
    pool.append(s, 2)
    kinds = [(e.number, e.kind, e.block) for e in pool.events()]
    assert kinds == [
        (1, "stored", 0), (2, "stored", 1), (3, "removed", 1), (4, "cleared", None),
        (5, "stored", 2), (6, "removed", 2),
    ]  # fmt: skip
    first, second, third, *_ = pool.events()
    assert (first.parent, second.parent) == (None, first.key)
    assert (third.key, third.parent) == (second.key, second.parent)
    assert [e.number for e in pool.events(after=4)] == [5, 6]
    assert pool.events(after=6) == []


def test_keys_of_events_mean_the_same_in_every_pool():
    pools = [DictPool(4, 2), DictPool(9, 2), DictPool(4, 2)]
    for pool, salt in zip(pools, (b"", b"", b"s"), strict=True):
        published(pool, [1, 2, 3, 4], salt=salt)
    a, b, salted = ([e.key for e in pool.events()] for pool in pools)
    assert (a, len(set(a + salted))) == (b, 4)


def test_old_events_are_dropped_and_a_reader_can_tell(monkeypatch):
    monkeypatch.setattr(journal, "EVENTS_KEPT", 3)
    pool = DictPool(4, 1)
    for token in range(4):
        published(pool, [token])
    assert [e.number for e in pool.events()] == [2, 3, 4]
