"""The round of a carryover drafter in vLLM's legacy (V1) model runner.

Verification and the next draft happen in one step, and the drafter's input still holds the rejected
rows. So nothing is kept between steps and the KV cache needs no more room: the drafter's context is
laid out as if nothing had been rejected,

    slots:      [committed 0 .. L-1][carried L .. L+R-1][block L+R .. L+R+B]
    positions:  [committed 0 .. L-1][carried L .. L+R-1][block  L  .. L+B  ]

which ends where stock vLLM's block ends when everything was accepted. The block overwrites none of
the carried rows, and the next step's committed rows overwrite them all: one round is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from carryover.serving.carry import carried_counts, carried_rows


class CarryoverProposer(DFlashProposer):
    """DFlash drafting with the rejected rows as temporary context.

    Subclasses vllm/v1/spec_decode/dflash.py. Its model is a CarryoverDFlashForCausalLM; where that
    is not to carry (`carryover.enabled: false`) this is the stock proposer.
    """

    # [requests] int32, rows to carry in this step; set where vLLM counts the rejected rows.
    _carried: torch.Tensor | None = None

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
        """As stock; also decides how many rows each request carries.

        The block that follows them fits: vLLM comes here only where one fits after all proposals.
        """
        metadata, sample, rejected = super().prepare_inputs_padded(
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )
        if self.model.carry_shift is None:
            return metadata, sample, rejected
        self._carried = carried_counts(
            rejected,
            spec_decode_metadata.cu_num_draft_tokens,
            spec_decode_metadata.draft_token_ids,
            self.num_speculative_tokens,
        )
        return metadata, sample, rejected

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """As stock, with the carried rows kept as context. Shapes as in the stock method.

        `target_hidden_states` [rows, hidden_size] comes after F.
        """
        carried = self._carried
        self._carried = None
        if num_rejected_tokens_gpu is not None and carried is not None:
            # A carried row counts as not rejected: it gets a slot and the block comes after it.
            num_rejected_tokens_gpu = num_rejected_tokens_gpu - carried
            rows = target_hidden_states.shape[0]
            mask = carried_rows(cad.query_start_loc, carried, rows, cad.max_query_len)
            shift: Any = self.model.carry_shift
            target_hidden_states = target_hidden_states + mask * shift
        num_tokens, sample, metadata = super().set_inputs_first_pass(
            target_token_ids=target_token_ids,
            next_token_ids=next_token_ids,
            target_positions=target_positions,
            target_hidden_states=target_hidden_states,
            token_indices_to_sample=token_indices_to_sample,
            cad=cad,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
        )
        if carried is not None:
            # Slots are settled; RoPE counts from the anchor's true position.
            block = self.positions[:num_tokens].view(carried.shape[0], -1)
            block -= carried.unsqueeze(1)
        return num_tokens, sample, metadata
