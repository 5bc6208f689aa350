"""Backends that do something else with memory that other libraries lend them."""

import itertools
from dataclasses import replace

from broken_backends import Cpu, Sim, caught

from lazykv.backends.sim_memory import Block, SimArray
from lazykv.device import Backend


@caught("interop/test_lent_memory.py", "test_both_sides_see", "both_sides and f32")
class CopiesWhatItIsLent(Cpu):
    def adopt(self, memory, location):
        return super().adopt(memory, location).copy()


@caught("interop/test_lent_memory.py", "test_both_sides_see", "both_sides and f32")
class CopiesWhatItIsLentOnTheDevice(Sim):
    def adopt(self, memory, location):
        made = self.allocate(memory.nbytes, location)
        self.transfer(made, location, super().adopt(memory, location), location)
        return made


@caught("interop/test_lent_memory.py", "test_both_sides_see", "both_sides and f32")
class DeclaresADeviceTypeAndNoMore(Cpu):
    adopt = Backend.adopt


@caught("interop/test_lent_memory.py", "test_memory_starts_where_the_lender_says", "starts_where")
class AdoptsFromTheStartOfTheAllocation(Sim):
    def adopt(self, memory, location):
        start = max(s for s in self._live if s <= memory.address)
        return super().adopt(replace(memory, address=start), location)


@caught("interop/test_lent_memory.py", "test_lent_memory_outlives_its_owner", "outlives")
class LetsGoOfWhatItUses(Sim):
    def __init__(self):
        super().__init__()
        self.bytes = {}

    def allocate(self, nbytes, location):
        made = super().allocate(nbytes, location)
        self.bytes[super().address(made)] = made._data  # stays, so that reading it is no crash
        return made

    def adopt(self, memory, location):
        data = self.bytes[memory.address][: memory.nbytes]
        return SimArray(data, location, Block())


@caught("interop/test_lent_memory.py", "test_lent_memory_is_let_go", "let_go")
class KeepsWhatItWasLent(Cpu):
    def __init__(self):
        super().__init__()
        self.kept = []

    def adopt(self, memory, location):
        self.kept.append(memory)
        return super().adopt(memory, location)


@caught("interop/test_lent_memory.py", "test_a_plan_that_writes_takes_memory_once", "once")
class NumbersItsArrays(Cpu):
    """Every array has an address of its own, whatever memory it is in."""

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(0, 1 << 30)

    def address(self, array):
        return next(self.numbers)


@caught("interop/test_lent_memory.py", "test_a_plan_takes_neighbours_in_lent_memory", "neighbours")
class HasOneAddress(Cpu):
    def address(self, array):
        return 1 << 20
