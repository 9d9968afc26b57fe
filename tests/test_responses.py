import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma4TextConfig

from carryover import responses, target
from carryover.artifacts import read_manifest
from carryover.config import Config
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.prompts.render import render
from tests.tiny_target import put_train_prompts, tiny_config, write_tiny_target

TEXTS = [f"{'carry the rejected states over'[: 3 * n + 2]} {n}" for n in range(9)]
SETTINGS = {
    "max_tokens": 12,
    "max_model_len": 128,
    "max_num_seqs": 8,  # fewer than the nine prompts: two engines
    "shard_size": 4,
}
TOO_LONG = "x" * 200  # a byte a token: no room in max_model_len


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Finished responses of the tiny target to ten prompts, one of them too long."""
    folder = tmp_path_factory.mktemp("responses")
    write_tiny_target(folder / "source")
    config = tiny_config(folder, responses=SETTINGS)
    target.run(config, target="tiny")
    put_train_prompts(config, [*TEXTS[:5], TOO_LONG, *TEXTS[5:]])
    responses.run(config, target="tiny")
    return config


def shards(config: Config) -> list[Path]:
    return sorted(Paths(config).responses("tiny").glob("shard-*.jsonl"))


def greedy(config: Config, prompt_ids: list[int], count: int) -> list[int]:
    """Plain greedy decoding, one full forward a token."""
    model, tokenizer = target.load_target(Paths(config).target("tiny"), "float32")
    ids = list(prompt_ids)
    with torch.no_grad():
        while len(ids) - len(prompt_ids) < count:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    return ids[len(prompt_ids) :]


def test_rows_are_the_targets_greedy_answers_in_prompt_order(config: Config) -> None:
    rows = responses.read_responses(Paths(config).responses("tiny"))
    tokenizer = target.load_tokenizer(Paths(config).target("tiny"))
    assert [row["prompt_ids"] for row in rows] == [
        render(tokenizer, text, thinking=False) for text in TEXTS
    ]
    for row in rows:
        assert row["response_ids"] == greedy(config, row["prompt_ids"], SETTINGS["max_tokens"])
        ended = row["response_ids"][-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert row["dataset"] == "chat"


def test_shards_hold_their_prompts_and_the_manifest_counts_the_rest(config: Config) -> None:
    counts = [len(path.read_text().splitlines()) for path in shards(config)]
    assert counts == [4, 3, 2]  # the sixth prompt, of the second shard, is too long
    manifest = read_manifest(
        Paths(config).responses("tiny"),
        stage="responses",
        config=config.stage("responses", target="tiny"),
        verify=True,
    )
    assert manifest["extra"] == {"responses": 9, "prompts_without_room": 1}


def test_after_a_crash_only_what_is_missing_or_cut_short_is_made_again(config: Config) -> None:
    before = {path.name: path.read_bytes() for path in shards(config)}
    kept, cut, gone = shards(config)
    stamp = kept.stat().st_mtime_ns
    (kept.parent / "manifest.json").unlink()
    cut.write_bytes(before[cut.name][:-40])
    gone.unlink()

    responses.run(config, target="tiny")
    assert {path.name: path.read_bytes() for path in shards(config)} == before
    assert kept.stat().st_mtime_ns == stamp
    assert cut.stat().st_mtime_ns > stamp


def test_answers_of_another_config_are_not_kept_and_sampled_ones_depend_on_prompt_and_seed(
    config: Config,
) -> None:
    """Alone: not on the neighbours in the batch nor on the order of the prompts."""
    folder = Paths(config).responses("tiny")
    root = Path(config.results_dir).parent
    other = tiny_config(root, responses={**SETTINGS, "temperature": 1.0, "max_tokens": 10})

    def answers(texts: list[str]) -> dict[str, list[int]]:
        put_train_prompts(other, texts)
        responses.run(other, target="tiny")
        return {row["prompt_id"]: row["response_ids"] for row in responses.read_responses(folder)}

    # What the other tests look at: the answers, and the prompts with their manifest.
    prompts = Paths(config).train_prompts()
    shared = [*folder.iterdir(), *prompts.parent.glob(f"{prompts.name}*")]
    saved = {path: path.read_bytes() for path in shared}
    try:
        whole = answers(TEXTS[:6])
        assert len(whole) == 6
        assert max(map(len, whole.values())) == 10 < SETTINGS["max_tokens"]
        assert len({json.dumps(ids) for ids in whole.values()}) == 6
        some = answers([TEXTS[4], TEXTS[1]])
        assert len(some) == 2
        assert some == {prompt: whole[prompt] for prompt in some}
    finally:
        for path, content in saved.items():
            path.write_bytes(content)


def test_prompts_without_any_room_are_an_error(tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "source")
    config = tiny_config(tmp_path, responses=SETTINGS)
    target.run(config, target="tiny")
    put_train_prompts(config, [TOO_LONG])
    with pytest.raises(CarryoverError, match=r"responses\.max_model_len"):
        responses.run(config, target="tiny")


def test_an_engine_that_cannot_start_is_one_line_with_its_log(tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "source")
    config = tiny_config(tmp_path, responses=SETTINGS)
    target.run(config, target="tiny")
    put_train_prompts(config, TEXTS[:2])
    weights = Paths(config).target("tiny") / "model.safetensors"
    size = weights.stat().st_size
    content = weights.read_bytes()
    weights.unlink()  # it is a hard link: writing through it would change the source
    weights.write_bytes(b"\0" * 8 + content[8:])  # right size, no safetensors header
    assert weights.stat().st_size == size
    with pytest.raises(CarryoverError, match=r"responses engine failed: .*header") as caught:
        responses.run(config, target="tiny")
    assert "\n" not in str(caught.value)
    log = Path(caught.value.fix.removeprefix("See ").rstrip("."))
    assert "Traceback" in log.read_text()
    assert not list(Paths(config).responses("tiny").glob("shard-*"))


def test_kv_cache_counts_the_heads_of_every_layer(tmp_path: Path) -> None:
    config = Gemma4TextConfig(
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        head_dim=8,
        global_head_dim=16,
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    )
    config.save_pretrained(tmp_path)
    size = responses.kv_cache_bytes(
        tmp_path, "bfloat16", longest=100, sequences=3, max_model_len=128
    )
    # A block for each sequence and vLLM's own, of 128 tokens; K and V of 4 x 8, 16 and 16 numbers.
    assert size == (1 + 3) * 128 * 2 * (32 + 16 + 16) * 2
