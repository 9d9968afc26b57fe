"""Compute the target's hidden states on recorded responses.

A plain Transformers forward, many responses at a time. The responses of a batch are padded on the
right and no padding mask is given: under causal attention a real token never sees what is to its
right, and plain causal attention is the fastest kernel. The LM head is not run, nor any block
above the last one asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from carryover.target import decoder_of
from carryover.target.hidden import captured, fuse_norms


class FeatureExtractor:
    """Hidden states of `feature_layers` (0-based block outputs: the residual stream).

    Takes the model over: the blocks above the last feature layer are dropped from it.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int]) -> None:
        self._decoder = fuse_norms(decoder_of(model))
        self._layers = list(feature_layers)
        self._decoder.layers = self._decoder.layers[: max(self._layers) + 1]

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return one bfloat16 tensor `[T_i, n_layers * H]` on the CPU for each sequence of ids.

        The layers are concatenated in the order of `feature_layers`.
        """
        device = self._decoder.embed_tokens.weight.device
        width = max(map(len, sequences))
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.as_tensor(sequence)

        with captured(self._decoder, self._layers) as outputs:
            self._decoder(input_ids=ids.to(device), use_cache=False)
        features = torch.cat([outputs[layer].to(torch.bfloat16) for layer in self._layers], dim=-1)
        return [row[: len(s)].cpu() for row, s in zip(features, sequences, strict=True)]


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield groups of positions in `lengths` that hold at most `batch_tokens`, padding included.

    Similar lengths go together. A sequence that is longer than `batch_tokens` goes alone.
    """
    group: list[int] = []
    # Longest first: the largest batch comes first, and so does running out of memory.
    for position in sorted(range(len(lengths)), key=lambda p: -lengths[p]):
        if group and (len(group) + 1) * lengths[group[0]] > batch_tokens:
            yield group
            group = []
        group.append(position)
    if group:
        yield group
