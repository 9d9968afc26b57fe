"""Recorded responses and their anchors, as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # the store needs pyarrow, which a step on given tensors does not
    from carryover.features.store import Recorded


@dataclass
class Batch:
    """R recorded responses, right-padded to T tokens, with N anchors each.

    token_ids: [R, T] int64; lengths: [R] int64, prompt included; features: [R, T, nH_t];
    anchors: [R, N] int64 positions; valid: [R, N] bool (a short response has fewer anchors).
    """

    token_ids: Tensor
    lengths: Tensor
    features: Tensor
    anchors: Tensor
    valid: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same batch on a device, its features as `dtype`."""
        return Batch(
            token_ids=self.token_ids.to(device),
            lengths=self.lengths.to(device),
            features=self.features.to(device, dtype),
            anchors=self.anchors.to(device),
            valid=self.valid.to(device),
        )


def sample_anchors(
    prompt_length: int, length: int, count: int, generator: torch.Generator
) -> Tensor:
    """At most `count` distinct anchor positions of one response, ascending, [n] int64.

    An anchor is a committed response token with at least one response token after it: none where
    `length`, after cutting, ends inside the prompt.
    """
    candidates = torch.arange(prompt_length, max(prompt_length, length - 1))
    if len(candidates) <= count:
        return candidates
    picked = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[picked].sort().values


def collate(
    responses: Sequence[Recorded],
    *,
    anchors: int,
    max_length: int,
    generators: Sequence[torch.Generator],
) -> Batch:
    """Cut responses to max_length tokens, draw their anchors (a generator each), and pad."""
    lengths = [min(len(r.token_ids), max_length) for r in responses]
    drawn = [
        sample_anchors(r.prompt_length, length, anchors, generator)
        for r, length, generator in zip(responses, lengths, generators, strict=True)
    ]
    rows, longest, most = len(responses), max(lengths), max(1, *map(len, drawn))
    width = responses[0].features.shape[1]
    batch = Batch(
        token_ids=torch.zeros(rows, longest, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        features=torch.zeros(rows, longest, width, dtype=responses[0].features.dtype),
        anchors=torch.zeros(rows, most, dtype=torch.int64),
        valid=torch.zeros(rows, most, dtype=torch.bool),
    )
    for i, (response, length, picked) in enumerate(zip(responses, lengths, drawn, strict=True)):
        batch.token_ids[i, :length] = response.token_ids[:length]
        batch.features[i, :length] = response.features[:length]
        batch.anchors[i, : len(picked)] = picked
        batch.valid[i, : len(picked)] = True
    return batch
