"""``python -m lazykv.cli.child ARGV``: the command as another process runs it, to its end.

A process that ends by surprise, inside a driver or a kernel, may leave any exit code, 0 among them.
So this one adds `ENDED` to the command's own. It ends when its standard input does: when whoever
started it is gone.
"""

import os
import sys
import threading

from lazykv.cli.entry import main
from lazykv.cli.exits import ENDED


def _follow() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_follow, daemon=True).start()
    sys.exit(ENDED + main())
