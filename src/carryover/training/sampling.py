"""Which responses a step trains on: a pure function of (seed, step), so that resume is exact."""

from collections.abc import Sequence

import numpy as np
import torch

from carryover.seeds import derive_seed


def generator(seed: int, *purpose: int | str) -> torch.Generator:
    """A torch generator that is decided by the seed and the purpose alone."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def split(rows: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """(training rows, held-out rows) of `rows` responses, disjoint, decided by the seed."""
    order = np.random.default_rng(derive_seed(seed, "split")).permutation(rows).tolist()
    return sorted(order[held_out:]), sorted(order[:held_out])


def step_rows(rows: Sequence[int], step: int, count: int, seed: int) -> list[int]:
    """The `count` responses of one step: consecutive entries of endless shuffled epochs."""
    picked: list[int] = []
    position = step * count
    while len(picked) < count:
        epoch, offset = divmod(position + len(picked), len(rows))
        order = np.random.default_rng(derive_seed(seed, "epoch", epoch)).permutation(len(rows))
        take = order[offset : offset + count - len(picked)]
        picked += [rows[i] for i in take]
    return picked
