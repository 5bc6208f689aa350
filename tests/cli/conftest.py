"""Running the command in this process, and a model small enough to run it on."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from models.tiny_models import spm_vocabulary, write_gguf

from lazykv.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """``run("graph", "dump", ...)``: the exit code and what was printed."""

    def command(*argv: str) -> Done:
        code = main(argv)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return command


CHAT = "{% for m in messages %}{{ '<s>' + m['content'] }}{% endfor %}{{ 'c' }}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with random weights over nine words, none of which ends a text."""
    metadata = spm_vocabulary() | {"tokenizer.chat_template": CHAT}
    metadata["tokenizer.ggml.eos_token_id"] = None
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", metadata=metadata)
