"""Ids: numbers of classes of their own, minted once and never again."""

import copy
import pickle

import numpy as np
import pytest

import lazykv as lk
from lazykv.ids import RequestId

KINDS = [
    lk.FenceId, lk.KvAllocId, lk.ModelInstanceId, lk.PrefixId, lk.SessionHandle, RequestId,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_is_a_number_of_its_own_class(kind):
    first, second = kind(), kind()
    assert isinstance(first, kind)
    assert 0 < first < second
    assert (first == int(first), hash(first)) == (True, hash(int(first)))
    assert repr(first) == str(first) == f"{kind.__name__}({int(first)})"


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_the_same_id_and_a_pickle_a_number(kind):
    made = kind()
    assert copy.copy(made) is copy.deepcopy([made])[0] is made
    back = pickle.loads(pickle.dumps(made))
    assert (type(back), back) == (int, int(made))


def test_allocations_are_named_by_one_class():
    pool = lk.DeviceKvPool(lk.KvGeometry(1, 1, 1, 1, 1, 4), "f32")
    cache = lk.KvCache.with_capacity(1, 1, 1, 1, "f32")
    latent = lk.LatentKvCache.with_capacity(1, 1, [(1,)], "f32")
    names = [x.alloc_id() for x in (pool, cache, latent)]
    assert {type(n) for n in names} == {lk.KvAllocId}
    assert len(set(names)) == 3


def test_the_number_of_a_foreign_allocation_mints_nothing():
    before = lk.KvAllocId()
    assert lk.KvAllocId(np.int64(7)) == 7
    assert lk.KvAllocId() == before + 1
