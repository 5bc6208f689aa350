"""Holds the CUDA backend to what it promises, on a machine with a GPU, in less than five minutes.

    python tools/gpu_check.py [--report FILE] [--part NAME ...] [--minutes 4.8]

Every part runs in a process of its own, since a fault in a kernel ends a process's use of the GPU,
and the others go on. The summary goes to stdout, everything measured to the report (JSON). Exit
codes: 0 all parts passed, 1 one did not, 3 there is no GPU or no CuPy.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_parts as parts
import numpy as np

import lazykv as lk
from lazykv.backends.cuda_probe import probe
from lazykv.testing.levels import LEVELS

Result = dict[str, Any]

LIMITS = {
    "kernels": 60, "conformance": 170, "capture": 60, "steps": 70, "bandwidth": 40, "memory": 30,
    "dlpack": 30, "sanitizer": 90,
}  # fmt: skip
"""Parts in their order, and the seconds that each may take."""


def conformance() -> Result:
    """Every level of the suite, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lazykv", "conformance", "cuda"]
        runs = {
            level: subprocess.Popen(
                [*command, "--level", level, "--report", f"{folder}/{level}.json"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for level in LEVELS
        }  # fmt: skip
        texts = {level: run.communicate()[0] for level, run in runs.items()}
        reports = {
            path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))
        }
    failed = {level: texts[level][-2000:] for level, run in runs.items() if run.returncode}
    counts = {level: report["counts"][level] for level, report in reports.items()}
    return {"ok": not failed, "counts": counts, "failed": failed, "reports": reports}


def sanitizer() -> Result:
    """The kernels once more under compute-sanitizer, if it is installed."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if tool is None:
        return {"ok": True, "skipped": "compute-sanitizer is not installed"}
    found: Result = {"ok": True}
    for check in ("memcheck", "racecheck"):
        done = subprocess.run(
            [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__, "--inner",
             "kernels"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found["ok"] &= done.returncode == 0
        found[check] = "clean" if done.returncode == 0 else done.stdout[-3000:]
    return found


PARTS: dict[str, Callable[[], Result]] = {
    "kernels": parts.kernels, "conformance": conformance, "capture": parts.capture,
    "steps": parts.steps, "bandwidth": parts.bandwidth, "memory": parts.memory,
    "dlpack": parts.dlpack, "sanitizer": sanitizer,
}  # fmt: skip


def in_process(name: str, seconds: float) -> Result:
    """A part in a process of its own: what it printed last, or how it ended."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--inner", name],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"took more than {seconds:.0f} s"}
    lines = done.stdout.splitlines()
    try:
        found: Result = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"ok": False, "error": (done.stderr or done.stdout)[-3000:]}
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def machine() -> Result:
    """What it ran on."""
    xp = lk.device("cuda:0").backend.xp
    properties = xp.cuda.runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(), "memory_bytes": properties["totalGlobalMem"],
        "compute_capability": xp.cuda.Device(0).compute_capability,
        "driver_cuda": xp.cuda.runtime.driverGetVersion(), "cupy": xp.__version__,
        "numpy": np.__version__, "python": platform.python_version(),
        "platform": platform.platform(),
    }  # fmt: skip


def _line(name: str, found: Result) -> str:
    """One part in one line."""
    if "skipped" in found:
        return f"  {name:<12} skipped: {found['skipped']}"
    text = "passed" if found["ok"] else "FAILED"
    said = found.get("summary") or str(found.get("error", "")).strip().splitlines()[-1:]
    more = said if isinstance(said, str) else " ".join(said)
    return f"  {name:<12} {text} ({found.get('seconds', 0)} s) {more}".rstrip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--report", metavar="FILE", help="write the report, JSON, here")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part")
    parser.add_argument("--minutes", type=float, default=4.8, help="for all parts together")
    parser.add_argument("--inner", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inner:
        print(json.dumps(PARTS[args.inner]()))
        return 0
    stages = probe()
    if not stages[-1].ok:
        last = stages[-1]
        print(f"gpu_check: got {last.detail} (stage {last.name!r}), need {last.hint}",
              file=sys.stderr)  # fmt: skip
        return 3
    end = time.perf_counter() + 60 * args.minutes
    report: Result = {"schema": 1, "machine": machine(), "parts": {}}
    print(f"{report['machine']['gpu']}, CuPy {report['machine']['cupy']}")
    for name in args.part or PARTS:
        left = end - time.perf_counter()
        found = (
            in_process(name, min(LIMITS[name], left)) if left > 5
            else {"ok": True, "skipped": "no time was left"}
        )  # fmt: skip
        report["parts"][name] = found
        print(_line(name, found), flush=True)
    if args.report is not None:
        Path(args.report).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(p["ok"] for p in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
