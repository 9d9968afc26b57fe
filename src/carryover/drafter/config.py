"""What a drafter is, as written to and read from its config.json."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from carryover.drafter.layout import SlotLayout, slots
from carryover.errors import CarryoverError

# The plugin's classes. vLLM's own are those that z-lab's and DeepSpec's checkpoints name.
PLUGIN_ARCHITECTURE, STOCK_ARCHITECTURE = "DFlashCarryoverDraftModel", "DFlashDraftModel"
PLUGIN_DSPARK, STOCK_DSPARK = "Qwen3CarryoverDSparkModel", "Qwen3DSparkModel"
PLUGIN_GEMMA, STOCK_GEMMA = "Gemma4CarryoverDSparkModel", "Gemma4DSparkModel"
# A DSpark class of vLLM's with other tensors, which without the plugin stops at our checkpoint.
OTHER_DSPARK = "K3DSparkModel"

BlockKind = Literal["qwen3", "gemma4"]


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes and conventions of one drafter.

    `target_layer_ids` are 0-based block *outputs* of the target, in the order in which their
    hidden states are concatenated. `draft_vocab_size` is None where the drafter predicts over
    the target's whole vocabulary with the target's head. `markov_rank` is the rank of the
    first-order correction head, 0 for a plain DFlash drafter; `confidence` adds the confidence
    head, which reads the Markov head's embedding and so needs a rank. `final_logit_softcapping` is
    the target's: the drafter's logits are capped as the target's own are. `blocks` names the
    transformer blocks; Gemma's may rotate only `partial_rotary_factor` of a head's pairs, and come
    with embeddings that are scaled by sqrt(hidden_size).
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    target_blocks: int
    mask_token_id: int
    proposals: int
    slot_layout: SlotLayout = "fill_in"
    qk_norm: bool = True
    draft_vocab_size: int | None = None
    carry: bool = False
    carry_rows: str = "hidden_states"
    carry_distinction: str = "embedding"
    markov_rank: int = 0
    confidence: bool = False
    final_logit_softcapping: float | None = None
    blocks: BlockKind = "qwen3"
    partial_rotary_factor: float = 1.0

    @property
    def feature_size(self) -> int:
        """Width of the concatenated target features, n * H_t."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def architectures(self) -> list[str]:
        """vLLM takes the first that it knows. Its own class may stand in only where it would serve
        the drafter rightly: it knows neither carry nor a lack of q/k norms, its DFlash has no
        Markov head, and its Qwen3DSparkModel caps no logits (without a Markov head the cap does
        not change which token is best). Its Gemma4DSparkModel needs a Markov head and the target's
        whole vocabulary."""
        plain = self.qk_norm and not self.carry
        if self.blocks == "gemma4":
            plain = plain and self.markov_rank > 0 and self.draft_vocab_size is None
            return [PLUGIN_GEMMA, STOCK_GEMMA if plain else OTHER_DSPARK]
        if self.slot_layout == "anchor_first":
            plain = plain and not (self.markov_rank and self.final_logit_softcapping)
            # vLLM 0.32 turns a DSpark drafter without one of its own names into DeepSeek-V4's.
            return [PLUGIN_DSPARK, STOCK_DSPARK if plain else OTHER_DSPARK]
        plain = plain and not self.markov_rank
        return [PLUGIN_ARCHITECTURE] + ([STOCK_ARCHITECTURE] if plain else [])

    def with_carry(self, rows: str, distinction: str) -> "DrafterConfig":
        """The same drafter, able to read what is carried: the config's section `carry`."""
        return replace(self, carry=True, carry_rows=rows, carry_distinction=distinction)

    def to_json(self, dtype: str) -> dict[str, Any]:
        """z-lab's `DFlashDraftModel` config.json (DeepSpec's `Gemma4DSparkModel` one with Gemma's
        blocks), plus the field `carryover`.

        `block_size` counts slots: B + 1 in z-lab's layout, B in DeepSpec's. A Markov drafter has
        DeepSpec's fields of its heads (`deepspec/modeling/dspark/qwen3/config.py`) at the top
        level, and an anchor-first one also its layer ids and mask token.
        """
        fields = asdict(self)
        own = {
            name: fields.pop(name)
            for name in (
                "target_hidden_size", "target_blocks", "slot_layout", "qk_norm",
                "carry", "carry_rows", "carry_distinction", "markov_rank", "confidence", "blocks",
            )
        }  # fmt: skip
        layer_ids = list(fields.pop("target_layer_ids"))
        proposals, mask = fields.pop("proposals"), fields.pop("mask_token_id")
        theta = fields.pop("rope_theta")
        del fields["partial_rotary_factor"]
        # vLLM's Gemma4DSparkModel asks for a rank, also where it is 0.
        dspark: dict[str, Any] = {"markov_rank": 0} if self.blocks == "gemma4" else {}
        if own["markov_rank"]:
            dspark |= {
                "markov_rank": own["markov_rank"],
                "markov_head_type": "vanilla",
                "enable_confidence_head": own["confidence"],
                "confidence_head_with_markov": own["confidence"],
            }
        if own["slot_layout"] == "anchor_first":
            dspark |= {"target_layer_ids": layer_ids, "mask_token_id": mask}
        for absent in ("draft_vocab_size", "final_logit_softcapping"):
            if fields[absent] is None:
                del fields[absent]
        return {
            "architectures": self.architectures,
            **fields,
            **(_gemma4(self) if self.blocks == "gemma4" else _qwen3(theta)),
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
            "block_size": slots(own["slot_layout"], proposals),
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": layer_ids},
            **dspark,
            "carryover": {
                "enabled": own["carry"],
                "rows": own["carry_rows"],
                "distinction": own["carry_distinction"],
                "slot_layout": own["slot_layout"],
                "qk_norm": own["qk_norm"],
                "blocks": own["blocks"],
                "proposals": proposals,
                "target_hidden_size": own["target_hidden_size"],
                "target_blocks": own["target_blocks"],
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "DrafterConfig":
        """Reads what `to_json` wrote; raises CarryoverError that names a missing field."""
        try:
            dflash, own = data["dflash_config"], data["carryover"]
            rope = data["rope_parameters"]
            # Gemma's is told apart by the type of layer.
            rope = rope.get("full_attention", rope)
            return cls(
                hidden_size=data["hidden_size"],
                num_hidden_layers=data["num_hidden_layers"],
                num_attention_heads=data["num_attention_heads"],
                num_key_value_heads=data["num_key_value_heads"],
                head_dim=data["head_dim"],
                intermediate_size=data["intermediate_size"],
                rms_norm_eps=data["rms_norm_eps"],
                rope_theta=rope["rope_theta"],
                max_position_embeddings=data["max_position_embeddings"],
                vocab_size=data["vocab_size"],
                target_hidden_size=own["target_hidden_size"],
                target_layer_ids=tuple(dflash["target_layer_ids"]),
                target_blocks=own["target_blocks"],
                mask_token_id=dflash["mask_token_id"],
                proposals=own["proposals"],
                slot_layout=own["slot_layout"],
                qk_norm=own["qk_norm"],
                draft_vocab_size=data.get("draft_vocab_size"),
                carry=own["enabled"],
                # Drafters from before it could be chosen do not say it.
                carry_rows=own.get("rows", "hidden_states"),
                carry_distinction=own["distinction"],
                markov_rank=data.get("markov_rank", 0),
                confidence=data.get("enable_confidence_head", False),
                final_logit_softcapping=data.get("final_logit_softcapping"),
                blocks=own.get("blocks", "qwen3"),
                partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
            )
        except KeyError as error:
            raise CarryoverError(
                f"the drafter's config.json has no field {error}",
                "Export the drafter again with `carryover export`.",
            ) from None


def _qwen3(theta: float) -> dict[str, Any]:
    """The keys of a Qwen3Config that say what kind of blocks these are."""
    return {
        "model_type": "qwen3",
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
    }


def _gemma4(config: DrafterConfig) -> dict[str, Any]:
    """The same of a Gemma4TextConfig, whose layers are all full-attention ones."""
    rope = {
        "rope_type": "proportional",
        "partial_rotary_factor": config.partial_rotary_factor,
        "rope_theta": config.rope_theta,
    }
    return {
        "model_type": "gemma4_text",
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": True,
        "rope_parameters": {"full_attention": rope},
        "hidden_activation": "gelu_pytorch_tanh",
        # Gemma4TextConfig's own defaults are those of a target.
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    }
