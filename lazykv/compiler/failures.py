"""What a pass that failed has done to the storages it writes, and the error that says where."""

from collections.abc import Sequence

from lazykv.compiler.program import Home, Program
from lazykv.errors import KernelError, LazyKvError, OutOfMemory
from lazykv.storage import Storage

Storages = Sequence[Storage | None]


def account(
    e: BaseException, program: Program, storages: Storages, step_at: int, *, tears: bool
) -> BaseException:
    """Count the writes of the steps before the failed one, and give the error to raise.

    `step_at` is where the host was; an asynchronous failure names an earlier step by its op. A
    write that failed midway tears its storage, if `tears`; a refusal has written nothing.
    """
    queued = step_of_op(program, getattr(e, "op", None))
    at = step_at if queued is None else queued
    for n in range(at):
        store = _written_by(program, storages, n)
        if store is not None:
            store.version += 1
    refused = isinstance(e, LazyKvError) and not isinstance(e, KernelError | OutOfMemory)
    if tears and not refused:
        tear(program, storages, at)
    step = program.steps[at]
    specs = ", ".join(str(program.registers[i].spec) for i in step.inputs)
    label = f"{step.op.name}[{step.node}] of ({specs})"
    if refused or not isinstance(e, Exception):
        e.add_note(f"in {label}, step {at} of its plan")
        return e
    kind = OutOfMemory if isinstance(e, MemoryError) else KernelError
    return kind(f"{label}: got {type(e).__name__}: {e} in step {at}, need it to run")


def tear(program: Program, storages: Storages, step: int) -> None:
    """Mark the storage that a step was writing."""
    store = _written_by(program, storages, step)
    if store is not None:
        store.torn = True


def step_of_op(program: Program, op: object) -> int | None:
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
