"""At T = 1 the sampled tokens follow the target's distribution, enumerated exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving import checkpoints
from tests.serving.harness import run_jobs
from tests.serving.reference import DenseTarget

VOCABULARY = 8
SAMPLES = 3000
TOKENS = 4
PROMPT = [3, 1, 4, 1, 5]
ALPHA = 1e-4
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
# name -> (arguments of write_drafter, keys of speculative_config)
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "carryover": ({}, {}),
    "carryover, Markov": ({"markov_rank": 4}, {}),
    "carryover, probabilistic": ({}, PROBABILISTIC),
    "carryover, Markov, draft vocabulary, probabilistic": (
        {"markov_rank": 4, "draft_vocabulary": 5},
        PROBABILISTIC,
    ),
}


def run_ahead(folder: Path) -> tuple[Path, dict[str, dict]]:
    """The target's folder, and vLLM's results."""
    target = checkpoints.write_target(folder / "target", seed=3, vocabulary=VOCABULARY)
    jobs = [
        {
            "target": target,
            "drafter": checkpoints.write_drafter(
                folder / f"drafter-{index}",
                seed=4,
                vocabulary=VOCABULARY,
                proposals=3,
                **arguments,
            ),
            "proposals": 3,
            "speculative": speculative,
            "prompts": [PROMPT] * SAMPLES,
            "sampling": {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True},
            "llm": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 64},
        }
        for index, (arguments, speculative) in enumerate(DRAFTERS.values())
    ]
    results = run_jobs(folder, jobs)
    return target, dict(zip(DRAFTERS, results, strict=True))


@pytest.fixture(scope="module")
def everything(ran_ahead: tuple[Path, dict[str, dict]]) -> tuple[torch.Tensor, dict[str, dict]]:
    """Probabilities [VOCABULARY] * TOKENS, and vLLM's results."""
    target, results = ran_ahead
    return _enumerate(DenseTarget.load(target, [0])), results


@pytest.fixture(params=DRAFTERS)
def sampled(
    request: pytest.FixtureRequest, everything: tuple[torch.Tensor, dict[str, dict]]
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Samples [SAMPLES, TOKENS], probabilities [VOCABULARY] * TOKENS, and vLLM's result."""
    joint, results = everything
    result = results[request.param]
    assert "error" not in result, result
    return torch.tensor(result["outputs"]), joint, result


def _enumerate(target: DenseTarget) -> torch.Tensor:
    """Probability of every sequence of TOKENS tokens: [VOCABULARY] * TOKENS."""
    joint = torch.ones(())
    for length in range(TOKENS):
        rows = []
        for index in range(VOCABULARY**length):
            tokens = [index // VOCABULARY**k % VOCABULARY for k in reversed(range(length))]
            _, logits = target(PROMPT + tokens)
            rows.append(logits[-1].double().softmax(-1))
        step = torch.stack(rows).view(*[VOCABULARY] * (length + 1))
        joint = joint.unsqueeze(-1) * step
    return joint


def _p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's chi-square test; cells expected fewer than 5 times are taken together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    keep = expected > 0
    statistic = ((observed - expected)[keep].pow(2) / expected[keep]).sum()
    freedom = torch.tensor(float(keep.sum() - 1))
    return float(torch.special.gammaincc(freedom / 2, statistic.float() / 2))


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (2, 3)])
def test_pairs_of_tokens(sampled: tuple, pair: tuple[int, int]) -> None:
    samples, joint, _ = sampled
    others = [axis for axis in range(TOKENS) if axis not in pair]
    probabilities = joint.sum(dim=others).flatten()
    cells = samples[:, pair[0]] * VOCABULARY + samples[:, pair[1]]
    counts = torch.bincount(cells, minlength=VOCABULARY**2)
    assert _p_value(counts, probabilities) > ALPHA


def test_the_test_notices_another_distribution(sampled: tuple) -> None:
    samples, joint, _ = sampled
    probabilities = joint.sum(dim=(2, 3)).flatten()
    cells = samples[:, 0] * VOCABULARY + samples[:, 1]
    counts = torch.bincount(cells, minlength=VOCABULARY**2)
    warmer = probabilities.pow(0.8) / probabilities.pow(0.8).sum()
    assert _p_value(counts, warmer) < ALPHA


def test_proposals_were_accepted_and_rejected(sampled: tuple) -> None:
    result = sampled[2]
    assert 0.02 * 3 * result["drafts"] < result["accepted"] < 0.9 * 3 * result["drafts"]
