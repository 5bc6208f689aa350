"""Backends that mix up devices or threads, or lose what failed there, or do not survive a fork."""

import os
import threading
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
from broken_backends import Cpu, Sim, caught, go

from lazykv.errors import LazyKvError, RangeError
from lazykv.ops import elementwise as ew

# Devices


@caught("core/test_memory.py", "test_memory_is_on_the_location_that_was_asked_for", "asked_for")
class PutsEverythingOnTheFirstDevice(Sim):
    def allocate(self, nbytes, location):
        return super().allocate(nbytes, self.locations()[0])


TOLD_BY_EVERY_LOCATION = "test_failures_are_told_by_every_location"


@caught("async_/test_failures.py", TOLD_BY_EVERY_LOCATION, "location")
class WaitsForTheFirstDeviceOnly(Sim):
    def synchronize(self, location):
        super().synchronize(self.locations()[0])

    def copy_out(self, source):
        super().synchronize(source.location)
        return self._cpu.copy_out(source._data)


@caught("async_/test_failures.py", TOLD_BY_EVERY_LOCATION, "location")
class LosesErrorsOfTheSecondDevice(Sim):
    def synchronize(self, location):
        try:
            super().synchronize(location)
        except LazyKvError:
            if location == self.locations()[0]:
                raise


LEAVES_THE_OTHER_ALONE = "test_a_failure_leaves_work_of_the_other_location_alone"


@caught("async_/test_failures.py", LEAVES_THE_OTHER_ALONE, "location")
class AFailureEmptiesEveryQueue(Sim):
    def synchronize(self, location):
        try:
            super().synchronize(location)
        except LazyKvError:
            for place in self.locations():
                self.stream(place).queue.clear()
            raise


@caught("async_/test_failures.py", LEAVES_THE_OTHER_ALONE, "location")
class EveryDeviceTellsOfAFailure(Sim):
    """Whoever waits for one device waits for all."""

    def synchronize(self, location):
        told = []
        for place in self.locations():
            try:
                super().synchronize(place)
            except LazyKvError as e:
                told.append(e)
        if told:
            raise told[0]


class TransfersBackAreWrong(Sim):
    def transfer(self, dest, to, source, from_):
        if from_ == self.locations()[0]:
            super().transfer(dest, to, source, from_)
        else:
            self.back(self.stream(from_), self.stream(to), dest._data, source._data)

    def back(self, giver, taker, dest, source):
        raise NotImplementedError


@caught(
    "async_/test_order.py", "test_the_source_is_not_overwritten_before_it_is_copied[back]", "source"
)
class TheGiverDoesNotWaitOnTheWayBack(TransfersBackAreWrong):
    def back(self, giver, taker, dest, source):
        taker.wait(giver.record())
        taker.push("copy", self._copy, dest, source)


@caught("async_/test_order.py", "test_a_transfer_waits_for_the_work_before_it[back]", "transfer")
class TheTakerDoesNotWaitOnTheWayBack(TransfersBackAreWrong):
    def back(self, giver, taker, dest, source):
        taker.push("copy", self._copy, dest, source)
        giver.wait(taker.record())


# Failures


@caught("async_/test_failures.py", "test_work_behind_a_failure_does_not_run", "behind")
class GoesOnAfterAFailure(Sim):
    """Work behind the failed one runs all the same, and nothing in the error says so."""

    def synchronize(self, location):
        stream, told = self.stream(location), []
        stream.refuse_in_capture("a wait")
        while stream.queue:
            stream.run_one()
            if self.giver.failure is not None:
                told.append(self.giver.failure)
                self.giver.failure = None
        if told:
            raise told[0]


@caught("async_/test_failures.py", "test_whoever_waits_for_failed_work_is_told_once", "once")
class TellsAgain(Sim):
    def synchronize(self, location):
        again, self.again = getattr(self, "again", None), None
        if again is not None:
            raise again
        try:
            super().synchronize(location)
        except LazyKvError as e:
            self.again = e
            raise


@caught("async_/test_failures.py", "test_a_copy_to_the_host_tells_too", "copy_to")
class CopiesToTheHostTellNothing(Sim):
    def copy_out(self, source):
        with suppress(LazyKvError):
            super().synchronize(source.location)
        return self._cpu.copy_out(source._data)


@caught("async_/test_failures.py", "test_whoever_waits_for_failed_work_is_told_once", "once")
class FailuresNameNoOp(Sim):
    def synchronize(self, location):
        try:
            super().synchronize(location)
        except LazyKvError as e:
            e.op = None
            raise


# Threads


@caught("async_/test_threads.py", "test_a_failure_is_told_to_the_thread_that_gave_the_work", "gave")
class TellsWhoeverWaitsFirst(Sim):
    """All threads are one to it."""

    def __init__(self):
        super().__init__()
        self.one = super().giver

    @property
    def giver(self):
        return self.one


@caught("async_/test_threads.py", "test_a_failure_is_told_to_the_thread_that_gave_the_work", "gave")
class AFailureDropsTheWorkOfOthers(Sim):
    def synchronize(self, location):
        stream = self.stream(location)
        with self.running:
            while stream.queue:
                giver = stream.queue[0].giver
                stream.run_one()
                if giver is not None and giver.failure is not None:
                    stream.queue.clear()
        super().synchronize(location)


@caught("async_/test_threads.py", "test_a_failure_is_told_to_the_thread_that_gave_the_work", "gave")
class ForgetsFailuresThatOthersFind(Sim):
    def synchronize(self, location):
        stream = self.stream(location)
        with self.running:
            while stream.queue:
                giver = stream.queue[0].giver
                stream.run_one()
                if giver is not None and giver is not self.giver:
                    giver.failure = None
        super().synchronize(location)


@caught("async_/test_threads.py", "test_moving_other_data_collects_no_failure", "moving")
class AllocationsTellOfAnyFailure(Sim):
    """As a library that looks at the last error of the process after every call."""

    def __init__(self):
        super().__init__()
        self.givers = []

    @property
    def giver(self):
        if super().giver not in self.givers:
            self.givers.append(super().giver)
        return super().giver

    def allocate(self, nbytes, location):
        with suppress(LazyKvError):
            self.synchronize(location)
        for giver in self.givers:
            if giver.failure is not None:
                failure, giver.failure = giver.failure, None
                raise failure
        return super().allocate(nbytes, location)


@caught("async_/test_threads.py", "test_a_failure_of_a_thread_that_has_ended", "ended")
class KnowsThreadsByTheirIdent(Sim):
    """Which a later thread gets again."""

    def __init__(self):
        super().__init__()
        self.givers = {}

    @property
    def giver(self):
        return self.givers.setdefault(threading.get_ident(), super().giver)


@caught("async_/test_threads.py", "test_threads_with_plans_of_their_own_do_not_meet", "meet")
class OneWorkspaceForAllThreads(Cpu):
    """Sums go through a buffer of the backend."""

    ops = (ew.AddScalar,)

    def __init__(self):
        super().__init__()
        self.workspaces = {}

    def run(self, inner, call):
        key = call.out.shape, call.out.dtype
        workspace = self.workspaces.setdefault(key, np.empty_like(call.out))
        go(inner, call, out=workspace)
        call.out[...] = workspace


@caught("async_/test_threads.py", "test_results_and_refusals_of_threads_do_not_mix", "mix")
class OneErrorForAllThreads(Cpu):
    """Kernels put their refusal into the backend; whoever copies a result takes what is there."""

    refusal: LazyKvError | None = None

    def kernel(self, op, ins, out):
        inner = super().kernel(op, ins, out)
        if inner is None:
            return None
        return replace(inner, emit=lambda call: [(self.checked, (inner, call))])

    def checked(self, inner, call):
        try:
            go(inner, call)
        except RangeError as e:
            self.refusal = e

    def copy_out(self, source):
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        return super().copy_out(source)


# Forks


@caught("core/test_fork.py", "test_a_forked_child_goes_on_with_the_memory_of_its_parent")
class LosesItsContextInAFork(Cpu):
    """As the driver of a device, which knows the process that it was opened in."""

    survives_fork: ClassVar[bool] = True

    def __init__(self):
        super().__init__()
        self.opened_in = os.getpid()

    def copy_out(self, source):
        if os.getpid() != self.opened_in:
            raise RuntimeError("initialization error")
        return super().copy_out(source)
