"""``python -m lazykv``."""

import sys

from lazykv.cli import main

sys.exit(main())
