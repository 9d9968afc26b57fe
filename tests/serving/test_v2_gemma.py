"""Drafters with Gemma's blocks in vLLM's V2 model runner, and in its own Gemma4DSparkModel.

A drafter is written in DeepSpec's format, read, and exported as ours; where it carries, E_carry is
added. Its states in vLLM at every round equal those of the module that we train and of a dense
reference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from carryover.drafter import formats
from carryover.drafter.checkpoint import load_into, save_drafter
from carryover.drafter.config import DrafterConfig
from carryover.drafter.layout import proposal_positions
from carryover.drafter.model import Carry, Drafter
from tests.serving import checkpoints
from tests.serving.gemma_reference import DenseGemmaDrafter
from tests.serving.harness import ACCEPTED, PROMPT_LENGTHS, random_prompts, run_jobs, run_script
from tests.serving.reference import DenseTarget
from tests.training import released as write

pytestmark = pytest.mark.long

TOLERANCE = 1e-4
PROPOSALS, GENERATED = 7, 48
CAP = 2.0  # the larger of the scores are bent
DRAFTERS: dict[str, dict[str, Any]] = {
    "Markov, carryover": {"carry": True},
    "Markov, carryover, reduced": {"carry": True, "drafted": 100},
    "carryover": {"carry": True, "rank": 0},
    "Markov, baseline": {"copies": True},
}


def ends(target: Path) -> dict[str, torch.Tensor]:
    weights = load_file(target / "model.safetensors")
    return {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }


def write_deepspec(folder: Path, target: Path, rank: int = write.RANK) -> Path:
    """A drafter of the tiny target as DeepSpec writes it."""
    vocabulary = checkpoints.VOCABULARY
    config = write.gemma(vocabulary, rank=rank, block_size=PROPOSALS, final_logit_softcapping=CAP)
    tensors = write.gemma_backbone(6) | ends(target)
    if rank:
        tensors |= write.heads(vocabulary, vocabulary)
    return write.write(folder, config, tensors)


def write_ours(
    folder: Path,
    source: Path,
    *,
    carry: bool = False,
    drafted: int | None = None,
    copies: bool = False,
) -> tuple[Path, Drafter]:
    """What we read in `source`, and its export; copies: with those that vLLM's own class needs."""
    found = formats.read(source)
    settings = DrafterConfig(target_hidden_size=write.HIDDEN, **found.fields)
    tensors, observed, head = dict(found.tensors), None, None
    assert found.head is not None and found.embedding is not None
    if drafted is not None:
        chosen = torch.randperm(settings.vocab_size, generator=torch.Generator().manual_seed(0))
        observed = chosen[:drafted].sort().values
        settings = replace(settings, draft_vocab_size=drafted)
        name = "markov_head.markov_w2.weight"
        tensors[name], head = tensors[name][observed], found.head[observed]
    if carry:
        settings = settings.with_carry("hidden_states", "embedding")
    drafter = Drafter(settings)
    load_into(drafter, tensors)
    if carry:
        torch.manual_seed(3)
        torch.nn.init.normal_(drafter.carry_embedding)
    drafter.share(found.embedding)
    if copies:
        head = found.head
    save_drafter(folder, drafter, observed, head, found.embedding if copies else None)
    return folder, drafter


def draft(
    drafter: Drafter, event: dict[str, Any], committed: torch.Tensor, carried: torch.Tensor
) -> torch.Tensor:
    """States [B, H] of one round's block in the module that we train.

    committed: [L, nH_t], features before the anchor; carried: [R, nH_t], of rejected rows.
    """
    carry = None
    if drafter.config.carry:
        padded = torch.zeros(1, 1, PROPOSALS, committed.shape[1])
        padded[0, 0, : len(carried)] = carried
        there = torch.arange(PROPOSALS)[None, None] < len(carried)
        # The first carried row stands where the rejected token did: at the anchor.
        positions = proposal_positions(torch.tensor([[len(committed) - 1]]), PROPOSALS)
        carry = Carry(padded, positions, there)
    token, at = torch.tensor([[event["anchor"]]]), torch.tensor([[len(committed)]])
    states: torch.Tensor = drafter(token, at, committed[None], carry)[0, 0]
    return states


class ServedGemma:
    """What the V2 runner did with one target and these drafters."""

    def __init__(self, folder: Path) -> None:
        self.prompts = random_prompts(0, checkpoints.VOCABULARY, PROMPT_LENGTHS)
        target = checkpoints.write_target(folder / "target", seed=0)
        sources = {
            rank: write_deepspec(folder / f"source-{rank}", target, rank)
            for rank in (0, write.RANK)
        }
        made = {
            name: write_ours(
                folder / f"drafter-{index}",
                sources[options.get("rank", write.RANK)],
                **{key: value for key, value in options.items() if key != "rank"},
            )
            for index, (name, options) in enumerate(DRAFTERS.items())
        }
        base = {"target": target, "prompts": self.prompts, "sampling": {"max_tokens": GENERATED}}
        jobs: dict[str, dict[str, Any]] = {
            "autoregressive": base | {"sampling": {"max_tokens": GENERATED + 32}}
        }
        for name, (path, _) in made.items():
            jobs[name] = base | {
                "drafter": path,
                "speculative": {"method": "dspark"},
                "continue_from": 0,
                "accepted": ACCEPTED,
                "worker": name != "Markov, baseline",
            }
        results = run_jobs(folder, list(jobs.values()), v2=True)
        self.results = dict(zip(jobs, results, strict=True))
        for name, result in self.results.items():
            assert "error" not in result, (name, result)
        self.target = DenseTarget.load(target, write.IDS)
        self.trained = {name: drafter for name, (_, drafter) in made.items()}
        self.dense = {name: DenseGemmaDrafter.load(path) for name, (path, _) in made.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedGemma:
    return ServedGemma(tmp_path_factory.mktemp("gemma"))


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_states_and_proposals_of_every_round(served: ServedGemma, name: str) -> None:
    dense, trained = served.dense[name], served.trained[name]
    enabled = trained.config.carry
    known = [list(prompt) for prompt in served.prompts]
    rounds = served.results[name]["rounds"]
    assert {len(event["rejected"]) for event in rounds} == set(range(PROPOSALS + 1))
    bent = 0
    for event in rounds:
        ids, length = known[event["request"]], event["anchor_position"]
        rows = event["verified"][: len(event["verified"]) - len(event["rejected"])]
        ids[length - len(rows) : length] = rows
        features, _ = served.target(ids[:length] + event["rejected"])
        count = event["carried"]
        assert count == (len(event["rejected"]) if enabled else 0)
        carried = features[length : length + count]
        want = dense(features[:length], carried, event["anchor"], trained.embedding, PROPOSALS)
        torch.testing.assert_close(event["states"], want, atol=TOLERANCE, rtol=0)
        ours = draft(trained, event, features[:length], carried)
        torch.testing.assert_close(event["states"], ours, atol=TOLERANCE, rtol=0)
        before = [event["anchor"], *event["proposals"][:-1]]
        scores = dense.logits(want, served.target.head, before)
        chosen = scores.gather(1, torch.tensor(event["proposals"]).unsqueeze(1)).squeeze(1)
        # The best token, but for ties within the tolerance of the states.
        assert (scores.max(dim=1).values - chosen).max() < 1e-3
        plain = want @ dense.tensors.get("lm_head.weight", served.target.head).T
        bent += int(plain.abs().max() > CAP)
    assert bent > len(rounds) / 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_the_targets(served: ServedGemma, name: str) -> None:
    for output, expected in zip(
        served.results[name]["outputs"], served.results["autoregressive"]["outputs"], strict=True
    ):
        assert output == expected[:GENERATED]


def write_gemma_target(folder: Path) -> Gemma4ForCausalLM:
    """A random Gemma 4 with full-attention layers, an untied head, and the cap."""
    config = Gemma4TextConfig(
        vocab_size=checkpoints.VOCABULARY, hidden_size=write.HIDDEN, intermediate_size=128,
        num_hidden_layers=write.BLOCKS, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        global_head_dim=32, num_global_key_value_heads=2, attention_k_eq_v=True,
        layer_types=["full_attention"] * write.BLOCKS, max_position_embeddings=2048,
        hidden_size_per_layer_input=0, final_logit_softcapping=CAP, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    target = Gemma4ForCausalLM(config).eval()
    target.save_pretrained(folder)
    return target


@torch.no_grad()
def test_a_gemma_target_with_a_carryover_drafter(tmp_path: Path) -> None:
    """The target's features and output are transformers' own; its embedding and head are shared."""
    target = write_gemma_target(tmp_path / "target")
    source = write_deepspec(tmp_path / "source", tmp_path / "target")
    folder, trained = write_ours(tmp_path / "ours", source, carry=True)
    prompts = random_prompts(0, checkpoints.VOCABULARY, (5, 20))
    base = {"target": tmp_path / "target", "prompts": prompts}
    served = {"drafter": folder, "speculative": {"method": "dspark"}, "continue_from": 0}
    jobs = [
        base | {"sampling": {"max_tokens": 60}},
        base | served | {"accepted": ACCEPTED, "sampling": {"max_tokens": 30}},
    ]
    alone, drafted = run_jobs(tmp_path, jobs, v2=True)
    assert "error" not in drafted, drafted
    for prompt, output, expected in zip(prompts, drafted["outputs"], alone["outputs"], strict=True):
        assert output == expected[:30]
        logits = target(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert (
            logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        ).max() < 1e-3
    known = [list(prompt) for prompt in prompts]
    carried = 0
    for event in drafted["rounds"]:
        ids, length = known[event["request"]], event["anchor_position"]
        rows = event["verified"][: len(event["verified"]) - len(event["rejected"])]
        ids[length - len(rows) : length] = rows
        text = torch.tensor([ids[:length] + event["rejected"]])
        states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in write.IDS], -1)
        want = draft(trained, event, features[:length], features[length:])
        torch.testing.assert_close(event["states"], want, atol=TOLERANCE, rtol=0)
        carried += event["carried"]
    assert carried > 20


@pytest.mark.parametrize("exported", [False, True])
def test_stock_vllm_loads_it(tmp_path: Path, exported: bool) -> None:
    """vLLM's own config and model classes take DeepSpec's folder, and an export of it."""
    target = checkpoints.write_target(tmp_path / "target", seed=0)
    source = write_deepspec(tmp_path / "source", target)
    folder = source
    if exported:
        folder, _ = write_ours(tmp_path / "ours", source, copies=True)
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"Gemma4CarryoverDSparkModel",', ""))
    built = run_script("load_dspark.py", [str(target), str(folder)], tmp_path / "built.pt")
    found = formats.read(source)
    assert built["architecture"] == "Gemma4DSparkForCausalLM"
    assert built["aux_layers"] == tuple(i + 1 for i in found.fields["target_layer_ids"])
    assert built["config"]["markov_rank"] == write.RANK
    assert built["config"]["mask_token_id"] == found.fields["mask_token_id"]
    assert built["config"]["block_size"] == found.fields["proposals"] == PROPOSALS
    copies = {"embed_tokens.weight": found.embedding, "lm_head.weight": found.head}
    for name, value in (found.tensors | copies).items():
        assert value is not None
        if "confidence" in name or "layer_scalar" in name:
            continue  # a buffer, and with what vLLM widens to float32
        own = name if name.startswith("lm_head") else f"model.{name}"
        held = None
        for index, part in enumerate(("gate", "up")):
            if f".{part}_proj." in own:
                stacked = built["tensors"][own.replace(f"{part}_proj", "gate_up_proj")]
                held = stacked.chunk(2)[index]
        held = built["tensors"][own] if held is None else held
        assert torch.equal(held[: len(value)].float(), value), name
