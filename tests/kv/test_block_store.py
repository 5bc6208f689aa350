"""What every store of blocks does: against a dict, with threads, after a fork, failing midway."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazykv.errors import BlockStoreError, DTypeError, OutOfMemory, RangeError
from lazykv.kv.block_store import (
    BlockStore,
    FolderBlockStore,
    FsspecBlockStore,
    MemoryBlockStore,
)
from lazykv.kv.evicted import store_all


def left_behind(store) -> list[str]:
    """What lies at a store's place, whatever the store itself says."""
    if isinstance(store, FolderBlockStore):
        return sorted(os.listdir(store.place))
    if isinstance(store, FsspecBlockStore):
        found = store._fs.ls(store.place, detail=False)
        return sorted(name.rpartition("/")[2] for name in found)
    return sorted(f"block-{key}" for key in store._blocks)


@pytest.fixture(params=["memory", "folder", "fsspec-memory", "fsspec-file"])
def store(request, tmp_path):
    made = {
        "memory": lambda: MemoryBlockStore(),
        "folder": lambda: FolderBlockStore(tmp_path),
        "fsspec-memory": lambda: FsspecBlockStore("memory://blocks"),
        "fsspec-file": lambda: FsspecBlockStore(f"file://{tmp_path}"),
    }[request.param]()
    yield made
    made.close()


# The contract of every store


def test_what_was_put_is_what_is_got(store):
    assert isinstance(store, BlockStore)
    blocks = {"a": b"", "b-0": b"x", "0": bytes(range(256)) * 300, "-": b"\0\r\n"}
    for key, data in blocks.items():
        store.put(key, data)
    assert {key: store.get(key) for key in blocks} == blocks
    assert all(type(store.get(key)) is bytes for key in blocks)
    assert store.keys() == sorted(blocks)
    assert left_behind(store) == sorted(f"block-{key}" for key in blocks)


def test_any_bytes_are_taken_and_copied(store):
    ours = bytearray(b"abc")
    array = np.arange(6, dtype="<u2").reshape(2, 3)
    store.put("bytearray", ours)
    store.put("view", memoryview(b"0123456789")[::3])
    store.put("array", array.T)
    ours[:] = b"xyz"
    assert store.get("bytearray") == b"abc"
    assert store.get("view") == b"0369"
    assert store.get("array") == array.T.tobytes()
    for wrong in (5, "text", None):
        with pytest.raises(DTypeError, match=r"\.put: got"):
            store.put("wrong", wrong)
    assert store.keys() == ["array", "bytearray", "view"]


def test_an_unknown_key_has_no_bytes_and_nothing_to_delete(store):
    store.put("a", b"1")
    with pytest.raises(BlockStoreError, match="unknown key 'b'"):
        store.get("b")
    store.delete("b")
    store.delete("a")
    store.delete("a")
    with pytest.raises(BlockStoreError, match="unknown key 'a'"):
        store.get("a")
    assert store.keys() == left_behind(store) == []


def test_a_key_is_written_once_until_it_is_deleted(store):
    store.put("a", b"1")
    with pytest.raises(BlockStoreError, match="got key 'a' twice"):
        store.put("a", b"2")
    assert store.get("a") == b"1"
    store.delete("a")
    store.put("a", b"3")
    assert store.get("a") == b"3"


@pytest.mark.parametrize(
    "key", ["", ".", "..", "../x", "a/b", "/a", "a\\b", "A", "a b", "a\n", "ä", "١", "a\0", 1, None]
)
def test_a_key_that_is_no_plain_name_is_refused(store, key):
    for call in (lambda: store.put(key, b"1"), lambda: store.get(key), lambda: store.delete(key)):
        with pytest.raises(BlockStoreError, match="need a name of a-z, 0-9 and -"):
            call()
    assert store.keys() == left_behind(store) == []


def test_a_closed_store_keeps_nothing(store):
    store.put("a", b"1")
    store.close()
    store.close()
    assert store.keys() == []
    for call in (lambda: store.put("b", b"1"), lambda: store.get("a"), lambda: store.delete("a")):
        with pytest.raises(BlockStoreError, match="store that is closed"):
            call()
    if not isinstance(store, MemoryBlockStore):
        assert not fsspec.filesystem("memory").exists(store.place)
        assert not Path(store.place).exists()


def test_threads_share_a_store(store):
    n_threads, n_blocks = 4, 12
    start, failures = threading.Barrier(n_threads), []

    def work(me):
        try:
            start.wait(30)
            for i in range(n_blocks):
                store.put(f"t{me}-{i}", bytes([me, i]) * 100)
                if i % 2:
                    store.delete(f"t{me}-{i - 1}")
                assert store.get(f"t{me}-{i}") == bytes([me, i]) * 100
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    kept = sorted(f"t{me}-{i}" for me in range(n_threads) for i in range(1, n_blocks, 2))
    assert failures == []
    assert store.keys() == kept
    assert left_behind(store) == [f"block-{key}" for key in kept]


@contextmanager
def put_in_flight(store, key, data):
    """Another thread has written a block and its `put` has not returned, until the end."""
    inside, go, write = threading.Event(), threading.Event(), store._write

    def slow(*args):
        write(*args)
        inside.set()
        assert go.wait(30)

    store._write = slow
    thread = threading.Thread(target=store.put, args=(key, data))
    thread.start()
    assert inside.wait(30)
    store._write = write
    yield
    go.set()
    thread.join(30)


def test_of_two_threads_one_puts_a_key(store):
    with put_in_flight(store, "a", b"first"):
        with pytest.raises(BlockStoreError, match="twice"):
            store.put("a", b"second")
        with pytest.raises(BlockStoreError, match="unknown key"):
            store.get("a")
        store.delete("a")
    assert store.get("a") == b"first"


def test_a_put_that_ends_after_the_close_puts_nothing(store):
    with put_in_flight(store, "a", b"first"):
        store.close()
    assert store.keys() == []


def test_a_block_deleted_while_it_is_read_is_named(store, monkeypatch):
    read = store._read
    monkeypatch.setattr(store, "_read", lambda key: (store.delete(key), read(key)))
    store.put("a", b"1")
    with pytest.raises(BlockStoreError, match=r"get: got .* for block 'a'"):
        store.get("a")


def test_memory_that_runs_out_is_typed(store, monkeypatch):
    def fail(*args):
        raise MemoryError

    store.put("a", b"1")
    monkeypatch.setattr(store, "_read", fail)
    monkeypatch.setattr(store, "_write", fail)
    for call in (lambda: store.get("a"), lambda: store.put("b", b"1")):
        with pytest.raises(OutOfMemory, match=r"got no memory for block '[ab]'"):
            call()
    assert store.keys() == ["a"]


# All or nothing over several blocks


def fail_at(monkeypatch, store, verb, bad_key, error):
    """Make one verb of a store fail for one key, before it does anything."""
    real = getattr(store, verb)

    def failing(key, *data):
        if key == bad_key:
            raise error
        return real(key, *data)

    monkeypatch.setattr(store, verb, failing)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_second_object_for_the_same_blocks_is_refused(store, way):
    store.put("a", b"1")
    with pytest.raises(BlockStoreError, match=f"{type(store).__name__}: got a copy or a pickle"):
        way(store)
    assert store.get("a") == b"1"


def test_all_items_are_stored(store):
    items = {f"k{i}": bytes([i]) for i in range(5)}
    store_all(store, items)
    store_all(store, {})
    assert {key: store.get(key) for key in store.keys()} == items  # noqa: SIM118


@pytest.mark.parametrize("error", [BlockStoreError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("bad_key", ["k0", "k2", "k4"])
def test_a_failing_put_leaves_nothing(store, monkeypatch, bad_key, error):
    store.put("other", b"1")
    fail_at(monkeypatch, store, "put", bad_key, error)
    with pytest.raises(type(error)) as caught:
        store_all(store, {f"k{i}": b"1" for i in range(5)})
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert store.keys() == ["other"]
    assert left_behind(store) == ["block-other"]


def test_a_key_that_was_there_before_survives_the_clean_up(store):
    store.put("k1", b"theirs")
    with pytest.raises(BlockStoreError, match="got key 'k1' twice"):
        store_all(store, {"k0": b"1", "k1": b"1"})
    assert store.keys() == ["k1"]
    assert store.get("k1") == b"theirs"


def test_an_error_while_cleaning_up_is_a_note_on_the_first(store, monkeypatch):
    fail_at(monkeypatch, store, "put", "k3", OutOfMemory("first"))
    fail_at(monkeypatch, store, "delete", "k1", BlockStoreError("second"))
    with pytest.raises(OutOfMemory, match="first") as caught:
        store_all(store, {f"k{i}": b"1" for i in range(5)})
    assert caught.value.__notes__ == ["store_all: block 'k1' stays in the store: second"]
    assert store.keys() == ["k1"]


# Memory


def test_the_limit_counts_bytes_held_and_a_refused_put_takes_none():
    store = MemoryBlockStore(10)
    store.put("a", b"x" * 6)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match=r"got 5 bytes for block 'b' beside 6 held, need 10"):
            store.put("b", b"x" * 5)
    store.put("c", b"x" * 4)
    store.delete("a")
    store.put("b", b"x" * 5)
    store.put("empty", b"")
    assert store.keys() == ["b", "c", "empty"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9)), max_size=40))
def test_a_limited_store_is_a_dict_with_a_sum(steps):
    store, model = MemoryBlockStore(16), {}
    for is_put, k, n in steps:
        key, data = f"k{k}", bytes(n)
        if not is_put:
            store.delete(key)
            model.pop(key, None)
        elif key in model:
            with pytest.raises(BlockStoreError):
                store.put(key, data)
        elif sum(map(len, model.values())) + n > 16:
            with pytest.raises(OutOfMemory):
                store.put(key, data)
        else:
            store.put(key, data)
            model[key] = data
        assert {key: store.get(key) for key in store.keys()} == model  # noqa: SIM118


def test_bytes_are_kept_without_a_copy():
    store, data = MemoryBlockStore(), bytes(100)
    store.put("a", data)
    assert store.get("a") is data


def test_a_bad_limit_is_refused():
    with pytest.raises(RangeError, match="limit_bytes -1"):
        MemoryBlockStore(-1)
    with pytest.raises(DTypeError, match="limit_bytes"):
        MemoryBlockStore(1.5)


# Forked children


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_its_own_memory_and_none_of_the_parents_files_p6(tmp_path):
    def child(pipe):
        pipe.send((memory.keys(), memory._used))
        memory.put("lost", b"x" * 9)
        memory.delete("a")
        for store in (folder, remote):
            for call in (lambda: store.delete("a"), lambda: store.put("b", b"")):  # noqa: B023
                with pytest.raises(BlockStoreError, match="this one was forked from"):
                    call()
            store.close()
        pipe.send((memory.keys(), memory._used))

    stores = memory, folder, remote = (
        MemoryBlockStore(10),
        FolderBlockStore(tmp_path),
        FsspecBlockStore(f"file://{tmp_path}"),
    )
    for store in stores:
        store.put("a", b"1")
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    process = forking.Process(target=child, args=(theirs,))
    with put_in_flight(memory, "lost", b"x" * 9), memory._lock, folder._lock, remote._lock:
        process.start()  # none of these locks is ever released in the child
    for told in ((["a"], 1), (["lost"], 9)):
        assert ours.poll(30)
        assert ours.recv() == told
    process.join(30)
    assert process.exitcode == 0
    assert [store.get("a") for store in stores] == [b"1"] * 3
    for store in stores:
        store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_ends_leaves_the_parents_folder_p6(tmp_path):
    code = (
        "import os, sys; from lazykv.kv.block_store import FolderBlockStore\n"
        "store = FolderBlockStore(sys.argv[1]); store.put('a', b'1')\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(0)  # runs what is registered for the end of a process\n"
        "os.waitpid(pid, 0); print(store.get('a'))"
    )
    out = subprocess.check_output(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], text=True
    )
    assert out.strip() == "b'1'"
