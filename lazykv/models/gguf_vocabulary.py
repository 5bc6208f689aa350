"""Tokenizers rebuilt from the vocabulary in a GGUF file.

Two kinds exist for Llama-type models (`tokenizer.ggml.model`): `gpt2`, byte-level BPE with its
merges listed, and `llama`, SentencePiece BPE with a score for each piece.
"""

from collections.abc import Callable, Iterable

import numpy as np
from gguf.constants import TokenType
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from lazykv.errors import ModelFormatError
from lazykv.models.gguf_fields import Fields
from lazykv.models.tokenizer import Tokenizer

MAX_PIECE_CHARACTERS = 512
"""SentencePiece pieces are split at every place to find merges; real ones stay under 50."""

_WORD_MARK = "\u2581"  # SentencePiece's stand-in for a space


def _gpt2_rule() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_rule() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_rule()])


def _split_rule(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The cl100k family of patterns, which differ in how many digits go together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# `tokenizer.ggml.pre` to the rule that cuts text before merging. A file that names none
# ("default") is read by GPT-2's own rule.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2_rule,
    "gpt-2": _gpt2_rule,
    "smollm": _smollm_rule,
    "llama-bpe": _split_rule(r"\p{N}{1,3}"),
    "llama3": _split_rule(r"\p{N}{1,3}"),
    "llama-v3": _split_rule(r"\p{N}{1,3}"),
    "qwen2": _split_rule(r"\p{N}"),
    "deepseek-r1-qwen": _split_rule(r"\p{N}"),
}
_LLAMA3 = {"llama-bpe", "llama3", "llama-v3"}
_QWEN2 = {"qwen2", "deepseek-r1-qwen"}


def tokenizer_from_fields(fields: Fields) -> Tokenizer | None:
    """The tokenizer that the metadata describes; None where it says there is no vocabulary.

    Whether prompts start with the begin token is `tokenizer.ggml.add_bos_token`; where that is
    missing, they do for SentencePiece and Llama 3 vocabularies that name a begin token.

    Raises ModelFormatError for an unknown kind or rule, and for an inconsistent vocabulary.
    """
    kind = fields.text("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelFormatError(f"GGUF vocabulary: got tokenizer model {kind!r}, need gpt2 or llama")
    tokens = fields.texts("tokenizer.ggml.tokens")
    _need_distinct(tokens)
    types = _token_types(fields, len(tokens))
    rule = fields.text("tokenizer.ggml.pre", "default")
    build = _byte_level_bpe if kind == "gpt2" else _sentencepiece_bpe
    pipeline = build(fields, tokens, types)
    _add_matched_tokens(pipeline, tokens, types)
    bos_id = fields.optional_integer("tokenizer.ggml.bos_token_id")
    by_default = bos_id is not None and (kind == "llama" or rule in _LLAMA3)
    return Tokenizer(
        pipeline,
        bos_id=bos_id,
        eos_ids=_end_ids(fields),
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", by_default),
    )


def _byte_level_bpe(fields: Fields, tokens: list[str], types: NDArray[np.int64]) -> Pipeline:
    rule = fields.text("tokenizer.ggml.pre", "default")
    if rule not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFormatError(
            f"GGUF vocabulary: got tokenizer.ggml.pre {rule!r}, need one of {known}"
        )
    merges = [_merge(line) for line in fields.texts("tokenizer.ggml.merges")]
    pipeline = _pipeline(
        tokens,
        merges,
        # Llama 3 takes a whole word that is in the vocabulary as it is, merges or not.
        ignore_merges=rule in _LLAMA3,
    )
    pipeline.pre_tokenizer = PRE_TOKENIZERS[rule]()
    pipeline.decoder = decoders.ByteLevel()
    if rule in _QWEN2:
        pipeline.normalizer = normalizers.NFC()
    return pipeline


def _sentencepiece_bpe(fields: Fields, tokens: list[str], types: NDArray[np.int64]) -> Pipeline:
    scores = fields.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise ModelFormatError(
            f"GGUF vocabulary: got {len(scores)} scores, need {len(tokens)} finite ones"
        )
    unknown = fields.optional_integer("tokenizer.ggml.unknown_token_id")
    if unknown is not None and not 0 <= unknown < len(tokens):
        raise ModelFormatError(
            f"GGUF vocabulary: got unknown token {unknown}, need 0 to {len(tokens) - 1}"
        )
    pipeline = _pipeline(
        tokens,
        _merges_from_scores(tokens, types, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    leading_space = fields.flag("tokenizer.ggml.add_space_prefix", True)
    marked = normalizers.Replace(" ", _WORD_MARK)
    pipeline.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_WORD_MARK), marked]) if leading_space else marked
    )
    steps = [decoders.Replace(_WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if leading_space else steps
    )
    return pipeline


def _merges_from_scores(
    tokens: list[str], types: NDArray[np.int64], scores: NDArray[np.float64]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored third first.

    SentencePiece joins whichever neighbours form the best-scored piece; listing all the pairs
    that form it, at its rank, gives a merge table that does the same. Pairs that form the same
    piece come longest left part first, the order in which transformers lists them.
    """
    ids = {token: id_ for id_, token in enumerate(tokens)}
    # Control and byte tokens are never formed by joining text.
    joinable = np.isin(types, [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED])
    merges: list[tuple[str, str]] = []
    for id_ in np.lexsort((np.arange(len(tokens)), -scores)).tolist():
        piece = tokens[id_]
        if not joinable[id_]:
            continue
        if len(piece) > MAX_PIECE_CHARACTERS:
            raise ModelFormatError(
                f"GGUF vocabulary: got a piece of {len(piece)} characters (token {id_}), "
                f"need at most {MAX_PIECE_CHARACTERS}"
            )
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids and joinable[ids[left]] and joinable[ids[right]]:
                merges.append((left, right))
    return merges


def _pipeline(tokens: list[str], merges: list[tuple[str, str]], **options: object) -> Pipeline:
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    for left, right in merges:
        for part in (left, right, left + right):
            if part not in vocabulary:
                raise ModelFormatError(
                    f"GGUF vocabulary: got a merge of {left!r} and {right!r}, "
                    f"need {part!r} to be a token"
                )
    return Pipeline(models.BPE(vocabulary, merges, **options))


def _merge(line: str) -> tuple[str, str]:
    cut = line.find(" ", 1)  # from 1: a part may itself be a space
    if cut < 1 or cut == len(line) - 1:
        raise ModelFormatError(f"GGUF vocabulary: got merge {line!r}, need two parts and a space")
    return line[:cut], line[cut + 1 :]


def _add_matched_tokens(pipeline: Pipeline, tokens: list[str], types: NDArray[np.int64]) -> None:
    """Tokens that are found in a text before any rule cuts it: control and user-defined ones."""
    special = np.isin(types, [TokenType.CONTROL, TokenType.UNKNOWN])
    verbatim = types == TokenType.USER_DEFINED
    pipeline.add_special_tokens(_added(tokens, special))
    pipeline.add_tokens(_added(tokens, verbatim))


def _added(tokens: list[str], chosen: NDArray[np.bool_]) -> list[AddedToken]:
    return [AddedToken(tokens[id_], normalized=False) for id_ in np.flatnonzero(chosen).tolist()]


def _need_distinct(tokens: list[str]) -> None:
    first: dict[str, int] = {}
    for id_, token in enumerate(tokens):
        if first.setdefault(token, id_) != id_:
            raise ModelFormatError(
                f"GGUF vocabulary: got text {token!r} for tokens {first[token]} and {id_}, "
                "need different texts"
            )


def _token_types(fields: Fields, n_tokens: int) -> NDArray[np.int64]:
    if not fields.has("tokenizer.ggml.token_type"):
        return np.full(n_tokens, TokenType.NORMAL, dtype=np.int64)
    types = fields.numbers("tokenizer.ggml.token_type").astype(np.int64)
    if len(types) != n_tokens or not np.isin(types, [int(kind) for kind in TokenType]).all():
        raise ModelFormatError(
            f"GGUF vocabulary: got {len(types)} token types, need {n_tokens} of values 1 to 6"
        )
    return types


def _end_ids(fields: Fields) -> Iterable[int]:
    for name in ("eos", "eot", "eom"):
        id_ = fields.optional_integer(f"tokenizer.ggml.{name}_token_id")
        if id_ is not None:
            yield id_
