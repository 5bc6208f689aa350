"""A backend that runs a few ops and says so: the suite asks for these, lowers what it can and skips
the rest."""

import pytest
from broken_backends import Cpu

from lazykv.cli import main
from lazykv.device import Capabilities, register_backend, unregister_backend
from lazykv.testing.runner import Done, run_suite

OPS = frozenset(
    {"copy", "write_slice", "zero_fill", "neg", "exp", "add", "add_scalar", "div", "mul", "matmul"}
)


class Few(Cpu):
    """Runs what it declares, and must not be asked for anything else."""

    capabilities = Capabilities(host_memory=True, ops=OPS)

    def kernel(self, op, ins, out):
        assert op.name in self.capabilities.ops, f"{op.name} is not declared"
        return super().kernel(op, ins, out)


class Missing(Few):
    """Declares no zero_fill, without which there is no cache."""

    capabilities = Capabilities(ops=OPS - {"zero_fill"})


class Unknown(Few):
    """Declares an op by another name than its own."""

    capabilities = Capabilities(ops=OPS | {"multiply"})


def run(backend: Cpu, **options) -> Done:
    register_backend("broken", backend)
    try:
        return run_suite("broken", **options)
    finally:
        unregister_backend("broken")


def failed(done: Done) -> dict[str, str]:
    found = done.run.report.results.values()
    return {r.id: r.reason or "" for r in found if r.outcome == "failed"}


@pytest.mark.slow
def test_a_few_ops_pass_and_the_others_are_skipped_by_name():
    done = run(Few())
    assert failed(done) == {}
    assert done.code == 0
    results = done.run.report.results
    counts = done.run.report.counts()
    assert counts["core"]["passed"] > 1000
    assert counts["dtype"]["passed"] > 50
    reasons = {r.reason for r in results.values() if r.outcome == "skipped"}
    assert {
        f"broken declares no {op}" for op in ("softmax", "take", "attention", "cast")
    } <= reasons
    declared = {f"broken declares no {op}" for op in OPS}
    assert not declared & reasons
    passed = {name for name, r in results.items() if r.outcome == "passed"}
    # Its lowering takes declared ops alone, but for 16-bit floats a cast, too.
    assert "core/test_elementwise.py::test_op[silu-f32-sliced]" in passed
    assert results["core/test_elementwise.py::test_op[silu-f16-sliced]"].outcome == "skipped"
    assert {"core/test_writes.py::test_write[slab-f8_e5m2-permuted]",
            "core/test_elementwise.py::test_op[mul-i8-broadcast]"} <= passed  # fmt: skip


def test_the_report_lists_them():
    backend = run(Few(), keyword="declarations").run.report.to_dict()["backend"]
    assert backend["capabilities"]["ops"] == sorted(OPS)


def test_the_command_counts_them(capsys):
    register_backend("broken", Few())
    try:
        code = main(["conformance", "broken", "--in-process", "--level", "capture"])
    finally:
        unregister_backend("broken")
    assert code == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "broken on broken:0: 12 dtypes, 10 ops, host_memory"


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (Missing(), "got no ['zero_fill'], need ['copy', 'write_slice', 'zero_fill']"),
        (Unknown(), "got ops ['multiply'], need names of ops"),
    ],
)
def test_declarations_of_ops_have_to_make_sense(backend, words):
    done = run(backend, tests=["core/test_memory.py::test_declarations_make_sense"])
    (reason,) = failed(done).values()
    assert words in reason
