"""TARGET: the graphs that the commands can show, and the options that size them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lazykv.cli.arguments import count, dtype_name, location_name
from lazykv.cli.exits import UsageError
from lazykv.dtypes import dtype
from lazykv.graph import Tensor
from lazykv.inspect import Document, describe
from lazykv.kv.layer import KvSlot
from lazykv.kv.rows import write_graph
from lazykv.models import open_checkpoint
from lazykv.models.cache_rows import LinearRows
from lazykv.models.config import LlamaConfig
from lazykv.models.llama import build_step
from lazykv.models.weights import untouched_weights
from lazykv.storage import Storage

HELP = (
    "write-bytes (one eager write into a cache), append (one step's rows into every layer), "
    "decode (one step of a small made-up Llama), or decode:MODEL (smollm2, a .gguf file, or a "
    "folder with config.json; only its header is read)"
)


@dataclass(frozen=True, slots=True)
class Target:
    """What to plan: results to hand back, and writes that only have to happen."""

    outputs: Sequence[Tensor] = ()
    effects: Sequence[Tensor] = field(default=())


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET and its options."""
    parser.add_argument("target", metavar="TARGET", help=HELP)
    sizes = parser.add_argument_group("sizes of the graph")
    sizes.add_argument("--layers", type=count, metavar="N", help="layers (default 2, at most 400)")
    sizes.add_argument("--heads", type=count, metavar="N", help="key/value heads (default 2)")
    sizes.add_argument("--head-dim", type=count, metavar="N", help="width of a head (default 8)")
    sizes.add_argument(
        "--max-seq-len", type=count, metavar="N", default=64, help="cache rows (default 64)"
    )
    sizes.add_argument(
        "--seq", type=count, metavar="N", default=1, help="rows of a step (default 1)"
    )
    sizes.add_argument(
        "--dtype", type=dtype_name, metavar="NAME", default="f32", help="of the cache (default f32)"
    )
    sizes.add_argument(
        "--device", type=location_name, metavar="LOCATION", default="cpu",
        help="where the cache lives (default cpu)",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="list every layer, also repeated ones")


def document(args: argparse.Namespace) -> Document:
    """Plan the target of the command line and describe the plan. Nothing runs."""
    target = _target(args)
    return describe(target.outputs, device=args.device, effects=target.effects, title=args.target)


MOST_LAYERS = 400
"""Several times what models have; to plan this many takes seconds."""


def _target(args: argparse.Namespace) -> Target:
    if args.layers is not None and args.layers > MOST_LAYERS:
        raise UsageError(f"--layers: got {args.layers}, need at most {MOST_LAYERS}")
    if args.seq > args.max_seq_len:
        raise UsageError(
            f"--seq: got {args.seq} rows, need at most --max-seq-len, which is {args.max_seq_len}"
        )
    kind, colon, model = args.target.partition(":")
    if args.target == "write-bytes":
        return Target(effects=_write(args, 1, [KvSlot.K]))
    if args.target == "append":
        return Target(effects=_write(args, args.layers or 2, list(KvSlot)))
    if kind == "decode" and bool(colon) == bool(model):
        config = _config_of(args, model) if model else _made_up(args)
        return Target(outputs=[_decode(config, args)])
    raise UsageError(
        f"TARGET: got {args.target!r}, need write-bytes, append, decode or decode:MODEL"
    )


def _write(args: argparse.Namespace, n_layers: int, slots: Sequence[KvSlot]) -> list[Tensor]:
    """The graph that `KvCache` makes for rows written into some slots of every layer."""
    heads, dim = args.heads or 2, args.head_dim or 8
    # Memory that nobody fills costs nothing: a cache of any size can be looked at.
    shape = (1, heads, args.max_seq_len, dim)
    names = [f"cache.{n}.{slot.name.lower()}" for n in range(n_layers) for slot in slots]
    storages = [Storage.allocate(shape, args.dtype, args.device) for _ in names]
    # Only now: of sizes that no memory has, storages tell by a typed error.
    rows = np.zeros((1, heads, args.seq, dim), dtype(args.dtype).numpy)
    effects, _ = write_graph([(storage, rows) for storage in storages], names)
    return effects


def _decode(config: LlamaConfig, args: argparse.Namespace) -> Tensor:
    weights, kv_dtype = untouched_weights(config), dtype(args.dtype)
    step = build_step(
        config, weights, seq=args.seq, rows=LinearRows(args.max_seq_len), kv_dtype=kv_dtype
    )
    return step.logits


def _made_up(args: argparse.Namespace) -> LlamaConfig:
    heads, dim = args.heads or 2, args.head_dim or 8
    return LlamaConfig(
        architecture="llama", vocab_size=64, hidden_size=2 * heads * dim,
        intermediate_size=4 * heads * dim, n_layers=args.layers or 2, n_heads=2 * heads,
        n_kv_heads=heads, head_dim=dim, rms_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        rope_interleaved=False, context_length=args.max_seq_len, tied_head=True,
    )  # fmt: skip


def _config_of(args: argparse.Namespace, model: str) -> LlamaConfig:
    if args.layers or args.heads or args.head_dim:
        raise UsageError(
            "--layers, --heads, --head-dim: got a size with decode:MODEL, need none; the model "
            "has its own"
        )
    return open_checkpoint(model).config
