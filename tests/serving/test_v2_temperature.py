"""The V2 runner at T = 1: sampled tokens follow the target's distribution, enumerated exactly.

With probabilistic drafts and carried rows that takes the noise of `round_seeds`. A random drafter's
bias without it is far smaller than so few samples can show, so a target and drafters are built by
hand in which it is large: those of the example in docs/serving.md, "Probabilistic drafts".
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving import checkpoints
from tests.serving.harness import run_jobs
from tests.serving.reference import DenseTarget
from tests.serving.test_temperature import (
    ALPHA,
    PROMPT,
    TOKENS,
    VOCABULARY,
    _enumerate,
    _p_value,
)

pytestmark = pytest.mark.long

SAMPLES = 400
PROPOSALS = 3
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
DSPARK: dict[str, Any] = {"slot_layout": "anchor_first", "markov_rank": 4}
# name -> (arguments of write_drafter, keys of speculative_config)
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "dflash, probabilistic": ({}, PROBABILISTIC),
    "dspark": (DSPARK, {"method": "dspark"}),
    "dspark, probabilistic": (DSPARK, PROBABILISTIC | {"method": "dspark"}),
}
# The example: of its two tokens neither is 0, which alone would be taken for a placeholder.
ONE, OTHER, OPENING, BEFORE, FIXED = 1, 2, 3, 4, 5
EXAMPLE_SAMPLES = 256
EXAMPLES = [name for name in DRAFTERS if "probabilistic" in name]
HALVES, BIASED = torch.tensor([1 / 2, 1 / 2]), torch.tensor([1 / 4, 3 / 4])
BEYOND_DOUBT = 1e-6


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, dict[str, dict]]:
    """Probabilities [VOCABULARY] * TOKENS, and vLLM's results."""
    folder: Path = tmp_path_factory.mktemp("v2-temperature")
    target = checkpoints.write_target(folder / "target", seed=3, vocabulary=VOCABULARY)
    example = _example_target(folder / "example")
    large = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 64}
    jobs: dict[str, dict[str, Any]] = {}
    for name, (arguments, speculative) in DRAFTERS.items():
        jobs[name] = {
            "target": target,
            "drafter": checkpoints.write_drafter(
                folder / name, seed=4, vocabulary=VOCABULARY, proposals=PROPOSALS, **arguments
            ),
            "proposals": PROPOSALS,
            "speculative": speculative,
            "prompts": [PROMPT] * SAMPLES,
            "sampling": {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True},
            "llm": large,
        }
        if name in EXAMPLES:
            job = {
                "target": example,
                "drafter": _example_drafter(folder / f"example, {name}", **arguments),
                "proposals": 2,
                "speculative": speculative,
                "prompts": [[6, 6, 6, 6, OPENING]] * EXAMPLE_SAMPLES,
                "sampling": {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True},
                "llm": large,
            }
            jobs |= {f"{name}, salted": job, f"{name}, unsalted": job | {"unsalted": True}}
    results = run_jobs(folder, list(jobs.values()), v2=True)
    return _enumerate(DenseTarget.load(target, [0])), dict(zip(jobs, results, strict=True))


def _example_target(folder: Path) -> Path:
    """After OPENING comes BEFORE, then FIXED, then ONE or OTHER with probability 1/2 each.

    Its blocks do nothing; the embedding of token t is the t-th axis.
    """
    checkpoints.write_target(folder, seed=3, vocabulary=VOCABULARY)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"].zero_().fill_diagonal_(8)  # as long as normalised ones
    scores = tensors["lm_head.weight"].fill_(-10)  # [next token, axis of this one], e^-80
    scores[BEFORE, OPENING] = scores[FIXED, BEFORE] = 0
    scores[[ONE, OTHER], FIXED] = 0
    save_file(tensors, folder / "model.safetensors")
    return folder


def _example_drafter(folder: Path, *, slot_layout: str = "fill_in", markov_rank: int = 0) -> Path:
    """Proposes ONE or OTHER with probability 1/2 each, but always ONE where ONE was rejected.

    Behind BEFORE both proposals are so, and FIXED takes the first one's place. The second one's
    place, then the first of the next block, is where the example happens.
    """
    checkpoints.write_drafter(
        folder,
        seed=4,
        vocabulary=VOCABULARY,
        proposals=2,
        draft_vocabulary=2,
        slot_layout=slot_layout,
        markov_rank=markov_rank,
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensor.fill_(1) if "norm" in name else tensor.zero_()
    tensors["d2t"] += torch.tensor([ONE, OTHER - 1])
    tensors["fc.weight"][:, : checkpoints.HIDDEN].fill_diagonal_(1)
    # Rows of token ONE have a key and a value, all others none. The value decides for it.
    attention = "layers.0.self_attn"
    tensors[f"{attention}.k_proj.weight"][0, ONE] = 1
    tensors[f"{attention}.v_proj.weight"][0, ONE] = 1
    tensors[f"{attention}.o_proj.weight"][-1, 0] = 1000
    tensors["lm_head.weight"][0, -1] = 5
    # The fastest rotation, one radian a position, tells the place where the example happens from
    # the one before it, which is read by nobody: scores of 27 and -27, where no key has 0.
    angle = math.pi / 2 + (0.5 if slot_layout == "anchor_first" else -0.5)
    queries = tensors[f"{attention}.q_proj.weight"]
    queries[0], queries[checkpoints.HEAD_DIM // 2] = math.cos(angle), math.sin(angle)
    tensors[f"{attention}.q_norm.weight"].fill_(10)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", DRAFTERS)
def test_samples_follow_the_target(everything: tuple, name: str) -> None:
    joint, results = everything
    samples = torch.tensor(results[name]["outputs"])
    for first in range(TOKENS - 1):
        others = [axis for axis in range(TOKENS) if axis not in (first, first + 1)]
        cells = samples[:, first] * VOCABULARY + samples[:, first + 1]
        counts = torch.bincount(cells, minlength=VOCABULARY**2)
        assert _p_value(counts, joint.sum(dim=others).flatten()) > ALPHA


@pytest.mark.parametrize("name", DRAFTERS)
def test_proposals_were_accepted_and_rejected(everything: tuple, name: str) -> None:
    result = everything[1][name]
    assert 0.02 * PROPOSALS * result["drafts"] < result["accepted"]
    assert result["accepted"] < 0.9 * PROPOSALS * result["drafts"]


def _example(everything: tuple, name: str) -> torch.Tensor:
    """How often ONE and OTHER came where the example happens."""
    outputs = torch.tensor(everything[1][name]["outputs"])
    assert (outputs[:, :2] == torch.tensor([BEFORE, FIXED])).all()
    return torch.stack([(outputs[:, 2] == token).sum() for token in (ONE, OTHER)])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_biased_with_vllms_own_noise(everything: tuple, name: str) -> None:
    counts = _example(everything, f"{name}, unsalted")
    assert _p_value(counts, HALVES) < BEYOND_DOUBT
    assert _p_value(counts, BIASED) > ALPHA


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_not_biased_with_a_rounds_own_noise(everything: tuple, name: str) -> None:
    counts = _example(everything, f"{name}, salted")
    assert _p_value(counts, HALVES) > ALPHA
    assert _p_value(counts, BIASED) < BEYOND_DOUBT
