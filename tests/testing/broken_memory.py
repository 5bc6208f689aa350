"""Backends whose declarations, memory, views or copies are wrong."""

import weakref

import numpy as np
from broken_backends import PLACES, Cpu, caught

from lazykv.device import Capabilities, DeviceLocation
from lazykv.layout import Layout

# Declarations


@caught("core/test_memory.py", "test_declarations_make_sense", "declarations")
class NamesDtypesAsNumpyDoes(Cpu):
    capabilities = Capabilities(dtypes=frozenset({"f32", "float64", "int64"}))


@caught("core/test_memory.py", "test_declarations_make_sense", "declarations")
class StoresNoFloats(Cpu):
    capabilities = Capabilities(dtypes=frozenset({"i64", "u8"}))


@caught("core/test_memory.py", "test_declarations_make_sense", "declarations")
class ListsItsLocations(Cpu):
    def locations(self):
        return list(PLACES)


@caught("core/test_memory.py", "test_a_device_that_is_not_there_is_refused", "not_there")
class ListsDevicesThatAreNotThere(Cpu):
    """As many as there could be."""

    def locations(self):
        return tuple(DeviceLocation(f"broken:{n}") for n in range(1024))


# Memory


@caught(
    "core/test_memory.py",
    "test_a_view_reads_where_its_layout_says[columns-f32]",
    "reads_where and f32",
)
class IgnoresStrides(Cpu):
    def view(self, buffer, dtype, layout):
        plain = Layout.contiguous(layout.shape).strides
        size = buffer.nbytes // dtype.itemsize
        fits = int(layout.offset) + int(np.prod(layout.shape)) <= size
        return super().view(
            buffer, dtype, Layout(layout.offset, layout.shape, plain) if fits else layout
        )


@caught(
    "core/test_memory.py",
    "test_a_view_reads_where_its_layout_says[offset-f32]",
    "reads_where and f32",
)
class IgnoresOffsets(Cpu):
    def view(self, buffer, dtype, layout):
        return super().view(buffer, dtype, Layout(0, layout.shape, layout.strides))


@caught("core/test_memory.py", "test_a_view_keeps_its_memory", "keeps")
class ReadsAfterFree(Cpu):
    """Takes memory back when the buffer's own handle is gone, whatever views there are."""

    def __init__(self):
        super().__init__()
        self.free = {}

    def allocate(self, nbytes, location):
        waiting = self.free.setdefault(nbytes, [])
        raw = waiting.pop() if waiting else super().allocate(nbytes, location)
        handle = raw.view()
        weakref.finalize(handle, waiting.append, raw)
        return handle


@caught("core/test_memory.py", "test_allocations_share_no_byte", "allocations")
class HandsOutMemoryTwice(Cpu):
    def __init__(self):
        super().__init__()
        self.known = {}

    def allocate(self, nbytes, location):
        if nbytes not in self.known:
            self.known[nbytes] = super().allocate(nbytes, location)
        return self.known[nbytes]


@caught("core/test_memory.py", "test_memory_is_aligned", "aligned")
class MisalignsMemory(Cpu):
    def allocate(self, nbytes, location):
        return super().allocate(nbytes + 8, location)[8:]


@caught("core/test_memory.py", "test_dropped_memory_is_let_go", "dropped")
class KeepsEverything(Cpu):
    def __init__(self):
        super().__init__()
        self.kept = []

    def allocate(self, nbytes, location):
        self.kept.append(super().allocate(nbytes, location))
        return self.kept[-1]


@caught("core/test_memory.py", "test_copies_to_the_host_are_fresh", "fresh")
class HandsOutItsMemory(Cpu):
    def copy_out(self, source):
        return np.asarray(source)


@caught("core/test_memory.py", "test_results_of_a_plan_are_fresh", "fresh")
class SharesResults(Cpu):
    """One staging array per shape, used for every result."""

    def __init__(self):
        super().__init__()
        self.staging = {}

    def copy_out(self, source):
        made = self.staging.setdefault((source.shape, source.dtype), np.empty_like(source))
        made[...] = source
        return made


@caught("dtype/test_bits.py", "test_a_move_keeps_every_bit[result-f64]", "result")
class CastsSilently(Cpu):
    """Doubles are kept as floats."""

    def copy_in(self, dest, source):
        if source.dtype == np.float64:
            with np.errstate(all="ignore"):
                source = source.astype(np.float32)
        super().copy_in(dest, source)


@caught("dtype/test_bits.py", "[result-f32]", "result")
class QuietsNans(Cpu):
    def copy_out(self, source):
        out = super().copy_out(source)
        if out.dtype.kind == "f":
            out[np.isnan(out)] = np.nan
        return out


@caught("core/test_memory.py", "test_copy_in_takes_host_arrays_of_any_strides[F]", "copy_in")
class TakesEveryHostArrayForContiguous(Cpu):
    def copy_in(self, dest, source):
        line = np.lib.stride_tricks.as_strided(
            source, (source.size,), (source.itemsize,)
        )  # fmt: skip
        dest[...] = line.reshape(source.shape)


@caught("capture/test_refusals.py", "test_symbols_are_refused", "symbols")
class KeepsItsViews(Cpu):
    """Makes a view once for every buffer and shape, wherever it begins."""

    def __init__(self):
        super().__init__()
        self.views = {}

    def view(self, buffer, dtype, layout):
        key = buffer.ctypes.data, dtype, layout.shape
        if key not in self.views:
            self.views[key] = super().view(buffer, dtype, layout)
        return self.views[key]
