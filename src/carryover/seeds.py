"""Seeds that derive from the one in the config."""

import hashlib


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Return a 31-bit seed for `purpose`, e.g. ("benchmark", prompt_id); equal for equal calls."""
    digest = hashlib.sha256("/".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
