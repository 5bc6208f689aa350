"""Small graphs that the tests of dumps share."""

import numpy as np

import lazykv as lk
from lazykv.inspect import Document, describe


def tangled() -> Document:
    """One cache written twice from one version (so one write works on a clone), read before it is
    overwritten (an ordering edge), and read beside the write's own result (a safety copy)."""
    g = lk.Graph()
    cache = g.placeholder((1, 2, 16, 4), "f32", name="cache")
    rows = g.const(np.ones((1, 2, 3, 4), np.float32), name="rows")
    start = lk.Sym("start")
    first = cache.at[:, :, start : start + 3].set(rows)
    second = cache.at[:, :, start + 1 : start + 4].set(rows)
    before = cache.reshape(2, 64).contiguous().exp()
    both = second + cache
    return describe([first, before, both], title="tangled")


def layered(n_layers: int = 4) -> Document:
    """Layers of equal structure between a first and a last step, as a model's graph has them."""
    g = lk.Graph()
    ids = g.placeholder((1,), "i64", name="ids")
    table = g.const(np.zeros((5, 8), np.float32), name="table")
    pos = lk.Sym("pos", 0, 6)
    x = table.take(ids)
    for i in range(n_layers):
        cache = g.placeholder((7, 8), "f32", name=f"blk.{i}.rows")
        x = x.rms_norm(g.const(np.ones(8, np.float32), name=f"blk.{i}.norm"))
        x = x + cache.at[pos : pos + 1, :].set(x).slice(0, pos, 1)
    x = x.slice(0, 0, 1).rms_norm(g.const(np.ones(8, np.float32), name="norm"))
    return describe(x @ table.transpose(0, 1), title="layered")
