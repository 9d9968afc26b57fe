"""A dense, slow drafter and target in plain torch, to compare any other implementation with.

Written from the definition of the method, without vLLM, transformers or our own training code: one
request, no cache, no batching, whole attention matrices, fp32. Use it for parity tests:

    target = DenseTarget.load(target_folder)
    drafter = DenseDrafter.load(drafter_folder)
    features, logits = target(ids)                    # of one sequence of token ids
    states = drafter(features[:L], features_rejected, anchor_id, target.embedding)

`states[k]`, k = 1 .. B, predicts position L + k; `drafter.logits(states, target.head)` scores them,
and `drafter.propose(states[1:], anchor_id, target.head)` chooses, with a Markov head left to right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding, half-split (neox) layout. x: [rows, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double().unsqueeze(1) * frequencies
    cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """q: [queries, heads, dim]; k, v: [keys, kv_heads, dim]; mask: [queries, keys], True reads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


@dataclass
class Block:
    """One transformer block; `prefix` names its tensors in the checkpoint."""

    tensors: Tensors
    prefix: str
    config: dict[str, Any]
    qk_norm: bool

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{self.prefix}.{name}.weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weight(name), self.config["rms_norm_eps"])

    def heads(self, x: torch.Tensor, name: str, positions: torch.Tensor | None) -> torch.Tensor:
        """Project [rows, hidden] to heads; norm them where the block does; rotate."""
        y = (x @ self.weight(f"self_attn.{name}_proj").T).unflatten(
            -1, (-1, self.config["head_dim"])
        )
        if positions is None:
            return y
        if self.qk_norm:
            y = self.norm(y, f"self_attn.{name}_norm")
        return rotate(y, positions, self.config["rope_parameters"]["rope_theta"])

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        context: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x: [rows, hidden]. `context` = keys and values that are read before the rows' own."""
        y = self.norm(x, "input_layernorm")
        q = self.heads(y, "q", positions)
        k, v = self.heads(y, "k", positions), self.heads(y, "v", None)
        if context is not None:
            k, v = torch.cat([context[0], k]), torch.cat([context[1], v])
        x = x + attend(q, k, v, mask) @ self.weight("self_attn.o_proj").T
        y = self.norm(x, "post_attention_layernorm")
        gate = torch.nn.functional.silu(y @ self.weight("mlp.gate_proj").T)
        return x + (gate * (y @ self.weight("mlp.up_proj").T)) @ self.weight("mlp.down_proj").T


def _load(folder: Path) -> tuple[dict[str, Any], Tensors]:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return config, {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


@dataclass
class DenseTarget:
    """A Llama. `feature_layers`: 0-based block outputs that make up the features."""

    config: dict[str, Any]
    tensors: Tensors
    feature_layers: list[int]

    @classmethod
    def load(cls, folder: Path, feature_layers: list[int]) -> DenseTarget:
        return cls(*_load(folder), feature_layers)

    @property
    def embedding(self) -> torch.Tensor:
        return self.tensors["model.embed_tokens.weight"]

    @property
    def head(self) -> torch.Tensor:
        return self.tensors.get("lm_head.weight", self.embedding)

    def __call__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [T, layers * hidden] and logits [T, vocabulary] of T token ids."""
        x = self.embedding[torch.tensor(ids)]
        positions = torch.arange(len(ids))
        causal = positions.unsqueeze(1) >= positions
        outputs = []
        for index in range(self.config["num_hidden_layers"]):
            block = Block(self.tensors, f"model.layers.{index}", self.config, qk_norm=False)
            x = block(x, positions, causal)
            outputs.append(x)
        final = rms_norm(x, self.tensors["model.norm.weight"], self.config["rms_norm_eps"])
        features = torch.cat([outputs[layer] for layer in self.feature_layers], dim=-1)
        return features, final @ self.head.T


@dataclass
class DenseDrafter:
    """A DFlash or DSpark drafter, with carried rows if it is given any."""

    config: dict[str, Any]
    tensors: Tensors

    @classmethod
    def load(cls, folder: Path) -> DenseDrafter:
        return cls(*_load(folder))

    @property
    def anchor_first(self) -> bool:
        return self.config["carryover"]["slot_layout"] == "anchor_first"

    def predicting(self, states: torch.Tensor) -> torch.Tensor:
        """Those of a block's states [slots, hidden] that predict: [proposals, hidden]."""
        return states if self.anchor_first else states[1:]

    def __call__(
        self,
        committed: torch.Tensor,
        rejected: torch.Tensor,
        anchor: int,
        embedding: torch.Tensor,
        proposals: int,
    ) -> torch.Tensor:
        """Hidden states [slots, hidden] of the block, after the last norm.

        Slots are 1 + proposals for slot_layout fill_in, proposals for anchor_first.

        Args:
            committed: [L, width] target features of positions 0 .. L-1; the anchor is at L.
            rejected: [R, width] features of the proposals rejected at L .. L+R-1; carried over.
            anchor: token id at L, the last committed token.
            embedding: [vocabulary, hidden], the target's.
            proposals: B.
        """
        epsilon = self.config["rms_norm_eps"]
        length = committed.shape[0]
        carry = rejected
        if rejected.shape[0]:
            carry = rejected + self.tensors["carry_embedding"]
        context = torch.cat([committed, carry]) @ self.tensors["fc.weight"].T
        context = rms_norm(context, self.tensors["hidden_norm.weight"], epsilon)
        context_positions = torch.arange(context.shape[0])  # carried rows keep L .. L+R-1
        masks = proposals - 1 if self.anchor_first else proposals
        positions = length + torch.arange(1 + masks)
        settings = self.config if self.anchor_first else self.config["dflash_config"]
        x = embedding[torch.tensor([anchor] + [settings["mask_token_id"]] * masks)]
        for index in range(self.config["num_hidden_layers"]):
            qk_norm = self.config["carryover"].get("qk_norm", True)
            block = Block(self.tensors, f"layers.{index}", self.config, qk_norm)
            keys = block.heads(context, "k", context_positions)
            values = block.heads(context, "v", None)
            x = block(x, positions, None, (keys, values))
        return rms_norm(x, self.tensors["norm.weight"], epsilon)

    def logits(
        self, states: torch.Tensor, target_head: torch.Tensor, before: list[int] | None = None
    ) -> torch.Tensor:
        """Scores [rows, target vocabulary]; -inf for tokens that the drafter cannot propose.

        Args:
            states: [rows, hidden], of the slots that predict.
            target_head: [target vocabulary, hidden].
            before: [rows] the token (a target id) before the one that each row predicts; with it
                a Markov head's correction is added.
        """
        scores = states @ self.tensors.get("lm_head.weight", target_head).T
        if before is not None and "markov_head.markov_w1.weight" in self.tensors:
            embedded = self.tensors["markov_head.markov_w1.weight"][torch.tensor(before)]
            scores = scores + embedded @ self.tensors["markov_head.markov_w2.weight"].T
        if "d2t" not in self.tensors:
            return scores
        offsets = self.tensors["d2t"]
        spread = torch.full((states.shape[0], target_head.shape[0]), float("-inf"))
        spread[:, torch.arange(offsets.shape[0]) + offsets] = scores
        return spread

    def propose(self, states: torch.Tensor, anchor: int, target_head: torch.Tensor) -> list[int]:
        """The greedy proposals of one block, left to right: `states` [B, hidden] in their order."""
        tokens = [anchor]
        for state in states:
            scores = self.logits(state.unsqueeze(0), target_head, tokens[-1:])
            tokens.append(int(scores.argmax()))
        return tokens[1:]
