"""The one exception that a user is meant to read."""


class CarryoverError(Exception):
    """A failure with a known cause: what is wrong, and what to do about it.

    The command line prints it as one line, `error: REASON. FIX`, without a traceback.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        self.reason = reason.rstrip(". ")
        self.fix = fix
        super().__init__(f"{self.reason}. {fix}".strip())
