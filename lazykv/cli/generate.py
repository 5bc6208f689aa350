"""``lazykv generate``: a prompt in, text out as it comes."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lazykv import counters
from lazykv.cli.arguments import count
from lazykv.cli.exits import OK, UsageError
from lazykv.cli.models import add_model, add_sampling, check_sampling, load_model, text_from
from lazykv.kv.pairs import KvPairCache
from lazykv.models import LlamaModel, generate
from lazykv.sessions.context import InferenceContext


@dataclass(frozen=True, slots=True)
class Stats:
    """What a generation cost. `plan_hits` are single-token steps that ran a plan that was already
    held, `plans_built` the structures compiled, `peak_bytes` the most that one run of a plan holds
    beyond weights and cache."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float | None
    plans_built: int
    plan_hits: int
    peak_bytes: int
    weights_bytes: int
    cache_bytes: int


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt with a Llama-type model",
        description="Continue PROMPT with a Llama-type model, printing the text as it comes.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text, or - for standard input")
    add_model(parser)
    parser.add_argument("--chat", action="store_true", help="lay PROMPT out as a chat message")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", default=128, help="default 128"
    )
    parser.add_argument(
        "--max-seq-len", type=count, metavar="N",
        help="most rows of the cache, prompt included (default: the model's context)",
    )  # fmt: skip
    add_sampling(parser)
    parser.add_argument("--stats", action="store_true", help="counts and speed, on standard error")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end, no stream")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    check_sampling(args)
    prompt = _prompt(args.prompt)
    ctx = InferenceContext(args.device)  # a device that is not there is told before a model loads
    model = load_model(args)
    text = model.chat_prompt([{"role": "user", "content": prompt}]) if args.chat else prompt
    run = _Run(model, model.tokenizer.with_bos(model.tokenizer.encode(text)), args, ctx)
    for piece in run.pieces():
        if not args.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if args.json:
        print(json.dumps(run.result(), ensure_ascii=False))
    else:
        print()
        if args.stats:
            print(_stats_text(run.stats()), file=sys.stderr)
    return OK


def _prompt(argument: str) -> str:
    def read() -> str:
        return sys.stdin.read().removesuffix("\n") if argument == "-" else argument

    text = text_from("PROMPT", read)
    if not text:
        raise UsageError("PROMPT: got no text, need some")
    return text


class _Run:
    """One generation, and what is to be told about it."""

    def __init__(
        self, model: LlamaModel, ids: list[int], args: argparse.Namespace, ctx: InferenceContext
    ) -> None:  # fmt: skip
        self.model = model
        self.prompt_ids = ids
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.ctx = ctx
        self.plans_before = counters.stats().plans_built
        limit = args.max_seq_len or model.config.context_length
        if len(ids) > limit:
            raise UsageError(
                f"PROMPT: got {len(ids)} tokens, need at most {limit}; --max-seq-len sets the limit"
            )
        # The last token's row is never needed, so the budget counts one less.
        self.cache: KvPairCache = model.new_cache(
            min(limit, len(ids) + args.max_new_tokens - 1), device=ctx.device
        )
        self.started = self.first = self.ended = time.perf_counter()
        self.stream = generate(
            model, ids, args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed,
            args.stop, cache=self.cache, ctx=self.ctx,
        )  # fmt: skip

    def pieces(self) -> Iterator[str]:
        for piece in self.stream:
            self.ended = time.perf_counter()
            if not self.ids:
                self.first = self.ended
            self.ids.append(piece.id)
            self.texts.append(piece)
            self.finish_reason = piece.finish_reason
            yield piece

    def stats(self) -> Stats:
        session = self.ctx.take_decode_session()
        held = [*self.cache.held.values(), *([session] if session else [])]
        seconds = self.ended - self.first
        steps = len(self.ids) - 1
        return Stats(
            prompt_tokens=len(self.prompt_ids),
            new_tokens=len(self.ids),
            prefill_seconds=round(self.first - self.started, 6),
            decode_seconds=round(seconds, 6),
            tokens_per_second=round(steps / seconds, 2) if steps and seconds else None,
            plans_built=counters.stats().plans_built - self.plans_before,
            plan_hits=session.realize_count - 1 if session else 0,
            peak_bytes=max((s.plan.peak_bytes for s in held), default=0),
            weights_bytes=self.model.weights.nbytes,
            cache_bytes=sum(
                storage.nbytes for layer in self.cache.layers if layer is not None
                for storage in (layer.k, layer.v)
            ),
        )  # fmt: skip

    def result(self) -> dict[str, Any]:
        return {
            "text": "".join(self.texts),
            "ids": self.ids,
            "prompt_ids": self.prompt_ids,
            "finish_reason": self.finish_reason,
            "stats": asdict(self.stats()),
        }


def _stats_text(s: Stats) -> str:
    speed = "" if s.tokens_per_second is None else f", {s.tokens_per_second:.1f} tokens/s"
    return (
        f"prompt {s.prompt_tokens} tokens in {s.prefill_seconds:.2f} s; "
        f"new {s.new_tokens} tokens in {s.decode_seconds:.2f} s{speed}\n"
        f"plans built {s.plans_built}, plan hits {s.plan_hits}; bytes: weights {s.weights_bytes}, "
        f"cache {s.cache_bytes}, peak of a run {s.peak_bytes}"
    )
