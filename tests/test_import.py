import os
import subprocess
import sys

HEAVY = ("cupy", "numba", "torch", "gguf", "tokenizers", "jinja2", "rich", "safetensors")
CODE = """
import sys
{statement}
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({heavy!r})))
"""


def loaded_by(statement: str) -> list[str]:
    code = CODE.format(statement=statement, heavy=HEAVY)
    out = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True)
    return out.split()


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import lazykv") == []


def test_planning_and_running_load_nothing_heavy() -> None:
    assert loaded_by("import lazykv as lk; lk.realize(lk.Graph().const([1.0]) + 1)") == []


def test_the_check_can_fail() -> None:
    assert loaded_by("import lazykv, jinja2") == ["jinja2"]


def test_a_bad_setting_is_named_when_imported() -> None:
    env = {**os.environ, "LAZYKV_PLAN_CACHE": "many"}
    done = subprocess.run(
        [sys.executable, "-c", "import lazykv"], env=env, capture_output=True, text=True
    )
    assert "LAZYKV_PLAN_CACHE: got 'many'" in done.stderr
