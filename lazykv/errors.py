"""Every error lazykv raises.

One root, `LazyKvError`; each class also derives from the built-in exception that a Python caller
would catch for that kind of fault. Messages read
``<op or class>: got <actual>, need <rule>[; <what to do>]``.
"""


class LazyKvError(Exception):
    """The root of all errors raised on purpose by lazykv."""

    op: object = None
    """The op whose queued work failed, where an asynchronous backend knows it."""

    refused: tuple[object, ...] | None = None
    """For a refusal that was found late, after the work given behind it had run too: the ops that
    refused, which have written nothing. None: no work behind the failed one has run."""


class ShapeError(LazyKvError, ValueError):
    """A rank, an extent or a byte length is not what the rule needs."""


class DTypeError(LazyKvError, TypeError):
    """An element type is unknown, unsupported here, or differs from the one needed."""


class RangeError(LazyKvError, IndexError, ValueError):
    """An index, a position or a count lies outside its bounds."""


class GraphError(LazyKvError, ValueError):
    """A graph is built or used against its rules (foreign node, bad parameter, missing kernel)."""


class SymbolError(LazyKvError, ValueError):
    """A symbol is unbound, bound twice to different values, or bound to a non-integer."""


class SymbolRangeError(SymbolError, RangeError):
    """A symbol is bound to a value outside its declared range."""


class BindingError(LazyKvError, ValueError):
    """A placeholder is unbound, or bound to something it cannot take."""


class StorageLockError(LazyKvError, RuntimeError):
    """A thread asked for a storage in a way that could only deadlock."""


class StorageTornError(LazyKvError, RuntimeError):
    """A storage whose last writer failed midway; rewrite it whole before reading it."""


class BackendUnavailable(LazyKvError, RuntimeError):
    """No working backend serves the location; the message says what to install."""

    ops: tuple[str, ...] = ()
    """Names of ops without a kernel on the location: the one that a graph asks for, then what its
    lowering led to; the last is the one of the message. Empty if the backend itself is missing."""


class EnvironmentMissing(LazyKvError, OSError):
    """Something outside the program is missing: network, pip, a writable folder, an extra."""


class OutOfMemory(LazyKvError, MemoryError):
    """An allocation failed; the message names the bytes asked for."""


class TopologyChanged(LazyKvError, RuntimeError):
    """A held plan was made under another generation of a location it uses."""


class KernelError(LazyKvError, RuntimeError):
    """A kernel failed while a plan ran, which names the node and its inputs; or a backend failed at
    another call, which names the location and the call."""


class CaptureError(LazyKvError, RuntimeError):
    """A step cannot be captured; the message says what stands in the way."""


class SessionBusy(LazyKvError, RuntimeError):
    """A plan or session is already running in another thread."""


class SnapshotError(LazyKvError, ValueError):
    """A snapshot file cannot be written, or is not what the target needs."""


class ModelFormatError(LazyKvError, ValueError):
    """A model file or name is unknown, corrupt, hostile or unsupported."""


class PoolError(LazyKvError, RuntimeError):
    """A paged pool refused a call; the pool is as it was."""


def must(held: bool, rule: str) -> None:
    """A pool's own rule; PoolError if it is broken. Not an assertion, which -O would remove."""
    if not held:
        raise PoolError(f"check: got a broken pool, need: {rule}")


class OutOfBlocks(PoolError, MemoryError):
    """A pool has fewer free blocks than a call takes."""

    def __init__(self, message: str, *, need: int = 0, have: int = 0) -> None:
        super().__init__(message)
        self.need = need
        self.have = have


class UnknownSession(PoolError, LookupError):
    """Not a session of this pool, or one that was discarded."""


class BadSpliceRange(PoolError, IndexError):
    """A range of blocks lies outside the session that is to share them."""


class BadBlockIndex(PoolError, IndexError):
    """A block index lies outside its session or pool, or is given twice."""


class SessionNotResident(PoolError):
    """A block that the call needs is evicted; restore it first."""


class PrefixTargetNotEmpty(PoolError, ValueError):
    """A prefix goes to the start of a session, and this one has tokens already."""


class PrefixNotFullyFilled(PoolError, ValueError):
    """A prefix is made of full blocks, and the session has fewer of them."""


class UnknownPrefix(PoolError, LookupError):
    """Not a registered prefix of this pool, or one that was released."""


class OffsetNotBlockAligned(PoolError, ValueError):
    """Shared blocks can follow only whole blocks."""


class StaleHandle(PoolError, ValueError):
    """What the handle stands for is gone: it was used, or the slots it covers have changed."""


class BlockStoreError(PoolError):
    """A store of blocks cannot take or give back bytes, or gives back other bytes than it took."""
