"""`lazykv generate`, against the library's own generation and, once, on the real model."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models.tiny_models import spm_vocabulary, weights, write_gguf

import lazykv as lk

GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "smollm2_greedy_ids.json"


@pytest.fixture
def generate(run, tiny_model):
    return lambda *argv: run("generate", "--model", str(tiny_model), *argv)


@pytest.fixture
def expected(tiny_model):
    """What the library yields for a prompt, joined, and the ids."""

    def pieces(prompt: str, n: int, **options) -> tuple[str, list[int]]:
        got = list(lk.generate(lk.models.load(tiny_model), prompt, n, **options))
        return "".join(got), [piece.id for piece in got]

    return pieces


def test_text_and_ids_are_the_librarys(generate, expected):
    text, ids = expected("ab c", 12)
    assert generate("ab c", "--max-new-tokens", "12") == (0, text + "\n", "")
    value = json.loads(generate("ab c", "--max-new-tokens", "12", "--json").out)
    assert (value["text"], value["ids"]) == (text, ids)


def test_a_model_runs_where_it_is_told_to(generate, expected, monkeypatch):
    """The simulated device adds up as the CPU does, so the text is the same."""
    text, ids = expected("ab c", 12)
    backend = lk.device("sim:1").backend
    before = backend.used_bytes(lk.DeviceLocation("sim:1"))
    caches = []
    made = lk.models.LlamaModel.new_cache

    def new_cache(self, *args, **kwargs):
        caches.append(made(self, *args, **kwargs))
        return caches[-1]

    monkeypatch.setattr(lk.models.LlamaModel, "new_cache", new_cache)
    value = json.loads(
        generate("ab c", "--max-new-tokens", "12", "--json", "--device", "sim:1").out
    )
    assert (value["text"], value["ids"]) == (text, ids)
    (cache,) = caches
    assert str(cache.device_location()) == "sim:1"
    assert backend.used_bytes(lk.DeviceLocation("sim:1")) - before >= value["stats"]["cache_bytes"]


def test_sampling_options_reach_the_sampler(generate, expected):
    text, ids = expected("a", 9, temperature=2.0, top_k=7, top_p=0.95, seed=5)
    argv = ["--temperature", "2", "--top-k", "7", "--top-p", "0.95", "--seed", "5"]
    value = json.loads(generate("a", "--max-new-tokens", "9", "--json", *argv).out)
    assert (value["text"], value["ids"]) == (text, ids)


def test_finish_reasons(generate, expected):
    length = json.loads(generate("abc", "--max-new-tokens", "3", "--json").out)
    assert (length["finish_reason"], len(length["ids"])) == ("length", 3)
    capacity = json.loads(generate("abc", "--max-seq-len", "5", "--json").out)
    assert capacity["finish_reason"] == "capacity"
    assert len(capacity["prompt_ids"]) + len(capacity["ids"]) == 5 + 1, "the last needs no row"
    text, _ = expected("abc", 30, temperature=3.0, seed=1)
    stop = text[3:5]
    argv = ["--temperature", "3", "--seed", "1", "--stop", "never", "--stop", stop]
    stopped = json.loads(generate("abc", "--max-new-tokens", "30", "--json", *argv).out)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]


def test_an_end_token_stops(run, tmp_path):
    tensors = weights()
    tensors["output_norm.weight"][:] = 0  # all logits are equal, so greedy takes the lowest id
    metadata = spm_vocabulary() | {"tokenizer.ggml.eos_token_id": 0}
    path = write_gguf(tmp_path / "ends.gguf", tensors, metadata)
    value = json.loads(run("generate", "--model", str(path), "abc", "--json").out)
    assert (value["finish_reason"], value["ids"], value["text"]) == ("stop", [0], "")


def test_chat_lays_the_prompt_out(generate, tiny_model):
    tokenizer = lk.models.load(tiny_model).tokenizer
    value = json.loads(generate("ab", "--chat", "--max-new-tokens", "2", "--json").out)
    assert value["prompt_ids"] == tokenizer.encode("<s>abc")


def test_prompt_from_standard_input(generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab c\n"))
    assert generate("-", "--max-new-tokens", "5") == generate("ab c", "--max-new-tokens", "5")


def test_stats(generate, tiny_model):
    value = json.loads(generate("abcabc", "--max-new-tokens", "10", "--json").out)
    stats = value["stats"]
    assert stats["prompt_tokens"] == len(value["prompt_ids"])
    assert stats["new_tokens"] == len(value["ids"]) == 10
    single_token_prefills = stats["prompt_tokens"] & 1
    assert stats["plan_hits"] == 9 + single_token_prefills - 1
    rows = stats["prompt_tokens"] + 9
    assert stats["cache_bytes"] == 2 * 2 * 2 * rows * 16 * 4
    assert stats["weights_bytes"] == lk.models.load(tiny_model).weights.nbytes
    assert stats["peak_bytes"] > 0
    assert stats["tokens_per_second"] > 0
    done = generate("abcabc", "--max-new-tokens", "10", "--stats")
    assert f"plan hits {stats['plan_hits']};" in done.err
    assert "plan" not in done.out


def test_nothing_is_drawn_where_no_terminal_is(generate):
    assert generate("a", "--max-new-tokens", "2").err == ""


def test_progress_on_a_terminal(generate, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = generate("a", "--max-new-tokens", "2", "--json")
    assert json.loads(done.out)["ids"]
    assert "loading" in done.err


@pytest.mark.parametrize("utf8_mode", ["0", "1"])
def test_bytes_that_are_no_text_are_usage(utf8_mode):
    env = {**os.environ, "PYTHONUTF8": utf8_mode, "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "lazykv", "generate", "-"]
    done = subprocess.run(command, input=b"\xff\xfe\xff", capture_output=True, check=False, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(b"lazykv: PROMPT: got bytes that are not UTF-8")
    assert done.stderr.count(b"\n") == 1


ENDLESS = """
import signal, sys, time
# A background job may start with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from lazykv.cli import generate, main
from lazykv.models import Piece
def slow(*args, **kwargs):
    for n in range(1000):
        yield Piece("abc" * 1000, 3)
        time.sleep(0.01)
generate.generate = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def endless(tiny_model):
    """A generation in a process of its own that goes on until somebody ends it."""
    command = [sys.executable, "-c", ENDLESS, "generate", "--model", str(tiny_model), "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout.read(3) == b"abc"
        yield running
        running.kill()


def test_interrupting_is_clean(endless):
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=30)
    assert (endless.returncode, err) == (130, b"")


def test_closing_the_pipe_is_clean(endless):
    endless.stdout.close()
    started = time.monotonic()
    assert endless.stderr.read() == b""
    assert endless.wait(timeout=30) == 0
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_real_model(run):
    golden = json.loads(GOLDEN.read_text())
    value = json.loads(run("generate", golden["prompt"], "--max-new-tokens", "16", "--json").out)
    assert value["prompt_ids"] == golden["prompt_ids"]
    assert value["ids"] == golden["generated_ids"][:16]
    assert golden["text"].startswith(value["text"])
    question = "Explain in a few sentences why the sky is blue."
    chat = json.loads(run("generate", question, "--chat", "--max-new-tokens", "1", "--json").out)
    assert chat["prompt_ids"] == golden["prompt_ids"]
