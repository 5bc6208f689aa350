"""A plan's calls recorded by a backend, replayed with one call instead of hundreds.

What is recorded refers to memory by address and to nothing else: inputs are copied to the same
place before every replay, and positions are read from memory by the kernels. A plan with symbols
has values that only the host knows, so it cannot be captured.
"""

from collections.abc import Sequence
from typing import Any

from lazykv.backend_call import BackendCall
from lazykv.compiler.ir import Output
from lazykv.compiler.kernels import emit, find_kernel
from lazykv.compiler.program import Program
from lazykv.compiler.registers import Registers
from lazykv.device import Call, DeviceLocation, Step, device
from lazykv.errors import CaptureError
from lazykv.ops.move import Copy
from lazykv.storage import Storage
from lazykv.symbols import Sym


class CapturedCalls:
    """The recorded form of one plan's calls, valid while its registers stay where they are.

    Results are copied, within the recording, into storages of its own, and handed to the host after
    each replay.
    """

    def __init__(self, program: Program, registers: Registers, symbols: Sequence[Sym]) -> None:
        place = _check(program, symbols)
        self._backend = device(place).backend
        # A recording does not keep memory alive. Registers do: the arenas, and views of all that is
        # bound until other memory is, when the recording is dropped.
        self._registers = registers
        self._results = [Storage.allocate(s.shape, s.dtype, place) for s in program.results]
        calls: list[Step] = []
        for n, step in enumerate(program.steps):
            if isinstance(step.op, Output):
                calls += self._hand_over(step.op.position, registers.array_of(step.inputs[0]))
            else:
                calls += registers.calls_of(n)
        with BackendCall(place, "capture"):
            self._capture = self._backend.capture(place, calls)

    def replay(self) -> None:
        """Run everything once more; the results are in the plan's registers when it returns."""
        self._capture.replay()
        for n, storage in enumerate(self._results):
            self._registers.results[n] = self._backend.copy_out(storage.array)

    def _hand_over(self, position: int, source: Any) -> Sequence[Step]:
        result = self._results[position]
        op, spec = Copy(str(result.location)), result.spec
        kernel = find_kernel(result.location, op, (spec,), spec)
        if kernel is None:
            raise CaptureError(f"capture: got no kernel for copies on {result.location}, need one")
        call = Call(op, (source,), result.array, (spec,), spec, (), [])
        return emit(result.location, kernel, call)


def _check(program: Program, symbols: Sequence[Sym]) -> DeviceLocation:
    """The one location of a program that can be captured."""
    if symbols:
        names = ", ".join(s.name for s in symbols)
        raise CaptureError(
            f"capture: got symbols {names}, need positions and lengths in tensors, which kernels "
            "read when they run"
        )
    if len(program.locations) != 1:
        got = ", ".join(map(str, program.locations))
        raise CaptureError(f"capture: got locations {got}, need one")
    (place,) = program.locations
    if not device(place).backend.capabilities.capture:
        raise CaptureError(f"capture: got {place}, need a backend that declares capture")
    return place
