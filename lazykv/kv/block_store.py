"""Where a pool's evicted blocks go: host memory, a local folder, or a URL that fsspec opens.

Stores keep bytes under keys and know nothing of what they mean. Whether bytes come back as they
went is the matter of `lazykv.kv.envelope`, once for every store.
"""

import errno
import os
import re
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, SupportsIndex, runtime_checkable

from lazykv.errors import BlockStoreError, EnvironmentMissing, LazyKvError, OutOfMemory
from lazykv.kv.envelope import BytesLike
from lazykv.kv.rows import count
from lazykv.storage import as_host_bytes

_KEY = re.compile("[a-z0-9-]+")


@runtime_checkable
class BlockStore(Protocol):
    """What a pool asks of the place that its evicted blocks go to.

    Any number of threads and pools may call one store. Keys are plain ``[a-z0-9-]+`` names that the
    pool mints and never uses again, so a key is written once.
    """

    def put(self, key: str, data: BytesLike) -> None:
        """Keep a copy of `data`, whole or not at all: `get` never sees what a failed `put` wrote.
        A key that is there already is refused and keeps its bytes."""

    def get(self, key: str) -> bytes:
        """The bytes put under `key`; raises if there are none."""

    def delete(self, key: str) -> None:
        """Forget `key`; nothing happens if it is unknown. After a failure it is still there."""


class _KeyedStore:
    """Which keys a store has. Subclasses move the bytes: `_write` (all or nothing), `_read`,
    `_remove`, and `_discard` for all of them.

    A key is absent, busy (one thread moves its bytes) or held, and only held keys can be read. So
    one thread at a time touches a key's bytes, and different keys do not wait for each other.
    """

    survives_fork: ClassVar[bool] = False
    """Whether a forked child has blocks of its own; those outside memory are the parent's."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What the place raises when it cannot do as told."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._held: set[str] = set()
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._gone = ""  # why the store can no longer be used
        _stores.add(self)

    def __reduce__(self) -> NoReturn:
        # Also what copy.copy asks for: both would delete the blocks of both.
        raise BlockStoreError(
            f"{type(self).__name__}: got a copy or a pickle, need the store itself, or a new one"
        )

    def put(self, key: str, data: BytesLike) -> None:
        """See `BlockStore.put`; typed errors name the key and the place."""
        who = self._admit("put", key)
        block = data if type(data) is bytes else as_host_bytes(who, data).data
        with self._lock:
            if key in self._held or key in self._busy:
                raise BlockStoreError(f"{who}: got key {key!r} twice, need a new one")
            self._busy.add(key)
        with self._moving(who, key, held_when_done=True):
            self._write(who, key, block)

    def get(self, key: str) -> bytes:
        """See `BlockStore.get`; raises BlockStoreError for an unknown key."""
        who = self._admit("get", key)
        with self._lock:
            if key not in self._held:
                raise BlockStoreError(f"{who}: got unknown key {key!r}, need one that was put")
        with self._typed(who, key):
            return self._read(key)

    def delete(self, key: str) -> None:
        """See `BlockStore.delete`."""
        who = self._admit("delete", key)
        with self._lock:
            if key not in self._held:
                return
            self._held.remove(key)
            self._busy.add(key)
        with self._moving(who, key, held_when_done=False):
            self._remove(key)

    def keys(self) -> list[str]:
        """The keys that `get` finds, sorted."""
        with self._lock:
            return sorted(self._held)

    def close(self) -> None:
        """Delete all blocks. Later calls are refused; closing again does nothing."""
        with self._lock:
            if self._gone:
                return
            self._gone = "is closed"
            self._held.clear()
        self._discard()

    def after_fork(self) -> None:
        """In a forked child: the threads that held the lock or moved a block are gone."""
        self._lock = threading.Lock()
        self._busy.clear()
        if not self.survives_fork:
            self._gone = "belongs to the process this one was forked from"

    def _write(self, who: str, key: str, data: bytes | memoryview) -> None:
        raise NotImplementedError

    def _read(self, key: str) -> bytes:
        raise NotImplementedError

    def _remove(self, key: str) -> None:
        """Nothing happens if the bytes are gone already."""
        raise NotImplementedError

    def _discard(self) -> None:
        raise NotImplementedError

    def _failure(self, who: str, key: str, error: Exception) -> LazyKvError:
        return BlockStoreError(
            f"{who}: got {_reason(error)} for block {key!r}, need {self.place} to serve it"
        )

    def _admit(self, verb: str, key: str) -> str:
        """The call's name in messages; refuses keys that could be more than a name."""
        who = f"{type(self).__name__}.{verb}"
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise BlockStoreError(f"{who}: got key {key!r:.80}, need a name of a-z, 0-9 and -")
        if self._gone:
            raise BlockStoreError(
                f"{who}: got a store that {self._gone}, need an open one of this process"
            )
        return who

    @contextmanager
    def _moving(self, who: str, key: str, *, held_when_done: bool) -> Iterator[None]:
        """What moves a busy key's bytes; a failure puts the key back to where it was."""
        done = False
        try:
            with self._typed(who, key):
                yield
            done = True
        finally:
            with self._lock:
                self._busy.discard(key)
                if done == held_when_done and not self._gone:
                    self._held.add(key)

    @contextmanager
    def _typed(self, who: str, key: str) -> Iterator[None]:
        try:
            yield
        except LazyKvError:
            raise
        except MemoryError as error:
            raise OutOfMemory(f"{who}: got no memory for block {key!r}, need its bytes") from error
        except self.failures as error:
            raise self._failure(who, key, error) from error


_stores: weakref.WeakSet[_KeyedStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class MemoryBlockStore(_KeyedStore):
    """Blocks in host memory, `limit_bytes` of them at most (any number if None).

    `put` raises OutOfMemory beyond the limit. A forked child has a copy of all blocks.
    """

    survives_fork: ClassVar[bool] = True
    failures: ClassVar[tuple[type[Exception], ...]] = (KeyError,)  # deleted since it was looked up

    def __init__(self, limit_bytes: SupportsIndex | None = None) -> None:
        who = type(self).__name__
        self._limit = None if limit_bytes is None else count(who, "limit_bytes", limit_bytes)
        self._used = 0
        self._blocks: dict[str, bytes] = {}
        super().__init__("host memory")

    def after_fork(self) -> None:
        super().after_fork()
        self._blocks = {key: self._blocks[key] for key in self._held}
        self._used = sum(map(len, self._blocks.values()))

    def _write(self, who: str, key: str, data: bytes | memoryview) -> None:
        with self._lock:
            if self._limit is not None and self._used + len(data) > self._limit:
                raise OutOfMemory(
                    f"{who}: got {len(data)} bytes for block {key!r} beside {self._used} held, "
                    f"need {self._limit} in all at most; delete blocks or raise limit_bytes"
                )
            self._blocks[key] = bytes(data)
            self._used += len(data)

    def _read(self, key: str) -> bytes:
        return self._blocks[key]

    def _remove(self, key: str) -> None:
        with self._lock:
            self._used -= len(self._blocks.pop(key))

    def _discard(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._used = 0


class FolderBlockStore(_KeyedStore):
    """Blocks as files in a sub-folder of `path` that this store makes for itself alone.

    A block is on disk (fsync) when `put` returns. The sub-folder is removed by `close`, when the
    store is collected, and when the process ends in order.

    Raises EnvironmentMissing if `path` is no writable folder, or has ceased to be one; a full disk
    and other failures are BlockStoreError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            folder = tempfile.mkdtemp(prefix="lazykv-", dir=Path(path).absolute())
        except (OSError, ValueError) as error:
            raise EnvironmentMissing(
                f"{type(self).__name__}: got {_reason(error)} for {str(path)!r}, "
                "need a writable folder"
            ) from error
        self._cleanup = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        super().__init__(folder)

    def after_fork(self) -> None:
        super().after_fork()
        self._cleanup.detach()

    def _path(self, key: str) -> Path:
        # A prefix, since some systems keep names such as "nul" for devices.
        return Path(self.place, f"block-{key}")

    def _write(self, who: str, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        part = path.with_suffix(".part")  # no key has a dot
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _sync_folder(self.place)
        except BaseException:
            for leftover in (part, path):
                with suppress(OSError):
                    leftover.unlink(missing_ok=True)
            raise

    def _read(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def _remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _discard(self) -> None:
        self._cleanup()

    def _failure(self, who: str, key: str, error: Exception) -> LazyKvError:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.EACCES, errno.EPERM, errno.EROFS) or not Path(self.place).is_dir():
            return EnvironmentMissing(
                f"{who}: got {_reason(error)} for block {key!r}, need a writable folder at "
                f"{self.place}"
            )
        return super()._failure(who, key, error)


class FsspecBlockStore(_KeyedStore):
    """Blocks under a URL that fsspec opens (``s3://bucket/folder``, ``memory://``), each below a
    prefix of this store's own; `options` go to the file system (credentials and the like).

    A block is written under a temporary name, compared in size, then moved. Nothing is removed at
    the end of the process: call `close`, or the blocks stay behind.

    Raises EnvironmentMissing if fsspec or the URL's driver is not installed, or the folder does not
    exist or take a sub-folder; any later failure is BlockStoreError.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (Exception,)  # drivers have their own kinds

    def __init__(self, url: str, **options: Any) -> None:
        who = type(self).__name__
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise EnvironmentMissing(
                f"{who}: got no module {error.name!r}, need it; pip install 'lazykv[fsspec]'"
            ) from error
        try:
            self._fs, base = url_to_fs(url, **options)
            if base == self._fs.root_marker == "":
                raise ValueError("no bucket")
            root = f"{base.rstrip('/')}/lazykv-{uuid.uuid4().hex}"
            # Without parents: a bucket is its owner's to make.
            self._fs.mkdir(root, create_parents=False)
        except Exception as error:
            scheme = str(url).partition("://")[0]  # what follows may hold a password
            raise EnvironmentMissing(
                f"{who}: got {_reason(error)} for a URL of {scheme!r}, need a writable folder that "
                "fsspec opens"
            ) from error
        super().__init__(root)

    def _path(self, key: str) -> str:
        return f"{self.place}/block-{key}"

    def _write(self, who: str, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        part = f"{path}.part"
        try:
            self._fs.pipe_file(part, bytes(data))
            size = self._fs.size(part)
            if size != len(data):
                raise BlockStoreError(
                    f"{who}: got {size} bytes at {self.place} for block {key!r}, need {len(data)}"
                )
            self._fs.mv(part, path)
        except BaseException:
            for leftover in (part, path):
                with suppress(Exception):
                    self._fs.rm(leftover)
            raise

    def _read(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(key)))

    def _remove(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(key))

    def _discard(self) -> None:
        with self._typed(f"{type(self).__name__}.close", "*"), suppress(FileNotFoundError):
            self._fs.rm(self.place, recursive=True)  # object stores have no empty folders


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return text or f"{type(error).__name__}: {error}"


def _sync_folder(folder: str) -> None:
    """Make a rename in `folder` last, where the system can open and sync folders."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
