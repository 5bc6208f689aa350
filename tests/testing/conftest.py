"""The reports of the two backends that the package brings, made once."""

import json
from typing import Any

import pytest

from lazykv.cli import main


@pytest.fixture(scope="session", params=["cpu", "sim"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `lazykv conformance` reports of the whole suite."""
    path = tmp_path_factory.mktemp("reports") / f"{request.param}.json"
    code = main(["conformance", request.param, "--report", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    found["exit code"] = code
    return found
