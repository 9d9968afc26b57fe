"""`python -m carryover` is the command `carryover`."""

import sys

try:
    from carryover.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("carryover"):
        raise
    print(
        f"error: the Python package {error.name} is not installed. Run `make setup`.",
        file=sys.stderr,
    )
    sys.exit(2)

sys.exit(main())
