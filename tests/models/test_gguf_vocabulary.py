"""Tokenizers rebuilt from GGUF metadata."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import spm_vocabulary
from tokenizers.pre_tokenizers import ByteLevel

from lazykv.errors import ModelFormatError
from lazykv.models.gguf_fields import Fields
from lazykv.models.gguf_vocabulary import PRE_TOKENIZERS, tokenizer_from_fields

MARK = "\u2581"
BYTES = sorted(ByteLevel.alphabet())
SPACE = "\u0120"  # byte-level BPE's stand-in for a space


def read(metadata):
    arrays = {k: np.array(v) for k, v in metadata.items() if k.endswith(("scores", "token_type"))}
    return tokenizer_from_fields(Fields(metadata | arrays))


def bpe(pre="gpt-2", merges=(), extra=(), control=("<|end|>",), **changes):
    tokens = [*control, *BYTES, *(merge.replace(" ", "") for merge in merges), *extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "tokenizer.ggml.merges": list(merges),
        **changes,
    }


def texts(tokenizer, text):
    return [tokenizer.token_text(id_) for id_ in tokenizer.encode(text)]


def test_golden_prompts(smollm2, golden):
    for case in golden:
        assert smollm2.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert smollm2.tokenizer.decode(case["prompt_ids"]) == case["prompt"]
    assert smollm2.tokenizer.decode(golden[0]["generated_ids"]) == golden[0]["text"]


def test_digits_are_cut_as_the_rule_says():
    merges = ["1 2", "12 3", "123 4"]
    longest = {
        "gpt-2": ["1234"],
        "default": ["1234"],
        "smollm": ["1", "2", "3", "4"],
        "llama-bpe": ["123", "4"],
        "qwen2": ["1", "2", "3", "4"],
    }
    for pre, expected in longest.items():
        assert texts(read(bpe(pre, merges)), "1234") == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text())
def test_byte_level_round_trip(pre, text):
    tokenizer = read(bpe(pre, ["a b", "t h", "th e", f"{SPACE} t"]))
    if pre in ("qwen2", "deepseek-r1-qwen"):  # these normalize text first
        text = "".join(c for c in text if c.isascii())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_found_in_text_and_nothing_is_added():
    tokenizer = read(bpe(**{"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0}))
    assert tokenizer.encode("<|end|>") == [0]
    assert texts(tokenizer, "a<|end|>b") == ["a", "<|end|>", "b"]
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("a<|end|>b"), skip_special=True) == "ab"
    assert tokenizer.decode(tokenizer.encode("a<|end|>b")) == "a<|end|>b"


def test_user_defined_tokens_are_taken_whole_and_are_text():
    metadata = bpe(extra=["<tool>"])
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = read(metadata)
    assert texts(tokenizer, "a<tool>") == ["a", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("a<tool>"), skip_special=True) == "a<tool>"


def test_llama3_takes_known_words_whole():
    # "abc" is in the vocabulary but no chain of merges leads to it.
    assert texts(read(bpe("llama-bpe", ["a b"], ["abc"])), "abc") == ["abc"]
    assert texts(read(bpe("gpt-2", ["a b"], ["abc"])), "abc") == ["ab", "c"]


def test_O10_begin_token():
    base = {"tokenizer.ggml.bos_token_id": 1}
    flag = "tokenizer.ggml.add_bos_token"
    without = read(spm_vocabulary(**base, **{flag: False}))
    assert without.with_bos([5, 6]) == [5, 6]
    with_ = read(spm_vocabulary(**base, **{flag: True}))
    assert with_.with_bos([5, 6]) == [1, 5, 6]
    assert with_.with_bos([1, 5]) == [1, 5]
    assert with_.with_bos([]) == [1]
    assert with_.encode("a") == without.encode("a")
    # Where the flag is missing: SentencePiece and Llama 3 lead with it, other BPE does not.
    assert read(spm_vocabulary(**base)).add_bos
    assert read(bpe("llama-bpe", **base)).add_bos
    assert not read(bpe("gpt-2", **base)).add_bos
    assert not read(bpe("llama-bpe")).add_bos
    with pytest.raises(ModelFormatError, match="add_bos without a begin token"):
        read(bpe(**{flag: True}))


def test_end_tokens():
    ids = {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in [("eos", 3), ("eot", 4)]}
    assert read(bpe(**ids)).eos_ids == (3, 4)
    assert read(bpe(**ids, **{"tokenizer.ggml.eom_token_id": 3})).eos_ids == (3, 4)


def spm(pieces, *, with_bytes=True, **changes):
    """A SentencePiece vocabulary; pieces come best first."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    tokens = ["<unk>", "<s>", "</s>", *fallback, *pieces]
    return spm_vocabulary(
        **{
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * len(fallback) + [1] * len(pieces),
            "tokenizer.ggml.scores": [0.0] * (3 + len(fallback))
            + [-float(i) for i in range(len(pieces))],
            "tokenizer.ggml.add_space_prefix": True,
            **changes,
        }
    )


def plain_sentencepiece(text, pieces):
    """Joins, again and again, the neighbours that form the best piece; what is left is bytes."""
    rank = {piece: place for place, piece in enumerate(pieces)}
    parts = list(text.replace(" ", MARK))
    while True:
        joins = [
            (rank[left + right], -len(left), place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in rank and left in rank and right in rank
        ]
        if not joins:
            break
        place = min(joins)[2]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [
        token
        for part in parts
        for token in ([part] if part in rank else [f"<0x{b:02X}>" for b in part.encode()])
    ]


@given(
    st.lists(st.text(alphabet=["a", "b", MARK], min_size=2, max_size=5), unique=True, max_size=20),
    st.text(alphabet=["a", "b", " ", "é"], max_size=20),
)
def test_sentencepiece_against_joining_by_hand(pieces, text):
    pieces = [*pieces, "a", "b", MARK]
    tokenizer = read(spm(pieces, **{"tokenizer.ggml.add_space_prefix": False}))
    assert texts(tokenizer, text) == plain_sentencepiece(text, pieces)


def test_sentencepiece_leading_space():
    tokenizer = read(spm([f"{MARK}a", "a", MARK]))
    assert texts(tokenizer, "a a") == [f"{MARK}a", f"{MARK}a"]
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"
    bare = read(spm([f"{MARK}a", "a", MARK], **{"tokenizer.ggml.add_space_prefix": False}))
    assert texts(bare, "a a") == ["a", f"{MARK}a"]
    assert bare.decode(bare.encode(" a")) == " a"


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text())
def test_sentencepiece_round_trip(prefix, text):
    tokenizer = read(spm(["ab", "a", "b", MARK], **{"tokenizer.ggml.add_space_prefix": prefix}))
    text = text.replace(MARK, "")  # the mark itself cannot be told from a space
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_controls_and_byte_tokens_are_never_spelled():
    tokenizer = read(spm(["<", "s", ">", "s>", "0", "x", "1", "A", MARK]))
    assert tokenizer.encode("<s>") == [1]
    assert texts(tokenizer, "<0x1A>") == [MARK, *"<0x1A>"]
    tokenizer = read(spm(["<0xC3><0xA9>", MARK]))
    assert texts(tokenizer, "é") == [MARK, "<0xC3>", "<0xA9>"]


def test_sentencepiece_unknown_characters_without_byte_tokens():
    tokenizer = read(spm(["a", MARK], with_bytes=False))
    assert texts(tokenizer, "aéa") == [MARK, "a", "<unk>", "a"]


def test_no_vocabulary():
    assert read({}) is None
    assert read({"tokenizer.ggml.model": "none"}) is None


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "model 'rwkv'"),
        (bpe("tekken"), "pre 'tekken', need one of default, gpt-2, smollm"),
        (bpe(extra=["a"]), "text 'a' for tokens"),
        (bpe(**{"tokenizer.ggml.merges": ["a zz"]}), "need 'zz' to be a token"),
        (bpe(**{"tokenizer.ggml.merges": ["ab"]}), "merge 'ab'"),
        (bpe(**{"tokenizer.ggml.merges": ["a "]}), "merge 'a '"),
        (bpe(**{"tokenizer.ggml.merges": 3}), "merges = 3"),
        (bpe(**{"tokenizer.ggml.tokens": [1, 2]}), "tokens = list"),
        (bpe(**{"tokenizer.ggml.token_type": [1]}), "1 token types"),
        (bpe(**{"tokenizer.ggml.bos_token_id": 9999}), "end token 9999"),
        (spm(["a"], **{"tokenizer.ggml.scores": [0.0]}), "1 scores"),
        (spm(["a", "b"], **{"tokenizer.ggml.scores": [np.nan] * 261}), "finite"),
        (spm(["a" * 600]), "600 characters"),
        (spm(["a"], **{"tokenizer.ggml.unknown_token_id": 999}), "unknown token 999"),
    ],
)
def test_refused_by_name(metadata, said):
    with pytest.raises(ModelFormatError, match=said):
        read(metadata)
