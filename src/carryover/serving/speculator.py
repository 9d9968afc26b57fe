"""The round of a carryover drafter in vLLM's V2 model runner (its default on CUDA).

Verification and the next draft happen in one step here too, and the layout is that of proposer.py:

    slots:      [committed 0 .. L-1][carried L .. L+R-1][block L+R .. L+R+S-1]
    positions:  [committed 0 .. L-1][carried L .. L+R-1][block  L  .. L+S-1  ]

with S = B + 1 slots in a block for the layout fill_in (vLLM's method dflash), and S = B for
anchor_first (dspark). Nothing is kept between steps, and nothing waits for the device. With CUDA
graphs the additions below come before the graph's replay, into buffers that the graph reads.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from carryover.serving.carry import carried_counts, carried_rows, owners
from carryover.serving.drafter_config import DrafterSettings

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as int64


def round_seeds(seeds: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Seeds of the drafts' noise in one round: another for each anchor of a request.

    vLLM draws a draft at position p with noise that depends on the request's seed and on p alone. A
    position that is proposed again after a rejection meets the same noise again. Without carried
    rows that is harmless: the first choice there was never looked at. With them the new
    distribution depends on that choice, so the noise is no longer independent of it, and the
    output is biased.

    Args:
        seeds, anchors: [requests] int64, each request's seed and its anchor's position.
    """
    return seeds + anchors * _ODD


class CarryoverDFlashSpeculator(DFlashSpeculator):
    """Drafting with the rejected rows as temporary context; fill_in slots, no Markov head.

    Subclasses vllm/v1/worker/gpu/spec_decode/dflash/speculator.py. Its model is a
    CarryoverDFlashForCausalLM; where that is not to carry (`carryover.enabled: false`) this is the
    stock speculator.
    """

    # [requests] int32, rows to carry in this step; None where no request can have any.
    _carried: torch.Tensor | None = None
    # [requests] int64, where each request keeps its state; None in a dummy run.
    _requests: torch.Tensor | None = None

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """As stock, with the carried rows kept as context. Shapes as in the stock method."""
        self._requests = None if dummy_run else input_batch.idx_mapping
        self._carried = self._count_carried(input_batch, num_rejected)
        if self._carried is not None:
            # A carried row counts as not rejected: it gets a slot and the block comes after it.
            num_rejected = num_rejected - self._carried
        return super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            temperature,
            seeds,
            dp_sync_state,
            dummy_run,
            skip_attn_for_dummy_run,
            mm_inputs,
            is_profile,
            num_speculative_tokens,
        )

    def _count_carried(self, batch: InputBatch, num_rejected: torch.Tensor) -> torch.Tensor | None:
        if batch.num_draft_tokens == 0 or not self._settings.enabled:
            return None
        requests, proposals = batch.num_reqs, batch.num_draft_tokens
        device = num_rejected.device
        # A request's rows with logits are its last committed token and then its proposals.
        committed = torch.arange(1, requests + 1, device=device)
        draft_ends = batch.cu_num_logits[1 : requests + 1] - committed
        before = owners(draft_ends, proposals) + 1
        rows = batch.logits_indices[torch.arange(proposals, device=device) + before]
        if batch.has_prefill:
            # Proposals in a step that starts inside the prefill are vLLM's padding.
            prefilling = async_tensor_h2d(batch.is_prefilling_np, device, torch.bool)
            num_rejected = num_rejected.masked_fill(prefilling, 0)
        # The block follows the carried rows, and may not pass the request's last position.
        room = self.max_model_len - self.num_query_per_req
        num_rejected = num_rejected.masked_fill(batch.seq_lens[:requests] > room, 0)
        drafts = batch.input_ids[rows]
        return carried_counts(num_rejected, draft_ends, drafts, self.num_speculative_steps)

    @property
    def _settings(self) -> DrafterSettings:
        model: Any = self.model
        return model.settings

    def prepare_context_anchor(self, input_batch: InputBatch, num_rejected: torch.Tensor) -> None:
        """As stock; also adds F(E_carry) to the carried rows, which F has just been applied to."""
        super().prepare_context_anchor(input_batch, num_rejected)
        if self._carried is None:
            return
        starts = input_batch.query_start_loc[: input_batch.num_reqs + 1]
        longest = int(input_batch.num_scheduled_tokens.max())
        mask = carried_rows(starts, self._carried, input_batch.num_tokens, longest)
        shift: Any = self.model.carry_shift
        self.hidden_states[: input_batch.num_tokens] += mask * shift

    def _prepare_eplb_forward(self, num_unpadded_tokens: int) -> None:
        """The last thing that the stock `propose` calls before the forward, eager or a graph."""
        if self._carried is not None:
            # Slots are settled; positions count from the anchor's true one.
            requests = self._carried.shape[0]
            shift = self._carried.unsqueeze(1)
            slots = self.input_buffers.positions[: requests * self.num_query_per_req]
            slots.view(requests, -1).sub_(shift)
            predicted = self.sample_pos[: requests * self.num_speculative_steps]
            predicted.view(requests, -1).sub_(shift)
        if self.draft_logits is not None and self._requests is not None and self._settings.enabled:
            self._salt_seeds(self._requests)
        super()._prepare_eplb_forward(num_unpadded_tokens)

    def _salt_seeds(self, requests: torch.Tensor) -> None:
        """Give this round's drafts noise of their own; stock `propose` has just set the seeds."""
        width = self.num_query_per_req
        anchors = self.input_buffers.positions[: requests.shape[0] * width : width]
        self.seeds[requests] = round_seeds(self.seeds[requests], anchors)


class CarryoverDSparkSpeculator(CarryoverDFlashSpeculator, DSparkSpeculator):
    """The same with anchor_first slots, and with a Markov head where the drafter has one.

    Subclasses vllm/v1/worker/gpu/spec_decode/dspark/speculator.py.
    """

    def _generate_draft(self, *args: Any, **kwargs: Any) -> None:
        if self._settings.markov_rank:
            super()._generate_draft(*args, **kwargs)
        else:
            # Nothing depends on the token before: all slots at once, as for DFlash.
            DFlashSpeculator._generate_draft(self, *args, **kwargs)


class CarryoverMarkovSpeculator(CarryoverDSparkSpeculator):
    """Fill_in slots with a Markov head: served with method dflash, sampled as for DSpark."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.sample_from_anchor = False
        self.num_query_per_req = 1 + self.num_speculative_steps
        self._anchor_idx = torch.arange(self.max_num_reqs, device=device) * self.num_query_per_req


def speculator_for(settings: DrafterSettings) -> type[CarryoverDFlashSpeculator]:
    """The class that drafts with such a drafter."""
    if settings.slot_layout == "anchor_first":
        return CarryoverDSparkSpeculator
    return CarryoverMarkovSpeculator if settings.markov_rank else CarryoverDFlashSpeculator
