"""Text to token ids and back, whole or as a stream, around a `tokenizers` pipeline."""

import operator
import re
from collections.abc import Iterable
from typing import SupportsIndex

import tokenizers

from lazykv.errors import DTypeError, ModelFormatError, RangeError
from lazykv.spec import whole

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A vocabulary with its rules.

    `bos_id` is the begin token or None; `eos_ids` are the tokens that end a reply; `add_bos` tells
    whether prompts for this model start with `bos_id` (see `with_bos`); `vocab_size` is one more
    than the largest id.
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
    ) -> None:
        # A stored pipeline may ask for fixed-length output, which would drop or invent tokens.
        pipeline.no_truncation()
        pipeline.no_padding()
        self._pipeline = pipeline
        self.vocab_size: int = (
            max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.add_bos = add_bos
        for id_ in (*self.eos_ids, *([] if bos_id is None else [bos_id])):
            if not 0 <= id_ < self.vocab_size:
                raise ModelFormatError(
                    f"Tokenizer: got begin or end token {id_}, need 0 to {self.vocab_size - 1}"
                )
        if add_bos and bos_id is None:
            raise ModelFormatError("Tokenizer: got add_bos without a begin token, need its id")
        self._special_ids = frozenset(
            id_ for id_, token in pipeline.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. The text of a special token becomes its id; nothing is added.

        Characters that a vocabulary cannot spell go the way the model was trained with: left out,
        or replaced by its unknown token.

        Raises DTypeError for a value that is not a string of Unicode characters.
        """
        _unicode("encode", text)
        return list(self._pipeline.encode(text, add_special_tokens=False).ids)

    def with_bos(self, ids: Iterable[SupportsIndex]) -> list[int]:
        """A whole prompt's ids, led by the begin token once if this model wants one."""
        prompt = self._ids("with_bos", ids)
        if self.add_bos and self.bos_id is not None and prompt[:1] != [self.bos_id]:
            return [self.bos_id, *prompt]
        return prompt

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises RangeError for an id outside the vocabulary.
        """
        return self._text(self._ids("decode", ids), skip_special)

    def stream(self, *, skip_special: bool = False) -> "TextStream":
        """A decoder for ids that come one at a time."""
        return TextStream(self, skip_special)

    def token_id(self, text: str) -> int | None:
        """The id of the token whose stored text is exactly `text`, or None."""
        _unicode("token_id", text)
        found: int | None = self._pipeline.token_to_id(text)
        return found

    def token_text(self, token_id: SupportsIndex) -> str | None:
        """The stored text of a token (byte-level or with word marks), None for an unused id."""
        found: str | None = self._pipeline.id_to_token(self._checked("token_text", token_id))
        return found

    def is_special(self, token_id: SupportsIndex) -> bool:
        """Whether `skip_special` leaves this token out."""
        return self._checked("is_special", token_id) in self._special_ids

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos_id={self.bos_id}, eos_ids={self.eos_ids})"
        )

    def _text(self, ids: list[int], skip_special: bool) -> str:
        return str(self._pipeline.decode(ids, skip_special_tokens=skip_special))

    def _ids(self, verb: str, ids: Iterable[SupportsIndex]) -> list[int]:
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise DTypeError(f"Tokenizer.{verb}: got {type(ids).__name__}, need token ids")
        return [self._checked(verb, id_) for id_ in ids]

    def _checked(self, verb: str, id_: SupportsIndex) -> int:
        index = whole(f"Tokenizer.{verb}", "token", id_)
        if not 0 <= index < self.vocab_size:
            raise RangeError(
                f"Tokenizer.{verb}: got token {index}, need 0 <= token < {self.vocab_size}"
            )
        return index


def _unicode(verb: str, text: str) -> None:
    """Refuse what is no text, or has no UTF-8 form."""
    if not isinstance(text, str):
        raise DTypeError(f"Tokenizer.{verb}: got {type(text).__name__}, need str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DTypeError(
            f"Tokenizer.{verb}: got a lone surrogate, need Unicode characters"
        ) from error


class TextStream:
    """Decodes ids as they come: the pieces and `finish()` join up to `decode` of all the ids.

    Text is held back while it could still change: an unfinished UTF-8 sequence, or a run of
    byte tokens (whose decoding depends on the whole run).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Ids already given out, kept as left context: decoders treat the first piece of a text
        # differently (they drop its leading space).
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: SupportsIndex) -> str:
        """The text that this token completes, often all of its own, perhaps none."""
        token = self._tokenizer.token_text(token_id)
        if token is None or (self._skip_special and self._tokenizer.is_special(token_id)):
            return ""
        # Lists are replaced and never changed, so that a copy of a stream goes on by itself.
        self._pending = [*self._pending, operator.index(token_id)]
        text = self._tokenizer._text([*self._context, *self._pending], self._skip_special)
        piece = text[len(self._context_text) :]
        if not piece or piece.endswith(_REPLACEMENT) or _BYTE_TOKEN.fullmatch(token):
            return ""
        self._context, self._pending = self._pending, []
        self._context_text = self._tokenizer._text(self._context, self._skip_special)
        return piece

    def finish(self) -> str:
        """What is still held back, with U+FFFD for what is not whole. The stream starts anew."""
        text = self._tokenizer._text([*self._context, *self._pending], self._skip_special)
        piece = text[len(self._context_text) :]
        self._context, self._context_text, self._pending = [], "", []
        return piece
