"""Tokenizer calls and streamed decoding, on the real byte-level vocabulary and a small one."""

import copy
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_gguf_vocabulary import MARK, read, spm

from lazykv.errors import DTypeError, RangeError

SPM = read(spm([f"{MARK}a", "ab", "a", "b", MARK]))


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    pieces = [stream.push(id_) for id_ in ids]
    return [*pieces, stream.finish()]


@given(st.lists(st.integers(0, SPM.vocab_size - 1), max_size=12), st.booleans())
def test_stream_joins_up_to_decode_sentencepiece(ids, skip):
    pieces = streamed(SPM, ids, skip_special=skip)
    assert "".join(pieces) == SPM.decode(ids, skip_special=skip)


def test_stream_joins_up_to_decode_byte_level(smollm2):
    tokenizer, source = smollm2.tokenizer, random.Random(5)
    # Mostly single bytes and marks, so that broken UTF-8 is common.
    few = [*range(17, 500), 0, 1, 2]
    for _ in range(500):
        ids = source.choices(few, k=source.randrange(12)) + source.choices(range(49152), k=2)
        for skip in (False, True):
            pieces = streamed(tokenizer, ids, skip_special=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)


def test_stream_gives_whole_characters_as_they_come(smollm2):
    tokenizer = smollm2.tokenizer
    text = "naïve 😀 漢字 \u202f👩‍👩‍👧"
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[0]  # plain text is not held back
    assert pieces[-1] == ""


def test_stream_of_an_unfinished_character(smollm2):
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode("a😀")[:-1]
    pieces = streamed(tokenizer, ids)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == tokenizer.decode(ids)


def test_stream_starts_anew_after_finish():
    stream = SPM.stream()
    first = [stream.push(id_) for id_ in SPM.encode("a ab")] + [stream.finish()]
    second = [stream.push(id_) for id_ in SPM.encode("a ab")] + [stream.finish()]
    assert first == second
    assert "".join(first) == "a ab"


def test_stream_of_single_bytes_holds_a_run_back():
    ids = [SPM.token_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    after = SPM.token_id("b")
    assert streamed(SPM, [*ids, after]) == ["", "", "éb", ""]


def test_lookups(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.token_id("no such token at all") is None
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(504)


def test_ids_may_be_numpy_integers(smollm2):
    ids = np.array(smollm2.tokenizer.encode("The sky"), np.uint32)
    assert smollm2.tokenizer.decode(ids) == "The sky"
    assert "".join(streamed(smollm2.tokenizer, ids)) == "The sky"


@pytest.mark.parametrize("id_", [-1, 49152, 2**40])
def test_ids_outside_the_vocabulary_are_refused(smollm2, id_):
    with pytest.raises(RangeError, match=str(id_)):
        smollm2.tokenizer.decode([id_])
    with pytest.raises(RangeError, match=str(id_)):
        smollm2.tokenizer.stream().push(id_)


def test_values_of_other_types_are_refused():
    for text in (None, b"a", ["a"], "\ud800"):
        with pytest.raises(DTypeError, match=r"Tokenizer\.encode"):
            SPM.encode(text)
        with pytest.raises(DTypeError, match=r"Tokenizer\.token_id"):
            SPM.token_id(text)
    for ids in ([1.5], ["a"], [None], [True], None, 5, b"a", "a"):
        for verb in ("decode", "with_bos"):
            with pytest.raises(DTypeError, match=rf"Tokenizer\.{verb}: got"):
                getattr(SPM, verb)(ids)
    for id_ in (1.5, "a", None, True):
        for call in (SPM.token_text, SPM.is_special, SPM.stream().push):
            with pytest.raises(DTypeError, match="Tokenizer"):
                call(id_)


def test_a_copied_stream_goes_on_by_itself():
    """Also from the middle of a character."""
    first, *rest = SPM.encode("é")
    assert rest
    stream = SPM.stream()
    stream.push(first)
    other = copy.copy(stream)
    assert "".join(map(stream.push, rest)) + stream.finish() == "é"
    assert "".join(map(other.push, rest)) + other.finish() == "é"
