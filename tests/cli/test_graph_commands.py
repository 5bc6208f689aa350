"""`graph dump`, `graph inspect` and `plan` for every target."""

import json
import re
from importlib.resources import files

import jsonschema
import pydot
import pytest
from models.tiny_models import spm_vocabulary, write_gguf

from lazykv.models.gguf_header import read_gguf_metadata

SCHEMA = json.loads((files("lazykv.inspect") / "graph.schema.json").read_text())


WRITE_BYTES = """\
graph write-bytes: 3 nodes on cpu

  layer 0:
  %0  const 'cache.0.k'       f16[1,2,16,8]
  %1  const 'cache.0.k.rows'  f16[1,2,3,8]   frozen snapshot
  %2  write_slice(%0, %1)     f16[1,2,16,8]  starts=(0,0,start,0) widths=(1,2,3,8); overwrites %0

symbol start: 0..13
writes for their effect: %2

plan write-bytes: 1 step, arena 0 B, results 0 B, peak 0 B

steps, in the order they run
  0  cache.0.k = write_slice(cache.0.k, cache.0.k.rows)  f16[1,2,16,8]  %2  starts=(0,0,start,0) widths=(1,2,3,8); in place

manifest
  baked: reused only where these are equal (ids are of this process, not shown)
    structure               STRUCTURE
    storage:cache.0.k       id
    storage:cache.0.k.rows  id
    generation:cpu          id
    range:start             0..13
  bound: supplied for every run
    start  symbol, 0..13
"""  # noqa: E501


def test_write_bytes_in_full(run):
    options = ["--dtype", "f16", "--max-seq-len", "16", "--seq", "3"]
    structure = json.loads(run("plan", "write-bytes", "--json", *options).out)["plan"]["structure"]
    done = run("graph", "dump", "write-bytes", *options)
    assert done == (0, WRITE_BYTES.replace("STRUCTURE", structure), "")


@pytest.mark.parametrize("target", ["write-bytes", "append", "decode"])
@pytest.mark.parametrize("options", [[], ["--dtype", "bf16", "--seq", "4", "--layers", "3"]])
def test_json_of_every_target(run, target, options):
    value = json.loads(run("graph", "dump", target, "--format", "json", *options).out)
    jsonschema.validate(value, SCHEMA)
    assert value["title"] == target
    assert value == json.loads(run("plan", target, "--json", *options).out)
    assert value == json.loads(run("graph", "dump", target, "--json", *options).out)


def test_sizes_reach_the_graph(run):
    options = [
        "--layers",
        "3",
        "--heads",
        "5",
        "--head-dim",
        "6",
        "--max-seq-len",
        "7",
        "--seq",
        "2",
    ]
    value = json.loads(run("graph", "dump", "append", "--format", "json", *options).out)
    nodes = value["graph"]["nodes"]
    assert {tuple(n["shape"]) for n in nodes} == {(1, 5, 7, 6), (1, 5, 2, 6)}
    assert sum(n["op"] == "write_slice" for n in nodes) == 6
    assert value["graph"]["symbols"] == [{"name": "start", "low": 0, "high": 5}]


def test_decode_of_a_model_file(run, tiny_model):
    value = json.loads(run("plan", f"decode:{tiny_model}", "--json", "--max-seq-len", "32").out)
    caches = [leaf for leaf in value["plan"]["leaves"] if leaf["written"]]
    assert [leaf["shape"] for leaf in caches] == [[1, 2, 32, 16]] * 4
    assert value["graph"]["symbols"] == [{"name": "cached_len", "low": 0, "high": 31}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the parser of the test itself
def test_diagrams(run):
    (drawing,) = pydot.graph_from_dot_data(run("graph", "dump", "decode", "--format", "dot").out)
    assert drawing.get_name() == '"decode"'
    assert run("graph", "dump", "decode", "--format", "mermaid").out.startswith("flowchart TB\n")


def test_output_file(run, tmp_path):
    path = tmp_path / "graph.json"
    argv = ["graph", "dump", "append", "--format", "json"]
    assert run(*argv, "-o", str(path)) == (0, "", "")
    assert path.read_text() == run(*argv).out


def test_long_graphs_are_short_unless_full(run):
    argv = ["graph", "dump", "decode", "--layers", "30"]
    short, full = run(*argv).out, run(*argv, "--full").out
    assert "layers 1..29: same as layer 0, 32 nodes each (--full shows all)" in short
    assert short.count("\n") < 200
    assert full.count("\n") > 1500
    assert run("plan", "decode", "--full").out in run("graph", "dump", "decode", "--full").out


def test_inspect(run):
    text = run("graph", "inspect", "append", "--layers", "4", "--dtype", "f16").out
    assert text.startswith(
        "graph append: 24 nodes in 4 layers\n  16 data, 0 views, 8 writes, 0 that"
    )
    value = json.loads(run("graph", "inspect", "append", "--layers", "4", "--json").out)
    assert value["schema"] == "lazykv.summary/1"
    assert value["ops"] == {"const": 16, "write_slice": 8}
    assert value["memory"]["written"] == [4 * 2 * 2 * 64 * 8 * 4, 8]
    assert [step["times"] for step in value["biggest"]] == [4, 4]


def test_O11_metadata_of_a_file_without_tensors_is_listed(run, tmp_path):
    path = str(write_gguf(tmp_path / "z.gguf", tensors={}))
    code, text, err = run("graph", "inspect", path)
    assert (code, err) == (0, "")
    assert text.startswith(f"file {path}: GGUF version 3, 8 metadata keys, 0 tensors\n")
    assert re.search(r"^  llama\.block_count +2$", text, re.M)
    assert text.endswith("\ntensors\n  nothing\n")
    value = json.loads(run("graph", "inspect", path, "--json").out)
    assert (value["metadata"]["llama.block_count"], value["tensors"]) == (2, [])
    for argv in (["graph", "inspect", f"decode:{path}"], ["generate", "a", "--model", path]):
        done = run(*argv)
        assert (done.code, done.out) == (2, "")
        assert "got no tensors" in done.err


def test_a_model_file_is_listed_without_its_weights(run, tmp_path):
    metadata = spm_vocabulary() | {"tokenizer.chat_template": "\x1b[2J" * 99, "general.tags": []}
    path = str(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    header = read_gguf_metadata(path)
    text = run("graph", "inspect", path).out
    assert "\x1b" not in text, "nothing that a terminal acts on"
    assert max(map(len, text.splitlines()[1:])) < 130
    assert re.search(r"^  tokenizer\.ggml\.tokens +9 values: '<unk>', '<s>',", text, re.M)
    value = json.loads(run("graph", "inspect", path, "--json").out)
    assert value["schema"] == "lazykv.gguf/1"
    assert value["metadata"]["tokenizer.chat_template"] == "\x1b[2J" * 99
    assert value["metadata"]["tokenizer.ggml.scores"] == [-float(n) for n in range(9)]
    assert [(t["name"], tuple(t["shape"]), t["type"], t["bytes"]) for t in value["tensors"]] == [
        (t.name, t.shape, t.type_name, t.n_bytes) for t in header.tensors
    ]
    assert all(f"  {t.name} " in text for t in header.tensors)
