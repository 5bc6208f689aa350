"""Model files, their graphs, and text generation."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lazykv.errors import DTypeError, EnvironmentMissing
from lazykv.models.generate import Piece, generate
from lazykv.models.model import LlamaModel
from lazykv.models.paged import PagedDecoder
from lazykv.models.weights import Progress, load_weights

if TYPE_CHECKING:
    from lazykv.models.checkpoint import Checkpoint

__all__ = ["LlamaModel", "PagedDecoder", "Piece", "generate", "load", "open_checkpoint"]


Notify = Callable[[str], None]
"""Called with a line of text when something slow begins, such as a download."""


def open_checkpoint(path_or_name: str | Path, notify: Notify | None = None) -> "Checkpoint":
    """Find and check a model file; its header is read, its weights are not.

    Raises like `load`.
    """
    # Late, because the file readers come with the optional `models` extra.
    try:
        from lazykv.models.fetch import locate_model  # noqa: PLC0415
        from lazykv.models.gguf_file import read_gguf  # noqa: PLC0415
        from lazykv.models.safetensors_folder import read_folder  # noqa: PLC0415
    except ModuleNotFoundError as e:
        raise EnvironmentMissing(
            f"models.load: got no module {e.name!r}, need it; pip install 'lazykv[models]'"
        ) from e
    path = locate_model(path_or_name, notify)
    return read_folder(path) if path.is_dir() else read_gguf(path)


def load(
    path_or_name: str | Path, *, progress: Progress | None = None, notify: Notify | None = None
) -> LlamaModel:
    """Load a Llama-type model: a GGUF file, a folder with config.json and safetensors, or a known
    name (``"smollm2"``, fetched once into the user cache folder).

    `progress` is called with (tensors loaded, tensors in all), `notify` with a line of text when a
    download begins. Raises `ModelFormatError` for an unknown name or a file that is corrupt or
    unsupported, `EnvironmentMissing` if the `models` extra, the network or a writable cache folder
    is missing.
    """
    for name, call in (("progress", progress), ("notify", notify)):
        if call is not None and not callable(call):
            raise DTypeError(f"models.load: got {name} {type(call).__name__}, need a function")
    checkpoint = open_checkpoint(path_or_name, notify)
    return LlamaModel(
        checkpoint.config,
        load_weights(checkpoint, progress),
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        name=checkpoint.name,
    )
