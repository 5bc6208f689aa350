"""A forked child has one thread: what the parent's other threads held must not hold it up (P6)."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

HEAD = """
import os, sys, threading, time
import numpy as np
import lazykv as lk
from lazykv import counters
from lazykv.device import registry
from lazykv.errors import StorageTornError
from lazykv.runtime.plan_cache import plan_cache

go = threading.Event()

def elsewhere(hold):
    '''Run `hold(inside)` in another thread until `go`; returns once it is inside.'''
    inside = threading.Event()
    threading.Thread(target=hold, args=(inside,), daemon=True).start()
    assert inside.wait(30)

def holding(lock):
    def hold(inside):
        with lock:
            inside.set()
            go.wait(60)
    return hold

def row(value, n=1):
    return np.full((1, 2, n, 4), value, np.float32)

def work(place="cpu"):
    '''Everything the host backend does: allocate, plan, append, decode.'''
    cache = lk.KvCache.with_capacity(1, 2, 4, 8, "f32", place)
    cache.append(0, row(1), row(2))
    g, pos = lk.Graph(), lk.Sym("pos", 0, 7)
    q, new = g.placeholder((1, 2, 1, 4), "f32"), g.placeholder((1, 2, 1, 4), "f32")
    k, v = g.placeholder((1, 2, 8, 4), "f32"), g.placeholder((1, 2, 8, 4), "f32")
    k_all, v_all = (d.at[:, :, pos : pos + 1].set(new) for d in (k, v))
    target = lk.attention(q, k_all, v_all, length=pos + 1)
    session = lk.DecodeSession.build(
        lk.InferenceContext(), target, kv=cache, kv_nodes=[(k, v)], bound={"q": q, "new": new}
    )
    feed = {"q": row(0), "new": row(4)}
    assert (session.step(feed, {pos: 1}) == 3).all()
    return cache, session, feed, pos

def run(child):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            start = time.monotonic()
            child()
            code = 0 if time.monotonic() - start < 10 else 3
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    go.set()
    assert os.waitstatus_to_exitcode(status) == 0, status
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HEAD + code],
        timeout=100, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_locks_of_the_process_are_free_in_the_child_p6():
    run("""
for lock in (counters._lock, plan_cache._lock, registry.lock):
    elsewhere(holding(lock))
before = plan_cache._lock
run(work)
assert plan_cache._lock is before  # the parent keeps its own
""")


def test_the_childs_work_is_its_own_p6():
    run("""
cache, session, feed, pos = work()

def child():
    assert (session.step(feed, {pos: 1}) == 3).all()
    cache.reset()
    cache.append(0, row(7, 5), row(7, 5))
    assert (cache.live(0)[0] == 7).all()
    work()

run(child)
assert len(cache) == 1 and cache.live(0)[0][0, 0, 0, 0] == 1
work()
""")


def test_what_a_lost_thread_was_reading_is_free_and_what_it_was_writing_is_torn_p6():
    run("""
cache, session, feed, pos = work()
k, v = cache.slot_storage(0, 0), cache.slot_storage(0, 1)
elsewhere(holding(k.read()))
elsewhere(holding(v.write()))

def child():
    cache.write_bytes(0, 0, 0, 8, row(5, 8))
    try:
        session.step(feed, {pos: 1})
    except StorageTornError as e:
        assert "rewritten whole" in str(e)
    else:
        raise AssertionError("read half a write")
    with v.write() as a:
        a[...] = 5
    assert (session.step({**feed, "new": row(5)}, {pos: 1}) == 5).all()

run(child)
""")


def test_what_the_forking_thread_holds_it_still_holds_p6():
    run("""
a, b = (lk.Storage.from_array(np.zeros(3, np.float32)) for _ in range(2))

def child():
    for st, held in ((a, "write"), (b, "read")):
        try:
            with st.write():
                raise AssertionError("got the lock twice")
        except lk.StorageLockError as e:
            assert f"own {held}" in str(e)
    assert a.to_numpy().tolist() == [1, 1, 1]

with a.write() as array, b.read():
    array[...] = 1
    run(child)
with a.write(), b.write():
    pass
""")


def test_what_the_forking_thread_is_in_the_middle_of_it_still_is_p6():
    run("""
g = lk.Graph()
x = g.placeholder((2,), "f32")
plan = lk.plan(x + 1.0, {x: np.zeros(2, np.float32)})
owned = lk.KvCache.with_capacity(1, 2, 4, 8, "f32")

def child():
    try:
        plan.run()
        raise AssertionError("ran within its own pass")
    except lk.SessionBusy:
        pass
    elsewhere_busy = []
    def other():
        try:
            owned.truncate_to(0)
        except lk.SessionBusy as e:
            elsewhere_busy.append(e)
    t = threading.Thread(target=other)
    t.start()
    t.join()
    assert elsewhere_busy
    owned.truncate_to(0)  # the verbs of a cache nest

with plan.alone("a pass"), owned.owned("a verb"):
    run(child)
plan.run()
""")


def test_a_step_that_a_lost_thread_was_running_left_its_cache_torn_and_nothing_busy_p6():
    run("""
cache, session, feed, pos = work()

def hold(inside):
    kernel, args = session.plan._calls[0]
    def slow(*given):
        inside.set()
        go.wait(60)
        return kernel(*given)
    session.plan._calls[0] = (slow, args)
    session.step(feed, {pos: 1})

elsewhere(hold)

def child():
    try:
        session.step(feed, {pos: 1})
    except lk.errors.StorageTornError:
        return work()
    raise AssertionError("read what another thread was writing")

run(child)
""")


def test_a_device_cache_is_a_named_error_in_the_child_p6():
    run("""
cache, session, feed, pos = work("sim:0")
plain = lk.KvCache.with_capacity(1, 2, 4, 8, "f32")

def child():
    work()
    plain.append(0, row(1), row(1))
    verbs = (
        lambda: cache.live(0),
        lambda: cache.append(0, row(1), row(1)),
        lambda: cache.write_bytes(0, 0, 0, 1, row(1)),
        lambda: cache.layers[0].k.to_numpy(),
        lambda: cache.grow(16),
        lambda: lk.KvCache.with_capacity(1, 2, 4, 8, "f32", "sim:1"),
        lambda: lk.device("sim:0"),
    )
    for verb in verbs:
        try:
            verb()
        except lk.BackendUnavailable as e:
            assert "forked child" in str(e) and "spawn" in str(e), e
        else:
            raise AssertionError("used a device after fork")
    try:
        session.step(feed, {pos: 1})
    except lk.TopologyChanged as e:
        assert "sim:0" in str(e)
    else:
        raise AssertionError("ran on a device after fork")
    assert session.validity_for(cache, model_key=()) is lk.PlanValidity.Stale
    assert len(cache) == 1

run(child)
cache.append(0, row(1), row(1))
assert (session.step(feed, {pos: 1}) == 3).all()
""")


def test_a_child_may_serve_the_location_anew_p6():
    run("""
from lazykv.backends.sim import SimBackend
from lazykv.device import register_backend
work("sim:0")

def child():
    register_backend("sim", SimBackend())
    work("sim:0")

run(child)
""")


def test_a_pool_that_another_thread_was_changing_says_so_in_the_child_p6():
    run("""
geometry = lk.KvGeometry(1, 4, 2, 1, 2, 4)
idle, busy = lk.DeviceKvPool(geometry, "f32"), lk.DeviceKvPool(geometry, "f32")
elsewhere(holding(busy._lock))

def child():
    s = idle.open()
    idle.append(s, 3)
    idle.check()
    try:
        busy.free_blocks()
    except lk.PoolError as e:
        assert "at the fork" in str(e)
    else:
        raise AssertionError("half a change was seen")

run(child)
assert idle.free_blocks() == 4 and busy.free_blocks() == 4
""")


def test_what_is_busy_with_a_lost_thread_is_free_in_the_child_p6():
    """A plan, a session, a paged session, a cache and a context: of none had anything been written
    when the process forked."""
    run("""
from collections.abc import Mapping

class Slow(Mapping):
    '''Data of a step, which is asked for while the step has its session to itself.'''
    def __init__(self, data, inside):
        self.data, self.inside = data, inside
    def __getitem__(self, name):
        self.inside.set()
        go.wait(60)
        return self.data[name]
    def __iter__(self):
        return iter(self.data)
    def __len__(self):
        return len(self.data)

cache, session, feed, pos = work()
elsewhere(lambda inside: session.step(Slow(feed, inside), {pos: 1}))

g = lk.Graph()
x = g.placeholder((2,), "f32")
plan = lk.plan(x + 1.0, {x: np.zeros(2, np.float32)})
elsewhere(holding(plan.alone("a pass")))

owned, ctx = lk.KvCache.with_capacity(1, 2, 4, 8, "f32"), lk.InferenceContext()
elsewhere(holding(owned.owned("a verb")))
elsewhere(holding(ctx.owned("a verb")))

pool = lk.DeviceKvPool(lk.KvGeometry(1, 8, 2, 1, 2, 4), "f32")
g = lk.Graph()
bound = {
    "rows": g.placeholder((1,), "i64"), "count": g.placeholder((), "i64"),
    "block_table": g.placeholder((1, 4), "u32"), "context_lens": g.placeholder((1,), "u32"),
    "q": g.placeholder((1, 1, 1, 2), "f32"),
}
k, v = (g.placeholder(pool.pool_shape, "f32") for _ in range(2))
new = bound["q"].reshape(1, 1, 2)
written = [
    p.reshape(*pool.pool_shape_flat).write_rows(new, bound["rows"], bound["count"])
    .reshape(*pool.pool_shape) for p in (k, v)
]
target = lk.paged_attention(bound["q"], *written, bound["block_table"], bound["context_lens"])
paged = lk.PagedDecodeSession.build(
    lk.InferenceContext(), target, pool=pool, kv_nodes=[(k, v)], bound=bound
)
ones = {"q": np.ones((1, 1, 1, 2), np.float32)}
lost, other = pool.open(), pool.open()

def slow(inside):
    def data(starts):
        inside.set()
        go.wait(60)
        return ones
    paged.step([lost], data)

elsewhere(slow)
busy = {
    "session": lambda: session.step(feed, {pos: 1}),
    "plan": plan.run,
    "cache": lambda: owned.append(0, row(1), row(1)),
    "context": lambda: ctx.refresh(cache, model_key=()),
    "paged": lambda: paged.step([other], ones),
}
for verb in busy.values():
    try:
        verb()
    except lk.SessionBusy:
        pass
    else:
        raise AssertionError("nobody held it up")

def child():
    for name, verb in busy.items():
        try:
            verb()
        except lk.SessionBusy as e:
            raise AssertionError(name) from e
    assert (session.step(feed, {pos: 1}) == 3).all()
    assert plan.run().tolist() == [1, 1]
    assert len(owned) == 1 and pool.filled_tokens(other) == 1

run(child)
""")
