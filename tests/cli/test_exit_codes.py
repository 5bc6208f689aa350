"""Every failure is one line on standard error, and an exit code that says of what kind it is."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import lazykv
from lazykv import errors
from lazykv.cli import main
from lazykv.cli.exits import UsageError, exit_code

USAGE = {
    "no command": [],
    "unknown command": ["frobnicate"],
    "no verb": ["graph"],
    "no target": ["graph", "dump"],
    "unknown target": ["graph", "dump", "nope"],
    "target without a model": ["plan", "decode:"],
    "unknown model": ["graph", "inspect", "decode:nope"],
    "unknown format": ["graph", "dump", "append", "--format", "xml"],
    "unknown dtype": ["graph", "dump", "append", "--dtype", "f99"],
    "malformed location": ["graph", "dump", "append", "--device", "cuda"],
    "zero layers": ["graph", "dump", "append", "--layers", "0"],
    "more layers than a model has": ["plan", "append", "--layers", "99999999"],
    "more layers to decode": ["plan", "decode", "--layers", "401"],
    "negative heads": ["graph", "dump", "append", "--heads", "-1"],
    "not a number": ["graph", "dump", "append", "--layers", "1_0"],
    "two formats": ["graph", "dump", "append", "--json", "--format", "dot"],
    "file that is not there": ["graph", "inspect", "/nowhere/model.gguf"],
    "odd rotary pairs": ["plan", "decode", "--head-dim", "3"],
    "more rows than capacity": ["plan", "append", "--seq", "9", "--max-seq-len", "8"],
    "file that cannot be written": ["graph", "dump", "append", "-o", "/dev/null/x"],
    "no prompt": ["generate"],
    "empty prompt": ["generate", ""],
    "unknown model to generate with": ["generate", "a", "--model", "nope"],
    "negative temperature": ["generate", "a", "--temperature", "-1"],
    "temperature that is no number": ["generate", "a", "--temperature", "nan"],
    "top-p above one": ["generate", "a", "--top-p", "2"],
    "empty stop string": ["generate", "a", "--stop", ""],
    "negative seed": ["generate", "a", "--seed", "-1"],
    "malformed location to generate on": ["generate", "a", "--device", "sim"],
    "no new tokens": ["generate", "a", "--max-new-tokens", "0"],
    "no file of prompts": ["serve-batch"],
    "file of prompts that is not there": ["serve-batch", "/nowhere/prompts.txt"],
    "empty batch": ["serve-batch", "-", "--batch", "0"],
    "no blocks": ["serve-batch", "-", "--blocks", "0"],
    "batch with a top-k of nothing": ["serve-batch", "-", "--top-k", "0"],
    "batch with an empty stop string": ["serve-batch", "-", "--stop", ""],
}


def fails(done, code: int) -> str:
    """The message of a failure, once it is known to be one line and nothing else."""
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("lazykv: ")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1
    return done.err


@pytest.mark.parametrize("argv", USAGE.values(), ids=USAGE.keys())
def test_usage_is_2(run, argv):
    fails(run(*argv), 2)


@pytest.mark.parametrize("target", ["append", "write-bytes", "decode"])
@pytest.mark.parametrize("size", [2**63 - 1, 10**20, 10**40])
@pytest.mark.parametrize("option", ["--layers", "--heads", "--head-dim", "--max-seq-len", "--seq"])
def test_a_size_that_no_memory_has_is_2(run, target, option, size):
    capacity = ["--max-seq-len", str(size)] if option == "--seq" else []
    said = fails(run("graph", "dump", target, option, str(size), *capacity), 2)
    assert ", need " in said


@pytest.mark.parametrize("option", ["--max-new-tokens", "--temperature", "--top-p"])
def test_a_number_that_is_too_large_to_generate_with_is_2(run, tiny_model, option):
    argv = ["generate", "a", "--model", str(tiny_model), option, f"1{'0' * 400}"]
    assert ", need " in fails(run(*argv), 2)


@pytest.mark.parametrize("option", ["--max-new-tokens", "--batch", "--blocks", "--block-size"])
def test_a_number_that_is_too_large_for_a_batch_is_2(run, tiny_model, tmp_path, option):
    (tmp_path / "prompts.txt").write_text("abc\n")
    argv = ["serve-batch", str(tmp_path / "prompts.txt"), "--model", str(tiny_model)]
    assert ", need " in fails(run(*argv, option, str(10**20)), 2)


def test_sizes_of_a_model_are_its_own(run, tiny_model):
    done = run("plan", f"decode:{tiny_model}", "--layers", "3")
    assert "the model has its own" in fails(done, 2)


def test_prompt_longer_than_capacity_is_2(run, tiny_model):
    done = run("generate", "abcabc", "--model", str(tiny_model), "--max-seq-len", "2")
    assert "need at most 2" in fails(done, 2)


def test_broken_model_file_is_2(run, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and then nothing")
    fails(run("generate", "a", "--model", str(broken)), 2)
    fails(run("plan", f"decode:{broken}"), 2)


def test_device_without_backend_is_3(run):
    done = run("graph", "dump", "append", "--device", "quantum:0")
    assert "quantum" in fails(done, 3)


def test_a_device_to_generate_on_is_looked_for_before_a_model_is(run):
    done = run("generate", "a", "--model", "/nowhere/model.gguf", "--device", "sim:9")
    assert "need one of: sim:0" in fails(done, 3)


@pytest.mark.parametrize("left", [SystemExit(0), SystemExit("no licence")])
def test_a_library_that_leaves_is_a_failure(run, monkeypatch, left):
    def leaves(*args):
        raise left

    monkeypatch.setattr("lazykv.cli.graph.document", leaves)
    assert "SystemExit" in fails(run("graph", "inspect", "append"), 1)


@pytest.mark.parametrize("argv", [["generate", "a"], ["plan", "decode:smollm2"]])
def test_missing_extra_is_3(run, monkeypatch, argv):
    monkeypatch.setitem(sys.modules, "lazykv.models.fetch", None)  # makes importing it fail
    assert "lazykv[models]" in fails(run(*argv), 3)


def test_unwritable_cache_folder_is_3(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LAZYKV_CACHE_DIR", str(tmp_path / "file"))
    assert "LAZYKV_CACHE_DIR" in fails(run("generate", "a"), 3)


def test_memory_that_is_not_there_is_3(run):
    size = ["--layers", "400", "--heads", "4000", "--head-dim", "4000", "--max-seq-len", "4000000"]
    fails(run("graph", "dump", "append", *size), 3)


@pytest.mark.parametrize("error", [errors.KernelError("k: got a\n  b, need c"), OSError("torn")])
def test_what_fails_while_running_is_1(run, monkeypatch, error):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr("lazykv.cli.graph.document", broken)
    fails(run("graph", "inspect", "append"), 1)


def test_every_error_class_has_a_code():
    kinds = [errors.LazyKvError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    codes = {kind.__name__: exit_code(kind("x")) for kind in kinds}
    assert set(codes.values()) == {1, 2, 3}
    assert codes["EnvironmentMissing"] == codes["BackendUnavailable"] == codes["OutOfMemory"] == 3
    assert codes["SymbolRangeError"] == codes["ModelFormatError"] == 2
    assert codes["KernelError"] == codes["SnapshotError"] == codes["StorageTornError"] == 1
    assert exit_code(UsageError("x")) == 2


def test_interrupt_is_130_and_silent(run, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lazykv.cli.graph.document", interrupted)
    assert run("graph", "inspect", "append") == (130, "", "")


def test_version_and_help(run):
    assert run("--version") == (0, f"lazykv {lazykv.__version__}\n", "")
    commands = [[], ["graph"], ["graph", "dump"], ["graph", "inspect"], ["plan"], ["generate"]]
    for command in [*commands, ["serve-batch"]]:
        done = run(*command, "--help")
        assert done.code == 0
        assert done.out.startswith("usage: " + " ".join(["lazykv", *command]))


def test_console_script_and_module_are_the_same_program():
    (script,) = entry_points(group="console_scripts", name="lazykv")
    assert script.load() is main
    done = subprocess.run(
        [sys.executable, "-m", "lazykv", "graph", "dump", "nope"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    fails(type("Done", (), {"code": done.returncode, "out": done.stdout, "err": done.stderr}), 2)


def test_optional_packages_wait_until_they_are_needed():
    program = (
        "import sys; from lazykv.cli import main; main(['plan', 'append']); "
        "names = ['gguf', 'rich', 'tokenizers', 'jinja2', 'safetensors', 'cupy', 'numba']; "
        "sys.exit([n for n in names if n in sys.modules] or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_reader_that_has_enough_is_no_failure():
    """The pipe closes after one line of many; nothing is said about it."""
    command = [
        sys.executable,
        "-m",
        "lazykv",
        "graph",
        "dump",
        "decode",
        "--layers",
        "60",
        "--full",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"graph decode: ")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
