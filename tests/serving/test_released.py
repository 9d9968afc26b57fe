"""Released drafters in stock vLLM: what it serves and loads is what we read.

The checkpoints are those of tests/training/released.py, the target is a tiny Llama.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from carryover.drafter import formats
from carryover.drafter.checkpoint import load_into, save_drafter
from carryover.drafter.config import DrafterConfig
from carryover.drafter.model import Drafter
from tests.serving import checkpoints
from tests.serving.harness import random_prompts, run_jobs, run_script
from tests.serving.reference import DenseTarget
from tests.serving.test_parity import committed_ids
from tests.training import released as write

pytestmark = pytest.mark.long

TOLERANCE = 1e-4
PROPOSALS = 4
GENERATED = 40


def drafter_of(folder: Path) -> Drafter:
    """The drafter that we train, as read from a folder in any format."""
    found = formats.read(folder)
    missing = {"target_hidden_size": write.HIDDEN, "target_blocks": write.BLOCKS}
    drafter = Drafter(DrafterConfig(**(missing | found.fields)))
    load_into(drafter, found.tensors)
    return drafter


def test_zlab_drafter_in_stock_vllm_and_as_ours(tmp_path: Path) -> None:
    """At every round: stock vLLM's states of the block = those of the module that we train = those
    of what we export of it.

    One k-norm for all blocks: stock vLLM on CPU takes the first block's for all (see
    docs/serving.md), and this test is about formats.
    """
    vocabulary = checkpoints.VOCABULARY
    target = checkpoints.write_target(tmp_path / "target", seed=0)
    released = write.write(
        tmp_path / "released", write.zlab(vocabulary), write.backbone(5, one_k_norm=True)
    )
    drafter = drafter_of(released)
    dense = DenseTarget.load(target, write.IDS)
    drafter.register_buffer("embedding", dense.embedding, persistent=False)
    save_drafter(tmp_path / "ours", drafter, None, None)

    prompts = random_prompts(3, vocabulary, (5, 60, 17))
    base = {"target": target, "prompts": prompts, "sampling": {"max_tokens": GENERATED}}
    edited = base | {"continue_from": 0, "accepted": [2, 4, 0, 3, 1], "proposals": PROPOSALS}
    jobs: dict[str, dict[str, Any]] = {
        "plain": base | {"sampling": {"max_tokens": 2 * GENERATED}},
        "stock": edited | {"drafter": released, "worker": False},
        "ours": edited | {"drafter": tmp_path / "ours", "worker": False},
    }
    results = dict(zip(jobs, run_jobs(tmp_path, list(jobs.values())), strict=True))
    served: Any = SimpleNamespace(jobs=jobs, results=results)
    for name in ("stock", "ours"):
        assert "error" not in results[name], results[name]
        rounds = results[name]["rounds"]
        assert len(rounds) > 20
        assert {len(event["rejected"]) for event in rounds} == set(range(PROPOSALS + 1))
        for event, ids in zip(rounds, committed_ids(served, name), strict=True):
            features, _ = dense(ids)
            anchor = torch.tensor([[event["anchor"]]])
            with torch.no_grad():
                expected = drafter(anchor, torch.tensor([[len(ids)]]), features[None])[0, 0]
            torch.testing.assert_close(event["states"][1:], expected, atol=TOLERANCE, rtol=0)
            scores = expected @ dense.head.T
            chosen = scores.gather(1, torch.tensor(event["proposals"]).unsqueeze(1)).squeeze(1)
            assert (scores.max(dim=1).values - chosen).max() < 1e-2


def vllm_name(name: str) -> str:
    """Where vLLM's DSpark classes keep a tensor; q, k, v and gate, up are stacked there."""
    return name if name.startswith("lm_head") else f"model.{name}"


def loaded(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor of a checkpoint's name, cut out of a stacked one where it is in one."""
    sizes = {"q": write.HEADS, "k": write.KV_HEADS, "v": write.KV_HEADS}
    for part, size in sizes.items():
        if f".{part}_proj." in name:
            stacked = tensors[vllm_name(name.replace(f"{part}_proj", "qkv_proj"))]
            first = list(sizes).index(part)
            start = sum(list(sizes.values())[:first]) * write.HEAD_DIM
            return stacked[start : start + size * write.HEAD_DIM]
    for index, part in enumerate(("gate", "up")):
        if f".{part}_proj." in name:
            stacked = tensors[vllm_name(name.replace(f"{part}_proj", "gate_up_proj"))]
            return stacked.chunk(2)[index]
    return tensors[vllm_name(name)]


@pytest.mark.parametrize("layout", ["DeepSpec", "speculators"])
def test_vllm_builds_the_same_dspark_drafter(tmp_path: Path, layout: str) -> None:
    """vLLM's own config and model classes take the checkpoint, and hold what we read."""
    vocabulary = checkpoints.VOCABULARY
    target = checkpoints.write_target(tmp_path / "target", seed=0)
    drafted = vocabulary if layout == "DeepSpec" else 100
    tensors = write.backbone(6) | write.heads(vocabulary, drafted)
    tensors |= {
        "embed_tokens.weight": torch.randn(vocabulary, write.HIDDEN),
        "lm_head.weight": torch.randn(drafted, write.HIDDEN),
    }
    if layout == "DeepSpec":
        config = write.deepspec(vocabulary, rank=write.RANK)
    else:
        config = write.speculators(vocabulary, "dspark", drafted=drafted)
        kept = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:drafted]
        kept = kept.sort().values
        marked = torch.zeros(vocabulary, dtype=torch.bool)
        marked[kept] = True
        tensors |= {"d2t": kept - torch.arange(drafted), "t2d": marked}
    folder = write.write(tmp_path / "drafter", config, tensors)

    built = run_script("load_dspark.py", [str(target), str(folder)], tmp_path / "built.pt")
    found = formats.read(folder)
    assert built["architecture"] == "Qwen3DSparkForCausalLM"
    assert built["aux_layers"] == tuple(i + 1 for i in found.fields["target_layer_ids"])
    assert built["config"] == {
        "vocab_size": vocabulary,
        "draft_vocab_size": drafted,
        "markov_rank": found.fields["markov_rank"],
        "mask_token_id": found.fields["mask_token_id"],
        "block_size": found.fields["proposals"],
    }
    assert found.fields["slot_layout"] == "anchor_first"
    own = {name: value for name, value in found.tensors.items() if name != "d2t"}
    for name, value in own.items():
        # vLLM fills a head up to a multiple of 64 rows.
        held = loaded(built["tensors"], name)[: len(value)]
        assert torch.equal(held.float(), value), name
    if layout == "speculators":
        assert torch.equal(built["tensors"]["draft_id_to_target_id"], found.tensors["d2t"])


@pytest.mark.parametrize("drafted", [None, 100])
def test_vllm_reads_a_speculators_dflash_config_as_we_do(drafted: int | None) -> None:
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    config = write.speculators(checkpoints.VOCABULARY, drafted=drafted)
    ours = formats.READERS["speculators"](config, Path("drafter"))
    theirs = SpeculatorsConfig.extract_transformers_pre_trained_config(config)
    assert theirs["dflash_config"]["target_layer_ids"] == list(ours["target_layer_ids"])
    assert theirs["dflash_config"]["mask_token_id"] == ours["mask_token_id"]
    assert theirs["dflash_config"]["sample_from_anchor"] is False
    assert theirs["draft_vocab_size"] == ours["draft_vocab_size"]
    served = SpeculatorsConfig.build_vllm_speculative_config(config)
    assert served == {"method": "dflash", "num_speculative_tokens": ours["proposals"]}
