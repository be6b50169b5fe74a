"""``python -m coppice`` is the command ``coppice``."""

import sys

from coppice.tools.main import main

sys.exit(main())
