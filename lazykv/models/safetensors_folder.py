"""Llama-type models as Hugging Face publishes them: a folder of JSON and safetensors files.

Tensors get their GGUF names. Rows of Q and K stay as stored, in the order of half-split rotary
pairs, and the configuration says so (`rope_interleaved`).
"""

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Pipeline

from lazykv.errors import ModelFormatError
from lazykv.models.checkpoint import Checkpoint, TensorSource, check_tensors
from lazykv.models.config import LinearScaling, Llama3Scaling, LlamaConfig, RopeScaling
from lazykv.models.json_file import JsonObject, read_object, read_text
from lazykv.models.safetensors_file import read_tensors
from lazykv.models.tokenizer import Tokenizer

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BLOCK_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)\.weight")
# Old checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")
_DECODERS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")


def read_folder(path: str | Path) -> Checkpoint:
    """Read and check a model folder (`config.json`, `*.safetensors`, tokenizer files).

    Raises ModelFormatError if something is missing, malformed, or not a Llama-type model.
    """
    folder = Path(path)
    settings = read_object(folder / "config.json")
    sources = _tensors(folder)
    if settings.get("tie_word_embeddings", bool, False):
        # Some writers store the tied head as well; the flag says that it is the embedding.
        sources.pop("output.weight", None)
    tied_head = "output.weight" not in sources
    config = _config(settings, tied_head)
    if tied_head and settings.optional("tie_word_embeddings", bool) is False:
        raise ModelFormatError("model folder: got no lm_head.weight, need it: the head is not tied")
    return Checkpoint(
        config=config,
        tensors=check_tensors(config, sources),
        tokenizer=_tokenizer(folder, settings),
        chat_template=_chat_template(folder),
        name=folder.resolve().name,
        file_path=folder,
    )


def _tensors(folder: Path) -> dict[str, TensorSource]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).need("weight_map", dict)
        names = sorted({str(name) for name in weight_map.values()})
    else:
        weight_map = None
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise ModelFormatError(f"model folder {folder}: got no safetensors files, need some")
    found: dict[str, TensorSource] = {}
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ModelFormatError(f"{index.name}: got file {name!r}, need one in this folder")
        for stored, source in read_tensors(folder / name).items():
            if weight_map is not None and weight_map.get(stored) != name:
                raise ModelFormatError(f"{name}: got tensor {stored!r}, need it in {index.name}")
            if stored in found:
                raise ModelFormatError(f"model folder: got tensor {stored!r} in two files")
            found[stored] = source
    missing = sorted(set(weight_map or ()) - set(found))
    if missing:
        raise ModelFormatError(f"{index.name}: got no tensor {missing[0]!r} in its file, need it")
    return {_canonical(s): source for s, source in found.items() if not _DERIVED.fullmatch(s)}


def _canonical(name: str) -> str:
    """The GGUF name of a tensor; a name that is not part of the architecture stays as it is."""
    block = _BLOCK_NAME.fullmatch(name)
    if block and block[2] in _BLOCK:
        return f"blk.{block[1]}.{_BLOCK[block[2]]}.weight"
    return _TOP.get(name, name)


def _config(settings: JsonObject, tied_head: bool) -> LlamaConfig:
    architecture = settings.need("model_type", str)
    if architecture not in ("llama", "mistral"):
        raise ModelFormatError(f"config.json: got model_type {architecture!r}, need llama, mistral")
    _refuse_variants(settings)
    hidden = settings.need("hidden_size", int)
    n_heads = settings.need("num_attention_heads", int)
    head_dim = settings.optional("head_dim", int)
    if head_dim is None:
        if n_heads < 1 or hidden % n_heads:
            raise ModelFormatError(
                f"config.json: got hidden_size {hidden} and num_attention_heads {n_heads} without "
                "head_dim, need a whole number of values per head"
            )
        head_dim = hidden // n_heads
    theta, scaling = _rope(settings)
    context = settings.get("max_position_embeddings", int, 2048)
    return LlamaConfig(
        architecture=architecture,
        vocab_size=settings.need("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=settings.need("intermediate_size", int),
        n_layers=settings.need("num_hidden_layers", int),
        n_heads=n_heads,
        n_kv_heads=settings.get("num_key_value_heads", int, n_heads),
        head_dim=head_dim,
        rms_eps=settings.get("rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_interleaved=False,
        context_length=context,
        tied_head=tied_head,
        sliding_window=_sliding_window(settings, architecture, context),
    )


def _refuse_variants(settings: JsonObject) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if settings.get(key, bool, False):
            raise ModelFormatError(f"config.json: got {key} true, need a model without biases")
    activation = settings.get("hidden_act", str, "silu")
    if activation != "silu":
        raise ModelFormatError(f"config.json: got hidden_act {activation!r}, need silu")
    if settings.optional("quantization_config", dict) is not None:
        raise ModelFormatError("config.json: got quantization_config, need plain weights")
    partial = settings.get("partial_rotary_factor", float, 1.0)
    if partial != 1.0:
        raise ModelFormatError(f"config.json: got partial_rotary_factor {partial}, need 1")


def _sliding_window(settings: JsonObject, architecture: str, context: int) -> int | None:
    """The window of every layer; None where it is no narrower than the context."""
    window = settings.optional("sliding_window", int)
    if "sliding_window" not in settings.values and architecture == "mistral":
        window = 4096  # what transformers takes for this model type; null is no window
    kinds = set(map(str, settings.get("layer_types", list, [])))
    if window is None or window >= context or not settings.get("use_sliding_window", bool, True):
        return None
    if kinds == {"full_attention"}:
        return None
    if not kinds <= {"sliding_attention"}:
        raise ModelFormatError(
            f"config.json: got layer_types {sorted(kinds)} with sliding_window {window}, need one "
            "window for all layers"
        )
    if architecture != "mistral":
        raise ModelFormatError(
            f"config.json: got sliding_window {window} with model_type {architecture!r}, need full "
            f"attention over {context}, or model_type mistral"
        )
    return window


def _rope(settings: JsonObject) -> tuple[float, RopeScaling | None]:
    """Base and scaling. Newer writers put both in `rope_parameters`, older ones spread them."""
    theta = settings.get("rope_theta", float, 10000.0)
    values = settings.optional("rope_parameters", dict) or settings.optional("rope_scaling", dict)
    if not values:
        return theta, None
    rope = JsonObject(values, "config.json rope")
    theta = rope.get("rope_theta", float, theta)
    if rope.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise ModelFormatError("config.json rope: got partial_rotary_factor, need 1")
    kind = rope.optional("rope_type", str) or rope.get("type", str, "default")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(rope.need("factor", float))
    if kind == "llama3":
        return theta, Llama3Scaling(
            factor=rope.need("factor", float),
            low_freq_factor=rope.need("low_freq_factor", float),
            high_freq_factor=rope.need("high_freq_factor", float),
            original_context_length=rope.need("original_max_position_embeddings", int),
        )
    raise ModelFormatError(
        f"config.json: got rope scaling {kind!r}, need default, linear or llama3"
    )


def _tokenizer(folder: Path, settings: JsonObject) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    text = read_text(path)
    _check_decoder(read_object(path))
    try:
        pipeline = Pipeline.from_str(text)
    except Exception as error:  # the library raises no narrower class
        raise ModelFormatError(f"tokenizer.json: got {error}, need a valid tokenizer") from error
    options = _optional_object(folder / "tokenizer_config.json")
    bos_id = _first_id(pipeline, options, settings, "bos_token")
    add_bos = options.optional("add_bos_token", bool)
    if add_bos is None:
        # The stored pipeline has a template for whole prompts; see whether it leads with bos.
        add_bos = bos_id is not None and pipeline.encode("a").ids[:1] == [bos_id]
    return Tokenizer(
        pipeline, bos_id=bos_id, eos_ids=_end_ids(folder, pipeline, options, settings),
        add_bos=add_bos,
    )  # fmt: skip


def _check_decoder(tokenizer: JsonObject) -> None:
    decoder = tokenizer.need("decoder", dict)
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    for step in steps if isinstance(steps, list) else [steps]:
        kind = step.get("type") if isinstance(step, dict) else step
        if kind not in _DECODERS:
            raise ModelFormatError(
                f"tokenizer.json: got decoder {kind!r}, need {', '.join(_DECODERS)}"
            )


def _end_ids(
    folder: Path, pipeline: Pipeline, options: JsonObject, settings: JsonObject
) -> list[int]:
    generation = _optional_object(folder / "generation_config.json")
    for source in (generation, settings):
        value = source.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(id_, bool) or not isinstance(id_, int) for id_ in ids):
            raise ModelFormatError(f"{source.name}: got eos_token_id {value!r}, need whole numbers")
        if ids:
            return ids
    last = _first_id(pipeline, options, settings, "eos_token")
    return [] if last is None else [last]


def _first_id(
    pipeline: Pipeline, options: JsonObject, settings: JsonObject, key: str
) -> int | None:
    """A special token's id: named by text in the tokenizer's settings, or by id in the model's."""
    token: Any = options.values.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        found: int | None = pipeline.token_to_id(text)
        if found is None:
            raise ModelFormatError(f"{options.name}: got {key} {text!r}, need a known token")
        return found
    value = settings.values.get(f"{key}_id")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _chat_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    value = _optional_object(folder / "tokenizer_config.json").values.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _optional_object(path: Path) -> JsonObject:
    return read_object(path) if path.is_file() else JsonObject({}, path.name)
