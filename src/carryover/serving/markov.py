"""The Markov head at work in vLLM's legacy (V1) model runner: a block sampled left to right.

The block's states come out of one parallel pass, as for DFlash. The head then adds to slot k what
the token chosen for slot k - 1 suggests (DSpark, arXiv 2607.05147; vLLM's DSpark speculator does
the same in the V2 runner):

    logits_k = head(h_k) + W2 W1[x_(k-1)],   x_0 = the anchor
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.metadata import SamplingMetadata

from carryover.serving.proposer import CarryoverProposer


class MarkovProposer(CarryoverProposer):
    """Drafting with a Markov head, with or without carried rows."""

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose the tokens of all requests' blocks, slot after slot.

        Args:
            hidden_states: [requests * B, hidden_size], request after request, slots 1 .. B.
            sampling_metadata: of the requests; read only for probabilistic drafts.

        Returns:
            Target ids [requests * B], and for probabilistic drafts the distributions that they
            were drawn from, [requests * B, vocabulary].
        """
        model: Any = self.model
        slots = self.num_speculative_tokens
        scores = model.draft_logits(hidden_states).unflatten(0, (-1, slots))
        requests = scores.shape[0]
        # Slot 0 of each block as it was laid out for this pass.
        previous = self.input_ids[: requests * (1 + slots)].view(requests, -1)[:, 0]
        greedy = not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy
        tokens, distributions = [], []
        for slot in range(slots):
            corrected = scores[:, slot] + model.markov_bias(previous)
            if greedy:
                previous = model.target_ids(corrected.argmax(dim=-1))
            else:
                previous, drawn_from = self._sample_from_logits(
                    model.over_target_vocabulary(corrected), sampling_metadata
                )
                assert drawn_from is not None  # not all greedy
                distributions.append(drawn_from)
            tokens.append(previous)
        chosen = torch.stack(tokens, dim=1).flatten()
        if greedy:
            return chosen, None
        return chosen, torch.stack(distributions, dim=1).flatten(0, 1)
