"""`load_format: dummy` (no checkpoint is read, for timing) serves every kind of drafter of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import checkpoints
from tests.serving.harness import random_prompts, run_jobs

DRAFTERS = {
    "carryover": {},
    "Markov, draft vocabulary": {"markov_rank": 16, "draft_vocabulary": 100},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder: Path = tmp_path_factory.mktemp("dummy")
    target = checkpoints.write_target(folder / "target", seed=0)
    jobs = [
        {
            "target": target,
            "drafter": checkpoints.write_drafter(folder / f"drafter-{index}", seed=1, **arguments),
            "prompts": random_prompts(0, checkpoints.VOCABULARY, (5, 20)),
            "sampling": {"max_tokens": 16, "ignore_eos": True},
            "llm": {"load_format": "dummy"},
            "record": True,
        }
        for index, arguments in enumerate(DRAFTERS.values())
    ]
    return dict(zip(DRAFTERS, run_jobs(folder, jobs), strict=True))


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_serves(results: dict[str, dict], name: str) -> None:
    result = results[name]
    assert [len(ids) for ids in result["outputs"]] == [16, 16]
    assert result["drafts"] > 0
    assert any(event["carried"] for event in result["rounds"])
