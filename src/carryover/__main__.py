"""`python -m carryover` is the command `carryover`."""

import sys

from carryover.cli import main

sys.exit(main())
