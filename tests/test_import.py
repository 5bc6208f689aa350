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


def test_the_cuda_backend_loads_cupy_when_it_is_made_and_not_before() -> None:
    assert loaded_by("import lazykv.backends.cuda, lazykv.backends.cuda_probe") == []


def test_the_check_can_fail() -> None:
    assert loaded_by("import lazykv, jinja2") == ["jinja2"]


def test_a_bad_setting_is_one_line_from_the_command() -> None:
    env = {**os.environ, "LAZYKV_PLAN_CACHE": "many"}
    command = [sys.executable, "-m", "lazykv", "plan", "write-bytes"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    need = "need a whole number of at least 1"
    assert done.stderr == f"lazykv: LAZYKV_PLAN_CACHE: got 'many', {need}\n"
    assert done.returncode == 2
