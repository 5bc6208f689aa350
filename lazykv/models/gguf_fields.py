"""Typed access to GGUF metadata: each getter gives the type it is named for, or refuses."""

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import ModelFormatError
from lazykv.models.gguf_header import Value


class Fields:
    """Metadata of one file. A getter without a default refuses a missing key."""

    def __init__(self, metadata: dict[str, Value]) -> None:
        self._metadata = metadata

    def has(self, key: str) -> bool:
        return key in self._metadata

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise _wrong(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list):
            raise _wrong(key, value, "an array of strings")
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) != len(value):
            raise _wrong(key, value, "an array of strings")
        return texts

    def numbers(self, key: str) -> NDArray[np.float64]:
        value = self._get(key, None)
        if not isinstance(value, np.ndarray):
            raise _wrong(key, value, "an array of numbers")
        return value.astype(np.float64)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, value, "a boolean")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(key, value, "a number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(key, value, "a whole number")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def per_layer_integer(self, key: str, n_layers: int, default: int | None = None) -> int:
        """A whole number given once, or as an array with the same number for every layer."""
        value = self._metadata.get(key)
        if not isinstance(value, np.ndarray):
            return self.integer(key, default)
        if value.dtype.kind not in "iu" or len(value) != n_layers or len(np.unique(value)) != 1:
            raise ModelFormatError(
                f"GGUF metadata: got {key} = {value.tolist()[:8]} ({len(value)} values), "
                f"need the same whole number for all {n_layers} layers"
            )
        return int(value[0])

    def _get(self, key: str, default: Value | None) -> Value:
        value = self._metadata.get(key, default)
        if value is None:
            raise ModelFormatError(f"GGUF metadata: got no {key}, need it")
        return value


def _wrong(key: str, value: Value, rule: str) -> ModelFormatError:
    shown = type(value).__name__ if isinstance(value, list | np.ndarray) else repr(value)[:60]
    return ModelFormatError(f"GGUF metadata: got {key} = {shown}, need {rule}")
