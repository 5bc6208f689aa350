"""Asynchronous backends whose work runs out of order, at the wrong time or unheard."""

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from broken_backends import Cpu, Sim, caught, go

from lazykv.backends.sim import SimCapture
from lazykv.device import Capabilities
from lazykv.errors import OutOfMemory


@caught("async_/test_order.py", "test_a_host_array_may_change", "host_array")
class CopiesInLater(Sim):
    def copy_in(self, dest, source):
        self.stream(dest.location).push("copy", self._copy, dest._data, source)


@caught("async_/test_order.py", "test_copies_and_kernels_take_turns", "turns or chain")
class CopiesOvertakeKernels(Sim):
    def copy_in(self, dest, source):
        super().copy_in(dest, source)
        queue = self.stream(dest.location).queue
        queue.insert(min(1, len(queue) - 1), queue.pop())


@caught("async_/test_order.py", "test_a_chain_of_kernels_runs_in_order", "turns or chain")
class RunsTheLastFirst(Sim):
    def synchronize(self, location):
        queue = self.stream(location).queue
        work = [queue.popleft() for _ in range(len(queue))]
        queue.extend(reversed(work))
        super().synchronize(location)


@caught("async_/test_order.py", "test_a_transfer_waits_for_the_work_before_it", "transfer")
class SkipsTheWait(Sim):
    def transfer(self, dest, to, source, from_):
        giver, taker = self.stream(from_), self.stream(to)
        taker.push("copy", self._copy, dest._data, source._data)
        giver.wait(taker.record())


@caught("async_/test_order.py", "test_the_source_is_not_overwritten_before_it_is_copied", "source")
class TheGiverDoesNotWait(Sim):
    def transfer(self, dest, to, source, from_):
        giver, taker = self.stream(from_), self.stream(to)
        taker.wait(giver.record())
        taker.push("copy", self._copy, dest._data, source._data)


@caught("async_/test_order.py", "test_work_on_the_destination_before_a_transfer", "transfer")
class TransfersPastTheQueue(Sim):
    """The source is waited for, the destination's own earlier work is not."""

    def transfer(self, dest, to, source, from_):
        self.synchronize(from_)
        self._copy(dest._data, source._data)


@caught("core/test_memory.py", "test_memory_holds_what_is_put_in[64]", "holds")
class ReadsWithoutWaiting(Sim):
    def copy_out(self, source):
        return self._cpu.copy_out(source._data)


@caught("async_/test_order.py", "test_memory_that_was_let_go_is_still_there", "let_go")
class FreesAtOnce(Sim):
    def _free(self, data, location):
        del self._live[self._cpu.address(data)]
        data.fill(255)


@caught("async_/test_order.py", "test_values_of_symbols_are_those_of_their_own_launch", "symbols")
class ReadsSymbolsWhenTheQueueRuns(Sim):
    def _launch(self, stream, inner, call):
        stream.push("launch", go, inner, call)


@caught("async_/test_failures.py", "test_whoever_waits_for_failed_work_is_told_once", "once")
class LosesErrors(Sim):
    def synchronize(self, location):
        with contextlib.suppress(Exception):
            super().synchronize(location)


@caught("async_/test_failures.py", "test_a_failure_is_typed_and_names_the_op", "typed")
class ErrorsHaveNoType(Sim):
    def synchronize(self, location):
        try:
            super().synchronize(location)
        except Exception as e:
            raise OutOfMemory("something went wrong") from e


# Recordings


class BakedCapture(SimCapture):
    """Puts back, before each replay, what small operands held when they were recorded."""

    def __init__(self, stream, work):
        super().__init__(stream, work)
        self.baked = [
            (a, a.copy()) for w in self.work for a in _arrays(w.args) if a.dtype == np.int64
        ]

    def replay(self):
        for array, value in self.baked:
            self._stream.push("bake", np.copyto, array, value)
        super().replay()


def _arrays(value: Any) -> Iterable[Any]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _arrays(item)


@caught("capture/test_replay.py", "test_a_replay_takes_the_data_of_its_own_pass")
class CaptureBakesOffsets(Sim):
    def capture(self, location, calls):
        self.synchronize(location)
        made = super().capture(location, calls)
        return BakedCapture(self.stream(location), made.work)


@caught("capture/test_replay.py", "test_recording_runs_nothing")
class RunsWhileRecording(Sim):
    def capture(self, location, calls):
        made = super().capture(location, calls)
        made.replay()
        return made


@caught("capture/test_replay.py", "test_what_is_bound_anew_is_what_is_written")
class ReplaysAnOldRecording(Sim):
    """Keeps recordings by what they do, not by the memory they do it to."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def capture(self, location, calls):
        made = super().capture(location, calls)
        return self.known.setdefault(tuple(w.label for w in made.work), made)


@caught("capture/test_refusals.py", "test_without_capture_it_is_refused")
class CapturesWithoutSayingSo(Sim):
    capabilities = Capabilities(is_async=True)


# Failures


@caught("fault/test_memory_runs_out.py", "test_too_much_memory_is_out_of_memory", "too_much")
class MemoryErrorsHaveNoType(Cpu):
    def allocate(self, nbytes, location):
        return np.empty(nbytes + 64, np.uint8)[:nbytes]


@caught("fault/test_memory_runs_out.py", "test_a_refused_allocation_takes_nothing", "refused")
class RefusedAllocationsCount(Sim):
    def allocate(self, nbytes, location):
        try:
            return super().allocate(nbytes, location)
        except OutOfMemory:
            self._live[-len(self._live)] = 1024, location
            raise


@caught("fault/test_kernels_fail.py", "test_failed_steps_keep_no_memory")
class FailedWorkKeepsItsMemory(Sim):
    """What was queued behind a failure is never let go."""

    def __init__(self):
        super().__init__()
        self.lost = []

    def synchronize(self, location):
        try:
            super().synchronize(location)
        except Exception:
            self.lost.append(self.allocate(64, location))
            raise


@caught("fault/test_kernels_fail.py", "test_a_session_goes_on_after_a_failed_step")
class IsDeafAfterAFailure(Sim):
    def synchronize(self, location):
        if getattr(self, "failed", False):
            self.stream(location).queue.clear()
        try:
            super().synchronize(location)
        except Exception:
            self.failed = True
            raise


@caught("interop/test_exchange.py", "test_a_storage_is_exported_by_dlpack[f32]", "exported and f32")
class DeclaresHostMemoryItHasNot(Sim):
    capabilities = Capabilities(is_async=True, capture=True, host_memory=True)
