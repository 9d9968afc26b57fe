"""The DFlash training step of `speculators`, on given weights, and the proof that it equals ours.

Nothing of it is rewritten: its own model class does forward and loss, and what its trainer calls is
called in its order (autocast where the dtype is bfloat16, backward, clipping to 1, AdamW). On a GPU
it would run a fused loss, flex attention and torch.compile; on CPU its settings are `sdpa` or
`eager` attention and the `eager` loss, and it does not compile.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash.utils import select_anchors
from transformers import Qwen3Config

from benchmarks.shapes import Shape
from carryover.drafter.model import Drafter
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks
from carryover.training.objective import draft_loss, label
from carryover.training.vocabulary import Vocabulary

GAMMA = 4.0
LOSS = resolve_loss_config("ce", "eager")


class SpeculatorsStep:
    """Its model with our drafter's weights, and the same responses packed into one sequence."""

    def __init__(
        self,
        shape: Shape,
        drafter: Drafter,
        vocabulary: Vocabulary,
        batch: Batch,
        attention: str,
        dtype: torch.dtype,
    ) -> None:
        """attention: `sdpa`, `eager` or `simple_flex_attention`; dtype: what autocast computes in,
        and of the features. The drafter must have q/k norms, which its model always has."""
        config, head = drafter.config, vocabulary.head
        layers = Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        layers._attn_implementation = attention
        self.model = DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=layers,
                draft_vocab_size=len(head),
                block_size=config.proposals + 1,
                aux_hidden_state_layer_ids=list(config.target_layer_ids),
                mask_token_id=config.mask_token_id,
            )
        ).train()
        self.model.load_state_dict(drafter.state_dict(), strict=False)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(drafter.embedding)
            self.model.lm_head.weight.copy_(head)
            self.model.verifier_lm_head.weight.copy_(head)
        rows, length = batch.token_ids.shape
        positions = torch.arange(length).expand(rows, -1)
        generator = torch.Generator().manual_seed(1)
        self.batch = {
            "hidden_states": batch.features.reshape(1, rows * length, -1).to(dtype),
            "input_ids": batch.token_ids.reshape(1, -1),
            "loss_mask": (positions >= shape.prompt).reshape(1, -1),
            "verifier_last_hidden_states": torch.randn(
                1, rows * length, config.hidden_size, generator=generator
            ).to(dtype),
            "document_ids": torch.arange(rows).repeat_interleave(length)[None],
            "position_ids": positions.reshape(1, -1),
        }
        self.anchors = rows * shape.anchors
        self.dtype = dtype
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def loss(self) -> torch.Tensor:
        with self._autocast():
            _, loss, _ = self.model(
                **self.batch, loss_config=LOSS, gamma=GAMMA, max_anchors=self.anchors
            )
        return loss

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def __call__(self) -> None:
        """One optimizer step, as in its trainer."""
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def seconds_for_targets(self) -> float:
        """What its step spends on labels: the target's head over the recorded states."""
        with torch.no_grad(), self._autocast():
            start = time.perf_counter()
            states = self.batch["verifier_last_hidden_states"]
            self.model.verifier_lm_head(self.model.verifier_norm(states))
            return time.perf_counter() - start


def check_equal(
    shape: Shape, drafter: Drafter, vocabulary: Vocabulary, batch: Batch, attention: str, seed: int
) -> float:
    """Loss and gradients of one fp32 step, theirs against ours, at the anchors that theirs draws.

    Labels are what its target states predict, so that both have the same. Returns the largest
    difference relative to the largest entry of its tensor; raises where that is above 1e-4.
    """
    theirs = SpeculatorsStep(shape, drafter, vocabulary, batch, attention, torch.float32)
    rows, length = batch.token_ids.shape
    states = theirs.batch["verifier_last_hidden_states"]
    with torch.no_grad():
        best = theirs.model.verifier_lm_head(theirs.model.verifier_norm(states)).argmax(-1)
    ids = vocabulary.target_ids(best).roll(1, 1)  # state t predicts token t + 1
    theirs.batch["input_ids"] = ids
    torch.manual_seed(seed)
    drawn, valid = select_anchors(theirs.batch["loss_mask"], theirs.anchors, shape.proposals + 1)
    torch.manual_seed(seed)
    loss = theirs.loss() * theirs_weight(theirs, drawn, valid, shape.proposals + 1)
    loss.backward()

    per_row = [drawn[valid & (drawn // length == r)] % length for r in range(rows)]
    anchors = torch.nn.utils.rnn.pad_sequence(per_row, batch_first=True)
    counts = torch.tensor([len(a) for a in per_row])
    exists = torch.arange(anchors.shape[1]) < counts[:, None]
    ours = Batch(ids.view(rows, length), batch.lengths, batch.features.float(), anchors, exists)
    blocks = Blocks(anchors, exists)
    labels = label(ours, blocks, vocabulary, shape.proposals, GAMMA)
    totals = draft_loss(drafter, vocabulary, ours, blocks, labels)
    totals.loss.backward()

    gradients = dict(theirs.model.named_parameters())
    differences = [_difference(totals.loss.detach(), loss.detach())]
    for name, parameter in drafter.named_parameters():
        differences.append(_difference(parameter.grad, gradients[name].grad))
        parameter.grad = None
    if max(differences) > 1e-4:
        raise AssertionError(f"the two steps differ by {max(differences):.2g}")
    return max(differences)


def theirs_weight(
    theirs: SpeculatorsStep, anchors: torch.Tensor, valid: torch.Tensor, block: int
) -> torch.Tensor:
    """What its loss is divided by: the number of labelled slots (ours is a weighted sum)."""
    slots = anchors[:, None] + torch.arange(1, block)
    return (theirs.batch["loss_mask"][0][slots] & valid[:, None]).sum() + 1e-5


def _difference(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
