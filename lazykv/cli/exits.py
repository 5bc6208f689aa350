"""Exit codes, and which failure gives which."""

from lazykv.errors import (
    BackendUnavailable,
    BindingError,
    DTypeError,
    EnvironmentMissing,
    GraphError,
    LazyKvError,
    ModelFormatError,
    OutOfMemory,
    RangeError,
    ShapeError,
    SymbolError,
)

OK = 0
CHECK_FAILED = 1
USAGE = 2
ENVIRONMENT_MISSING = 3
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
ENDED = 100
"""Added to the exit code of a command that another process runs to its end."""


class UsageError(Exception):
    """Arguments that cannot be used."""


# The first class that fits decides. What is not listed is a failure while running.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (EnvironmentMissing, ENVIRONMENT_MISSING),
    (BackendUnavailable, ENVIRONMENT_MISSING),
    (OutOfMemory, ENVIRONMENT_MISSING),
    (MemoryError, ENVIRONMENT_MISSING),
    (UsageError, USAGE),
    (ShapeError, USAGE),
    (DTypeError, USAGE),
    (RangeError, USAGE),
    (GraphError, USAGE),
    (SymbolError, USAGE),
    (BindingError, USAGE),
    (ModelFormatError, USAGE),
    (LazyKvError, CHECK_FAILED),
)


def exit_code(error: BaseException) -> int:
    """The exit code for a failure; what lazykv did not raise itself counts as a failed check."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), CHECK_FAILED)


def error_line(error: BaseException) -> str:
    """A failure in one line; the kind of one that nobody put into words is named."""
    text = " ".join(str(error).split())
    if isinstance(error, LazyKvError | UsageError):
        return text
    return f"{type(error).__name__}: {text}"
