"""Tiny random targets and drafters in fp32, and slow dense references written from the paper."""

import torch
from torch import Tensor
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from carryover.drafter.config import DrafterConfig
from carryover.drafter.model import Drafter

VOCABULARY = 97
# carry.rows and carry.distinction: all that the config accepts.
CARRIES = [
    ("hidden_states", "embedding"),
    ("hidden_states", "none"),
    ("hidden_states", "projector"),
    ("draft_tokens", "none"),
    ("target_tokens", "none"),
    ("target_top5", "none"),
]
CAP = 3.0  # of the Gemma target's logits; most of them are larger without it
WINDOW = 3  # of sliding layers: shorter than a branch
LAYERS = (0, 1)  # not the last block: transformers reports its output after the final norm


def tiny_target(family: str = "llama", seed: int = 0):
    """A 3-block random target, hidden 32, grouped-query heads.

    family: llama, qwen3 or gemma4; "qwen3, sliding" and "gemma4, sliding" have sliding layers.
    """
    torch.manual_seed(seed)
    family, _, sliding = family.partition(", ")
    layers = ["sliding_attention" if sliding else "full_attention"] * 2 + ["full_attention"]
    shape = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif family == "gemma4":
        config = Gemma4TextConfig(
            **shape, layer_types=layers, sliding_window=WINDOW, global_head_dim=16,
            num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0,
            final_logit_softcapping=CAP,
        )  # fmt: skip
        model = Gemma4ForCausalLM(config)
    else:
        window = {"use_sliding_window": True, "sliding_window": WINDOW} if sliding else {}
        model = Qwen3ForCausalLM(Qwen3Config(**shape, layer_types=layers, **window))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1).add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def tiny_drafter(
    layout="fill_in", qk_norm=True, carry=True, proposals=4, seed=1,
    rows="hidden_states", distinction="embedding", **markov,
) -> Drafter:  # fmt: skip
    """A 2-block random drafter for `tiny_target` with a random shared embedding.

    A random head of the target's size is kept beside it, as `.head`. markov: `markov_rank`,
    `confidence` and `draft_vocab_size` of its config.
    """
    torch.manual_seed(seed)
    config = DrafterConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=256, vocab_size=VOCABULARY, target_hidden_size=32,
        target_layer_ids=LAYERS, target_blocks=3, mask_token_id=VOCABULARY - 1,
        proposals=proposals, slot_layout=layout, qk_norm=qk_norm, carry=carry,
        carry_rows=rows, carry_distinction=distinction, **markov,
    )  # fmt: skip
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    drafter.share(torch.randn(VOCABULARY, 32))
    drafter.head = torch.randn(VOCABULARY, 32)
    return drafter


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one vector [D], pair by pair."""
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half), dtype=torch.float64)
        cos, sin = angle.cos().float(), angle.sin().float()
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def dense_draft(
    drafter: Drafter,
    anchor_token: int,
    anchor: int,
    features: Tensor,
    carried: list[tuple[int, Tensor]],
    hints: dict[int, Tensor] | None = None,
) -> Tensor:
    """One block, one token and one head at a time. Returns [B, H].

    features: [>= anchor, nH_t], of which rows 0..anchor-1 are context; carried: (position,
    feature) of the rejected rows; hints: absolute position -> what replaces the mask embedding in
    the slot that predicts it.
    """
    c, w = drafter.config, dict(drafter.named_parameters())
    slots = c.proposals + 1 if c.slot_layout == "fill_in" else c.proposals
    ids = [anchor_token] + [c.mask_token_id] * (slots - 1)
    x = [drafter.embedding[i] for i in ids]
    for s in range(1, slots):
        predicted = anchor + s + (c.slot_layout == "anchor_first")
        x[s] = (hints or {}).get(predicted, x[s])
    rows = [(p, w["fc.weight"] @ features[p]) for p in range(anchor)]
    mark = w["carry_embedding"] if c.carry_distinction == "embedding" and carried else 0
    apart = "carry_projector.weight" if c.carry_distinction == "projector" else "fc.weight"
    rows += [(p, w[apart] @ (f + mark)) for p, f in carried]
    memory = [(p, norm(v, w["hidden_norm.weight"], c.rms_norm_eps)) for p, v in rows]
    group = c.num_attention_heads // c.num_key_value_heads
    for i in range(c.num_hidden_layers):
        name = f"layers.{i}."

        def heads(vector, projection, count, qk=None, name=name):
            y = (w[f"{name}self_attn.{projection}.weight"] @ vector).view(count, c.head_dim)
            if qk and c.qk_norm:
                y = norm(y, w[f"{name}self_attn.{qk}.weight"], c.rms_norm_eps)
            return y

        normed = [norm(v, w[name + "input_layernorm.weight"], c.rms_norm_eps) for v in x]
        sources = memory + [(anchor + s, normed[s]) for s in range(slots)]
        keys = [(p, heads(v, "k_proj", c.num_key_value_heads, "k_norm")) for p, v in sources]
        keys = [[rotate(head, p, c.rope_theta) for head in k] for p, k in keys]
        values = [heads(v, "v_proj", c.num_key_value_heads) for _, v in sources]
        attended = []
        for s in range(slots):
            q = heads(normed[s], "q_proj", c.num_attention_heads, "q_norm")
            out = []
            for h in range(c.num_attention_heads):
                qh = rotate(q[h], anchor + s, c.rope_theta)
                scores = torch.stack([qh @ k[h // group] for k in keys])
                weights = (scores / c.head_dim**0.5).softmax(0)
                out.append(sum(a * v[h // group] for a, v in zip(weights, values, strict=True)))
            attended.append(w[f"{name}self_attn.o_proj.weight"] @ torch.cat(out))
        x = [v + a for v, a in zip(x, attended, strict=True)]
        for s in range(slots):
            y = norm(x[s], w[name + "post_attention_layernorm.weight"], c.rms_norm_eps)
            gate = w[name + "mlp.gate_proj.weight"] @ y
            up = w[name + "mlp.up_proj.weight"] @ y
            x[s] = x[s] + w[name + "mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
    x = [norm(v, w["norm.weight"], c.rms_norm_eps) for v in x]
    return torch.stack(x[1:] if c.slot_layout == "fill_in" else x)


@torch.no_grad()
def dense_next(target, prefix: Tensor, proposals: Tensor) -> Tensor:
    """The target's probabilities [B, V] for the token after each proposal of a branch."""
    target.set_attn_implementation("eager")
    return target(torch.cat((prefix, proposals))[None]).logits[0, -len(proposals) :].softmax(-1)


@torch.no_grad()
def dense_verify(target, prefix: Tensor, proposals: Tensor) -> tuple[Tensor, Tensor]:
    """One branch with the target's ordinary forward over the whole text.

    prefix: [a+1] ids up to the anchor; proposals: [B]. Returns features [B, nH_t] at the proposed
    positions and the greedy tokens [B] for them.
    """
    target.set_attn_implementation("eager")
    out = target(torch.cat((prefix, proposals))[None], output_hidden_states=True)
    size = len(proposals)
    features = torch.cat([out.hidden_states[i + 1][0] for i in LAYERS], -1)[-size:]
    return features, out.logits[0, -size - 1 : -1].argmax(-1)
