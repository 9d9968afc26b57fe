"""`reference.DenseDrafter` with Gemma's blocks: plain torch, whole attention matrices, fp32.

Written from transformers' `Gemma4TextDecoderLayer` and the definition of the method, without vLLM,
transformers or our own training code.
"""

from __future__ import annotations

import torch

from tests.serving.reference import DenseDrafter, rms_norm


def rotate_part(x: torch.Tensor, positions: torch.Tensor, theta: float, part: float):
    """Rotary embedding of the first `part` of the pairs (i, i + D/2). x: [rows, heads, D]."""
    size = x.shape[-1]
    out = x.clone()
    for i in range(int(part * size) // 2):
        angle = positions.double() * theta ** (-2 * i / size)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        first, second = x[..., i], x[..., i + size // 2]
        out[..., i] = first * cos - second * sin
        out[..., i + size // 2] = second * cos + first * sin
    return out


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class DenseGemmaDrafter(DenseDrafter):
    """Anchor-first. The arguments of every method are those of `DenseDrafter`."""

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors.get(f"{name}.weight", torch.ones(x.shape[-1]))  # v_norm has none
        return rms_norm(x, weight, self.config["rms_norm_eps"])

    def heads(self, x: torch.Tensor, projection: str) -> torch.Tensor:
        y = x @ self.tensors[f"{projection}.weight"].T
        return y.unflatten(-1, (-1, self.config["global_head_dim"]))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rope = self.config["rope_parameters"]["full_attention"]
        return rotate_part(x, positions, rope["rope_theta"], rope["partial_rotary_factor"])

    def block(self, x, positions, context, context_positions, at: str) -> torch.Tensor:
        attention = f"{at}self_attn."
        y = self.norm(x, f"{at}input_layernorm")
        rows, places = torch.cat([context, y]), torch.cat([context_positions, positions])
        projected = self.heads(rows, f"{attention}k_proj")
        keys = self.rotate(self.norm(projected, f"{attention}k_norm"), places)
        values = self.norm(projected, f"{attention}v_norm")
        q = self.norm(self.heads(y, f"{attention}q_proj"), f"{attention}q_norm")
        q = self.rotate(q, positions)
        group = q.shape[1] // keys.shape[1]
        out = []
        for head in range(q.shape[1]):
            weights = (q[:, head] @ keys[:, head // group].T).softmax(-1)
            out.append(weights @ values[:, head // group])
        y = torch.cat(out, -1) @ self.tensors[f"{attention}o_proj.weight"].T
        x = x + self.norm(y, f"{at}post_attention_layernorm")
        y = self.norm(x, f"{at}pre_feedforward_layernorm")
        gate, up = (y @ self.tensors[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        y = (gelu(gate) * up) @ self.tensors[f"{at}mlp.down_proj.weight"].T
        x = x + self.norm(y, f"{at}post_feedforward_layernorm")
        return x * self.tensors[f"{at}layer_scalar"]

    def __call__(self, committed, rejected, anchor, embedding, proposals) -> torch.Tensor:
        length = len(committed)
        if len(rejected):
            rejected = rejected + self.tensors["carry_embedding"]
        context = torch.cat([committed, rejected]) @ self.tensors["fc.weight"].T
        context = self.norm(context, "hidden_norm")
        ids = [anchor] + [self.config["mask_token_id"]] * (proposals - 1)
        x = embedding[torch.tensor(ids)] * self.config["hidden_size"] ** 0.5
        positions = length + torch.arange(proposals)
        for index in range(self.config["num_hidden_layers"]):
            x = self.block(x, positions, context, torch.arange(len(context)), f"layers.{index}.")
        return self.norm(x, "norm")

    def logits(self, states, target_head, before=None) -> torch.Tensor:
        cap = self.config["final_logit_softcapping"]
        scores = cap * torch.tanh(states @ self.tensors.get("lm_head.weight", target_head).T / cap)
        if before is not None and "markov_head.markov_w1.weight" in self.tensors:
            embedded = self.tensors["markov_head.markov_w1.weight"][torch.tensor(before)]
            bias = embedded @ self.tensors["markov_head.markov_w2.weight"].T
            scores = scores + cap * torch.tanh(bias / cap)
        if "d2t" not in self.tensors:
            return scores
        offsets = self.tensors["d2t"]
        spread = torch.full((len(states), len(target_head)), float("-inf"))
        spread[:, torch.arange(len(offsets)) + offsets] = scores
        return spread
