"""What pages cost beside contiguous caches, and what batching gives, on a real model in one run.

    python tools/bench/paged.py [--model smollm2] [--block-size 16] [--rounds 24]

Every pair of numbers that is compared is measured in turns, so that a slow second of the machine
hits both; reported are medians. Block tables are taken in three states: neighbouring blocks (a
sequence that grew alone), blocks dealt in turns to 8 sequences, and shuffled ones. The last line is
one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

import lazykv as lk
from lazykv.models.paged import PagedDecoder

LIVE = (128, 1024, 4096)
POOL_TOKENS = (512, 16384)
BATCH = 8
TOKEN = 7
STEP_LIMIT, GAIN_LIMIT, CAPACITY_LIMIT = 1.15, 3.0, 1.05
"""A paged step in contiguous ones (at most), a batch of 8 in solo tokens per second (at least), and
a step in a large pool in one of a small pool (at most)."""


def in_turns(rounds: int, *steps: Callable[[], float]) -> list[float]:
    """Median seconds of each, one call of each per round."""
    for step in steps:
        step()
    times = [[step() for step in steps] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def timed(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def contiguous_step(model, live: int) -> Callable[[], float]:
    """One token at a live length; what the rows hold does not change the cost."""
    cache = model.new_cache(live + 1)

    def step() -> float:
        cache.truncate_to(0)
        cache.cached_len = live
        return timed(lambda: model.decode_step(TOKEN, cache))

    return step


def paged_step(decoder: PagedDecoder, sessions: list, live: int) -> Callable[[], float]:
    def step() -> float:
        for s in sessions:
            decoder.pool.truncate(s, live)
        return timed(lambda: decoder.decode(sessions, [TOKEN] * len(sessions)))

    return step


def pool_for(model, tokens: int, block_size: int):
    return model.new_pool(-(-tokens // block_size), block_size)


def grown_alone(model, live: int, block_size: int) -> Callable[[], float]:
    pool = pool_for(model, live + block_size, block_size)
    session = pool.open()
    pool.append(session, live)
    return paged_step(PagedDecoder(model, pool), [session], live)


def grown_together(model, live: int, block_size: int) -> Callable[[], float]:
    """The first of 8 sequences whose blocks were dealt in turns."""
    pool = pool_for(model, BATCH * (live + block_size), block_size)
    sessions = [pool.open() for _ in range(BATCH)]
    for _ in range(0, live, block_size):
        for s in sessions:
            pool.append(s, block_size)
    return paged_step(PagedDecoder(model, pool), sessions[:1], live)


def shuffled(model, live: int, block_size: int) -> Callable[[], float]:
    pool = pool_for(model, live + block_size, block_size)
    holders = [pool.open() for _ in range(pool.capacity())]
    for s in holders:
        pool.append(s, block_size)
    session = pool.open()
    for n in np.random.default_rng(0).permutation(len(holders))[: live // block_size]:
        pool.splice(holders[n], session, 0, 1)
    for s in holders:
        pool.discard(s)
    return paged_step(PagedDecoder(model, pool), [session], live)


def compare_lengths(model, block_size: int, rounds: int) -> dict[int, dict[str, float]]:
    print(f"one step, block size {block_size}: ms, times the contiguous step (limit {STEP_LIMIT}x)")
    rows = {}
    for live in LIVE:
        names = ("contiguous", "alone", "in turns", "shuffled")
        steps = [contiguous_step(model, live)]
        steps += [make(model, live, block_size) for make in (grown_alone, grown_together, shuffled)]
        rows[live] = dict(zip(names, in_turns(rounds, *steps), strict=True))
        base = rows[live]["contiguous"]
        cells = [f"{name} {1e3 * t:7.2f} ({t / base:.3f}x)" for name, t in rows[live].items()]
        print(f"  live {live:5}: " + "  ".join(cells))
    return rows


def compare_batch(model, block_size: int, rounds: int, live: int = 128) -> dict[str, float]:
    """A step of 8 ragged sequences beside 8 steps of one."""
    pool = pool_for(model, BATCH * (2 * live + block_size), block_size)
    lives = [live + 7 * n for n in range(BATCH)]
    sessions = [pool.open() for _ in lives]
    for s, n in zip(sessions, lives, strict=True):
        pool.append(s, n)
    decoder = PagedDecoder(model, pool, max_batch=BATCH)

    def together() -> float:
        for s, n in zip(sessions, lives, strict=True):
            pool.truncate(s, n)
        return timed(lambda: decoder.decode(sessions, [TOKEN] * BATCH))

    batch, solo = in_turns(rounds, together, contiguous_step(model, live))
    out = {"batch": batch, "solo": solo, "tokens/s": BATCH / batch, "gain": BATCH * solo / batch}
    print(
        f"batch of {BATCH}, live {live}..: {1e3 * batch:.1f} ms, {out['tokens/s']:.0f} tokens/s; "
        f"one at a time {1 / solo:.0f} tokens/s; gain {out['gain']:.2f}x "
        f"(limit {GAIN_LIMIT}x)"
    )
    return out


def compare_capacity(model, block_size: int, rounds: int, live: int = 128) -> float:
    """The same step in a small and in a large pool."""
    steps = []
    for tokens in POOL_TOKENS:
        pool = pool_for(model, tokens, block_size)
        session = pool.open()
        pool.append(session, live)
        steps.append(paged_step(PagedDecoder(model, pool), [session], live))
    small, large = in_turns(rounds, *steps)
    print(
        f"pool of {POOL_TOKENS[0]} / {POOL_TOKENS[1]} tokens, live {live}: {1e3 * small:.2f} / "
        f"{1e3 * large:.2f} ms, {large / small:.3f}x (limit {CAPACITY_LIMIT}x)"
    )
    return large / small


def verbs(model, block_size: int, tokens: int = 512, rounds: int = 200) -> dict[str, float]:
    """Microseconds of the pool's own verbs on a sequence of `tokens` tokens."""
    pool = pool_for(model, 4 * tokens, block_size)
    ids, session = list(range(tokens)), pool.open()
    pool.append(session, tokens)
    pool.mark_written(session)
    pool.publish(session, ids)

    def of(f: Callable[[], object], after: Callable[[object], object]) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            made = f()
            times.append(time.perf_counter() - start)
            after(made)
        return 1e6 * statistics.median(times)

    out = {
        "fork": of(lambda: pool.fork(session), pool.discard),
        "lookup": of(lambda: pool.lookup(ids), lambda lease: lease.release()),
        "append 1": of(lambda: pool.append(session, 1), lambda _: pool.truncate(session, tokens)),
        "block table": of(lambda: pool.materialize_block_table([session]), lambda _: None),
    }
    cells = ", ".join(f"{name} {us:.1f}" for name, us in out.items())
    print(f"verbs on {tokens} tokens in {tokens // block_size} blocks, microseconds: {cells}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=24)
    args = parser.parse_args()
    model = lk.models.load(args.model)
    out = {
        "bench": "paged",
        "block_size": args.block_size,
        "verbs_us": verbs(model, args.block_size),
        "capacity_ratio": compare_capacity(model, args.block_size, args.rounds),
        "batch": compare_batch(model, args.block_size, args.rounds),
        "lengths": compare_lengths(model, args.block_size, args.rounds),
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
