"""`python -m effjax.cli`."""

import sys

from . import main

sys.exit(main())
