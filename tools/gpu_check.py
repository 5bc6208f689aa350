"""Holds the CUDA backend to what it promises, on a machine with a GPU, in less than five minutes.

    python tools/gpu_check.py [--report FILE] [--part NAME ...] [--minutes 4.8]

Every part runs in processes of its own, since a fault in a kernel ends a process's use of the GPU,
and the others go on. Parts follow each other; processes of one part run side by side, for most of
their time goes into compiling kernels. A part has to end by its share of the time, to which what
earlier parts left over is added.

The summary goes to stdout, everything measured to the report (JSON), which is written anew behind
every part. Exit codes: 0 all parts passed, or were skipped, which the last line says; 1 a part
failed; 3 there is no GPU, or no CuPy that can use it; 4 none failed, but one has not finished.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_kernels as kernels
import gpu_parts as parts
import numpy as np

import lazykv as lk
import lazykv.testing
from lazykv.backends.cuda_probe import probe

Result = dict[str, Any]

STATES = ("passed", "skipped", "not finished", "FAILED")
"""What a part can end as, the gravest last."""

NOT_BEGUN: Result = {"state": "not finished", "summary": "not begun"}


# Parts that are no measurements


def machine() -> Result:
    """What it runs on; `missing` says why it does not run."""
    stages = probe()
    last = stages[-1]
    if not last.ok and last.name != "capture":
        missing = f"got {last.detail} (stage {last.name!r}), need {last.hint}"
        return {"ok": False, "missing": missing}
    xp = lk.device("cuda:0").backend.xp
    properties = xp.cuda.runtime.getDeviceProperties(0)
    gpu = properties["name"].decode()
    return {
        "ok": True, "gpu": gpu, "memory_bytes": properties["totalGlobalMem"],
        "compute_capability": xp.cuda.Device(0).compute_capability,
        "driver_cuda": xp.cuda.runtime.driverGetVersion(), "cupy": xp.__version__,
        "numpy": np.__version__, "python": platform.python_version(), "cpus": cpus(),
        "platform": platform.platform(), "stages": {s.name: s.detail for s in stages},
        "summary": f"{gpu}, CuPy {xp.__version__}",
    }  # fmt: skip


def suite_files() -> tuple[str, ...]:
    """The files of the conformance suite, as it names them: ``core/test_moves.py``."""
    found = Path(lazykv.testing.__file__).with_name("suite").glob("*/test_*.py")
    return tuple(sorted(f"{p.parent.name.rstrip('_')}/{p.name}" for p in found))


def conformance(file: str) -> Result:
    """One file of the conformance suite."""
    done = importlib.import_module("lazykv.testing.runner").run_suite("cuda", tests=[file])
    results = done.run.report.results.values()
    failed = {r.id: str(r.reason)[-2000:] for r in results if r.outcome == "failed"}
    error = ", ".join([*failed][:3]) or ("" if done.code == 0 else done.text[-2000:])
    counts = Counter(r.outcome for r in results)
    return {"ok": done.code == 0, "counts": counts, "failed": failed, "error": error}


def sanitizer(check: str) -> Result:
    """A few kernels under a tool of compute-sanitizer, if it is installed and has the device."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if tool is None:
        return {"ok": True, "skipped": "compute-sanitizer is not installed"}
    # Errors that calls of CUDA return are CuPy's to handle: it asks for things that may not be.
    options = ["--report-api-errors", "no"] if check == "memcheck" else []
    done = subprocess.run(
        [tool, "--tool", check, *options, "--error-exitcode", "9", sys.executable, __file__,
         "--inner", "few_kernels"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        return {"ok": True, "skipped": "compute-sanitizer does not support the device"}
    if done.returncode == 0 and '"ok": true' in done.stdout:
        return {"ok": True, "counts": {"tools without a finding": 1}}
    return {"ok": False, "error": f"{check}: exit code {done.returncode}\n{done.stdout[-3000:]}"}


# Parts, and the processes they run in


@dataclass(frozen=True)
class Part:
    """A function, its share of the time, and the argument of each of its processes."""

    run: Callable[..., Result]
    seconds: float
    shares: tuple[str, ...] = ()


PARTS = {
    "machine": Part(machine, 20),
    "kernels": Part(kernels.kernels, 40, tuple(kernels.TOLERANCE)),
    "conformance": Part(conformance, 85, suite_files()),
    "capture": Part(parts.capture, 30),
    "steps": Part(parts.steps, 45),
    "bandwidth": Part(parts.bandwidth, 25),
    "memory": Part(parts.memory, 8),
    "dlpack": Part(parts.dlpack, 10),
    "sanitizer": Part(sanitizer, 25, ("memcheck", "racecheck")),
}


class Child:
    """A process that runs a part, or a share of one, and leads a process group, so that whatever
    it starts ends with it."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._start = time.perf_counter()
        self._out, self._err = folder / "out", folder / "err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--inner", *arguments], stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, process_group=0,
            )  # fmt: skip

    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> Result:
        """Its last line, if it has ended well; else how it ended, and if it had to be stopped what
        it said until then."""
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        out, err = (p.read_text("utf-8", "replace") for p in (self._out, self._err))
        found = _last_line(out)
        error = (err or ("" if found else out))[-3000:]
        if code is None:
            found = {"state": "not finished", "error": error}
        elif code:
            found |= {"state": "FAILED", "exit_code": code, "error": error}
        elif "ok" not in found:
            found = {"state": "FAILED", "error": f"{error}\nno result"}
        elif "skipped" in found:
            found["state"] = "skipped"
        else:
            found["state"] = "passed" if found["ok"] else "FAILED"
        return found | {"seconds": round(time.perf_counter() - self._start, 1)}


def _last_line(out: str) -> Result:
    """A part's result, which it prints last; nothing if it did not come to that."""
    try:
        found = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def cpus() -> int:
    return len(os.sched_getaffinity(0))


def at_once(machine: Result) -> int:
    """Processes at a time: one for each processor, with room for their contexts on the GPU."""
    return min(cpus(), max(1, machine.get("memory_bytes", 0) >> 30))


def run_part(name: str, end: float, width: int) -> Result:
    """A part in its processes, at most `width` at a time, until `end`."""
    shares = PARTS[name].shares
    if not shares:
        return side_by_side({name: [name]}, end, 1)[name]
    return merged(side_by_side({share: [name, share] for share in shares}, end, width))


def side_by_side(commands: dict[str, list[str]], end: float, width: int) -> dict[str, Result]:
    """The results of processes, by name; `commands` are their arguments."""
    waiting, running = list(commands), dict[str, Child]()
    found = dict.fromkeys(commands, NOT_BEGUN)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (waiting or running) and time.perf_counter() < end:
                while waiting and len(running) < width:
                    name = waiting.pop(0)
                    running[name] = Child(commands[name], Path(tempfile.mkdtemp(dir=folder)))
                for name in [n for n, child in running.items() if child.ended()]:
                    found[name] = running.pop(name).end()
                time.sleep(0.02)
        finally:  # also if this process is told to stop
            found |= {name: child.end() for name, child in running.items()}
    return found


def merged(shares: dict[str, Result]) -> Result:
    """One result of several: the gravest state, and the sums of what they counted."""
    worst = max((r["state"] for r in shares.values()), key=STATES.index)
    counts = sum((Counter(r.get("counts", {})) for r in shares.values()), Counter[str]())
    told = [f"{share}: {said(r)}" for share, r in shares.items() if r["state"] not in STATES[:2]]
    told += sorted({r["skipped"] for r in shares.values() if "skipped" in r})
    told += [f"{n} {what}" for what, n in counts.items()]
    seconds = max(r.get("seconds", 0) for r in shares.values())
    return {"state": worst, "seconds": seconds, "summary": "; ".join(told), "shares": shares}


# What is told


def said(found: Result) -> str:
    """A result in a few words: what went wrong, or what was found."""
    wrong = [f"exit code {found['exit_code']}"] if "exit_code" in found else []
    wrong += str(found.get("error", "")).strip().splitlines()[-1:]
    counts = ", ".join(f"{n} {what}" for what, n in found.get("counts", {}).items())
    return ": ".join(wrong) or found.get("skipped") or found.get("summary") or counts


def line(name: str, found: Result) -> str:
    """One part in one line."""
    return f"  {name:<12} {found['state']} ({found.get('seconds', 0)} s) {said(found)}".rstrip()


def verdict(found: dict[str, Result]) -> tuple[int, str]:
    """The exit code, and all parts that did not pass by name."""
    named = {s: [n for n, r in found.items() if r["state"] == s] for s in STATES}
    code = 1 if named["FAILED"] else 4 if named["not finished"] else 0
    told = [f"{s}: {', '.join(named[s])}" for s in reversed(STATES[1:]) if named[s]]
    return code, "gpu_check: " + "; ".join([*([] if code else ["passed"]), *told])


def check(names: Sequence[str], seconds: float, report: Path | None) -> int:
    """Run parts in `seconds` together; the exit code."""
    names = ["machine", *(n for n in PARTS if n in names and n != "machine")]
    found = dict.fromkeys(names, NOT_BEGUN)
    start, whole, share = time.perf_counter(), sum(PARTS[n].seconds for n in names), 0.0
    for name in names:
        share += PARTS[name].seconds
        width = at_once(found["machine"])
        found[name] = run_part(name, start + seconds * share / whole, width)
        if "missing" in found[name]:
            print(f"gpu_check: {found[name]['missing']}", file=sys.stderr)
            return 3
        print(line(name, found[name]), flush=True)
        code, told = verdict(found)
        if report is not None:
            made = {"schema": 1, "code": code, "verdict": told, "parts": found}
            report.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(told)
    return code


def inner(name: str, *share: str) -> Result:
    """What a process of its own runs."""
    return kernels.few_kernels() if name == "few_kernels" else PARTS[name].run(*share)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the report, JSON, here")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part")
    parser.add_argument("--minutes", type=float, default=4.8, help="for all parts together")
    parser.add_argument("--inner", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inner:
        print(json.dumps(inner(*args.inner)))
        return 0
    # Its children have process groups of their own, so that who ends this one must end them too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return check(args.part or list(PARTS), 60 * args.minutes, args.report)


if __name__ == "__main__":
    sys.exit(main())
