"""Random targets, drafters and responses of given shapes: speed does not depend on values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from carryover.drafter.initialize import initialize_random, new_config
from carryover.drafter.markov import MarkovHead
from carryover.drafter.model import Drafter
from carryover.target.load import decoder_of
from carryover.training.batch import Batch, sample_anchors
from carryover.training.losses import predict
from carryover.training.vocabulary import Vocabulary


@dataclass(frozen=True)
class Shape:
    """A target, its drafter, and what one step trains on.

    length counts the prompt in; anchors are per response.
    """

    family: str
    hidden: int
    inner: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    feature_layers: tuple[int, ...]
    qk_norm: bool
    drafter_layers: int
    proposals: int
    responses: int
    prompt: int
    length: int
    anchors: int


SMOLLM2_135M = Shape(
    family="llama", hidden=576, inner=1536, blocks=30, heads=9, kv_heads=3, head_dim=64,
    vocabulary=49152, feature_layers=(1, 8, 14, 20, 27), qk_norm=False, drafter_layers=2,
    proposals=7, responses=4, prompt=40, length=160, anchors=64,
)  # fmt: skip
QWEN3_4B = Shape(
    family="qwen3", hidden=2560, inner=9728, blocks=36, heads=32, kv_heads=8, head_dim=128,
    vocabulary=151936, feature_layers=(1, 9, 17, 25, 33), qk_norm=True, drafter_layers=5,
    proposals=15, responses=1, prompt=512, length=4096, anchors=512,
)  # fmt: skip
TINY = Shape(
    family="llama", hidden=32, inner=48, blocks=3, heads=4, kv_heads=2, head_dim=8,
    vocabulary=97, feature_layers=(0, 1), qk_norm=True, drafter_layers=2,
    proposals=4, responses=2, prompt=6, length=24, anchors=5,
)  # fmt: skip


def random_target(
    shape: Shape, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> PreTrainedModel:
    """A frozen target with transformers' own initial weights and a tied head."""
    fields = dict(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.blocks, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        model = (
            LlamaForCausalLM(LlamaConfig(**fields))
            if shape.family == "llama"
            else Qwen3(Qwen3Config(**fields))
        )
    return model.to(dtype).requires_grad_(False).eval()


def random_drafter(
    shape: Shape, target: PreTrainedModel, seed: int, draft_vocabulary: int | None, carry: bool
) -> tuple[Drafter, Vocabulary]:
    """A drafter for `target` on its device and in its dtype.

    draft_vocabulary: None for the target's whole head, else how many of its rows.
    """
    head = target.get_output_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(seed)
    observed = None
    if draft_vocabulary is not None:
        observed = torch.randperm(shape.vocabulary, generator=generator)[:draft_vocabulary]
        observed = observed.sort().values
    config = new_config(
        target,
        feature_layers=list(shape.feature_layers),
        mask_token_id=shape.vocabulary - 1,
        layers=shape.drafter_layers,
        proposals=shape.proposals,
        slot_layout="fill_in",
        qk_norm=shape.qk_norm,
        draft_vocab_size=draft_vocabulary,
    )
    drafter = Drafter(config.with_carry("hidden_states", "embedding") if carry else config)
    initialize_random(drafter, seed)
    drafter.share(target.get_input_embeddings().weight.detach())
    return drafter.to(head.device, head.dtype), Vocabulary(head, observed)


def random_batch(
    shape: Shape, seed: int, dtype: torch.dtype, device: str, vocabulary: Vocabulary
) -> Batch:
    """Responses of random tokens that the draft vocabulary has, with random features."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = shape.responses, shape.length
    ids = torch.randint(0, len(vocabulary.head), (rows, length), generator=generator)
    anchors = torch.stack(
        [sample_anchors(shape.prompt, length, shape.anchors, generator) for _ in range(rows)]
    )
    width = len(shape.feature_layers) * shape.hidden
    return Batch(
        token_ids=vocabulary.target_ids(ids.to(vocabulary.head.device)),
        lengths=torch.full((rows,), length),
        features=torch.randn(rows, length, width, generator=generator),
        anchors=anchors,
        valid=torch.ones_like(anchors, dtype=torch.bool),
    ).to(torch.device(device), dtype)


class PartlyRight(Vocabulary):
    """A vocabulary whose proposals begin, at some anchors, with the token that the target wants.

    Nothing that a random drafter proposes is accepted, and verification may leave out what follows
    a rejection; so acceptance is set to what was measured elsewhere. The work is unchanged.
    """

    def __init__(self, vocabulary: Vocabulary, wanted: Tensor, right: Tensor) -> None:
        """wanted: [R, N] int64, the target's token after each anchor; right: [R, N] bool."""
        self.__dict__.update(vocabulary.__dict__)
        self.wanted, self.right = wanted, right

    def propose(
        self, hidden: Tensor, anchor_tokens: Tensor, markov: MarkovHead | None = None
    ) -> Tensor:
        proposals = super().propose(hidden, anchor_tokens, markov)
        proposals[..., 0] = torch.where(self.right, self.wanted, proposals[..., 0])
        return proposals


@torch.no_grad()
def partly_right(
    vocabulary: Vocabulary, target: PreTrainedModel, batch: Batch, accepted: float, seed: int
) -> PartlyRight:
    """`accepted` (0 to 1) of the first proposals are right: about so many tokens a draft."""
    hidden = decoder_of(target)(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    at_anchor = hidden.gather(1, batch.anchors[..., None].expand(-1, -1, hidden.shape[-1]))
    head = target.get_output_embeddings().weight
    wanted = predict(at_anchor.flatten(0, 1), head).view(batch.anchors.shape)
    draws = torch.rand(batch.anchors.shape, generator=torch.Generator().manual_seed(seed))
    return PartlyRight(vocabulary, wanted, (draws < accepted).to(wanted.device))
