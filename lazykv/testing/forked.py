"""A forked child that goes on with its parent's memory, as a backend with `survives_fork` promises.

``python -m lazykv.testing.forked MODULE CLASS PLACE`` makes a backend of that class, and exits with
0 if parent and child can use it, with `UNMADE` if it cannot make one. In a process of its own: a
fork copies whatever state a process is in, and that of a test run is nobody's business.
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

import numpy as np

from lazykv.device import Backend, DeviceLocation, register_backend
from lazykv.graph import Graph
from lazykv.runtime.realize import plan
from lazykv.storage import Storage

UNMADE = 3
SECONDS = 60
"""How long the child may take; it may hang where a thread is missing."""


def work(place: DeviceLocation) -> Callable[[], None]:
    """Memory and a plan, which can be used any number of times."""
    g = Graph()
    x, y = g.placeholder((4,), "f32"), g.placeholder((4,), "f32")
    held = Storage.from_array(np.zeros(4, np.float32), place)
    made = plan([y * 2.0], {x: held}, place, effects=[x.at[:].set(x + y)])
    total = 0.0

    def use() -> None:
        nonlocal total
        fresh = Storage.from_array(np.full(4, 3, np.float32), place)
        total += 3
        np.testing.assert_array_equal(made.run({y: fresh})[0], np.full(4, 6))
        np.testing.assert_array_equal(held.to_numpy(), np.full(4, total))

    use()
    return use


def main(module: str, name: str, place: str) -> None:
    location = DeviceLocation(place)
    register_backend(location.kind, _made(module, name))
    use = work(location)
    pid = os.fork()
    if pid == 0:
        _child(use)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"a forked child on {place}: got exit code {code}, need 0")
    use()


def _made(module: str, name: str) -> Backend:
    try:
        made: Backend = getattr(importlib.import_module(module), name)()
    except Exception as e:  # it is no part of the promise
        print(f"{type(e).__name__}: {e}")
        sys.exit(UNMADE)
    return made


def _child(use: Callable[[], None]) -> None:
    """Leaves the process, and leaves alone what the parent would do at its end."""
    signal.alarm(SECONDS)
    code = 1
    try:
        use()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
