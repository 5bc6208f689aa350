"""Random sequences of a pool's verbs against plain lists of rows.

The row of a token is made from all tokens up to it, as a model's would be, so a block that is
shared, copied, restored or found wrongly shows in what a session reads. What verbs refuse is
checked elsewhere; here a refused one changes nothing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_state import make_pool, number, put, read, slots, state

import lazykv as lk

ANY = st.integers(0, 100)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
MOST = 5


def rows_of(tokens: list[int]) -> list[int]:
    """A number below 31 for every token, out of the tokens up to it."""
    out, mixed = [], 1
    for token in tokens:
        mixed = (7 * mixed + 11 * token + 5) % 31
        out.append(mixed)
    return out


class ByteMachine(RuleBasedStateMachine):
    """The model: tokens of every session, and which of its blocks each open handle covers."""

    @initialize(place=st.sampled_from(["cpu", "sim:0"]), size=st.integers(1, 4),
                dtype=st.sampled_from(["f32", "bf16", "i8"]))  # fmt: skip
    def build(self, place: str, size: int, dtype: str) -> None:
        self.pool = make_pool(9, size, dtype=dtype, heads=1, dim=2, place=place)
        self.size = size
        self.sessions: dict[lk.SessionHandle, list[int]] = {}
        self.handles: list[Any] = []
        self.prefixes: list[tuple[lk.PrefixId, list[int]]] = []
        self.open()

    def pick(self, which: int) -> lk.SessionHandle:
        return list(self.sessions)[which % len(self.sessions)]

    def tries(self, verb: Callable[[], Any], *refusals: type[lk.PoolError]) -> tuple[bool, Any]:
        """A verb that may be refused for one of these reasons; then it has changed nothing."""
        before = state(self.pool)
        try:
            return True, verb()
        except (lk.OutOfBlocks, *refusals):
            assert state(self.pool) == before
            return False, None

    @precondition(lambda self: len(self.sessions) < MOST)
    @rule()
    def open(self) -> None:
        self.sessions[self.pool.open()] = []

    @rule(which=ANY, tokens=TOKENS)
    def append(self, which: int, tokens: list[int]) -> None:
        s = self.pick(which)
        done, _ = self.tries(lambda: self.pool.append(s, len(tokens)), lk.SessionNotResident)
        if done:
            self.wrote(s, tokens)

    def wrote(self, s: lk.SessionHandle, tokens: list[int]) -> None:
        known = self.sessions[s]
        start = len(known)
        known += tokens
        put(self.pool, s, start, rows_of(known)[start:])

    @rule(which=st.lists(ANY, min_size=1, max_size=3), tokens=TOKENS, ends=st.booleans())
    def step(self, which: list[int], tokens: list[int], ends: bool) -> None:
        some = list(dict.fromkeys(map(self.pick, which)))
        n = len(tokens)
        need = self.pool.step_required(some, n) if self.resident(some) else None
        free = self.pool.free_blocks()
        done, step = self.tries(
            lambda: self.pool.begin_step(some, n), lk.SessionNotResident
        )  # fmt: skip
        assert not done or free - self.pool.free_blocks() == need
        if not done:
            return
        if ends:
            for s in some:
                self.wrote(s, tokens)
            self.pool.end_step(step)
        else:
            for s in some:
                put(self.pool, s, len(self.sessions[s]), [31] * n)
            self.pool.cancel_step(step)

    def resident(self, some: list[lk.SessionHandle]) -> bool:
        return all(None not in self.pool.session_block_table(s) for s in some)

    @rule(which=ANY, n=st.integers(0, 12))
    def truncate(self, which: int, n: int) -> None:
        s = self.pick(which)
        self.pool.truncate(s, n)
        del self.sessions[s][n:]

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(which=ANY)
    def discard(self, which: int) -> None:
        s = self.pick(which)
        self.pool.discard(s)
        del self.sessions[s]

    @precondition(lambda self: len(self.sessions) < MOST)
    @rule(which=ANY)
    def fork(self, which: int) -> None:
        s = self.pick(which)
        done, child = self.tries(lambda: self.pool.fork(s), lk.SessionNotResident)
        if done:
            self.sessions[child] = list(self.sessions[s])

    @rule(which=ANY, i=ANY)
    def ensure_writable(self, which: int, i: int) -> None:
        s = self.pick(which)
        n = self.pool.session_blocks(s)
        if n:
            done, block = self.tries(
                lambda: self.pool.ensure_writable_block(s, i % n), lk.SessionNotResident
            )
            assert not done or self.pool.block_refcount(block) == 1

    @rule(which=ANY, some=st.sets(st.integers(0, 8)))
    def evict(self, which: int, some: set[int]) -> None:
        s = self.pick(which)
        indices = [i for i in some if i < self.pool.session_blocks(s)]
        done, report = self.tries(
            lambda: self.pool.evict_blocks(s, indices), lk.SessionNotResident
        )  # fmt: skip
        if done:
            self.handles.append((s, report.handle))

    @precondition(lambda self: self.handles)
    @rule(which=ANY)
    def restore(self, which: int) -> None:
        s, handle = self.handles[which % len(self.handles)]
        done, _ = self.tries(lambda: self.pool.restore(s, handle), lk.StaleHandle)
        if done:
            self.handles.remove((s, handle))

    @rule(which=ANY, k=ANY)
    def register(self, which: int, k: int) -> None:
        s = self.pick(which)
        full = len(self.sessions[s]) // self.size
        if full and len(self.prefixes) < 2:
            k = 1 + k % full
            done, prefix = self.tries(
                lambda: self.pool.register_prefix(s, k), lk.SessionNotResident
            )
            if done:
                self.prefixes.append((prefix, self.sessions[s][: k * self.size]))

    @precondition(lambda self: self.prefixes)
    @rule(which=ANY, ends=st.booleans())
    def use_prefix(self, which: int, ends: bool) -> None:
        prefix, tokens = self.prefixes[which % len(self.prefixes)]
        if ends:
            self.pool.release_prefix(prefix)
            self.prefixes.remove((prefix, tokens))
        elif len(self.sessions) < MOST:
            s = self.pool.open()
            assert self.pool.splice_prefix_from(prefix, s) == len(tokens)
            self.sessions[s] = list(tokens)

    @rule(which=ANY)
    def publish(self, which: int) -> None:
        s = self.pick(which)
        before = self.pool.publish(s, self.sessions[s])
        assert before <= len(self.sessions[s]) // self.size
        if self.resident([s]):  # every row has been written, by steps or as whole blocks
            assert before == len(self.sessions[s]) // self.size

    @precondition(lambda self: len(self.sessions) < MOST)
    @rule(tokens=st.lists(st.integers(0, 2), max_size=9), which=ANY, own=st.booleans())
    def find(self, tokens: list[int], which: int, own: bool) -> None:
        asked = list(self.sessions[self.pick(which)]) if own else tokens
        s = self.pool.open()
        with self.pool.lookup(asked) as lease:
            n = lease.splice_into(s)
        self.sessions[s] = asked[:n]

    # What must hold after every verb

    @invariant()
    def same_rows(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for s, tokens in self.sessions.items():
            got, table = read(self.pool, s), self.pool.session_block_table(s)
            want = rows_of(tokens)
            resident = [table[p // self.size] is not None for p in range(len(want))]
            assert got == [n if r else None for n, r in zip(want, resident, strict=True)]


ByteMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestByteMachine = ByteMachine.TestCase


def test_the_rows_tell_slots_and_tokens_apart():
    pool = make_pool()
    assert len({number(at, n) for at in slots(pool) for n in range(32)}) == 128
    assert all(-65 < number(at, n) < 64 for at in slots(pool) for n in range(32))
    assert np.unique(rows_of([0] * 40)).size > 10
