"""Folders and file systems that fill up, fail midway or vanish under a store of blocks."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lazykv.errors import BlockStoreError, EnvironmentMissing, PoolError
from lazykv.kv import block_store
from lazykv.kv.block_store import FolderBlockStore, FsspecBlockStore
from lazykv.kv.envelope import open_sealed, seal


def left_behind(store) -> list[str]:
    """What lies at a store's place, whatever the store itself says."""
    if isinstance(store, FolderBlockStore):
        return sorted(os.listdir(store.place))
    return sorted(path.rpartition("/")[2] for path in store._fs.ls(store.place, detail=False))


@pytest.fixture
def folder(tmp_path):
    store = FolderBlockStore(tmp_path)
    yield store
    store.close()


@pytest.fixture
def remote():
    store = FsspecBlockStore("memory://blocks")
    yield store
    store.close()


# A folder


def failing_with(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("where", "name"), [(os, "fsync"), (Path, "replace"), (block_store, "_sync_folder")]
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_is_typed_and_leaves_no_file(folder, monkeypatch, where, name, number):
    folder.put("old", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing_with(number))
        with pytest.raises(BlockStoreError, match=rf"put: got {os.strerror(number)} .*'a'") as got:
            folder.put("a", b"data")
    assert isinstance(got.value, PoolError)
    assert isinstance(got.value.__cause__, OSError)
    assert left_behind(folder) == ["block-old"]
    with pytest.raises(BlockStoreError, match="unknown key"):
        folder.get("a")
    folder.put("a", b"again")
    assert folder.get("a") == b"again"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_disk_that_fills_while_writing(folder, monkeypatch):
    Path(folder.place, "block-a.part").symlink_to("/dev/full")
    with pytest.raises(BlockStoreError, match="No space left on device"):
        folder.put("a", bytes(100))
    assert left_behind(folder) == []


def test_an_interrupted_write_leaves_no_file(folder, monkeypatch):
    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        folder.put("a", b"data")
    assert folder.keys() == left_behind(folder) == []


def test_a_file_and_its_folder_are_synced_around_the_rename(folder, monkeypatch):
    calls, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (calls.append("move"), replace(a, b)))
    folder.put("a", b"data")
    assert calls == ["sync", "move", "sync"]


def test_only_a_folder_that_cannot_be_synced_at_all_is_no_failure(folder, monkeypatch):
    fsync = os.fsync

    def files_only(number):
        def sync(handle):
            if os.path.samestat(os.fstat(handle), os.stat(folder.place)):
                raise OSError(number, os.strerror(number))
            fsync(handle)

        return sync

    for number in (errno.EINVAL, errno.ENOTSUP):
        monkeypatch.setattr(os, "fsync", files_only(number))
        folder.put(f"a{number}", b"data")
        assert folder.get(f"a{number}") == b"data"
    before = left_behind(folder)
    monkeypatch.setattr(os, "fsync", files_only(errno.EIO))
    with pytest.raises(BlockStoreError, match="Input/output error"):
        folder.put("b", b"data")
    assert left_behind(folder) == before


def test_a_failed_delete_keeps_the_block(folder, monkeypatch):
    folder.put("a", b"data")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing_with(errno.EIO))
        with pytest.raises(BlockStoreError, match="delete: got Input/output error for block 'a'"):
            folder.delete("a")
    assert folder.get("a") == b"data"
    folder.delete("a")
    assert left_behind(folder) == []


def test_a_missing_folder_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (tmp_path / "none", file, "bad\0name"):
        with pytest.raises(EnvironmentMissing, match=r"FolderBlockStore: got .* writable folder"):
            FolderBlockStore(path)
    assert os.listdir(tmp_path) == ["file"]


def test_an_unwritable_folder_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "mkdir", failing_with(errno.EACCES))
    with pytest.raises(EnvironmentMissing, match="Permission denied"):
        FolderBlockStore(tmp_path)
    monkeypatch.setattr(Path, "open", failing_with(errno.EROFS))
    with pytest.raises(EnvironmentMissing, match=r"put: got Read-only file system for block 'a'"):
        folder.put("a", b"1")


def test_a_folder_that_vanished_is_named(folder):
    folder.put("a", b"1")
    os.rename(folder.place, f"{folder.place}-away")
    for call in (lambda: folder.put("b", b"1"), lambda: folder.get("a")):
        with pytest.raises(EnvironmentMissing, match=rf"need a writable folder at {folder.place}"):
            call()
    assert folder.keys() == ["a"]
    folder.delete("a")
    assert folder.keys() == []


def test_a_file_that_vanished_is_named(folder):
    folder.put("a", b"1")
    os.unlink(Path(folder.place, "block-a"))
    with pytest.raises(BlockStoreError, match="get: got No such file or directory for block 'a'"):
        folder.get("a")


@pytest.mark.parametrize(
    "make", [FolderBlockStore, lambda path: FsspecBlockStore(f"file://{path}")]
)
def test_two_stores_over_one_folder_do_not_meet(tmp_path, make):
    one, two = make(tmp_path), make(tmp_path)
    one.put("a", b"1")
    with pytest.raises(BlockStoreError, match="unknown key"):
        two.get("a")
    two.put("a", b"2")
    assert (one.get("a"), two.get("a")) == (b"1", b"2")
    one.delete("a")
    one.close()
    assert two.get("a") == b"2"
    two.close()
    assert os.listdir(tmp_path) == []


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "blocks").mkdir()
    monkeypatch.chdir(tmp_path)
    store = FolderBlockStore("blocks")
    monkeypatch.chdir("/")
    store.put("a", b"1")
    assert store.get("a") == b"1"
    store.close()
    assert os.listdir(tmp_path / "blocks") == []


def test_the_files_go_with_the_store(tmp_path):
    store = FolderBlockStore(tmp_path)
    store.put("a", b"1")
    del store
    assert os.listdir(tmp_path) == []
    code = "from lazykv.kv.block_store import FolderBlockStore; import sys\n"
    code += "kept = FolderBlockStore(sys.argv[1]); kept.put('a', b'1'); print(kept.place)"
    out = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True)
    assert Path(out.strip()).parent == tmp_path
    assert os.listdir(tmp_path) == []


def test_a_torn_file_is_found(folder):
    folder.put("a", seal(b"hello", "a"))
    path = Path(folder.place, "block-a")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BlockStoreError, match="block 'a': got 3 bytes of payload, need 5"):
        open_sealed(folder.get("a"), "a")


# fsspec


def test_a_short_write_is_found_before_it_is_seen(remote, monkeypatch):
    pipe = MemoryFileSystem.pipe_file

    def short(self, path, value, **options):
        pipe(self, path, value[:-1], **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", short)
    with pytest.raises(BlockStoreError, match=r"put: got 3 bytes at .*'a', need 4"):
        remote.put("a", b"data")
    assert remote.keys() == left_behind(remote) == []


class DriverError(Exception):
    """Drivers raise errors that are no OSError."""


@pytest.mark.parametrize("verb", ["pipe_file", "size", "mv", "_rm", "rm"])
def test_a_failing_driver_is_typed_and_leaves_no_object(remote, monkeypatch, verb):
    real, calls = getattr(MemoryFileSystem, verb), []

    def once(self, *args, **options):
        calls.append(args)
        if len(calls) == 1:
            real(self, *args, **options)  # the worst case: done, and yet an error
            raise DriverError("503")
        return real(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, verb, once)
    with pytest.raises(BlockStoreError, match=r"put: got DriverError: 503 for block 'a'"):
        remote.put("a", b"data")
    assert remote.keys() == left_behind(remote) == []
    remote.put("a", b"data")
    assert remote.get("a") == b"data"
    assert left_behind(remote) == ["block-a"]


def test_other_verbs_of_a_failing_driver_are_typed(remote, monkeypatch):
    def fail(self, *args, **options):
        raise DriverError("503")

    remote.put("a", b"data")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", fail)
        patch.setattr(MemoryFileSystem, "rm", fail)
        for name in ("get", "delete"):
            with pytest.raises(BlockStoreError, match=rf"{name}: got DriverError: 503 .*'a'"):
                getattr(remote, name)("a")
    assert remote.get("a") == b"data"
    monkeypatch.setattr(MemoryFileSystem, "rm", fail)
    with pytest.raises(BlockStoreError, match=rf"close: got DriverError: 503 .*{remote.place}"):
        remote.close()


def test_an_object_that_vanished_is_named(remote):
    remote.put("a", b"data")
    remote._fs.rm(remote._path("a"))
    with pytest.raises(BlockStoreError, match=r"get: got FileNotFoundError.* for block 'a'"):
        remote.get("a")
    remote.delete("a")
    assert remote.keys() == []


@pytest.mark.parametrize("url", ["nosuch://x", "file://{tmp}/none", 7])
def test_a_url_that_cannot_be_opened_is_named(tmp_path, url):
    url = url.format(tmp=tmp_path) if isinstance(url, str) else url
    with pytest.raises(EnvironmentMissing, match=r"FsspecBlockStore: got .* that fsspec opens"):
        FsspecBlockStore(url)
    assert os.listdir(tmp_path) == []


def test_a_driver_that_is_missing_is_named_and_no_password_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(EnvironmentMissing, match=r"ImportError: .*s3fs.* URL of 's3'") as got:
        FsspecBlockStore("s3://user:password@bucket/folder")
    assert "password" not in str(got.value)


def test_no_bucket_is_made(remote, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "root_marker", "")
    monkeypatch.setattr(MemoryFileSystem, "mkdir", lambda *_, **__: pytest.fail("made a bucket"))
    with pytest.raises(EnvironmentMissing, match="no bucket"):
        FsspecBlockStore("memory://")


def test_without_fsspec_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.delitem(sys.modules, "fsspec.core", raising=False)
    with pytest.raises(EnvironmentMissing, match=r"need it; pip install 'lazykv\[fsspec\]'"):
        FsspecBlockStore("memory://blocks")


def test_fsspec_is_imported_only_by_the_store_that_needs_it(tmp_path):
    code = (
        "import sys; from lazykv.kv.block_store import *\n"
        "MemoryBlockStore().put('a', b''); FolderBlockStore(sys.argv[1]).put('a', b'')\n"
        "print('fsspec' in sys.modules); FsspecBlockStore('memory://x')\n"
        "print('fsspec' in sys.modules)"
    )
    out = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True)
    assert out.split() == ["False", "True"]
