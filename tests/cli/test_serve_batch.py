"""`lazykv serve-batch`: every prompt of a file gets what `lk.generate` gives it alone."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lazykv as lk
from lazykv.models import PagedDecoder

PROMPTS = ["ab c", "abc abc abc abc abc", "a", "ab c", "c b a"]
GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "smollm2_greedy_ids.json"


@pytest.fixture
def prompts(tmp_path):
    """A file with blank lines between the prompts: they are on lines 1, 3, 5, 7 and 9."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n \t\n".join(PROMPTS) + "\n\n")
    return str(path)


@pytest.fixture
def serve(run, tiny_model):
    return lambda *argv: run("serve-batch", "--model", str(tiny_model), *argv)


@pytest.fixture
def expected(tiny_model):
    """Text, ids and finish reason of each prompt, one at a time."""
    model = lk.models.load(tiny_model)

    def results(n: int, **options) -> list[tuple[str, list[int], str | None]]:
        done = [list(lk.generate(model, prompt, n, **options)) for prompt in PROMPTS]
        return [("".join(p), [x.id for x in p], p[-1].finish_reason) for p in done]

    return results


def objects(out: str) -> tuple[list[dict], dict]:
    """The results and the summary."""
    *results, last = [json.loads(line) for line in out.splitlines()]
    assert list(last) == ["summary"]
    return results, last["summary"]


def got(results: list[dict]) -> list[tuple[str, list[int], str | None]]:
    return [(r["text"], r["ids"], r["finish_reason"]) for r in results]


def test_a_batch_runs_where_it_is_told_to(serve, prompts, expected, monkeypatch):
    """The simulated device adds up as the CPU does, so the texts are the same."""
    want, pools = expected(9), []
    made = lk.models.LlamaModel.new_pool

    def new_pool(self, *args, **kwargs):
        pools.append(made(self, *args, **kwargs))
        return pools[-1]

    monkeypatch.setattr(lk.models.LlamaModel, "new_pool", new_pool)
    results, _ = objects(serve(prompts, "--max-new-tokens", "9", "--json", "--device", "sim:1").out)
    assert got(results) == want
    assert [str(pool.device_location()) for pool in pools] == ["sim:1"]


def test_a_device_that_is_not_there_is_told_before_a_model_is_looked_for(run, prompts):
    command = ["serve-batch", prompts, "--model", "nowhere.gguf"]
    assert "nowhere.gguf" in run(*command).err
    done = run(*command, "--device", "sim:9")
    assert (done.code, done.out) == (3, "")
    assert "sim:9" in done.err
    assert "nowhere" not in done.err


def test_texts_in_the_order_of_the_file(serve, prompts, expected):
    want = "".join(
        f"> {prompt}\n{text}\n\n"
        for prompt, (text, _, _) in zip(PROMPTS, expected(9), strict=True)
    )  # fmt: skip
    assert serve(prompts, "--max-new-tokens", "9") == (0, want, "")


@pytest.mark.parametrize(
    "argv",
    [[], ["--batch", "2", "--block-size", "4"], ["--batch", "1"], ["--blocks", "3"]],
    ids=str,
)
def test_objects_and_their_summary(serve, prompts, expected, tiny_model, argv):
    done = serve(prompts, "--max-new-tokens", "9", "--json", *argv)
    assert (done.code, done.err) == (0, "")
    results, summary = objects(done.out)
    assert got(results) == expected(9)
    assert [r["line"] for r in results] == [1, 3, 5, 7, 9]
    tokenizer = lk.models.load(tiny_model).tokenizer
    assert [r["prompt_ids"] for r in results] == [
        tokenizer.with_bos(tokenizer.encode(p)) for p in PROMPTS
    ]
    assert [r["error"] for r in results] == [None] * 5
    assert summary["requests"] == 5
    assert summary["failed"] == 0
    assert summary["new_tokens"] == 45
    assert summary["prompt_tokens"] == sum(len(r["prompt_ids"]) for r in results)
    for name in ("prefill_tokens", "tokens_found", "preemptions"):
        assert summary[name] == sum(r["stats"][name] for r in results)
    assert summary["prefill_tokens"] + summary["tokens_found"] == summary["prompt_tokens"]
    assert summary["rounds"] >= 8
    assert summary["pool_bytes"] == summary["pool_blocks"] * 2 * 2 * 2 * 16 * 4 * (
        4 if "--block-size" in argv else 16
    )
    assert summary["weights_bytes"] == lk.models.load(tiny_model).weights.nbytes
    assert summary["tokens_per_second"] > 0
    # All structures are known by now.
    again = objects(serve(prompts, "--max-new-tokens", "9", "--json", *argv).out)[1]
    assert (again["plans_built"], again["rounds"]) == (0, summary["rounds"])


def test_enough_blocks_are_made_for_the_batch(serve, prompts):
    """The two longest prompts in blocks of four, and nobody has to give way."""
    argv = ["--batch", "2", "--block-size", "4", "--max-new-tokens", "20", "--json"]
    results, summary = objects(serve(prompts, *argv).out)
    longest = sorted(len(r["prompt_ids"]) for r in results)[-2:]
    assert summary["pool_blocks"] == sum(-(-(n + 19) // 4) for n in longest)
    assert summary["preemptions"] == 0


def test_too_few_blocks_only_take_longer(serve, prompts, expected, tmp_path):
    argv = ["--max-new-tokens", "20", "--block-size", "2", "--blocks", "20", "--json"]
    for store in ([], ["--store", str(tmp_path)]):
        results, summary = objects(serve(prompts, *argv, *store).out)
        assert got(results) == expected(20)
        assert summary["preemptions"] > 0
        assert summary["pool_blocks"] == 20
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.txt"], "the store is cleared"


def test_sampling_options_reach_every_request(serve, prompts, expected):
    argv = ["--temperature", "2", "--top-k", "7", "--top-p", "0.95", "--seed", "5"]
    results, _ = objects(serve(prompts, "--max-new-tokens", "9", "--json", *argv).out)
    assert got(results) == expected(9, temperature=2.0, top_k=7, top_p=0.95, seed=5)
    stop = results[1]["text"][2:4]
    results, _ = objects(
        serve(prompts, "--max-new-tokens", "9", "--json", "--stop", stop, *argv).out
    )
    assert got(results) == expected(9, temperature=2.0, top_k=7, top_p=0.95, seed=5, stop=stop)
    assert results[1]["finish_reason"] == "stop"


def test_chat_lays_every_prompt_out(serve, prompts, tiny_model):
    tokenizer = lk.models.load(tiny_model).tokenizer
    results, _ = objects(serve(prompts, "--chat", "--max-new-tokens", "2", "--json").out)
    assert [r["prompt_ids"] for r in results] == [tokenizer.encode(f"<s>{p}c") for p in PROMPTS]


def test_prompts_from_standard_input(serve, prompts, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path(prompts).read_text()))
    assert serve("-", "--max-new-tokens", "5") == serve(prompts, "--max-new-tokens", "5")


def test_stats_are_the_summary_in_words(serve, prompts):
    done = serve(prompts, "--max-new-tokens", "9", "--stats")
    assert "5 prompts of " in done.err
    assert "new 45 tokens" in done.err
    assert done.out == serve(prompts, "--max-new-tokens", "9").out


def test_a_prompt_that_fails_is_told_and_the_others_are_served(
    serve, prompts, expected, monkeypatch
):
    """Whatever decodes token 4 of the third prompt fails."""
    honest, want = PagedDecoder.decode, expected(9)
    after = want[2][1][1]

    def fails(self, sessions, ids):
        if len(sessions) == 1 and list(ids) == [after]:
            raise lk.KernelError("decode: got a\n  broken device, need a whole one")
        return honest(self, sessions, ids)

    monkeypatch.setattr(PagedDecoder, "decode", fails)
    argv = ["--max-new-tokens", "9", "--batch", "1"]
    done = serve(prompts, *argv, "--json")
    assert (done.code, done.err) == (1, "")
    results, summary = objects(done.out)
    failed = [n for n, r in enumerate(results) if r["error"]]
    assert 2 in failed
    assert summary["failed"] == len(failed)
    for n, result in enumerate(results):
        if n in failed:
            assert result["error"] == "decode: got a broken device, need a whole one"
            assert (result["finish_reason"], result["ids"][-1]) == ("error", after)
        else:
            assert got([result]) == want[n : n + 1]
    done = serve(prompts, *argv)
    assert done.code == 1
    assert done.err.splitlines() == [
        f"lazykv: line {2 * n + 1}: decode: got a broken device, need a whole one" for n in failed
    ]
    assert done.out.count("\n> ") == 4


def test_nothing_is_drawn_where_no_terminal_is(serve, prompts):
    assert serve(prompts, "--max-new-tokens", "2").err == ""


def test_progress_on_a_terminal(serve, prompts, monkeypatch):
    plain = serve(prompts, "--max-new-tokens", "5")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = serve(prompts, "--max-new-tokens", "5")
    assert (done.code, done.out) == (0, plain.out)
    assert "loading" in done.err
    assert "5 prompts done, 25 tokens" in done.err


def usage(done) -> str:
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("lazykv: PROMPTS: ")
    return done.err


def test_prompts_that_cannot_be_read_are_usage(serve, tmp_path, monkeypatch):
    assert "No such file" in usage(serve(str(tmp_path / "nothing.txt")))
    assert "need a text file" in usage(serve(str(tmp_path)))
    assert "need a text file" in usage(serve("a\0b"))
    (tmp_path / "blank").write_text("\n \n\t\n")
    assert "need a prompt on at least one line" in usage(serve(str(tmp_path / "blank")))
    (tmp_path / "bytes").write_bytes(b"abc\n\xff\xfe\n")
    assert "not UTF-8" in usage(serve(str(tmp_path / "bytes")))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "got no text" in usage(serve("-"))


def test_a_prompt_that_never_fits_is_usage(serve, prompts, tmp_path):
    err = usage(serve(prompts, "--blocks", "2", "--block-size", "2"))
    assert "tokens on line 3, need at most 4; give the pool more --blocks" in err
    (tmp_path / "long").write_text("a\n" + "abc" * 200)
    assert "tokens on line 2, need at most 128\n" in usage(serve(str(tmp_path / "long")))


def test_a_store_that_is_no_folder_is_3(serve, prompts):
    done = serve(prompts, "--store", prompts)
    assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)
    assert "need a writable folder" in done.err


SLOW = """
import signal, sys, time
# A background job may start with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from lazykv.cli import main
from lazykv.models import PagedDecoder
honest = PagedDecoder.decode
def slow(*args):
    time.sleep(0.02)
    return honest(*args)
PagedDecoder.decode = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def endless(tiny_model, tmp_path):
    """A batch in a process of its own, of which the first prompt is done and the others are not."""
    many = tmp_path / "many.txt"
    many.write_text("abc\n" * 2000)
    command = [sys.executable, "-c", SLOW, "serve-batch", "--model", str(tiny_model), str(many)]
    command += ["--batch", "1", "--max-new-tokens", "5", "--store", str(tmp_path)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as running:
        assert running.stdout.read(6) == b"> abc\n"
        yield running
        running.kill()


def test_interrupting_is_clean(endless, tmp_path):
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=30)
    assert (endless.returncode, err) == (130, b"")
    assert [p.name for p in tmp_path.iterdir()] == ["many.txt"]


def test_closing_the_pipe_is_clean(endless):
    endless.stdout.close()
    assert endless.stderr.read() == b""
    assert endless.wait(timeout=30) == 0


@pytest.mark.slow
def test_real_model(run, tmp_path):
    """The golden prompt among others, in a pool where they have to take turns."""
    golden = json.loads(GOLDEN.read_text())
    question = "Explain in a few sentences why the sky is blue."
    path = tmp_path / "prompts.txt"
    path.write_text(
        f"Water boils at what temperature?\n{question}\nName three colours.\n{question}\n"
    )
    argv = ["--chat", "--max-new-tokens", "16", "--json", "--batch", "3", "--blocks", "10"]
    results, summary = objects(run("serve-batch", str(path), *argv).out)
    assert [results[n]["prompt_ids"] for n in (1, 3)] == [golden["prompt_ids"]] * 2
    assert [results[n]["ids"] for n in (1, 3)] == [golden["generated_ids"][:16]] * 2
    assert results[3]["stats"]["tokens_found"] > 0
    assert summary["failed"] == 0
