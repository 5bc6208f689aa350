"""lazykv: lazy ops and plans held once, for the key/value caches of language models."""

from lazykv.compiler.plan import Plan
from lazykv.counters import Stats, stats
from lazykv.device import Device, DeviceLocation, device
from lazykv.dtypes import (
    DType,
    bf16,
    bool_,
    dtype,
    f8_e4m3,
    f8_e5m2,
    f16,
    f32,
    f64,
    i8,
    i32,
    i64,
    u8,
    u32,
)
from lazykv.graph import Graph, Tensor, attention, concat, where
from lazykv.runtime.realize import plan, realize
from lazykv.storage import Storage
from lazykv.symbols import Sym, SymEnv
