"""What a drafter is, as written to and read from its config.json."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from carryover.drafter.layout import SlotLayout
from carryover.errors import CarryoverError

# The plugin's class, and vLLM's own, which z-lab's checkpoints name.
PLUGIN_ARCHITECTURE, STOCK_ARCHITECTURE = "DFlashCarryoverDraftModel", "DFlashDraftModel"


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes and conventions of one drafter.

    `target_layer_ids` are 0-based block *outputs* of the target, in the order in which their
    hidden states are concatenated. `draft_vocab_size` is None where the drafter predicts over
    the target's whole vocabulary with the target's head.
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
    carry_distinction: str = "embedding"

    @property
    def feature_size(self) -> int:
        """Width of the concatenated target features, n * H_t."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def architectures(self) -> list[str]:
        """vLLM takes the first that it knows. Its own class may stand in for a plain DFlash only:
        it would serve a drafter with carry, or without q/k norms, wrongly and silently."""
        plain = self.qk_norm and not self.carry and self.slot_layout == "fill_in"
        return [PLUGIN_ARCHITECTURE] + ([STOCK_ARCHITECTURE] if plain else [])

    def with_carry(self, distinction: str) -> "DrafterConfig":
        """The same drafter, able to read carried rows."""
        return replace(self, carry=True, carry_distinction=distinction)

    def to_json(self, dtype: str) -> dict[str, Any]:
        """z-lab's `DFlashDraftModel` config.json, plus the field `carryover`."""
        fields = asdict(self)
        own = {
            name: fields.pop(name)
            for name in (
                "target_hidden_size", "target_blocks", "slot_layout", "qk_norm",
                "carry", "carry_distinction",
            )
        }  # fmt: skip
        layer_ids = list(fields.pop("target_layer_ids"))
        proposals, mask = fields.pop("proposals"), fields.pop("mask_token_id")
        theta = fields.pop("rope_theta")
        if fields["draft_vocab_size"] is None:
            del fields["draft_vocab_size"]
        return {
            "architectures": self.architectures,
            "model_type": "qwen3",
            **fields,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
            "block_size": proposals + 1,
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": layer_ids},
            "carryover": {
                "enabled": own["carry"],
                "distinction": own["carry_distinction"],
                "slot_layout": own["slot_layout"],
                "qk_norm": own["qk_norm"],
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
            return cls(
                hidden_size=data["hidden_size"],
                num_hidden_layers=data["num_hidden_layers"],
                num_attention_heads=data["num_attention_heads"],
                num_key_value_heads=data["num_key_value_heads"],
                head_dim=data["head_dim"],
                intermediate_size=data["intermediate_size"],
                rms_norm_eps=data["rms_norm_eps"],
                rope_theta=data["rope_parameters"]["rope_theta"],
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
                carry_distinction=own["distinction"],
            )
        except KeyError as error:
            raise CarryoverError(
                f"the drafter's config.json has no field {error}",
                "Export the drafter again with `carryover export`.",
            ) from None
