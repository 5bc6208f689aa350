"""How a location's backend runs an op: the one place where backends are asked."""

from collections.abc import Sequence

import numpy as np

from lazykv.backend_call import BackendCall
from lazykv.device import Call, DeviceLocation, Kernel, Step, device
from lazykv.errors import BackendUnavailable, KernelError
from lazykv.ops.op import Op
from lazykv.spec import Spec


def find_kernel(where: DeviceLocation, op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
    """The kernel for an op on these operands; None if the backend declares no such op (it is not
    asked then) or has no kernel for them."""
    backend = device(where).backend
    declared = backend.capabilities.ops
    if declared is not None and op.name not in declared:
        return None
    with BackendCall(where, f"kernel() for {op.name}"):
        found: object = backend.kernel(op, ins, out)
    if found is not None and not isinstance(found, Kernel):
        raise KernelError(
            f"backend of {where}: got {type(found).__name__} from kernel() for {op.name}, need a "
            "Kernel or None"
        )
    return found


def scratch_of(
    where: DeviceLocation, kernel: Kernel, op: Op, ins: tuple[Spec, ...], out: Spec
) -> tuple[Spec, ...]:
    """The scratch memory that a kernel asks for."""
    with BackendCall(where, f"scratch of {op.name}"):
        return tuple(kernel.scratch(op, ins, out))


def emit(where: DeviceLocation, kernel: Kernel, call: Call) -> list[Step]:
    """The calls of one op."""
    # A number that the dtype cannot hold is infinite, which is no news.
    with BackendCall(where, f"emit of {call.op.name}"), np.errstate(over="ignore"):
        return list(kernel.emit(call))


def no_kernel(
    where: DeviceLocation, op: Op, ins: Sequence[Spec], lowered: Sequence[str] = ()
) -> BackendUnavailable:
    """What to raise for an op that can run in no way; `lowered` are the ops whose lowerings led to
    it, the one that the graph asks for first."""
    error = BackendUnavailable(
        f"{op.name}: got {', '.join(map(str, ins))} on {where}, need a kernel, a portable body or "
        "a lowering, and its backend has none"
    )
    error.ops = (*lowered, op.name)
    return error
