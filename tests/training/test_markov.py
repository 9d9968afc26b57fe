"""Markov drafters: heads, losses and greedy drafting against slow references."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from carryover.drafter.checkpoint import load_into, load_tensors, observed_ids, save_drafter
from carryover.drafter.initialize import initialize_random
from carryover.drafter.model import Drafter
from carryover.errors import CarryoverError
from carryover.target.load import logit_cap
from carryover.training import losses, vocabulary
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks, draft_and_verify
from carryover.training.objective import Totals, draft_loss, label
from carryover.training.verify import Verifier
from carryover.training.vocabulary import Vocabulary
from tests.training.tiny import LAYERS, VOCABULARY, tiny_drafter, tiny_target

OBSERVED = torch.arange(0, VOCABULARY - 1, 3)
RANK, GAMMA = 5, 3.0
FACTORS = (0.1, 0.9, 1.0)


def markov_drafter(layout="fill_in", observed=None, carry=True) -> Drafter:
    size = None if observed is None else len(observed)
    drafter = tiny_drafter(
        layout, carry=carry, markov_rank=RANK, confidence=True, draft_vocab_size=size
    )
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.mul_(5)  # the head's logits are large
    return drafter


def head_of(target) -> torch.Tensor:
    return target.get_output_embeddings().weight.detach()


def capped(x: torch.Tensor, target) -> torch.Tensor:
    cap = getattr(target.config, "final_logit_softcapping", None)
    return x if cap is None else cap * torch.tanh(x / cap)


def words_of(target, observed) -> Vocabulary:
    return Vocabulary(head_of(target), observed, logit_cap(target.config))


def features_of(target, ids) -> torch.Tensor:
    target.set_attn_implementation("eager")
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in LAYERS], -1)


def recorded(target) -> Batch:
    """Two responses, the second one padded; some blocks reach past the end, one is unused."""
    torch.manual_seed(5)
    ids = torch.randint(0, VOCABULARY - 1, (2, 16))
    return Batch(
        token_ids=ids,
        lengths=torch.tensor([16, 12]),
        features=features_of(target, ids),
        anchors=torch.tensor([[2, 5, 9, 14], [3, 7, 10, 0]]),
        valid=torch.tensor([[True] * 4, [True] * 3 + [False]]),
    )


def dense_loss(target, drafter, batch, blocks, observed, factors) -> torch.Tensor:
    """The three terms, each a weighted mean, one position at a time in plain torch."""
    hidden = drafter(
        batch.token_ids.gather(1, blocks.anchors), blocks.anchors, batch.features, blocks.carry
    )
    known = list(range(VOCABULARY)) if observed is None else observed.tolist()
    weights = dict(drafter.named_parameters())
    target.set_attn_implementation("eager")
    sums, totals = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for r in range(len(batch.token_ids)):
        ids = batch.token_ids[r, : int(batch.lengths[r])]
        with torch.no_grad():
            p_all = target(ids[None]).logits[0].softmax(-1)
        for n in range(blocks.anchors.shape[1]):
            if not blocks.valid[r, n]:
                continue
            a = int(blocks.anchors[r, n])
            for k in range(1, drafter.config.proposals + 1):
                if a + k >= len(ids):
                    continue
                w = 2.718281828459045 ** (-(k - 1) / GAMMA)
                h, latent = hidden[r, n, k - 1], weights["markov_head.markov_w1.weight"]
                latent = latent[ids[a + k - 1]]  # the anchor's where k is 1
                z = capped(head_of(target)[known] @ h, target)
                z = z + capped(weights["markov_head.markov_w2.weight"] @ latent, target)
                q = torch.zeros(VOCABULARY).index_put((torch.tensor(known),), z.softmax(-1))
                p = p_all[a + k - 1]
                row = torch.cat((h, latent))
                confidence = weights["confidence_head.proj.weight"][0] @ row
                confidence = confidence + weights["confidence_head.proj.bias"][0]
                accepted = torch.minimum(p, q).sum().detach()
                label = int(ids[a + k])
                if label in known:
                    sums[0] = sums[0] - w * q[label].log()
                    totals[0] += w
                sums[1] = sums[1] + w * (q - p).abs().sum()
                sums[2] = sums[2] - w * (
                    accepted * F.logsigmoid(confidence) + (1 - accepted) * F.logsigmoid(-confidence)
                )
                totals[1] += w
                totals[2] += w
    return sum(f * s / t for f, s, t in zip(factors, sums, totals, strict=True))


@pytest.mark.parametrize("layout", ["fill_in", "anchor_first"])
@pytest.mark.parametrize("observed", [OBSERVED, None], ids=["reduced", "full"])
@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_loss_and_the_gradient_of_every_parameter_equal_the_dense_ones(
    family, layout, observed, chunk, monkeypatch
):
    """The Gemma target caps its logits, in transformers' own code."""
    monkeypatch.setattr(losses, "CHUNK", chunk)
    monkeypatch.setattr(vocabulary, "CHUNK", chunk)
    target, drafter = tiny_target(family), markov_drafter(layout, observed)
    batch = recorded(target)
    words = words_of(target, observed)
    verifier = Verifier(target, list(LAYERS))
    reading = verifier.read(batch.token_ids)
    blocks = draft_and_verify(drafter, words, verifier, batch, reading)
    size = drafter.config.proposals
    labels = label(batch, blocks, words, size, GAMMA, reading.hidden)
    scales = torch.tensor(FACTORS) / labels.summed_weights()
    totals = draft_loss(drafter, words, batch, blocks, labels, scales)
    got = torch.autograd.grad(totals.loss, list(drafter.parameters()))
    loss = dense_loss(target, drafter, batch, blocks, observed, FACTORS)
    want = torch.autograd.grad(loss, list(drafter.parameters()))
    torch.testing.assert_close(totals.loss, loss, rtol=1e-4, atol=1e-5)
    report = Totals.report(totals.as_vector(), size, FACTORS)
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for (name, _), g, w in zip(drafter.named_parameters(), got, want, strict=True):
        torch.testing.assert_close(
            g, w, rtol=1e-3, atol=1e-4 * float(w.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


def test_gradients_reach_the_drafter_its_heads_and_e_carry_and_nothing_else():
    target, drafter = tiny_target(), markov_drafter(observed=OBSERVED)
    batch = recorded(target)
    batch.features.requires_grad_(True)
    words = Vocabulary(head_of(target), OBSERVED)
    verifier = Verifier(target, list(LAYERS))
    reading = verifier.read(batch.token_ids)
    blocks = draft_and_verify(drafter, words, verifier, batch, reading)
    assert not blocks.carry.features.requires_grad and not reading.hidden.requires_grad
    labels = label(batch, blocks, words, drafter.config.proposals, GAMMA, reading.hidden)
    draft_loss(drafter, words, batch, blocks, labels, FACTORS).loss.backward()
    reached = {n for n, p in drafter.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {name for name, _ in drafter.named_parameters()}
    assert {
        "carry_embedding",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    } < reached
    assert all(parameter.grad is None for parameter in target.parameters())
    assert words.head.grad is None and drafter.embedding.grad is None


def test_a_term_of_factor_zero_moves_nothing():
    target, drafter = tiny_target(), markov_drafter()
    batch = recorded(target)
    words = Vocabulary(head_of(target), None)
    read = Verifier(target, list(LAYERS)).read(batch.token_ids).hidden
    blocks = Blocks(batch.anchors, batch.valid)
    for given, factors in ((None, (1.0, 0.0, 0.0)), (read, (1.0, 0.0, 0.0)), (read, FACTORS)):
        drafter.zero_grad()
        labels = label(batch, blocks, words, drafter.config.proposals, GAMMA, given)
        draft_loss(drafter, words, batch, blocks, labels, factors).loss.backward()
        bias = drafter.confidence_head.proj.bias.grad
        w2 = drafter.markov_head.markov_w2.weight.grad.clone()
        if given is None:
            first = w2
            assert bias is None
        elif factors[1] == 0:
            torch.testing.assert_close(w2, first)
            assert not bias.any()
        else:
            assert not torch.allclose(w2, first) and bias.any()


def test_the_recorded_text_is_read_once_and_as_the_target_reads_it():
    target = tiny_target("qwen3")
    batch = recorded(target)
    target.set_attn_implementation("eager")
    with torch.no_grad():
        want = target.get_decoder()(batch.token_ids).last_hidden_state
    verifier = Verifier(target, list(LAYERS))
    lengths: list[int] = []
    verifier.stack.layers[0].register_forward_hook(
        lambda _, args, __: lengths.append(args[0].shape[1])
    )
    reading = verifier.read(batch.token_ids)
    torch.testing.assert_close(reading.hidden, want, rtol=1e-4, atol=1e-4)
    verifier(reading, batch.anchors, torch.randint(0, VOCABULARY, (2, 4, 3)))
    assert lengths == [16, 12]  # the text; the branches of a verification


@pytest.mark.parametrize("layout", ["fill_in", "anchor_first"])
@pytest.mark.parametrize("observed", [OBSERVED, None], ids=["reduced", "full"])
@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_greedy_drafting_equals_a_loop_over_anchors(cap, layout, observed, chunk, monkeypatch):
    monkeypatch.setattr(vocabulary, "CHUNK", chunk)
    drafter = markov_drafter(layout, observed)
    words = Vocabulary(drafter.head, observed, cap)
    known = torch.arange(VOCABULARY) if observed is None else observed
    torch.manual_seed(1)
    anchors = torch.randint(1, 9, (2, 5))
    tokens = torch.randint(0, VOCABULARY, (2, 5))
    features = torch.randn(2, 9, drafter.config.feature_size)
    with torch.no_grad():
        hidden = drafter(tokens, anchors, features)
        got = words.propose(hidden, tokens, drafter.markov_head)
        w1 = drafter.markov_head.markov_w1.weight
        w2 = drafter.markov_head.markov_w2.weight
        for r in range(2):
            for n in range(5):
                previous, drafted = int(tokens[r, n]), []
                for k in range(drafter.config.proposals):
                    parts = [drafter.head[known] @ hidden[r, n, k], w2 @ w1[previous]]
                    if cap is not None:
                        parts = [cap * torch.tanh(part / cap) for part in parts]
                    previous = int(known[sum(parts).argmax()])
                    drafted.append(previous)
                assert got[r, n].tolist() == drafted
        assert not torch.equal(got, words.propose(hidden, tokens))


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("observed", [OBSERVED, None], ids=["reduced", "full"])
@pytest.mark.parametrize("layout", ["fill_in", "anchor_first"])
def test_round_trip_is_bit_exact(tmp_path: Path, carry, observed, layout) -> None:
    drafter = markov_drafter(layout, observed, carry).to(torch.bfloat16)
    head = None if observed is None else torch.randn(len(observed), 32).bfloat16()
    save_drafter(tmp_path, drafter, observed, head)
    config, tensors = load_tensors(tmp_path)
    assert config == drafter.config
    assert observed is None or observed_ids(tensors).tolist() == observed.tolist()
    rows = VOCABULARY if observed is None else len(observed)
    assert tensors["markov_head.markov_w1.weight"].shape == (VOCABULARY, RANK)
    assert tensors["markov_head.markov_w2.weight"].shape == (rows, RANK)
    assert tensors["confidence_head.proj.weight"].shape == (1, 32 + RANK)
    assert tensors["confidence_head.proj.bias"].shape == (1,)
    again = Drafter(config).to(torch.bfloat16)
    load_into(again, tensors)
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    if not carry:  # a baseline that goes on with carry
        further = Drafter(config.with_carry("hidden_states", "embedding")).to(torch.bfloat16)
        load_into(further, tensors)
        assert torch.equal(
            further.markov_head.markov_w2.weight, drafter.markov_head.markov_w2.weight
        )
    plain = Drafter(dataclasses.replace(config, markov_rank=0, confidence=False))
    with pytest.raises(CarryoverError, match=r"has unknown .*confidence_head\.proj\.bias"):
        load_into(plain, tensors)


@pytest.mark.parametrize(
    ("changes", "architectures"),
    [
        ({}, ["DFlashCarryoverDraftModel", "DFlashDraftModel"]),
        ({"carry": True}, ["DFlashCarryoverDraftModel"]),
        ({"qk_norm": False}, ["DFlashCarryoverDraftModel"]),
        ({"markov_rank": 4}, ["DFlashCarryoverDraftModel"]),
        (
            {"markov_rank": 4, "slot_layout": "anchor_first"},
            ["Qwen3CarryoverDSparkModel", "Qwen3DSparkModel"],
        ),
        (
            {"markov_rank": 4, "slot_layout": "anchor_first", "carry": True},
            ["Qwen3CarryoverDSparkModel", "K3DSparkModel"],
        ),
        (
            {"markov_rank": 4, "slot_layout": "anchor_first", "qk_norm": False},
            ["Qwen3CarryoverDSparkModel", "K3DSparkModel"],
        ),
        # Capped logits: their sum with a Markov head's is another in vLLM's own Qwen3 class.
        (
            {"final_logit_softcapping": 30.0},
            ["DFlashCarryoverDraftModel", "DFlashDraftModel"],
        ),
        (
            {"markov_rank": 4, "slot_layout": "anchor_first", "final_logit_softcapping": 30.0},
            ["Qwen3CarryoverDSparkModel", "K3DSparkModel"],
        ),
    ],
)
def test_stock_vllm_is_named_only_where_it_would_serve_the_drafter(changes, architectures):
    config = dataclasses.replace(tiny_drafter(carry=False).config, **changes)
    assert config.architectures == architectures
    assert config.to_json("float32")["architectures"] == architectures


def test_config_json_has_deepspecs_fields(tmp_path: Path) -> None:
    save_drafter(tmp_path, markov_drafter("anchor_first"), None, None)
    data = json.loads((tmp_path / "config.json").read_text())
    assert {
        "block_size": 4,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "target_layer_ids": list(LAYERS),
        "mask_token_id": VOCABULARY - 1,
    }.items() <= data.items()
    save_drafter(tmp_path, markov_drafter("fill_in"), None, None)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["block_size"] == 5 and "target_layer_ids" not in data
    save_drafter(tmp_path, tiny_drafter(), None, None)
    assert "markov_rank" not in json.loads((tmp_path / "config.json").read_text())


def test_initial_weights_are_deepspecs():
    drafter = markov_drafter()
    initialize_random(drafter, 3)
    for weight in (drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight):
        assert 0.015 < weight.std().item() < 0.025
    assert not drafter.confidence_head.proj.bias.any()


@pytest.mark.parametrize("kind", ["dflash", "markov"])
def test_a_handful_of_responses_is_learnt(kind: str) -> None:
    """The target's own greedy responses, to more than 0.9 (B + 1) tokens a round."""
    target = tiny_target("qwen3", seed=3)  # one that does not repeat itself
    with torch.no_grad():
        head_of(target).mul_(8)  # a sharp distribution, as real targets have
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY - 1, (4, 4))
    target.set_attn_implementation("eager")
    with torch.no_grad():
        for _ in range(18):
            ids = torch.cat((ids, target(ids).logits[:, -1:].argmax(-1)), 1)
    assert len(ids[:, 4:].unique()) > 20
    batch = Batch(
        token_ids=ids,
        lengths=torch.full((4,), ids.shape[1]),
        features=features_of(target, ids),
        anchors=torch.arange(4, ids.shape[1] - 1).expand(4, -1),
        valid=torch.ones(4, ids.shape[1] - 5, dtype=torch.bool),
    )
    markov = {"markov_rank": 8, "confidence": True} if kind == "markov" else {}
    factors = FACTORS if kind == "markov" else (1.0, 0.0, 0.0)
    drafter = tiny_drafter(carry=False, **markov)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 32**-0.5)  # learns sooner at this width than N(0, 0.02)
    drafter.share(target.get_input_embeddings().weight)
    words = Vocabulary(head_of(target), None)
    read = Verifier(target, list(LAYERS)).read(ids).hidden if kind == "markov" else None
    blocks, size = Blocks(batch.anchors, batch.valid), drafter.config.proposals
    labels = label(batch, blocks, words, size, 4.0, read)
    scales = torch.tensor(factors) / labels.summed_weights()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    taus = []
    for _ in range(120):
        totals = draft_loss(drafter, words, batch, blocks, labels, scales)
        report = Totals.report(totals.as_vector(), size, factors)
        taus.append(report["expected_acceptance_length"])
        if taus[-1] > 0.9 * (size + 1):
            break
        optimizer.zero_grad()
        totals.loss.backward()
        optimizer.step()
    assert taus[0] < 2 and taus[-1] > 0.9 * (size + 1)
