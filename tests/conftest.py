"""Settings of all tests; being here also makes `oracle` importable for tests in folders."""

import os

# Tests measure no time, and a BLAS with several threads crawls when other processes want the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import settings

# Examples run beside other work, so a slow one is no failure; a failing one prints how to replay.
settings.register_profile("lazykv", deadline=None, print_blob=True)
settings.load_profile("lazykv")
