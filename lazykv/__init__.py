"""lazykv: lazy ops and plans held once, for the key/value caches of language models."""

import importlib
from typing import TYPE_CHECKING, Any

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
from lazykv.errors import (
    BackendUnavailable,
    BadBlockIndex,
    BadSpliceRange,
    BindingError,
    BlockStoreError,
    CaptureError,
    DTypeError,
    EnvironmentMissing,
    GraphError,
    KernelError,
    LazyKvError,
    ModelFormatError,
    OffsetNotBlockAligned,
    OutOfBlocks,
    OutOfMemory,
    PoolError,
    PrefixNotFullyFilled,
    PrefixTargetNotEmpty,
    RangeError,
    SessionBusy,
    SessionNotResident,
    ShapeError,
    SnapshotError,
    StaleHandle,
    StorageLockError,
    StorageTornError,
    SymbolError,
    SymbolRangeError,
    TopologyChanged,
    UnknownPrefix,
    UnknownSession,
)
from lazykv.functions import (
    attention,
    concat,
    latent_attention,
    paged_attention,
    ring_attention,
    where,
)
from lazykv.graph import Graph, Tensor
from lazykv.ids import FenceId, KvAllocId, ModelInstanceId, PrefixId, SessionHandle
from lazykv.kv.block_store import (
    BlockStore,
    FolderBlockStore,
    FsspecBlockStore,
    MemoryBlockStore,
)
from lazykv.kv.cache import KvCache
from lazykv.kv.latent import LatentKvCache
from lazykv.kv.layer import AuthorityState, KvLayer, KvSlot
from lazykv.kv.layer_cache import KVCacheConfig, KVSpan, LayerKvCache
from lazykv.kv.pool import NO_BLOCK, BlockKind, DeviceKvPool, PageTable
from lazykv.kv.sliding import SlidingKvCache
from lazykv.pages.geometry import KvGeometry
from lazykv.pages.journal import PoolEvent, PoolStats
from lazykv.pages.pool import KvBlockPool
from lazykv.pages.sequence import EvictHandle, EvictReport, PrefixLease
from lazykv.pages.steps import PoolStep
from lazykv.runtime.realize import plan, realize
from lazykv.sessions.captured import CapturedDecodeSession
from lazykv.sessions.context import InferenceContext
from lazykv.sessions.decode import DecodeSession
from lazykv.sessions.paged import PagedDecodeSession
from lazykv.sessions.rebind import (
    KvRebindSource,
    MissingSlot,
    RebindRefusal,
    ResidencyDiffers,
    ResidencyUnknown,
    SessionDisposition,
    StorageDiffers,
    StorageTorn,
)
from lazykv.sessions.validity import PlanValidity
from lazykv.storage import Storage
from lazykv.symbols import Sym, SymEnv

if TYPE_CHECKING:
    from lazykv import models, serving
    from lazykv.models import generate

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Models are loaded on first use: most embedders bring their own.
    if name in ("models", "serving"):
        return importlib.import_module(f"lazykv.{name}")
    if name == "generate":
        return importlib.import_module("lazykv.models").generate
    raise AttributeError(f"module 'lazykv' has no attribute {name!r}")
