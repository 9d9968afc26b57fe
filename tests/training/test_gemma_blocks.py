"""Drafters with Gemma's blocks: forward, gradients, checkpoints, DeepSpec's format.

The references are transformers' own decoder layer, where there is no context, and the dense
drafter of tests/serving/gemma_reference.py, which vLLM is held against too.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
)

from carryover.config import load_config
from carryover.drafter import formats
from carryover.drafter.attention import Visible
from carryover.drafter.checkpoint import load_into, load_tensors, save_drafter
from carryover.drafter.config import DrafterConfig
from carryover.drafter.gemma import Block
from carryover.drafter.initialize import initialize_from_target, initialize_random, new_config
from carryover.drafter.layout import proposal_positions
from carryover.drafter.model import Carry, Drafter, Hints
from carryover.errors import CarryoverError
from carryover.training.dvd import draft_and_verify
from carryover.training.objective import draft_loss, label
from carryover.training.verify import Verifier
from carryover.training.vocabulary import Vocabulary
from tests.serving.gemma_reference import DenseGemmaDrafter
from tests.tiny_target import DEFAULT
from tests.training import released as write
from tests.training.test_markov import FACTORS, GAMMA, head_of, recorded
from tests.training.tiny import CAP, LAYERS, VOCABULARY, tiny_drafter, tiny_target

GEMMA = {"blocks": "gemma4", "partial_rotary_factor": 0.25, "final_logit_softcapping": CAP}


def gemma_drafter(carry: bool = True, **changes: Any) -> Drafter:
    """A random drafter of `tiny_target`; scores of attention are as far apart as trained ones'."""
    markov = {"markov_rank": 5, "confidence": True} | changes
    plain = tiny_drafter("anchor_first", carry=carry, **markov)
    drafter = Drafter(replace(plain.config, **GEMMA))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in drafter.state_dict().items():
            value.normal_(0.0, 0.3, generator=generator)
            if "norm" in name or "scalar" in name:
                value.add_(1)
    drafter.share(plain.embedding)
    return drafter


@torch.no_grad()
def test_a_block_without_context_is_transformers_own_decoder_layer() -> None:
    torch.manual_seed(0)
    theirs_config = Gemma4TextConfig(
        vocab_size=9, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True, layer_types=["full_attention"],
        hidden_size_per_layer_input=0, max_position_embeddings=64,
    )  # fmt: skip
    theirs_config._attn_implementation = "eager"
    theirs = Gemma4TextDecoderLayer(theirs_config, 0)
    for value in theirs.state_dict().values():
        value.copy_(torch.randn_like(value) * 0.5 + (value.ndim == 1))
    plain = tiny_drafter("anchor_first", carry=False).config
    ours = Drafter(
        replace(
            plain, blocks="gemma4", num_hidden_layers=1, num_key_value_heads=1, head_dim=16,
            partial_rotary_factor=0.25, rope_theta=1e6,
        )
    )  # fmt: skip
    block = ours.layers[0]
    assert isinstance(block, Block)
    block.load_state_dict(theirs.state_dict())
    x, at = torch.randn(2, 3, 4, 32), torch.randint(0, 40, (2, 3, 1)) + torch.arange(4)
    unseen, nowhere = torch.randn(2, 1, 32), torch.zeros(2, 1, dtype=torch.long)
    context, own = torch.zeros(2, 3, 1, 1).bool(), torch.ones(2, 3, 1, 4).bool()
    got = block(x, at, unseen, nowhere, Visible(context, own), None, None)
    flat = at.flatten(0, 1)
    embeddings = Gemma4TextRotaryEmbedding(theirs_config)(x, flat, "full_attention")
    want = theirs(x.flatten(0, 1), shared_kv_states={}, position_embeddings=embeddings)
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reduced", [True, False])
@torch.no_grad()
def test_exported_drafter_drafts_as_trained_for_every_number_of_carried_rows(
    tmp_path: Path, reduced: bool
) -> None:
    """States and greedy proposals equal the dense reference's, on the exported folder."""
    observed = torch.tensor([1, 4, 5, 40, 77, 96]) if reduced else None
    drafter = gemma_drafter(draft_vocab_size=6 if reduced else None)
    size = drafter.config.proposals
    torch.manual_seed(2)
    target_head = torch.randn(VOCABULARY, 32)
    words = Vocabulary(target_head, observed, CAP)
    save_drafter(tmp_path, drafter, observed, words.head if reduced else None)
    reference = DenseGemmaDrafter.load(tmp_path)
    features = torch.randn(1, 12, drafter.config.feature_size)
    rejected = torch.randn(1, 1, size, drafter.config.feature_size)
    different = []
    for accepted in range(size + 1):
        anchor = 3 + accepted + 1
        carry = Carry(
            rejected,
            proposal_positions(torch.tensor([[3]]), size),
            torch.arange(1, size + 1)[None, None] > accepted,
        )
        token, at = torch.tensor([[17]]), torch.tensor([[anchor]])
        got = drafter(token, at, features, carry)
        left = rejected[0, 0, accepted:]
        want = reference(features[0, :anchor], left, 17, drafter.embedding, size)
        torch.testing.assert_close(got[0, 0], want, rtol=1e-4, atol=1e-4)
        proposals = words.propose(got, token, drafter.markov_head)[0, 0].tolist()
        assert proposals == reference.propose(want, 17, target_head)
        different.append((got - drafter(token, at, features)).abs().max() > 0.05)
    assert different == [True] * size + [False]  # carried rows change the block


@torch.no_grad()
def test_hints_are_scaled_as_the_masks_they_replace() -> None:
    drafter = gemma_drafter()
    token, at = torch.tensor([[17]]), torch.tensor([[4]])
    features = torch.randn(1, 9, drafter.config.feature_size)
    mask = drafter.config.mask_token_id
    size = drafter.config.proposals
    hints = Hints(
        ids=torch.full((1, 1, size, 1), mask),
        weights=torch.ones(1, 1, size, 1),
        exists=torch.arange(size)[None, None] > 0,
    )
    assert torch.equal(drafter(token, at, features, hints), drafter(token, at, features))


def test_gradients_reach_the_drafter_and_e_carry_and_nothing_else() -> None:
    target, drafter = tiny_target("gemma4"), gemma_drafter()
    drafter.share(target.get_input_embeddings().weight)
    batch = recorded(target)
    batch.features.requires_grad_(True)
    words = Vocabulary(head_of(target), None, CAP)
    verifier = Verifier(target, list(LAYERS))
    reading = verifier.read(batch.token_ids)
    blocks = draft_and_verify(drafter, words, verifier, batch, reading)
    labels = label(batch, blocks, words, drafter.config.proposals, GAMMA, reading.hidden)
    draft_loss(drafter, words, batch, blocks, labels, FACTORS).loss.backward()
    reached = {n for n, p in drafter.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {name for name, _ in drafter.named_parameters()}
    of_a_block = {name.removeprefix("layers.0.") for name in reached if "layers.0." in name}
    assert of_a_block == {
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "o_proj")),
        *(f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
    }
    assert {"fc.weight", "carry_embedding", "hidden_norm.weight"} < reached
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(not layer.layer_scalar.requires_grad for layer in drafter.layers)


@pytest.mark.parametrize("carry", [True, False])
def test_round_trip_is_bit_exact(tmp_path: Path, carry: bool) -> None:
    drafter = gemma_drafter(carry).to(torch.bfloat16)
    save_drafter(tmp_path, drafter, None, None)
    config, tensors = load_tensors(tmp_path)
    assert config == drafter.config
    assert not any("v_proj" in name or "v_norm" in name for name in tensors)
    again = Drafter(config).to(torch.bfloat16)
    load_into(again, tensors)
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("changes", "stock"),
    [
        ({}, "Gemma4DSparkModel"),
        ({"carry": True}, "K3DSparkModel"),
        ({"markov_rank": 0, "confidence": False}, "K3DSparkModel"),
        ({"draft_vocab_size": 6}, "K3DSparkModel"),
    ],
)
def test_stock_vllm_is_named_only_where_it_would_serve_the_drafter(
    changes: dict[str, Any], stock: str
) -> None:
    config = replace(gemma_drafter(carry=False).config, **changes)
    assert config.architectures == ["Gemma4CarryoverDSparkModel", stock]


@pytest.mark.parametrize("rank", [0, write.RANK])
@pytest.mark.parametrize("newer", [True, False])
def test_deepspecs_gemma_drafters_are_read(tmp_path: Path, rank: int, newer: bool) -> None:
    config = write.gemma(320, rank=rank)
    if newer:  # as transformers 5.19 writes the same
        del config["global_head_dim"], config["num_global_key_value_heads"]
        layer = {"head_dim": write.HEAD_DIM, "num_key_value_heads": 1}
        config["per_layer_config"] = {str(i): layer for i in range(write.LAYERS)}
        rope = config["rope_parameters"]
        config["rope_parameters"] = {name: rope[name] for name in rope if "attention" in name}
    # In transformers' own words.
    kinds = {k: v for k, v in config["rope_parameters"].items() if "attention" in k}
    theirs = Gemma4TextConfig.from_dict(config | {"rope_parameters": kinds})
    tensors = write.gemma_backbone(1) | (write.heads(320, 320) if rank else {})
    copies = {"embed_tokens.weight": torch.randn(320, 64), "lm_head.weight": torch.randn(320, 64)}
    found = formats.read(write.write(tmp_path / "d", config, tensors | copies))
    assert found.format == "DeepSpec-Gemma"
    own = {"markov_rank": rank, "confidence": True} if rank else {}
    assert found.fields == own | {
        "blocks": "gemma4", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96,
        "max_position_embeddings": 2048, "vocab_size": 320, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "partial_rotary_factor": 0.25, "qk_norm": True,
        "final_logit_softcapping": 30.0, "target_layer_ids": (0, 2), "mask_token_id": 3,
        "proposals": 4, "slot_layout": "anchor_first", "target_blocks": 4,
    }  # fmt: skip
    for i in range(write.LAYERS):
        assert theirs.per_layer_config[i].head_dim == found.fields["head_dim"]
        assert theirs.per_layer_config[i].num_key_value_heads == 1
    assert torch.equal(found.embedding, copies["embed_tokens.weight"])
    assert torch.equal(found.head, copies["lm_head.weight"])
    drafter = Drafter(DrafterConfig(target_hidden_size=64, **found.fields))
    load_into(drafter, found.tensors)
    for name, value in tensors.items():
        assert torch.equal(drafter.state_dict()[name], value), name


@pytest.mark.parametrize("tensor", ["layers.1.layer_scalar", "layers.0.self_attn.q_norm.weight"])
def test_a_missing_or_unknown_tensor_is_named(tmp_path: Path, tensor: str) -> None:
    tensors = write.gemma_backbone(1)
    folder = write.write(tmp_path / "d", write.gemma(320, rank=0), tensors)
    found = formats.read(folder)
    drafter = Drafter(DrafterConfig(target_hidden_size=64, **found.fields))
    with pytest.raises(CarryoverError, match=f"lacks {tensor}"):
        load_into(drafter, {k: v for k, v in tensors.items() if k != tensor})
    extra = {"layers.0.self_attn.v_proj.weight": torch.zeros(32, 64)}
    with pytest.raises(CarryoverError, match=r"has unknown layers\.0\.self_attn\.v_proj"):
        load_into(drafter, tensors | extra)


def test_a_new_drafter_has_the_shapes_of_the_targets_full_attention_layers() -> None:
    options: dict[str, Any] = {
        "feature_layers": [0, 1], "mask_token_id": 5, "layers": 2, "proposals": 4,
        "slot_layout": "anchor_first", "blocks": "gemma4", "qk_norm": True,
        "draft_vocab_size": None, "markov_rank": 4,
    }  # fmt: skip
    target = tiny_target("gemma4")
    config = new_config(target, **options)
    assert (config.head_dim, config.num_key_value_heads) == (16, 2)  # its sliding ones would have 8
    assert (config.rope_theta, config.partial_rotary_factor) == (1e6, 0.25)
    assert config.final_logit_softcapping == CAP
    drafter = Drafter(config)
    initialize_random(drafter, 3)
    assert all(layer.layer_scalar.item() == 1 for layer in drafter.layers)
    initialize_from_target(drafter, target)
    theirs = target.get_decoder().layers[-1].state_dict()
    for name, value in theirs.items():
        assert torch.equal(drafter.layers[-1].state_dict()[name], value), name
    plain = new_config(tiny_target("llama"), **options)
    assert (plain.head_dim, plain.num_key_value_heads) == (8, 2)
    assert (plain.partial_rotary_factor, plain.final_logit_softcapping) == (1.0, None)


def test_qwens_blocks_for_a_target_whose_layers_differ() -> None:
    options: dict[str, Any] = {
        "feature_layers": [0, 1], "mask_token_id": 5, "layers": 2, "proposals": 4,
        "slot_layout": "fill_in", "qk_norm": True, "draft_vocab_size": None,
    }  # fmt: skip
    config = new_config(tiny_target("gemma4"), **options)
    assert (config.blocks, config.head_dim, config.num_key_value_heads) == ("qwen3", 16, 2)
    assert (config.rope_theta, config.partial_rotary_factor) == (1e6, 1.0)
    assert config.final_logit_softcapping == CAP


def test_config_keys_that_gemmas_blocks_do_not_go_with() -> None:
    gemma = ["drafters.DFlash.blocks=gemma4", "drafters.DFlash.kind=markov"]
    with pytest.raises(CarryoverError) as caught:
        load_config(DEFAULT, gemma)
    assert "drafters.DFlash.slot_layout: fill_in does not go with" in str(caught.value)
    assert "drafters.DFlash.qk_norm: " in str(caught.value)
    fits = ["drafters.DFlash.slot_layout=anchor_first", "drafters.DFlash.qk_norm=true"]
    config = load_config(DEFAULT, gemma + fits)
    assert config.drafters["DFlash"].blocks == "gemma4"


def test_an_export_says_its_blocks_in_the_words_of_a_gemma_config(tmp_path: Path) -> None:
    drafter = gemma_drafter(carry=False)
    save_drafter(tmp_path, drafter, None, None)
    data = json.loads((tmp_path / "config.json").read_text())
    theirs = Gemma4TextConfig.from_dict(data)
    for layer in (theirs.per_layer_config[i] for i in range(2)):
        assert (layer.head_dim, layer.num_key_value_heads) == (8, 2)
    assert theirs.layer_types == ["full_attention"] * 2 and theirs.attention_k_eq_v
    assert theirs.final_logit_softcapping == CAP
    assert data["carryover"]["blocks"] == "gemma4" and data["target_layer_ids"] == [0, 1]
