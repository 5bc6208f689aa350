"""Model folders: files, configuration, tokenizer, and hostile safetensors (N1 to N7)."""

import json
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_gguf_vocabulary import MARK, spm
from test_gguf_vocabulary import read as read_vocabulary
from tiny_models import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, WORDS, weights, write_gguf

from lazykv.errors import ModelFormatError
from lazykv.models.config import LinearScaling, Llama3Scaling
from lazykv.models.gguf_file import read_gguf
from lazykv.models.json_file import parse_json
from lazykv.models.safetensors_folder import read_folder

CONFIG = {
    "model_type": "llama",
    "vocab_size": len(WORDS),
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name):
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block:
        return f"model.layers.{block[1]}.{HF_NAMES[block[2]]}.weight"
    return HF_NAMES[name.removesuffix(".weight")] + ".weight"


def half_split_rows(rows, n_heads):
    """Rows of Q or K as GGUF files store them, put in the order that Hugging Face folders use."""
    return rows.reshape(n_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def hf_tensors(**changes):
    return {hf_name(name): array for name, array in weights().items()} | changes


@pytest.fixture
def build(tmp_path):
    """Writes a folder and reads it back. `files` maps names to objects or text."""

    def write(tensors=None, files=None, **config):
        for old in tmp_path.iterdir():
            old.unlink()
        settings = {k: v for k, v in (CONFIG | config).items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        save_file(hf_tensors() if tensors is None else tensors, tmp_path / "model.safetensors")
        for name, content in (files or {}).items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        return read_folder(tmp_path)

    return write


def test_tiny_model(build, tmp_path):
    checkpoint = build()
    config = checkpoint.config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.rope_theta == 50000.0
    assert not config.rope_interleaved
    assert config.tied_head
    assert checkpoint.name == tmp_path.name
    assert (checkpoint.tokenizer, checkpoint.chat_template) == (None, None)
    assert checkpoint.tensors.keys() == weights().keys()
    for name, array in weights().items():
        loaded = checkpoint.tensors[name].load()
        assert loaded.flags.c_contiguous
        assert loaded.flags.writeable
        np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "F16"), (ml_dtypes.bfloat16, "BF16")])
def test_half_precision(build, dtype, name):
    stored = {n: array.astype(dtype) for n, array in hf_tensors().items()}
    checkpoint = build(stored)
    source = checkpoint.tensors["blk.1.ffn_up.weight"]
    assert source.type_name == name
    expected = stored["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(source.load(), expected)


def test_other_types_are_refused(build):
    with pytest.raises(ModelFormatError, match="of type F64, need one of F32, F16, BF16"):
        build(hf_tensors(**{"model.norm.weight": np.ones(HIDDEN)}))


def test_head(build):
    head = {"lm_head.weight": weights(1)["token_embd.weight"]}
    untied = build(hf_tensors(**head), tie_word_embeddings=False)
    assert not untied.config.tied_head
    np.testing.assert_array_equal(untied.tensors["output.weight"].load(), head["lm_head.weight"])
    assert build(hf_tensors(**head)).config.tied_head
    with pytest.raises(ModelFormatError, match=r"no lm_head\.weight"):
        build(tie_word_embeddings=False)


def test_shards(build, tmp_path):
    whole = hf_tensors()
    build(whole)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: whole[name] for name in part}, tmp_path / file)
    index = {name: file for file, part in parts.items() for name in part}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    loaded = read_folder(tmp_path).tensors["blk.1.ffn_down.weight"].load()
    np.testing.assert_array_equal(loaded, weights()["blk.1.ffn_down.weight"])
    for changes, said in [
        ({names[0]: "b.safetensors"}, "need it in model"),
        ({"extra.weight": "a.safetensors"}, "no tensor 'extra.weight'"),
        ({names[0]: "../a.safetensors"}, "need one in this folder"),
        ({"extra.weight": "c.safetensors"}, "no plain file"),
    ]:
        path.write_text(json.dumps({"weight_map": index | changes}))
        with pytest.raises(ModelFormatError, match=said):
            read_folder(tmp_path)
    path.unlink()
    save_file({names[0]: whole[names[0]]}, tmp_path / "b.safetensors")
    with pytest.raises(ModelFormatError, match="in two files"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"model_type": ...}, "no model_type"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_hidden_layers": 3}, "no tensor 'blk.2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"sliding_window": 64}, "sliding_window 64 with model_type 'llama'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window -1"),
        (
            {
                "model_type": "mistral",
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            r"layer_types \['full_attention', 'sliding_attention'\] with sliding_window 64",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rms_norm_eps": -1}, "rms_eps -1.0"),
        ({"eos_token_id": "2"}, None),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"rope_theta": 10**400}, "rope_theta inf"),
    ],
)
def test_configurations_are_checked(build, config, said):
    if said is None:
        assert build(**config).tokenizer is None  # without a tokenizer there is nothing to end
        return
    with pytest.raises(ModelFormatError, match=said):
        build(**config)


def test_configurations_that_fit(build):
    linear = {"type": "linear", "factor": 2}
    assert build(rope_scaling=linear).config.rope_scaling == LinearScaling(2.0)
    new = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 77.0,
    }
    config = build(rope_parameters=new, rope_theta=...).config
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert config.rope_theta == 77.0
    assert build(rope_scaling=None, head_dim=None).config.head_dim == 16
    assert build(model_type="mistral", sliding_window=None).config.architecture == "mistral"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert build(hf_tensors(**old)).tensors.keys() == weights().keys()


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 2}, None),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096}, None),
        ({"max_position_embeddings": 8192}, 4096),
        ({"max_position_embeddings": 8192, "sliding_window": None}, None),
    ],
)
def test_sliding_windows_of_the_mistral_type(build, changes, window):
    assert build(model_type="mistral", **changes).config.sliding_window == window


def test_extra_tensors_are_refused(build):
    with pytest.raises(ModelFormatError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        build(hf_tensors(**{"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "[" * 100000, "nul"])
def test_hostile_json(build, tmp_path, text):
    build()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        read_folder(tmp_path)


def test_missing_files(build, tmp_path):
    build()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="no safetensors files"):
        read_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelFormatError, match=r"config\.json: got no such file"):
        read_folder(tmp_path)


VOCABULARY = read_vocabulary(spm([f"{MARK}a", "ab", "a", "b", MARK]))
TOKENIZER_JSON = VOCABULARY._pipeline.to_str()


def test_tokenizer(build):
    files = {"tokenizer.json": TOKENIZER_JSON, "chat_template.jinja": "{{ bos_token }}"}
    checkpoint = build(files=files)
    tokenizer = checkpoint.tokenizer
    assert tokenizer.encode("a ab</s>") == VOCABULARY.encode("a ab</s>")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), False)
    assert checkpoint.chat_template == "{{ bos_token }}"

    options = {
        "bos_token": {"content": "</s>"},
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "x"}],
    }
    files = {
        "tokenizer.json": TOKENIZER_JSON,
        "tokenizer_config.json": options,
        "generation_config.json": {"eos_token_id": [5, 2]},
    }
    checkpoint = build(files=files)
    tokenizer = checkpoint.tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (2, (5, 2), True)
    assert checkpoint.chat_template == "x"


def test_a_pipeline_that_leads_with_the_begin_token_says_so(build):
    stored = json.loads(TOKENIZER_JSON)
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    stored["truncation"] = {
        "direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    tokenizer = build(files={"tokenizer.json": stored}).tokenizer
    assert tokenizer.add_bos
    assert tokenizer.encode("a ab") == VOCABULARY.encode("a ab")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.json": "{}"}, "no decoder"),
        ({"tokenizer.json": {"decoder": {"type": "ByteLevel"}}}, "need a valid tokenizer"),
        ({"tokenizer.json": {"decoder": {"type": "WordPiece"}}}, "decoder 'WordPiece'"),
        (
            {"tokenizer.json": TOKENIZER_JSON, "tokenizer_config.json": {"bos_token": "<nope>"}},
            "bos_token '<nope>'",
        ),
        (
            {"tokenizer.json": TOKENIZER_JSON, "generation_config.json": {"eos_token_id": ["x"]}},
            "eos_token_id",
        ),
        (
            {"tokenizer.json": TOKENIZER_JSON, "generation_config.json": {"eos_token_id": 999}},
            "end token 999",
        ),
    ],
)
def test_tokenizer_files_are_checked(build, files, said):
    with pytest.raises(ModelFormatError, match=said):
        build(files=files)


def test_a_folder_made_from_a_gguf_file_differs_in_row_order_alone(build, tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    gguf = read_gguf(path)
    stored = {name: source.load() for name, source in gguf.tensors.items()}
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for name, rows in stored.items():
        n_heads = next((heads[part] for part in heads if part in name), None)
        stored[name] = rows if n_heads is None else half_split_rows(rows, n_heads)
    folder = build({hf_name(name): rows for name, rows in stored.items()}, rope_theta=10000)
    for name, rows in stored.items():
        np.testing.assert_array_equal(folder.tensors[name].load(), rows)
    same = {"rms_eps": folder.config.rms_eps, "rope_interleaved": False}
    assert replace(gguf.config, **same) == folder.config
    assert half_split_rows(np.array([[0], [2], [1], [3]]), 1)[:, 0].tolist() == [0, 1, 2, 3]


def test_a_file_changed_after_opening_is_not_read(build, tmp_path):
    source = build().tensors["token_embd.weight"]
    source.load()
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match="changed file"):
        source.load()


def test_numbers_too_long_for_python_are_refused():
    with pytest.raises(ModelFormatError, match="need valid JSON"):
        parse_json("1" * 5000, "x")
