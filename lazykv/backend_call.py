"""Calls into a backend: whatever it raises, the caller gets a typed error."""

from lazykv.errors import KernelError, LazyKvError, OutOfMemory


class BackendCall:
    """While the backend of a location is called, as in ``with BackendCall(place, "copy_in"):``."""

    __slots__ = ("call", "location")

    def __init__(self, location: object, call: str) -> None:
        self.location = location
        self.call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, LazyKvError):
            raise typed(error, self.location, self.call) from error


def typed(error: Exception, location: object, call: str) -> LazyKvError:
    """What to raise for a backend's own exception: a `KernelError`, or `OutOfMemory` for a
    MemoryError, that names the location and the call."""
    kind = OutOfMemory if isinstance(error, MemoryError) else KernelError
    return kind(
        f"backend of {location}: got {type(error).__name__}: {error} in {call}, need it to run"
    )
