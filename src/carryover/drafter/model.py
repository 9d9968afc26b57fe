"""The block drafter: DFlash's backbone with the carry interface (paper, Algorithm 1).

Shapes: R rows (one response each, right-padded to T tokens), N anchors a row, S slots a block,
B proposals, H hidden size, nH_t width of the concatenated target features.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carryover.drafter import blocks, gemma, layout
from carryover.drafter.attention import Kernel, Visible
from carryover.drafter.config import DrafterConfig
from carryover.drafter.markov import ConfidenceHead, MarkovHead

BLOCKS: dict[str, type[nn.Module]] = {"qwen3": blocks.Block, "gemma4": gemma.Block}


@dataclass
class Carry:
    """Rejected rows of one round, the temporary context U of the next draft.

    features: [R, N, B, nH_t], the target's at the proposed positions; positions: [R, N, B] int64,
    where each row was computed; visible: [R, N, B] bool, rows m+1..B.
    """

    features: Tensor
    positions: Tensor
    visible: Tensor


@dataclass
class Hints:
    """Tokens of one round that stand in for MASK in the next draft, which then carries no rows.

    Slot by slot: ids: [R, N, S, k] int64, target ids; weights: [R, N, S, k], summing to one over
    k; exists: [R, N, S] bool, where the slot keeps its own input if false. Paper, Table 3.
    """

    ids: Tensor
    weights: Tensor
    exists: Tensor

    def embedded(self, embedding: Tensor) -> Tensor:
        """Weighted mean of the tokens' rows of embedding [V, H]: [R, N, S, H]."""
        tokens = F.embedding(self.ids, embedding)
        return (self.weights.to(tokens.dtype)[..., None, :] @ tokens).squeeze(-2)


class Drafter(nn.Module):
    """DFlash backbone; parameters are named as in z-lab's `DFlashDraftModel` checkpoints, and with
    Gemma's blocks as in DeepSpec's `Gemma4DSparkModel`.

    A Markov drafter is the same backbone with `markov_head` and, where the config asks for it,
    `confidence_head`; what reads the hidden states applies them. The target's input embedding is
    frozen and shared: it is handed in with `share` and is neither a parameter nor part of a
    checkpoint.
    """

    embedding: Tensor  # [V, H], the target's
    kernel: Kernel = "auto"

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        block = BLOCKS[config.blocks]
        self.layers = nn.ModuleList(block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.carry and config.carry_distinction == "embedding":
            self.carry_embedding = nn.Parameter(torch.zeros(config.feature_size))  # E_carry
        if config.carry and config.carry_distinction == "projector":  # F_carry
            self.carry_projector = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        rank, vocabulary = config.markov_rank, config.draft_vocab_size or config.vocab_size
        self.markov_head = MarkovHead(config.vocab_size, vocabulary, rank) if rank else None
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, rank) if config.confidence else None
        )

    def share(self, embedding: Tensor) -> None:
        """Attach the frozen input embedding [V, H]."""
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    def project(self, features: Tensor) -> Tensor:
        """Normed F(h), what every layer's K and V read: [..., nH_t] -> [..., H]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        anchor_tokens: Tensor,
        anchors: Tensor,
        features: Tensor,
        carry: Carry | Hints | None = None,
    ) -> Tensor:
        """Hidden states that predict positions a+1 .. a+B.

        anchor_tokens, anchors: [R, N] int64, token and position of each anchor (positions count
        from the start of the row); features: [R, T, nH_t], row t being position t's.
        Returns [R, N, B, H], normed, ready for the head.
        """
        config = self.config
        ids = layout.block_inputs(
            anchor_tokens, config.mask_token_id, config.slot_layout, config.proposals
        )
        positions = layout.slot_positions(anchors, config.slot_layout, config.proposals)
        length = features.shape[1]
        context = self.project(features)
        context_positions = torch.arange(length, device=anchors.device).expand(len(anchors), -1)
        x = F.embedding(ids, self.embedding)
        if isinstance(carry, Hints):
            x = torch.where(carry.exists[..., None], carry.embedded(self.embedding), x)
        if config.blocks == "gemma4":
            # Rounded to the weights' type first, as in Gemma itself.
            x = x * torch.tensor(config.hidden_size**0.5, dtype=x.dtype)
        rows = carry if isinstance(carry, Carry) else None
        carried = None if rows is None else self.project_carried(rows.features)
        visible = self._visible(anchors, length, None if rows is None else rows.visible)
        at = None if rows is None else rows.positions
        for block in self.layers:
            x = block(x, positions, context, context_positions, visible, carried, at)
        return self.norm(x)[:, :, layout.predicting_slots(config.slot_layout, config.proposals)]

    def _visible(self, anchors: Tensor, length: int, carried: Tensor | None) -> Visible:
        """A slot sees the context before its anchor, the carried rows, and its own block."""
        size = layout.slots(self.config.slot_layout, self.config.proposals)
        own = anchors.new_ones(*anchors.shape, size, dtype=torch.bool)
        if carried is not None:
            own = torch.cat((carried, own), 2)
        context = layout.context_visible(anchors, length)
        return Visible(context[:, :, None], own[:, :, None], self.kernel)

    def project_carried(self, features: Tensor) -> Tensor:
        """`project` for carried rows, told apart from committed ones by `carry_distinction`.

        embedding: F(h + E_carry) (Algorithm 1, line 1); projector: F_carry(h); none: F(h).
        """
        match self.config.carry_distinction:
            case "embedding":
                return self.project(features + self.carry_embedding)
            case "projector":
                return self.hidden_norm(self.carry_projector(features))
        return self.project(features)
