"""``lazykv serve-batch``: a file of prompts in, their continuations out, many at once."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lazykv import counters
from lazykv.cli.arguments import count
from lazykv.cli.exits import OK, UsageError, error_line, exit_code
from lazykv.cli.models import (
    add_model,
    add_sampling,
    check_sampling,
    load_model,
    terminal_bar,
    text_from,
)
from lazykv.device import device
from lazykv.kv.block_store import BlockStore, FolderBlockStore
from lazykv.models import LlamaModel
from lazykv.serving import Engine, Request


class Prompt(NamedTuple):
    """A prompt and the line it stands on, counted from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a batch cost. `tokens_found` of the prompts were in the prefix index already,
    `prefill_tokens` were computed, some of them again after a request had to give way."""

    requests: int
    failed: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    tokens_found: int
    preemptions: int
    rounds: int
    seconds: float
    tokens_per_second: float | None
    plans_built: int
    weights_bytes: int
    pool_blocks: int
    pool_bytes: int


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "serve-batch",
        help="continue many prompts at once over a paged pool",
        description="Continue every prompt of a file. They run together and share the blocks of "
        "what they begin with alike; each gets the text that `generate` gives it. Results are "
        "printed in the order of the file.",
    )  # fmt: skip
    parser.add_argument(
        "prompts", metavar="PROMPTS",
        help="a text file with a prompt on every line, or - for standard input; blank lines are "
        "skipped",
    )  # fmt: skip
    add_model(parser)
    parser.add_argument("--chat", action="store_true", help="lay prompts out as chat messages")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", default=64, help="for each (default 64)"
    )
    parser.add_argument(
        "--batch", type=count, metavar="N", default=8, help="most prompts at once (default 8)"
    )
    parser.add_argument(
        "--blocks", type=count, metavar="N",
        help="blocks of the pool (default: enough for the batch); with fewer, prompts wait or give "
        "way",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=count, metavar="N", default=16, help="tokens of a block (default 16)"
    )
    parser.add_argument(
        "--store", metavar="DIR",
        help="folder for the blocks of those that gave way (default: host memory)",
    )  # fmt: skip
    add_sampling(parser)
    parser.add_argument("--stats", action="store_true", help="counts and speed, on standard error")
    parser.add_argument(
        "--json", action="store_true", help="a JSON object for each prompt, and a summary"
    )
    parser.set_defaults(run=_serve_batch)


def _serve_batch(args: argparse.Namespace) -> int:
    check_sampling(args)
    prompts = _prompts(args.prompts)
    device(args.device)  # one that is not there is told before a model loads
    model = load_model(args)
    with ExitStack() as stack:
        store = None
        if args.store is not None:
            store = stack.enter_context(closing(FolderBlockStore(args.store)))
        run = _Run(model, prompts, args, store)
        run.serve(_print_json if args.json else _print_text)
        summary = run.summary()
    if args.json:
        print(json.dumps({"summary": asdict(summary)}))
    elif args.stats:
        print(_summary_text(summary), file=sys.stderr)
    return next((exit_code(r.error) for r in run.requests if r.error is not None), OK)


def _prompts(argument: str) -> list[Prompt]:
    def read() -> str:
        return sys.stdin.read() if argument == "-" else Path(argument).read_text(encoding="utf-8")

    try:
        text = text_from("PROMPTS", read)
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise UsageError(f"PROMPTS: got {argument!r} ({reason}), need a text file") from e
    prompts = [Prompt(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise UsageError("PROMPTS: got no text, need a prompt on at least one line")
    return prompts


class _Run:
    """One batch, and what is to be told about it."""

    def __init__(
        self, model: LlamaModel, prompts: list[Prompt], args: argparse.Namespace,
        store: BlockStore | None,
    ) -> None:  # fmt: skip
        self.model = model
        self.prompts = prompts
        self.rounds = 0
        self.plans_before = counters.stats().plans_built
        ids = [_ids(model, prompt, args.chat) for prompt in prompts]
        blocks = args.blocks or _enough_blocks(model, ids, args)
        self.pool = model.new_pool(blocks, args.block_size, device=args.device, store=store)
        self.engine = Engine(model, self.pool, max_batch=args.batch)
        most = self.engine.max_context
        for prompt, tokens in zip(prompts, ids, strict=True):
            if len(tokens) > most:
                raise UsageError(
                    f"PROMPTS: got {len(tokens)} tokens on line {prompt.line}, need at most {most}"
                    f"{'; give the pool more --blocks' if args.blocks else ''}"
                )
        self.started = time.perf_counter()
        self.requests = [
            self.engine.submit(
                tokens, args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed,
                args.stop,
            )
            for tokens in ids
        ]  # fmt: skip

    def serve(self, give: Callable[[Prompt, Request], None]) -> None:
        """Run all; `give` is called in the order of the file, with each request as soon as it and
        those before it have ended. Meanwhile a terminal sees how far they are."""
        bar = terminal_bar()
        task = None if bar is None else bar.add_task("", total=len(self.requests))
        with bar or nullcontext():
            for prompt, request in zip(self.prompts, self.requests, strict=True):
                while not request.ended:
                    self.engine.step()
                    self.rounds += 1
                    if bar is not None:
                        bar.update(task, **self._progress())
                if bar is None:
                    give(prompt, request)
                else:
                    bar.stop()  # results and the bar may share a terminal
                    give(prompt, request)
                    bar.start()

    def _progress(self) -> dict[str, Any]:
        ended = sum(r.ended for r in self.requests)
        tokens = sum(len(r.pieces) for r in self.requests)
        return {"completed": ended, "description": f"{ended} prompts done, {tokens} tokens"}

    def summary(self) -> Summary:
        seconds = time.perf_counter() - self.started
        done = self.requests
        new_tokens = sum(len(r.pieces) for r in done)
        return Summary(
            requests=len(done),
            failed=sum(r.error is not None for r in done),
            prompt_tokens=sum(len(r.prompt) for r in done),
            new_tokens=new_tokens,
            prefill_tokens=sum(r.prefill_tokens for r in done),
            tokens_found=sum(r.tokens_found for r in done),
            preemptions=sum(r.preemptions for r in done),
            rounds=self.rounds,
            seconds=round(seconds, 6),
            tokens_per_second=round(new_tokens / seconds, 2) if seconds else None,
            plans_built=counters.stats().plans_built - self.plans_before,
            weights_bytes=self.model.weights.nbytes,
            pool_blocks=self.pool.capacity(),
            pool_bytes=self.pool.geometry.total_bytes,
        )


def _ids(model: LlamaModel, prompt: Prompt, chat: bool) -> list[int]:
    text = prompt.text
    if chat:
        text = model.chat_prompt([{"role": "user", "content": text}])
    return model.tokenizer.with_bos(model.tokenizer.encode(text))


def _enough_blocks(model: LlamaModel, ids: list[list[int]], args: argparse.Namespace) -> int:
    """Blocks with which the longest prompts run together to their ends."""
    longest = sorted((len(tokens) for tokens in ids), reverse=True)[: args.batch]
    # The last token's row is never needed, so the budget counts one less.
    rows = [min(n + args.max_new_tokens - 1, model.config.context_length) for n in longest]
    return sum(-(-n // args.block_size) for n in rows)


def _print_text(prompt: Prompt, request: Request) -> None:
    print(f"> {prompt.text}\n{request.text}\n", flush=True)
    if request.error is not None:
        line = error_line(request.error)
        print(f"lazykv: line {prompt.line}: {line}", file=sys.stderr, flush=True)


def _print_json(prompt: Prompt, request: Request) -> None:
    result = {
        "line": prompt.line,
        "text": request.text,
        "ids": request.tokens,
        "prompt_ids": list(request.prompt),
        "finish_reason": request.finish_reason,
        "error": None if request.error is None else error_line(request.error),
        "stats": {
            "prefill_tokens": request.prefill_tokens,
            "tokens_found": request.tokens_found,
            "preemptions": request.preemptions,
        },
    }
    print(json.dumps(result, ensure_ascii=False), flush=True)


def _summary_text(s: Summary) -> str:
    speed = "" if s.tokens_per_second is None else f", {s.tokens_per_second:.1f} tokens/s"
    return (
        f"{s.requests} prompts of {s.prompt_tokens} tokens, {s.tokens_found} of them found and "
        f"{s.prefill_tokens} computed; new {s.new_tokens} tokens in {s.seconds:.2f} s{speed}\n"
        f"rounds {s.rounds}, preemptions {s.preemptions}, plans built {s.plans_built}; bytes: "
        f"weights {s.weights_bytes}, pool {s.pool_bytes} in {s.pool_blocks} blocks"
    )
