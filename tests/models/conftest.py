"""Fixtures for tests of model files."""

import json
from pathlib import Path

import pytest

import lazykv as lk
from lazykv.models import fetch
from lazykv.models.checkpoint import Checkpoint
from lazykv.models.gguf_file import read_gguf

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real small model, fetched into the user's cache folder by the first test to ask."""
    return fetch.smollm2_path()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return read_gguf(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_model(smollm2_path: Path) -> lk.models.LlamaModel:
    return lk.models.load(smollm2_path)


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Prompts with the ids that a reference implementation gives and generates (`name` each)."""
    sky = json.loads((GOLDEN / "smollm2_greedy_ids.json").read_text())
    others = json.loads((GOLDEN / "smollm2_greedy_ids_2.json").read_text())["cases"]
    return [{"name": "sky", **sky}, *others]
