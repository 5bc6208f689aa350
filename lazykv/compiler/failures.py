"""What a pass that failed has done to the storages it writes, and the error that says where."""

from collections.abc import Iterator, Sequence

from lazykv.compiler.program import Home, Program
from lazykv.errors import KernelError, LazyKvError, OutOfMemory
from lazykv.storage import Storage

Storages = Sequence[Storage | None]


def account(
    e: BaseException, program: Program, storages: Storages, step_at: int, *, tears: bool,
    others: Sequence[LazyKvError] = (),
) -> BaseException:  # fmt: skip
    """Count the writes of the steps before the failed one, and give the error to raise.

    `step_at` is where the host was; an asynchronous failure names an earlier step by its op. A
    write that failed midway tears its storage, if `tears`; a refusal has written nothing. Steps
    that ran behind a refusal may have written what they could not know to be wrong: they tear too.
    So do those that `others` name, failures of the same pass that nobody is told of.
    """
    queued = _step_of_op(program, getattr(e, "op", None))
    at = step_at if queued is None else queued
    for n in range(at):
        store = _written_by(program, storages, n)
        if store is not None:
            store.version += 1
    refused = _is_refusal(e)
    if tears and not refused:
        _tear(program, storages, at)
    if queued is not None:
        for store in _went_on(e, program, storages, range(queued + 1, step_at + 1)):
            store.version += 1
            store.torn |= tears
    for other in others if tears else ():
        _tear_late(other, program, storages, step_at)
    step = program.steps[at]
    specs = ", ".join(str(program.registers[i].spec) for i in step.inputs)
    label = f"{step.op.name}[{step.node}] of ({specs})"
    if refused or not isinstance(e, Exception):
        e.add_note(f"in {label}, step {at} of its plan")
        return e
    kind = OutOfMemory if isinstance(e, MemoryError) else KernelError
    error = kind(f"{label}: got {type(e).__name__}: {e} in step {at}, need it to run")
    error.op = getattr(e, "op", None)
    return error


def _is_refusal(e: BaseException) -> bool:
    return isinstance(e, LazyKvError) and not isinstance(e, KernelError | OutOfMemory)


def _went_on(
    e: BaseException, program: Program, storages: Storages, steps: range
) -> Iterator[Storage]:
    """What steps behind a late refusal have written."""
    refused: tuple[object, ...] | None = getattr(e, "refused", None)
    if refused is None:
        return
    for n in steps:
        store = _written_by(program, storages, n)
        if store is not None and not any(op is program.steps[n].op for op in refused):
            yield store


def _tear_late(e: LazyKvError, program: Program, storages: Storages, step_at: int) -> None:
    """Mark what a failure has spoiled whose writes have been counted as if they had gone well."""
    at = _step_of_op(program, e.op)
    if at is None:
        return
    if not _is_refusal(e):
        _tear(program, storages, at)
    for store in _went_on(e, program, storages, range(at + 1, step_at + 1)):
        store.torn = True


def _tear(program: Program, storages: Storages, step: int) -> None:
    """Mark the storage that a step was writing."""
    store = _written_by(program, storages, step)
    if store is not None:
        store.torn = True


def _step_of_op(program: Program, op: object) -> int | None:
    """The step that a failure names by its op."""
    steps = enumerate(program.steps)
    return None if op is None else next((n for n, s in steps if s.op is op), None)


def _written_by(program: Program, storages: Storages, step: int) -> Storage | None:
    """The bound storage that a step writes in place."""
    done = program.steps[step]
    register = program.registers[done.output]
    if done.op.destroys is None or register.home is not Home.LEAF:
        return None
    return storages[register.index]
