"""The levels of the suite, in the order they are worth passing: one folder of `suite` each."""

LEVELS: dict[str, str] = {
    "core": "memory, and every op on every dtype and layout; writes, bounds",
    "dtype": "bit-exact moves of every pattern, and roundings",
    "session": "held plans: reuse, truncate, rebind, fresh results",
    "paged": "the pool, paged attention, copy on write, evict and restore",
    "async": "order of work, transfers, host arrays, waiting, failures",
    "capture": "replays equal plain passes; what cannot be recorded is refused",
    "fault": "memory that is not there, and kernels that fail",
    "interop": "DLPack and the buffer protocol, both ways",
}
