"""A tiny model with random weights: with an end token, and without one."""

from pathlib import Path
from typing import Any

import pytest
from models.tiny_models import spm_vocabulary, weights, write_gguf

import lazykv as lk


def tiny(folder: Path, **vocabulary: Any) -> lk.models.LlamaModel:
    """Matrices small enough that rounding is not blown up from layer to layer."""
    scaled = {
        name: array * 0.3 if array.ndim == 2 and name != "token_embd.weight" else array
        for name, array in weights().items()
    }
    return lk.models.load(
        write_gguf(folder / "tiny.gguf", scaled, metadata=spm_vocabulary(**vocabulary))
    )


@pytest.fixture(scope="session")
def ending(tmp_path_factory: pytest.TempPathFactory) -> lk.models.LlamaModel:
    return tiny(tmp_path_factory.mktemp("ending"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> lk.models.LlamaModel:
    """No token ends a text."""
    return tiny(tmp_path_factory.mktemp("endless"), **{"tokenizer.ggml.eos_token_id": None})
