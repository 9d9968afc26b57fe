"""vLLM's V2 model runner: block states against the dense reference, and greedy losslessness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving import checkpoints
from tests.serving.harness import (
    ACCEPTED,
    PROMPT_LENGTHS,
    REGEXES,
    check_best_tokens,
    check_grammars,
    check_lossless,
    random_prompts,
    run_jobs,
)
from tests.serving.reference import DenseDrafter, DenseTarget
from tests.tiny_target import write_tokenizer

pytestmark = pytest.mark.long

TOLERANCE = 1e-4
REDUCED = {"qk_norm": False, "draft_vocabulary": 100}
MARKOV = {"markov_rank": 8}
ANCHOR_FIRST = {"slot_layout": "anchor_first"}
BASELINE = {"enabled": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash, carryover": {},
    "dflash, baseline": BASELINE,
    "dflash, Markov, carryover, reduced": MARKOV | REDUCED,
    "dspark, carryover, reduced": ANCHOR_FIRST | REDUCED,
    "dspark, baseline": ANCHOR_FIRST | BASELINE,
    "dspark, Markov, carryover": ANCHOR_FIRST | MARKOV,
    "dspark, Markov, baseline": ANCHOR_FIRST | MARKOV | BASELINE,
}
WITHOUT_WORKER = ("dflash, baseline", "dspark, Markov, baseline")
PREEMPTED, LIMITED = "preempted", "own proposals, to the length limit"
CACHED = "own proposals, behind a cached prefix"
GRAMMAR = {"dflash, grammar": "dflash, carryover", "dspark, grammar": "dspark, Markov, carryover"}
EDITED = [*DRAFTERS, PREEMPTED, *GRAMMAR]
ALL = [*EDITED, LIMITED, CACHED]
GENERATED = 48
LIMIT = 96


class ServedV2:
    """What the V2 runner did with one target and many drafters, and the dense models."""

    def __init__(self, folder: Path) -> None:
        self.prompts = random_prompts(0, checkpoints.VOCABULARY, PROMPT_LENGTHS)
        target = checkpoints.write_target(folder / "target", seed=0)
        folders = {
            name: checkpoints.write_drafter(folder / f"drafter-{index}", seed=1, **settings)
            for index, (name, settings) in enumerate(DRAFTERS.items())
        }
        write_tokenizer(target)  # read where there is a grammar
        # They find their prefix cached, of a request that has ended.
        later = [[*self.prompts[1], 9, 8, 7], self.prompts[1][:66]]
        base = {"target": target, "prompts": self.prompts, "sampling": {"max_tokens": GENERATED}}
        edited = {"continue_from": 0, "accepted": ACCEPTED}
        grammar = base | {"grammars": REGEXES, "llm": {"skip_tokenizer_init": False}}
        longer = {"sampling": {"max_tokens": GENERATED + 32}}
        jobs: dict[str, dict[str, Any]] = {
            "autoregressive": base | longer | {"prompts": [*self.prompts, *later]},
            "autoregressive, grammar": grammar | longer,
        }
        for name, drafter in folders.items():
            jobs[name] = base | edited | _served(name, drafter)
        for name, without in GRAMMAR.items():
            folders[name] = folders[without]
            jobs[name] = grammar | edited | _served(without, folders[without])
            jobs[name] |= {"continue_from": 1}
        markov = "dspark, Markov, carryover"
        folders |= dict.fromkeys((PREEMPTED, LIMITED, CACHED), folders[markov])
        again = base | _served(markov, folders[markov])
        jobs[PREEMPTED] = again | edited | {"llm": {"num_gpu_blocks_override": 9}}
        jobs[LIMITED] = again | {"record": True, "llm": {"max_model_len": LIMIT}}
        jobs[CACHED] = again | {"record": True, "llm": {"enable_prefix_caching": True}}
        jobs[CACHED] |= {"prompts": [*self.prompts[:4], *later]}
        self.jobs = jobs
        results = run_jobs(folder, list(jobs.values()), v2=True)
        self.results = dict(zip(jobs, results, strict=True))
        for name, result in self.results.items():
            assert "error" not in result, (name, result)
        self.target = DenseTarget.load(target, checkpoints.FEATURE_LAYERS)
        self.drafters = {name: DenseDrafter.load(path) for name, path in folders.items()}


def _served(name: str, drafter: Path) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "speculative": {"method": name.split(",")[0]},
        "worker": name not in WITHOUT_WORKER,
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedV2:
    return ServedV2(tmp_path_factory.mktemp("v2"))


def test_autoregressive_output_is_the_dense_targets(served: ServedV2) -> None:
    """The reference of the other runs: this runner without a drafter."""
    name = "autoregressive"
    check_best_tokens(served.target, served.jobs[name]["prompts"], served.results[name]["outputs"])


def test_outputs_with_a_grammar_match_it(served: ServedV2) -> None:
    """The reference of the runs with a grammar: this runner without a drafter."""
    free = served.results["autoregressive"]["outputs"]
    check_grammars(free, served.results["autoregressive, grammar"]["outputs"])


@pytest.mark.parametrize("name", ALL)
def test_states_and_proposals_of_every_round(served: ServedV2, name: str) -> None:
    drafter = served.drafters[name]
    known = [list(prompt) for prompt in served.jobs[name]["prompts"]]
    rounds = served.results[name]["rounds"]
    assert len(rounds) > 40
    limit = served.jobs[name].get("llm", {}).get("max_model_len", 1 << 30)
    for event in rounds:
        # The request's committed tokens, put together from the rows verified.
        ids, length = known[event["request"]], event["anchor_position"]
        rows = event["verified"][: len(event["verified"]) - len(event["rejected"])]
        ids[length - len(rows) : length] = rows
        if length + 1 + checkpoints.PROPOSALS > limit:
            continue  # its proposals would lie beyond, and are never verified
        features, _ = served.target(ids[:length] + event["rejected"])
        expected = drafter(
            features[:length],
            features[length : length + event["carried"]],
            event["anchor"],
            served.target.embedding,
            checkpoints.PROPOSALS,
        )
        torch.testing.assert_close(event["states"], expected, atol=TOLERANCE, rtol=0)
        scores = drafter.logits(
            drafter.predicting(expected),
            served.target.head,
            [event["anchor"], *event["proposals"][:-1]],
        )
        chosen = scores.gather(1, torch.tensor(event["proposals"]).unsqueeze(1)).squeeze(1)
        # The best token, but for ties within the tolerance of the states.
        assert (scores.max(dim=1).values - chosen).max() < 1e-2


@pytest.mark.parametrize("name", EDITED)
def test_rejected_counts_run_from_none_to_all_and_all_are_carried(
    served: ServedV2, name: str
) -> None:
    rounds = served.results[name]["rounds"]
    rejected = {len(event["rejected"]) for event in rounds}
    assert rejected == set(range(checkpoints.PROPOSALS + 1))
    enabled = served.drafters[name].config["carryover"]["enabled"]
    for event in rounds:
        assert event["carried"] == (len(event["rejected"]) if enabled else 0)


def test_conditions_that_the_parity_claims_to_cover(served: ServedV2) -> None:
    for name in EDITED:
        rounds = served.results[name]["rounds"]
        assert {event["batch"] for event in rounds} >= {1, 2, 3}  # requests join and leave
        first = next(event for event in rounds if event["request"] == 1)
        assert first["anchor_position"] < PROMPT_LENGTHS[1]  # prefilled in chunks
    assert served.results[PREEMPTED]["preemptions"] > 0
    for request in (4, 5):  # starts behind a cached prefix
        first = next(e for e in served.results[CACHED]["rounds"] if e["request"] == request)
        assert first["anchor_position"] - len(first["verified"]) >= 32


@pytest.mark.parametrize("name", ALL)
def test_greedy_output_is_the_targets(served: ServedV2, name: str) -> None:
    source = "autoregressive, grammar" if name in GRAMMAR else "autoregressive"
    prompts, outputs = served.jobs[source]["prompts"], served.results[source]["outputs"]
    reference = dict(zip(map(tuple, prompts), outputs, strict=True))
    check_lossless(served.jobs[name], served.results[name], reference)


def test_nothing_is_carried_where_the_block_would_pass_the_length_limit(served: ServedV2) -> None:
    rounds = [e for e in served.results[LIMITED]["rounds"] if e["rejected"]]
    slots = checkpoints.PROPOSALS
    near = [e for e in rounds if e["anchor_position"] + len(e["rejected"]) + slots > LIMIT]
    assert near
    assert all(event["carried"] == 0 for event in near)
    assert all(e["carried"] == len(e["rejected"]) for e in rounds if e not in near)
