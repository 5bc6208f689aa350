"""Random sequences of a pool's verbs against plain lists.

What a session reads is compared cell by cell (see `pool_model`), so a block that is shared, reused,
copied, restored or found wrongly shows, whatever the counts say.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_state import machine_settings
from pool_model import Block, PoolModel, Session, Shared, Stored, first
from pool_state import GONE, DictPool, snapshot

from lazykv.errors import (
    BadBlockIndex,
    BadSpliceRange,
    LazyKvError,
    OffsetNotBlockAligned,
    OutOfBlocks,
    PoolError,
    PrefixNotFullyFilled,
    PrefixTargetNotEmpty,
    RangeError,
    SessionBusy,
    SessionNotResident,
    StaleHandle,
    UnknownPrefix,
    UnknownSession,
)
from lazykv.ids import FenceId, PrefixId

ANY = st.integers(0, 59)
WILD = [-1, 99]
# Most indices are brought into range (`PoolMachine.place`), so that most verbs go through.
INDEX = st.sampled_from([*range(6)] * 4 + WILD)
TOKENS = st.lists(st.integers(0, 1), max_size=6)
WRONG = st.sampled_from([False] * 7 + [True])
SALT = st.sampled_from([b"", b"", b"", b"s"])
MOST_SESSIONS, MOST_SHARED, MOST_BLOCKS = 5, 3, 14

Errors = set[type[LazyKvError]]


class PoolMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(6, 12), size=st.integers(1, 4), prefix=st.booleans())
    def build(self, blocks: int, size: int, prefix: bool) -> None:
        self.pool, self.model = DictPool(blocks, size), PoolModel(blocks, size)
        self.size = size
        self.stored: list[Stored] = []
        self.steps: list[tuple[Any, list[Session]]] = []
        self.ended: list[Any] = []
        self.dead: list[Any] = [DictPool(blocks, size).open(), True, 1, None]
        self.events, self.indexed = 0, set[int]()
        for _ in range(3):
            self.open()
        self.append(0, [0, 1] * size)
        self.publish(0, b"", 0, [], 99)
        if prefix:
            self.register(0, 1)

    # Picking and calling

    def session(self, which: int) -> Session:
        return self.model.sessions[which % len(self.model.sessions)]

    def target(self, which: int) -> Session:
        """Mostly an empty session, which is what prefixes go to."""
        empty = [s for s in self.model.sessions if not s.cells]
        return empty[which % len(empty)] if empty and which % 8 else self.session(which)

    def call(
        self, errors: Errors, action: Callable[[], Any], need: int = 0, keep: Any = None
    ) -> tuple[bool, Any]:
        """Run a verb that takes `need` blocks. A refused one changes nothing."""
        have = self.model.available()
        if need > have:
            errors = errors | {OutOfBlocks}
        if not errors:
            return True, action()
        before = snapshot(self.pool, keep)
        with pytest.raises(LazyKvError) as caught:
            action()
        assert type(caught.value) in errors
        if isinstance(caught.value, OutOfBlocks):
            assert (caught.value.need, caught.value.have) == (need, have)
        assert snapshot(self.pool, keep) == before
        return False, None

    def place(self, i: int, most: int) -> int:
        """An index within 0..most, unless it is meant to be out of range."""
        return i if i in WILD else i % (most + 1)

    def idle(self, *sessions: Session) -> Errors:
        return {SessionBusy} if any(s.start is not None for s in sessions) else set()

    def whole(self, s: Session) -> Errors:
        return {SessionNotResident} if s.evicted else set()

    def room(self, s: Session, n: int) -> Errors:
        """Why n more tokens do not go to the end of a session."""
        tail = isinstance(self.model.tail(s), Stored)
        return {SessionNotResident} if n and tail else set()

    def aligned(self, s: Session) -> Errors:
        return {OffsetNotBlockAligned} if len(s.cells) % self.size else set()

    def empty(self, s: Session) -> Errors:
        return {PrefixTargetNotEmpty} if s.cells else set()

    def full(self, s: Session, k: int) -> Errors:
        """Why the first k blocks are no prefix."""
        if k < 0:
            return {RangeError}
        if k * self.size > len(s.cells):
            return {PrefixNotFullyFilled}
        return {SessionNotResident} if any(isinstance(b, Stored) for b in s.table[:k]) else set()

    def write(self, s: Session, start: int) -> None:
        self.pool.write(s.handle, start, s.cells[start:])

    # Sequences

    def open(self) -> None:
        if len(self.model.sessions) < MOST_SESSIONS:
            self.add(self.pool.open())

    def add(self, handle: Any) -> Session:
        assert handle not in [s.handle for s in self.model.sessions] + self.dead
        self.model.sessions.append(Session(handle))
        return self.model.sessions[-1]

    @rule(which=ANY, tokens=TOKENS)
    def append(self, which: int, tokens: list[int]) -> None:
        s, n = self.session(which), len(tokens)
        if len(s.table) > MOST_BLOCKS:
            return
        errors = self.idle(s) | self.room(s, n)
        need = 0 if errors else self.model.required([s], n)
        done, taken = self.call(errors, lambda: self.pool.append(s.handle, n), need)
        if done:
            start = len(s.cells)
            assert taken == [b.number for b in self.model.grow(s, tokens)]
            assert len(taken) == need
            self.write(s, start)

    @rule(which=ANY, cut=ANY, wrong=WRONG)
    def truncate(self, which: int, cut: int, wrong: bool) -> None:
        s = self.session(which)
        n = -1 if wrong else max(0, len(s.cells) + 1 - cut % (2 * self.size + 2))
        errors = self.idle(s) | ({RangeError} if n < 0 else set())
        if self.call(errors, lambda: self.pool.truncate(s.handle, n))[0] and n < len(s.cells):
            self.model.truncate(s, n)

    @rule(which=ANY, cut=ANY, tokens=TOKENS)
    def speculate(self, which: int, cut: int, tokens: list[int]) -> None:
        """Drop some tokens, write others in their place and publish them."""
        self.truncate(which, cut, False)
        self.append(which, tokens)
        self.publish(which, b"", 0, [], 99)

    @rule(which=ANY)
    def discard(self, which: int) -> None:
        s = self.session(which)
        if len(self.model.sessions) > 1:
            self.pool.discard(s.handle)
            self.dead.append(s.handle)
            self.model.sessions.remove(s)
            dropped, s.table = s.table, []
            for slot in dropped:
                if isinstance(slot, Stored):
                    slot.gone = True
            self.model.let_go(dropped)

    @rule(which=ANY)
    def fork(self, which: int) -> None:
        s = self.session(which)
        if len(self.model.sessions) < MOST_SESSIONS:
            errors = self.idle(s) | self.whole(s)
            done, handle = self.call(errors, lambda: self.pool.fork(s.handle))
            if done:
                child = self.add(handle)
                self.model.share(child, list(s.table), s.cells, s.foreign, s.edited)

    @rule(which=ANY, i=INDEX, slot=ANY, token=st.integers(0, 1))
    def edit(self, which: int, i: int, slot: int, token: int) -> None:
        """Rewrite one token of a block that `cow_break` made the session's own."""
        s = self.session(which)
        i = self.place(i, max(0, len(s.table) - 1))
        errors, need, block = self.idle(s), 0, None
        if not 0 <= i < len(s.table):
            errors |= {BadBlockIndex}
        else:
            block = s.table[i]
            if isinstance(block, Stored):
                errors |= {SessionNotResident}
            elif not errors:
                need = int(self.model.holders(block) > 1)
        done, number = self.call(errors, lambda: self.pool.cow_break(s.handle, i), need)
        if done:
            if need:
                s.table[i] = self.model.copied(block, self.model.take(1)[0])
                self.model.let_go([block])
            else:
                self.model.rewrite(block)
            assert number == s.table[i].number
            at = i * self.size + slot % min(self.size, len(s.cells) - i * self.size)
            s.cells[at] = self.model.cell(s.cells[:at], token)
            s.edited = first(s.edited, at)
            self.pool.write(s.handle, at, [s.cells[at]])

    # Splices

    @rule(which=ANY, other=ANY, start=INDEX, end=INDEX)
    def splice(self, which: int, other: int, start: int, end: int) -> None:
        src, dst = self.session(which), self.session(other)
        if len(dst.table) > MOST_BLOCKS:
            return
        start, end = self.place(start, len(src.table)), self.place(end, len(src.table))
        if start != 99 and end != -1:
            start, end = min(start, end), max(start, end)
        errors = self.idle(src, dst) | self.aligned(dst)
        if not 0 <= start <= end <= len(src.table):
            errors |= {BadSpliceRange}
        elif any(isinstance(b, Stored) for b in src.table[start:end]):
            errors |= {SessionNotResident}
        done, n = self.call(
            errors, lambda: self.pool.splice(src.handle, dst.handle, start, end)
        )  # fmt: skip
        if done:
            cells = src.cells[start * self.size : end * self.size]
            assert n == len(cells)
            foreign, edited = self.model.prefix_marks(src, end)
            if src.table[:start] != dst.table:
                foreign = len(dst.table) if start < end else None
                edited = None if edited is None else max(edited, start * self.size)
            if edited is not None:
                edited += len(dst.cells) - start * self.size
            self.model.share(dst, src.table[start:end], cells, foreign, edited)

    @rule(which=ANY, token=st.integers(0, 1), start=INDEX, end=INDEX)
    def paste(self, which: int, token: int, start: int, end: int) -> None:
        """Blocks of one session behind others in a new one."""
        if len(self.model.sessions) < MOST_SESSIONS:
            self.open()
            last = len(self.model.sessions) - 1
            self.append(last, [token] * self.size)
            self.splice(which, last, start, end)
            self.publish(last, b"", 0, [], 99)

    @rule(which=ANY, other=ANY, k=INDEX)
    def splice_prefix(self, which: int, other: int, k: int) -> None:
        src, dst = self.session(which), self.target(other)
        k = self.place(k, len(src.table))
        errors = self.idle(src, dst) | self.full(src, k) | self.empty(dst)
        done, n = self.call(errors, lambda: self.pool.splice_prefix(src.handle, dst.handle, k))
        if done:
            assert n == k * self.size
            self.model.share(dst, src.table[:k], src.cells[:n], *self.model.prefix_marks(src, k))
            self.publish(self.model.sessions.index(dst), b"", other % 2, [], 99)

    @rule(which=ANY, k=INDEX)
    def register(self, which: int, k: int) -> None:
        s = self.session(which)
        if len(self.model.prefixes) == MOST_SHARED:
            return
        k = self.place(k, len(s.table))
        errors = self.idle(s) | self.full(s, k) | ({PrefixNotFullyFilled} if k == 0 else set())
        done, prefix = self.call(errors, lambda: self.pool.register_prefix(s.handle, k))
        if done:
            blocks = s.table[:k]
            epoch = min(b.epoch for b in blocks)
            made = Shared(prefix, blocks, s.cells[: k * self.size], epoch)
            made.foreign, made.edited = self.model.prefix_marks(s, k)
            self.model.prefixes.append(made)

    def prefix(self, which: int) -> Shared:
        return self.model.prefixes[which % len(self.model.prefixes)]

    @precondition(lambda self: self.model.prefixes)
    @rule(which=ANY)
    def release_prefix(self, which: int) -> None:
        prefix = self.prefix(which)
        self.pool.release_prefix(prefix.real)
        self.model.prefixes.remove(prefix)
        self.model.let_go(prefix.blocks)
        for use in (
            lambda: self.pool.release_prefix(prefix.real),
            lambda: self.pool.splice_prefix_from(prefix.real, self.session(which).handle),
            lambda: self.pool.alloc_shifted_prefix_slots(PrefixId(), self.session(0).handle),
        ):
            self.call({UnknownPrefix}, use)

    def epoch(self, prefix: Shared) -> Errors:
        return {StaleHandle} if prefix.epoch != self.model.epoch else set()

    @precondition(lambda self: self.model.prefixes)
    @rule(which=ANY, other=ANY)
    def splice_prefix_from(self, which: int, other: int) -> None:
        prefix, dst = self.prefix(which), self.target(other)
        errors = self.idle(dst) | self.empty(dst) | self.epoch(prefix)
        done, n = self.call(errors, lambda: self.pool.splice_prefix_from(prefix.real, dst.handle))
        if done:
            assert n == len(prefix.cells)
            self.model.share(dst, prefix.blocks, prefix.cells, prefix.foreign, prefix.edited)
            self.publish(self.model.sessions.index(dst), b"", other % 2, [], 99)

    @precondition(lambda self: self.model.prefixes)
    @rule(which=ANY, other=ANY)
    def alloc_shifted(self, which: int, other: int) -> None:
        prefix, dst = self.prefix(which), self.session(other)
        if len(dst.table) > MOST_BLOCKS:
            return
        errors = self.idle(dst) | self.aligned(dst) | self.epoch(prefix)
        need = len(prefix.blocks)
        action = partial(self.pool.alloc_shifted_prefix_slots, prefix.real, dst.handle)
        done, answer = self.call(errors, action, need)
        if done:
            offset, blocks = len(dst.cells), self.model.take(need)
            pairs = zip(prefix.blocks, blocks, strict=True)
            assert answer == (offset, [(a.number, b.number) for a, b in pairs])
            cells, foreign, edited = prefix.cells, prefix.foreign, prefix.edited
            if offset:
                cells = [self.model.cell(dst.cells, self.model.token_of[c], c) for c in cells]
                foreign, edited = len(dst.table), None
            self.model.share(dst, blocks, cells, foreign, edited)
            self.write(dst, offset)

    # Eviction

    @rule(which=ANY, how=st.sampled_from(["all", "some", "range"]),
          indices=st.lists(INDEX, min_size=1, max_size=3), end=INDEX)  # fmt: skip
    def evict(self, which: int, how: str, indices: list[int], end: int) -> None:
        s = self.session(which)
        indices, end = [self.place(i, len(s.table)) for i in indices], self.place(end, len(s.table))
        errors = self.idle(s)
        if how == "all":
            wanted = [i for i, b in enumerate(s.table) if not isinstance(b, Stored)]
            action = partial(self.pool.evict, s.handle)
        elif how == "some":
            wanted = indices
            action = partial(self.pool.evict_blocks, s.handle, indices)
        else:
            start = indices[0]
            wanted = list(range(start, end))
            action = partial(self.pool.evict_range, s.handle, start, end)
            if not 0 <= start <= end <= len(s.table):
                errors |= {BadBlockIndex}
        if len(set(wanted)) < len(wanted) or any(not 0 <= i < len(s.table) for i in wanted):
            errors |= {BadBlockIndex}
        elif any(isinstance(s.table[i], Stored) for i in wanted):
            errors |= {SessionNotResident}
        done, report = self.call(errors, action)
        if done:
            freed, shared, stored = self.model.evict(s, wanted)
            assert (report.freed, report.still_shared) == (freed, shared)
            stored.handle = report.handle
            self.stored.append(stored)

    @precondition(lambda self: self.stored)
    @rule(which=ANY, owner=st.sampled_from([True, True, True, False]), other=ANY)
    def restore(self, which: int, owner: bool, other: int) -> None:
        good = [stored for stored in self.stored if not stored.gone and which % 8]
        stored = (good or self.stored)[which % len(good or self.stored)]
        target = stored.owner if owner else self.session(other)
        errors = self.idle(target)
        if stored.gone or target is not stored.owner or target not in self.model.sessions:
            errors |= {StaleHandle}
        action = partial(self.pool.restore, target.handle, stored.handle)
        done, numbers = self.call(errors, action, len(stored.indices), stored.handle)
        if done:
            assert numbers == [b.number for b in self.model.restore(stored)]

    # The index

    @rule(which=ANY, salt=SALT, short=st.integers(0, 3), extra=TOKENS,
          realized=st.sampled_from([99, 99, 0, 1, 2]))  # fmt: skip
    def publish(self, which: int, salt: bytes, short: int, extra: list[int], realized: int) -> None:
        """With the tokens that the session really has: an edit in the middle ends them."""
        s = self.session(which)
        known = len(s.cells) if s.edited is None else s.edited + 1
        tokens = self.model.tokens(s.cells[: max(0, known - short)])
        if known == len(s.cells) and not short:
            tokens += extra
        self.pool.unready = {b.number for b in s.table[realized:] if isinstance(b, Block)}
        done, n = self.call(self.idle(s), lambda: self.pool.publish(s.handle, tokens, salt=salt))
        if done:
            assert n == self.model.publish(s, tokens, salt, self.pool.unready)
        self.pool.unready = set()

    @rule(which=ANY)
    def publish_other_tokens(self, which: int) -> None:
        """What a block is published with is what it holds."""
        s = self.session(which)
        known = [b for b in s.table[: len(s.cells) // self.size] if b in self.model.index.values()]
        published = bool(known) and s.table[0] is known[0] and s.foreign != 0
        if published and known[0].epoch == self.model.epoch:
            tokens = [7, *self.model.tokens(s.cells)[1:]]
            self.call({PoolError} | self.idle(s), lambda: self.pool.publish(s.handle, tokens))

    @rule(which=ANY, cut=st.integers(0, 2), extra=TOKENS, salt=SALT)
    def lookup(self, which: int, cut: int, extra: list[int], salt: bytes) -> None:
        """Tokens of a session or of an indexed chain, less their end, and others."""
        if len(self.model.leases) == MOST_SHARED:
            return
        known = [self.model.tokens(s.cells) for s in self.model.sessions]
        known += [list(tokens) for _, tokens in self.model.index]
        tokens = known[which % len(known)]
        tokens = tokens[: max(0, len(tokens) - cut)] + extra
        lease, blocks = self.pool.lookup(tokens, salt=salt), self.model.lookup(tokens, salt)
        assert (lease.blocks, lease.tokens) == (
            tuple(b.number for b in blocks), len(blocks) * self.size
        )  # fmt: skip
        cells = self.model.cells_of(tokens[: lease.tokens])
        read = [self.pool.rows[b, slot] for b in lease.blocks for slot in range(self.size)]
        assert read == cells, "a hit holds exactly what a model computes for these tokens"
        self.model.leases.append(Shared(lease, blocks, cells, self.model.epoch))

    def lease(self, which: int) -> Shared:
        return self.model.leases[which % len(self.model.leases)]

    @precondition(lambda self: self.model.leases)
    @rule(which=ANY, other=ANY)
    def splice_lease(self, which: int, other: int) -> None:
        lease, dst = self.lease(which), self.target(other)
        errors = self.idle(dst) | self.empty(dst) | self.epoch(lease)
        done, n = self.call(errors, lambda: lease.real.splice_into(dst.handle), keep=lease.real)
        if done:
            assert n == len(lease.cells)
            self.model.share(dst, lease.blocks, lease.cells, None, None)

    @precondition(lambda self: self.model.leases)
    @rule(which=ANY)
    def release_lease(self, which: int) -> None:
        lease = self.lease(which)
        lease.real.release()
        self.model.leases.remove(lease)
        self.model.let_go(lease.blocks)
        self.call({StaleHandle}, lease.real.release, keep=lease.real)
        target = self.session(0).handle
        self.call({StaleHandle, *self.idle(self.session(0))},
                  lambda: lease.real.splice_into(target), keep=lease.real)  # fmt: skip

    @rule(which=ANY, cut=st.integers(0, 2), extra=TOKENS, keep=st.booleans())
    def serve(self, which: int, cut: int, extra: list[int], keep: bool) -> None:
        """What a server does with a prompt: reuse what is known, compute the rest, publish."""
        if len(self.model.sessions) == MOST_SESSIONS or len(self.model.leases) == MOST_SHARED:
            return
        self.open()
        last = len(self.model.sessions) - 1
        self.lookup(which, cut, extra, b"")
        lease = self.model.leases[-1]
        assert lease.real.splice_into(self.model.sessions[-1].handle) == len(lease.cells)
        self.model.share(self.model.sessions[-1], lease.blocks, lease.cells, None, None)
        self.release_lease(len(self.model.leases) - 1)
        self.append(last, extra * self.size)
        self.publish(last, b"", 0, [], 99)
        if not keep:
            self.discard(last)

    @rule(model=st.integers(0, 1))
    def use_model(self, model: int) -> None:
        self.pool.use_model(("m", model) if model else ())
        self.model.use_model(model)

    # Steps

    @rule()
    def open_fence(self) -> None:
        if len(self.model.fences) < 3:
            self.model.fences.append(self.pool.open_fence())

    def free_fences(self) -> list[FenceId]:
        return [f for f in self.model.fences if f not in [step.fence for step, _ in self.steps]]

    @precondition(lambda self: self.free_fences())
    @rule(which=ANY)
    def close_fence(self, which: int) -> None:
        fences = self.free_fences()
        fence = fences[which % len(fences)]
        self.pool.close_fence(fence)
        self.model.close_fence(fence)
        for wrong in (fence, FenceId(), *map(int, self.model.fences), "f", []):
            self.call({PoolError}, lambda wrong=wrong: self.pool.close_fence(wrong))

    @rule(which=ANY, count=st.sampled_from([1, 2, 2, 3, 0]), same=WRONG, tokens=TOKENS)
    def begin_step(self, which: int, count: int, same: bool, tokens: list[int]) -> None:
        sessions, n = [self.session(which + i) for i in range(count)], len(tokens)
        sessions = list(dict.fromkeys(sessions)) + (sessions[:1] if same else [])
        if any(len(s.table) > MOST_BLOCKS for s in sessions):
            return
        errors = self.idle(*sessions).union(*(self.room(s, n) for s in sessions))
        errors |= {RangeError} if not n else set()
        errors |= {PoolError} if not sessions or len(set(sessions)) < len(sessions) else set()
        need = 0 if errors else self.model.required(sessions, n)
        handles = [s.handle for s in sessions]
        done, step = self.call(errors, lambda: self.pool.begin_step(handles, n), need)
        if done:
            for s in sessions:
                s.start = len(s.cells)
                self.model.grow(s, tokens)
            self.model.fences.append(step.fence)
            self.steps.append((step, sessions))

    @precondition(lambda self: self.steps)
    @rule(which=ANY, worked=st.sampled_from([True, True, False]))
    def end_step(self, which: int, worked: bool) -> None:
        step, sessions = self.steps.pop(which % len(self.steps))
        there = [s for s in sessions if s in self.model.sessions]
        (self.pool.end_step if worked else self.pool.cancel_step)(step)
        self.model.close_fence(step.fence)
        for s in there:
            start, s.start = s.start, None
            if worked:
                self.write(s, start)
            else:
                self.model.truncate(s, start)
        for again in (self.pool.end_step, self.pool.cancel_step):
            self.call({PoolError}, lambda again=again: again(step))

    # Handles of nobody

    @rule(which=ANY, verb=ANY)
    def unknown_session(self, which: int, verb: int) -> None:
        dead: Any = [*self.dead, int(self.session(0).handle)][which % (len(self.dead) + 1)]
        alive, pool = self.session(which), self.pool
        verbs = [
            lambda: pool.append(dead, 1), lambda: pool.append_required(dead, 1),
            lambda: pool.truncate(dead, 0), lambda: pool.discard(dead), lambda: pool.fork(dead),
            lambda: pool.cow_break(dead, 0), lambda: pool.splice(dead, alive.handle, 0, 0),
            lambda: pool.splice(alive.handle, dead, 0, 0), lambda: pool.session_blocks(dead),
            lambda: pool.splice_prefix(dead, alive.handle, 0), lambda: pool.evict(dead),
            lambda: pool.splice_prefix(alive.handle, dead, 0), lambda: pool.publish(dead, [1]),
            lambda: pool.register_prefix(dead, 0), lambda: pool.evict_blocks(dead, []),
            lambda: pool.evict_range(dead, 0, 0), lambda: pool.session_block_table(dead),
            lambda: pool.resident_block(dead, 0), lambda: pool.filled_tokens(dead),
            lambda: pool.begin_step([dead], 1), lambda: pool.step_required([dead], 1),
        ]  # fmt: skip
        self.call({UnknownSession} | self.idle(alive), verbs[verb % len(verbs)])

    # What must hold after every verb

    @invariant()
    def same_counts(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        pool.check()
        held = model.held() + [b for b, _ in model.waiting]
        assert pool.free_blocks() == model.available() == pool.capacity() - len(held)
        assert pool.cached_blocks() == len(model.cached)
        assert pool.kv_bytes_resident() == len(held) * 2 * 2 * self.size * 1 * 3 * 2
        counts = dict.fromkeys(range(model.capacity), 0)
        counts |= {b.number: model.holders(b) for b in held}
        assert [pool.block_refcount(n) for n in counts] == list(counts.values())
        assert asdict(pool.stats) == {name: model.counts[name] for name in asdict(pool.stats)}

    @invariant()
    def same_sessions(self) -> None:
        for s in self.model.sessions if hasattr(self, "pool") else []:
            pool, table = self.pool, [None if isinstance(b, Stored) else b.number for b in s.table]
            assert (pool.filled_tokens(s.handle), pool.session_blocks(s.handle)) == (
                len(s.cells), len(s.table)
            )  # fmt: skip
            assert pool.session_block_table(s.handle) == table
            assert [pool.resident_block(s.handle, i) for i in range(len(table))] == table
            for n in (0, 1, self.size + 1):
                if not self.room(s, n):
                    need = self.model.required([s], n)
                    assert pool.append_required(s.handle, n) == need
                    assert pool.step_required([s.handle], n) == need
            for at, cell in enumerate(s.cells[: s.start]):
                number = table[at // self.size]
                assert number is None or pool.rows[number, at % self.size] == cell

    @invariant()
    def same_handles(self) -> None:
        for stored in self.stored if hasattr(self, "pool") else []:
            assert stored.handle.spent == (stored.handle.payload is GONE) == stored.gone

    @invariant()
    def same_index(self) -> None:
        """A reader of the events knows what is indexed."""
        for event in self.pool.events(self.events) if hasattr(self, "pool") else []:
            self.events += 1
            assert event.number == self.events
            if event.kind == "cleared":
                self.indexed.clear()
            elif event.kind == "stored":
                assert event.block not in self.indexed
                self.indexed.add(event.block)
            else:
                self.indexed.remove(event.block)
        if hasattr(self, "pool"):
            assert self.indexed == {b.number for b in self.model.index.values()}


PoolMachine.TestCase.settings = machine_settings()
TestPoolMachine = PoolMachine.TestCase
