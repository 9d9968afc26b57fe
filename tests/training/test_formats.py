"""Released drafters: each format read, checked against the config, trained from, and refused.

The checkpoints are written by tests/training/released.py with the keys and tensor names of the
projects that release them. tests/serving/test_released.py serves them with stock vLLM.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from carryover import features, target
from carryover.artifacts import read_manifest
from carryover.config import Config, load_config
from carryover.drafter import formats, released
from carryover.drafter.checkpoint import save_drafter
from carryover.drafter.model import Drafter
from carryover.errors import CarryoverError
from carryover.identity import input_identity
from carryover.paths import Paths
from carryover.training.result import checkpoint_config, released_folder
from tests.test_features import put_responses
from tests.tiny_target import VOCABULARY, tiny_config, write_tiny_target
from tests.training import released as write
from tests.training.stages import Stages
from tests.training.tiny import tiny_drafter

LENGTHS = [(5, 30), (3, 20), (11, 25), (8, 30), (2, 22), (30, 40)]
OBSERVED = torch.tensor([0, 5, 6, 70, 150, 200, 319])

# What every format says of the backbone that `write.backbone` makes, in our terms.
BACKBONE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2048, "vocab_size": 320,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "qk_norm": True, "target_layer_ids": (0, 2),
    "mask_token_id": 3, "proposals": 4,
}  # fmt: skip


def ends() -> dict[str, Tensor]:
    """Copies of an embedding and a head, as DeepSpec and speculators save them."""
    torch.manual_seed(4)
    return {
        "embed_tokens.weight": torch.randn(VOCABULARY, 64),
        "lm_head.weight": torch.randn(VOCABULARY, 64),
    }


def maps() -> dict[str, Tensor]:
    marked = torch.zeros(VOCABULARY, dtype=torch.bool)
    marked[OBSERVED] = True
    return {"d2t": OBSERVED - torch.arange(len(OBSERVED)), "t2d": marked}


# --- Reading ---


def test_zlab(tmp_path: Path) -> None:
    tensors = write.backbone(1)
    found = formats.read(write.write(tmp_path / "d", write.zlab(VOCABULARY), tensors))
    assert found.format == "z-lab"
    assert found.fields == BACKBONE | {"slot_layout": "fill_in", "target_blocks": 4}
    assert found.embedding is None and found.head is None
    assert set(found.tensors) == set(tensors)
    assert len(found.tensors) == 3 + 2 * 11
    for name, value in tensors.items():
        assert torch.equal(found.tensors[name], value), name


def test_zlab_of_older_and_newer_times(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling; newer drafters nest block_size."""
    config = write.zlab(VOCABULARY, rope_theta=500000, rope_scaling=None, layer_types=None)
    del config["rope_parameters"], config["block_size"]
    config["dflash_config"] = config["dflash_config"] | {"block_size": 5}
    config |= {"use_sliding_window": False, "sliding_window": 4096}
    found = formats.read(write.write(tmp_path / "d", config, write.backbone(1)))
    assert found.fields == BACKBONE | {"slot_layout": "fill_in", "target_blocks": 4}


@pytest.mark.parametrize("rank", [0, write.RANK])
def test_deepspec(tmp_path: Path, rank: int) -> None:
    tensors = write.backbone(1) | (write.heads(VOCABULARY, VOCABULARY) if rank else {})
    copies = ends()
    config = write.deepspec(VOCABULARY, rank=rank)
    found = formats.read(write.write(tmp_path / "d", config, tensors | copies))
    assert found.format == "DeepSpec"
    own = {"markov_rank": rank, "confidence": True} if rank else {}
    assert found.fields == BACKBONE | {"slot_layout": "anchor_first", "target_blocks": 4} | own
    assert set(found.tensors) == set(tensors)
    assert found.embedding is not None and found.head is not None
    assert torch.equal(found.embedding, copies["embed_tokens.weight"])
    assert torch.equal(found.head, copies["lm_head.weight"])
    shapes = {name: tuple(value.shape) for name, value in found.tensors.items() if "_head" in name}
    assert shapes == (
        {
            "markov_head.markov_w1.weight": (320, 8),
            "markov_head.markov_w2.weight": (320, 8),
            "confidence_head.proj.weight": (1, 72),
            "confidence_head.proj.bias": (1,),
        }
        if rank
        else {}
    )


def test_speculators_with_the_whole_vocabulary(tmp_path: Path) -> None:
    """Its ids name block inputs: [1, 3] are our [0, 2]. Its class is called as z-lab's."""
    config = write.speculators(VOCABULARY)
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["architectures"] == ["DFlashDraftModel"]
    found = formats.read(write.write(tmp_path / "d", config, write.backbone(1) | ends()))
    assert found.format == "speculators"
    assert found.fields == BACKBONE | {"slot_layout": "fill_in"}
    assert set(found.tensors) == set(write.backbone(1))


def test_speculators_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    tensors = write.backbone(1) | ends() | maps() | {"lm_head.weight": torch.randn(7, 64)}
    config = write.speculators(VOCABULARY, drafted=7)
    found = formats.read(write.write(tmp_path / "d", config, tensors))
    assert found.fields == BACKBONE | {"slot_layout": "fill_in", "draft_vocab_size": 7}
    assert set(found.tensors) == set(write.backbone(1)) | {"d2t", "lm_head.weight"}
    assert found.tensors["d2t"].tolist() == [0, 4, 4, 67, 146, 195, 313]
    assert found.head is None


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_speculators_dspark(tmp_path: Path, sample_from_anchor: bool) -> None:
    layout = {} if sample_from_anchor else {"sample_from_anchor": None, "block_size": 5}
    config = write.speculators(VOCABULARY, "dspark", drafted=7, **layout)
    tensors = write.backbone(1) | maps() | write.heads(VOCABULARY, 7)
    tensors["lm_head.weight"] = torch.randn(7, 64)
    found = formats.read(write.write(tmp_path / "d", config, tensors))
    assert found.fields == BACKBONE | {
        "slot_layout": "anchor_first" if sample_from_anchor else "fill_in",
        "draft_vocab_size": 7,
        "markov_rank": 8,
        "confidence": True,
    }
    assert found.tensors["markov_head.markov_w1.weight"].shape == (320, 8)
    assert found.tensors["markov_head.markov_w2.weight"].shape == (7, 8)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_our_own(tmp_path: Path, qk_norm: bool) -> None:
    plain = tiny_drafter(carry=False, qk_norm=qk_norm)
    drafter = Drafter(replace(plain.config, draft_vocab_size=3))
    drafter.load_state_dict(plain.state_dict())
    save_drafter(tmp_path / "d", drafter, torch.tensor([1, 5, 9]), torch.randn(3, 32))
    found = formats.read(tmp_path / "d")
    assert found.format == "carryover"
    assert found.fields["qk_norm"] is qk_norm
    assert found.fields["draft_vocab_size"] == 3
    assert found.fields["target_layer_ids"] == drafter.config.target_layer_ids
    for name, value in drafter.state_dict().items():
        assert torch.equal(found.tensors[name], value), name


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = write.backbone(1)
    folder = write.write(tmp_path / "d", write.zlab(VOCABULARY), tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": []}
    files["model-00002-of-00002.safetensors"] = names[9:]
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(formats.read(folder).tensors) == set(tensors)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CarryoverError, match=r"cannot be read.*00002-of-00002"):
        formats.read(folder)


# --- Refused, by key ---

_SLIDING = ["sliding_attention", "full_attention"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    # What our blocks do not do.
    (write.zlab(320, layer_types=_SLIDING, sliding_window=2048), "layer_types .*whole context"),
    (
        write.zlab(320, layer_types=None, use_sliding_window=True, sliding_window=64),
        "sliding_window to 64",
    ),
    (write.zlab(320, attention_bias=True), "attention_bias to true"),
    (write.zlab(320, hidden_act="gelu"), 'hidden_act to "gelu"'),
    (write.zlab(320, is_neox_style=False), "is_neox_style"),
    (write.zlab(320, logit_scale=0.5), "logit_scale to 0.5"),
    (write.zlab(320, rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope_parameters"),
    (
        write.zlab(320, rope_parameters={"rope_theta": 1.0, "partial_rotary_factor": 0.5}),
        "rope_parameters .*partial",
    ),
    (write.zlab(320, rope_parameters=None, rope_scaling={"type": "linear"}), "rope_scaling"),
    (write.zlab(320, rope_theta=1e4), "rope_theta to 10000.0"),
    (write.zlab(320, quantization_config={"bits": 4}), "quantization_config .*does not know"),
    (write.zlab(320, use_tree_pos_emb=True), "use_tree_pos_emb .*does not know"),
    (write.zlab(320, markov_rank=8), "markov_rank .*does not know"),
    # z-lab's section.
    *(
        (
            write.zlab(
                320, dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2], **extra}
            ),
            m,
        )
        for extra, m in (
            ({"causal": True}, "dflash_config.causal to true"),
            ({"use_swa": True, "swa_window_size": 64}, "dflash_config.use_swa"),
            ({"attention_sink_bias": True}, "dflash_config.attention_sink_bias"),
            ({"attention_value_scale": 0.7}, "dflash_config.attention_value_scale"),
            ({"use_aux_hidden_state": False}, "dflash_config.use_aux_hidden_state"),
            ({"sample_from_anchor": True}, "dflash_config.sample_from_anchor"),
            ({"block_size": 16}, "dflash_config.block_size .*top-level block_size is 5"),
            ({"projector_type": "x"}, "dflash_config.projector_type"),
            ({"target_layer_ids": [2, 0]}, r"dflash_config.target_layer_ids: \[2, 0\]"),
            ({"target_layer_ids": [-1, 2]}, r"dflash_config.target_layer_ids: \[-1, 2\]"),
            ({"target_layer_ids": None}, "no dflash_config.target_layer_ids"),
            ({"mask_token_id": None}, "no dflash_config.mask_token_id"),
            ({"mask_token_id": True}, "dflash_config.mask_token_id: true"),
        )
    ),
    (write.zlab(320, dflash_config=None), "no dflash_config"),
    (write.zlab(320, num_hidden_layers="2"), 'num_hidden_layers: "2"'),
    # DeepSpec.
    (write.deepspec(320, rank=8, markov_head_type="gated"), 'markov_head_type to "gated"'),
    (
        write.deepspec(320, rank=8, confidence_head_with_markov=False),
        "confidence_head_with_markov to false",
    ),
    (write.deepspec(320, enable_confidence_head=True), "confidence_head_with_markov"),
    (write.deepspec(320, sample_from_anchor=False), "sample_from_anchor to false"),
    (write.deepspec(320, target_layer_ids=[-1, 2]), "target_layer_ids.*embedding"),
    # DeepSpec's Gemma drafters.
    (write.gemma(320, layer_types=_SLIDING), "layer_types .*whole context"),
    (write.gemma(320, layer_types=None), "no layer_types"),
    (write.gemma(320, layer_types=["full_attention"]), "layer_types .*num_hidden_layers is 2"),
    (write.gemma(320, attention_k_eq_v=False), "attention_k_eq_v to false"),
    (write.gemma(320, attention_k_eq_v=None), "no attention_k_eq_v"),
    (write.gemma(320, global_head_dim=None), "no global_head_dim"),
    (
        write.gemma(320, per_layer_config={"0": {"head_dim": 32}}),
        "per_layer_config .*all alike",
    ),
    (
        write.gemma(320, per_layer_config={str(i): {"num_experts": 2} for i in range(2)}),
        "per_layer_config .*all alike",
    ),
    (
        write.gemma(320, per_layer_config={"full_attention": {"head_dim": 32}}),
        "per_layer_config .*all alike",
    ),
    (write.gemma(320, hidden_activation="silu"), 'hidden_activation to "silu"'),
    (write.gemma(320, hidden_size_per_layer_input=64), "hidden_size_per_layer_input to 64"),
    (write.gemma(320, enable_moe_block=True), "enable_moe_block to true"),
    (write.gemma(320, use_double_wide_mlp=True), "use_double_wide_mlp to true"),
    (write.gemma(320, attn_logit_softcapping=50.0), "attn_logit_softcapping to 50.0"),
    (write.gemma(320, is_causal=True), "is_causal to true"),
    (write.gemma(320, attention_bias=True), "attention_bias to true"),
    (write.gemma(320, rope_theta=1e4), "rope_theta .*does not know"),
    (write.gemma(320, rope_parameters={"rope_theta": 1e4}), "no rope_parameters.full_attention"),
    *(
        (write.gemma(320, rope_parameters={"full_attention": rope}), message)
        for rope, message in (
            ({"rope_type": "yarn", "rope_theta": 1e4}, "full_attention.rope_type to"),
            (
                {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                "partial_rotary_factor to 0.5",
            ),
            (
                {"rope_type": "proportional", "rope_theta": 1e4, "factor": 8.0},
                "full_attention.factor to 8.0",
            ),
            ({"rope_type": "proportional"}, "no rope_parameters.full_attention.rope_theta"),
        )
    ),
    (write.gemma(320, markov_head_type="gated"), 'markov_head_type to "gated"'),
    # speculators; its default draft first.
    (
        write.speculators(
            320,
            transformer_layer_config=write.qwen3(320)
            | {
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 2048,
                "use_sliding_window": True,
            },
        ),
        "transformer_layer_config.layer_types .*whole context",
    ),
    (write.speculators(320, aux_hidden_state_layer_ids=[0, 3]), r"layer_ids: \[0, 3\]"),
    (write.speculators(320, speculators_model_type="eagle3"), 'speculators_model_type to "eagle3"'),
    (write.speculators(320, block_size=8), "speculative_tokens to 4, and its block_size .* give 7"),
    (write.speculators(320, "dspark", sample_from_anchor=None), "speculative_tokens .* give 3"),
    (write.speculators(320, norm_before_fc=True), "norm_before_fc"),
    (write.speculators(320, mask_token_id=None), "no mask_token_id"),
    (write.speculators(320, drafted=7), "has no d2t.*draft_vocab_size is 7 of 320"),
    # Others.
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM.*Known are"),
    ({}, "no drafter format"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_our_drafters_cannot_represent_is_refused_by_key(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CarryoverError, match=message) as caught:
        formats.read(write.write(tmp_path / "d", config, write.backbone(1)))
    assert "\n" not in str(caught.value) and caught.value.fix


ALL = {
    "z-lab": write.zlab(320),
    "DeepSpec": write.deepspec(320, rank=8),
    "speculators": write.speculators(320, "dspark"),
    "DeepSpec-Gemma": write.gemma(320),
}
# Keys that other projects' drafters have, and others. (Hypothesis knows the constants of our code.)
FOREIGN = ["use_tree_pos_emb", "use_q_head", "log_snr_conditioning", "norm_before_fc"]
KEYS = st.sampled_from(FOREIGN) | st.text("abcdefghijklmnopqrstuvwxyz_").map("unheard_of_{}".format)
VALUES = st.booleans() | st.integers() | st.text() | st.lists(st.integers(), max_size=2)


@settings(deadline=None)
@given(key=KEYS, value=VALUES, layout=st.sampled_from(list(ALL)), inside=st.booleans())
def test_no_key_is_passed_over(key: str, value: Any, layout: str, inside: bool) -> None:
    """An unknown key is refused by name wherever it stands; a null asks for nothing."""
    places = {
        "z-lab": "dflash_config",
        "speculators": "transformer_layer_config",
        "DeepSpec-Gemma": "rope_parameters",
    }
    place = places.get(layout)
    inside = inside and place is not None

    def read(found: Any) -> dict[str, Any]:
        config = ALL[layout]
        more = {place: config[place] | {key: found}} if inside else {key: found}
        return formats.READERS[layout](config | more, Path("d"))

    assert read(None) == formats.READERS[layout](ALL[layout], Path("d"))
    with pytest.raises(CarryoverError) as caught:
        read(value)
    at = f"{place}.{key}" if inside else key
    assert f"sets {at} to {json.dumps(value)}, and carryover does not know" in caught.value.reason


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = write.write(tmp_path / "d", write.zlab(VOCABULARY), write.backbone(1))
    torch.save(torch.zeros(64), folder / "mask_embedding.pt")
    with pytest.raises(CarryoverError, match=r"mask_embedding\.pt"):
        formats.read(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    folder = write.write(tmp_path / "d", write.zlab(VOCABULARY), write.backbone(1))
    path = folder / file
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CarryoverError, match="Fetch"):
        formats.read(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("rope_parameters", {"rope_type": "default", "rope_theta": theta})
            for theta in (0, -1, 1e999, True, "1e6", [])
        ),
        ("rope_parameters", {"rope_type": [], "rope_theta": 1e6}),
        *(("rms_norm_eps", v) for v in (0, -1, 7, float("nan"))),
        *((name, v) for name in ("head_dim", "intermediate_size") for v in (0, -1)),
        ("architectures", 5),
        ("block_size", 1),
    ],
)
def test_numbers_with_which_nothing_can_be_drafted_are_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    config = write.zlab(VOCABULARY) | {key: value}
    with pytest.raises(CarryoverError, match=r"config\.json"):
        formats.read(write.write(tmp_path / "d", config, write.backbone(1)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("per_layer_config", {"0": None, "1": None}),
        ("per_layer_config", {"0": {"head_dim": "32"}, "1": {"head_dim": "32"}}),
        ("per_layer_config", {"0": [1], "1": 5}),
        ("layer_types", []),
        ("num_hidden_layers", 0),
        ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": -1.0}}),
    ],
)
def test_gemma_keys_of_another_kind_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    config = write.gemma(VOCABULARY) | {key: value}
    with pytest.raises(CarryoverError, match=r"config\.json|num_hidden_layers|layer_types"):
        formats.read(write.write(tmp_path / "d", config, {}))


@pytest.mark.parametrize(
    "wrong",
    [torch.full((64,), torch.nan), torch.ones(64, dtype=torch.int64), torch.ones(64).char()],
)
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path: Path, wrong: Tensor) -> None:
    tensors = write.backbone(1) | {"norm.weight": wrong}
    with pytest.raises(CarryoverError, match=r"norm\.weight"):
        formats.read(write.write(tmp_path / "d", write.zlab(VOCABULARY), tensors))


@pytest.mark.parametrize("index", ["[]", "5", '{"weight_map": null}', '{"weight_map": [3]}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    folder = write.write(tmp_path / "d", write.zlab(VOCABULARY), write.backbone(1))
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CarryoverError, match="cannot be read"):
        formats.read(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"d2t": torch.tensor(3)},
        {"d2t": torch.tensor([0, 4, 4, 67, 146, 195, 314])},  # 320, outside
        {"d2t": torch.tensor([0, -1, 4, 67, 146, 195, 313])},  # 0 twice
        {"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)},
        {"d2t": torch.tensor([0, 4, 4])},
    ],
)
def test_a_map_that_leads_nowhere_is_refused(tmp_path: Path, wrong: dict[str, Tensor]) -> None:
    tensors = write.backbone(1) | maps() | {"lm_head.weight": torch.randn(7, 64)} | wrong
    config = write.speculators(VOCABULARY, drafted=7)
    with pytest.raises(CarryoverError, match="d2t"):
        formats.read(write.write(tmp_path / "d", config, tensors))


# --- Against config and target, and training from it ---


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, a tiny fp32 target and its features on random responses."""
    folder = tmp_path_factory.mktemp("released")
    write_tiny_target(folder / "source")
    config = tiny_config(
        folder,
        drafters={
            "DFlash": {
                "kind": "dflash", "layers": 2, "proposals": 4, "vocabulary": "full",
                "initialize": f"path:{folder / 'none'}", "qk_norm": True,
            }
        },
        training={
            "precision": "float32", "anchors": 8, "responses_per_step": 2, "micro_batch": 2,
            "held_out": 2, "log_every": 1, "evaluate_every": 100, "checkpoint_every": 2,
            "baseline": {"steps": 2, "learning_rate": 0.01},
            "further": {"steps": 2, "learning_rate": 0.005},
        },
        benchmark={"max_model_len": 512},
    )  # fmt: skip
    target.run(config, target="tiny")
    put_responses(config, LENGTHS)
    features.run(config, target="tiny")
    return folder


def target_ends(recorded: Path, rows: Tensor | None = None) -> dict[str, Tensor]:
    weights = load_file(recorded / "source" / "model.safetensors")
    head = weights["lm_head.weight"]
    return {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "lm_head.weight": head if rows is None else head[rows],
    }


def with_drafter(
    recorded: Path, name: str, source: Path, steps: int = 2, **keys: Any
) -> tuple[Path, Config]:
    """The recorded config with `initialize: path:source`; `name` is that of the drafter."""
    content = yaml.safe_load((recorded / "config.yaml").read_text())
    wanted = content["drafters"].pop("DFlash") | keys | {"initialize": f"path:{source}"}
    content["drafters"] = {name: wanted}
    content["training"]["baseline"]["steps"] = steps
    path = recorded / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path, load_config(path)


def written(recorded: Path, layout: str) -> tuple[Path, dict[str, Any]]:
    """A drafter of the tiny target in one format, and the config keys that go with it."""
    folder = recorded / f"drafter-{layout}"
    keys: dict[str, Any] = {}
    if layout == "z-lab":
        config, tensors = write.zlab(VOCABULARY), write.backbone(1)
    elif layout == "DeepSpec":
        config = write.deepspec(VOCABULARY)
        tensors = write.backbone(2) | target_ends(recorded)
        keys = {"slot_layout": "anchor_first"}
    elif layout == "speculators":
        config = write.speculators(VOCABULARY, drafted=len(OBSERVED))
        tensors = write.backbone(3) | target_ends(recorded, OBSERVED) | maps()
        keys = {"vocabulary": "observed"}
    elif layout == "DeepSpec-Gemma":
        config = write.gemma(VOCABULARY, final_logit_softcapping=None)  # as the tiny target
        tensors = write.gemma_backbone(4) | write.heads(VOCABULARY, VOCABULARY)
        tensors |= target_ends(recorded)
        keys = {
            "kind": "markov", "markov_rank": 8, "slot_layout": "anchor_first", "blocks": "gemma4",
        }  # fmt: skip
    else:  # ours, out of the stage itself
        zlab, _ = written(recorded, "z-lab")
        _, made = with_drafter(recorded, "source-of-ours", zlab)
        released.run(made, target="tiny", drafter="source-of-ours")
        return Paths(made).released("tiny", "source-of-ours"), {}
    if not folder.exists():
        write.write(folder, config, tensors)
    return folder, keys


@pytest.mark.parametrize(
    "layout", ["z-lab", "DeepSpec", "speculators", "DeepSpec-Gemma", "carryover"]
)
def test_training_starts_from_it(stages: Stages, recorded: Path, layout: str) -> None:
    source, keys = written(recorded, layout)
    path, config = with_drafter(recorded, f"from-{layout}", source, **keys)
    name = f"from-{layout}"
    stages.run("released", "--config", str(path))
    ours = Paths(config).released("tiny", name)
    subset = config.stage("released", "tiny", name)
    manifest = read_manifest(ours, stage="released", config=subset, verify=True)
    assert manifest["extra"]["format"] == layout
    start = load_file(ours / "model.safetensors")
    backbone = {k for k in load_file(source / "model.safetensors") if "embed" not in k}
    for key in backbone - {"lm_head.weight", "t2d"}:
        given = load_file(source / "model.safetensors")[key]
        assert torch.equal(start[key], given), key
    assert ("d2t" in start) is (layout == "speculators")

    stages.run("train", "--variant", "baseline", "--config", str(path))
    stages.run("export", "--variant", "baseline", "--config", str(path))
    rows = [
        json.loads(line)
        for line in (Paths(config).training("tiny", name, "baseline") / "metrics.jsonl")
        .read_text()
        .splitlines()
    ]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    trained = load_file(Paths(config).drafter("tiny", name, "baseline") / "model.safetensors")
    moved = {key for key, value in start.items() if not torch.equal(value, trained[key])}
    # Every weight but frozen ones and the map learns, and Adam's first steps are small.
    frozen = {"lm_head.weight", "d2t", *(f"layers.{i}.layer_scalar" for i in range(2))}
    assert moved == set(start) - frozen
    # vLLM's own Gemma class asks for copies of the target's embedding and head.
    if layout == "DeepSpec-Gemma":
        for key, value in target_ends(recorded).items():
            assert torch.equal(trained.pop(key), value), key
    assert set(trained) == set(start)
    assert all((trained[key] - start[key]).abs().max() < 0.05 for key in moved)


def test_zero_steps_leave_it_as_it_is_and_further_phases_go_on_from_it(
    stages: Stages, recorded: Path
) -> None:
    source, _ = written(recorded, "z-lab")
    path, config = with_drafter(recorded, "as-it-is", source, steps=0)
    stages.run("released", "--config", str(path))
    stages.run("train", "--variant", "baseline", "--config", str(path))
    stages.run("export", "--variant", "baseline", "--config", str(path))
    exported = load_file(
        Paths(config).drafter("tiny", "as-it-is", "baseline") / "model.safetensors"
    )
    given = load_file(source / "model.safetensors")
    assert set(exported) == set(given)
    for name, value in given.items():
        assert torch.equal(exported[name], value), name
    stages.run("train", "--variant", "carryover", "--config", str(path))
    folder = Paths(config).training("tiny", "as-it-is", "carryover") / "final"
    carried = load_file(folder / "model.safetensors")
    assert carried["carry_embedding"].abs().sum() > 0
    assert 0 < (carried["fc.weight"] - given["fc.weight"]).abs().max() < 0.05


def test_zero_steps_need_a_released_drafter(recorded: Path) -> None:
    path, _ = with_drafter(recorded, "zero", recorded / "drafter", steps=0)
    content = yaml.safe_load(path.read_text())
    content["drafters"]["zero"]["initialize"] = "random"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(
        CarryoverError,
        match=r"training\.baseline\.steps: 0 leaves drafters\.zero untrained.*path:DIR or hub:",
    ):
        load_config(path)


@pytest.mark.parametrize("value", ["hub:z-lab/Qwen3-4B-DFlash-b16", "hub:@main", "path:"])
def test_a_source_is_whole_and_pinned(recorded: Path, value: str) -> None:
    path, _ = with_drafter(recorded, "pinned", recorded / "drafter")
    with pytest.raises(CarryoverError, match=r"drafters\.pinned\.initialize"):
        load_config(path, [f"drafters.pinned.initialize={value!r}"])
    load_config(path, ["drafters.pinned.initialize=hub:z-lab/Qwen3-4B-DFlash-b16@0123abc"])


def test_an_unreachable_hub_is_one_line(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path, _ = with_drafter(recorded, "far", recorded / "drafter")
    key = "drafters.far.initialize"
    config = load_config(path, [f"{key}=hub:carryover-test/no-such-drafter@main"])
    with pytest.raises(CarryoverError, match=f"{key}: carryover-test/no-such-drafter at main"):
        released.run(config, target="tiny", drafter="far")


def test_all_that_the_config_says_otherwise_is_named_at_once(recorded: Path) -> None:
    source, _ = written(recorded, "z-lab")
    path, _ = with_drafter(
        recorded,
        "wrong",
        source,
        layers=3,
        proposals=7,
        vocabulary="observed",
        qk_norm=False,
        rope_theta=1e4,
    )
    changes = ["targets.tiny.feature_layers=[1, 2]", "targets.tiny.mask_token_id=4"]
    config = load_config(path, [*changes, "benchmark.max_model_len=4096"])
    with pytest.raises(CarryoverError, match="does not fit the config") as caught:
        released.run(config, target="tiny", drafter="wrong")
    assert caught.value.fix == (
        "Set drafters.wrong.layers to 2 (now 3), drafters.wrong.proposals to 4 (now 7), "
        "drafters.wrong.rope_theta to 500000.0 (now 10000.0), "
        "drafters.wrong.qk_norm to true (now false), "
        "drafters.wrong.vocabulary to full (now observed), "
        "targets.tiny.feature_layers to [0, 2] (now [1, 2]), "
        "targets.tiny.mask_token_id to 3 (now 4), "
        "benchmark.max_model_len to 2048 or less (now 4096)."
    )
    assert not Paths(config).released("tiny", "wrong").exists()


@pytest.mark.parametrize(
    ("keys", "layout", "fix"),
    [
        ({"slot_layout": "fill_in"}, "DeepSpec", "slot_layout to anchor_first (now fill_in)"),
        ({"slot_layout": "anchor_first"}, "z-lab", "slot_layout to fill_in (now anchor_first)"),
        ({"vocabulary": "full"}, "speculators", "vocabulary to observed (now full)"),
    ],
)
def test_layout_and_vocabulary_are_the_drafters_own(
    recorded: Path, keys: dict[str, str], layout: str, fix: str
) -> None:
    source, own = written(recorded, layout)
    _, config = with_drafter(recorded, "other", source, **(own | keys))
    with pytest.raises(CarryoverError) as caught:
        released.run(config, target="tiny", drafter="other")
    assert caught.value.fix == f"Set drafters.other.{fix}."


def test_a_markov_drafter_needs_its_kind(recorded: Path) -> None:
    config = write.deepspec(VOCABULARY, rank=8)
    tensors = write.backbone(2) | target_ends(recorded) | write.heads(VOCABULARY, VOCABULARY)
    source = recorded / "markov"
    write.write(source, config, tensors)
    _, settings = with_drafter(recorded, "markov", source, slot_layout="anchor_first")
    with pytest.raises(CarryoverError) as caught:
        released.check(formats.read(source), settings, "tiny", "markov")
    assert caught.value.fix == (
        "Set drafters.markov.kind to markov (now dflash), "
        "drafters.markov.markov_rank to 8 (now 256)."
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            write.zlab(VOCABULARY, num_target_layers=36),
            "target_blocks is 36, and the target's is 4",
        ),
        (write.zlab(512), "vocab_size is 512, and the target's is 320"),
        (write.zlab(VOCABULARY, hidden_size=128), "hidden_size is 128, and the target's is 64"),
        (write.zlab(VOCABULARY, target_hidden_size=32), "target_hidden_size is 32"),
        (write.zlab(VOCABULARY, final_logit_softcapping=30), "final_logit_softcapping is 30.0"),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    recorded: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    source = write.write(tmp_path / "d", config, write.backbone(1))
    _, settings = with_drafter(recorded, "foreign", source)
    with pytest.raises(CarryoverError, match=f"another target than tiny: its {message}"):
        released.run(settings, target="tiny", drafter="foreign")


@pytest.mark.parametrize("changed", ["embed_tokens.weight", "lm_head.weight"])
def test_an_embedding_or_head_of_its_own_is_refused(
    recorded: Path, tmp_path: Path, changed: str
) -> None:
    tensors = write.backbone(2) | target_ends(recorded)
    tensors[changed] = tensors[changed].clone()
    tensors[changed][7, 7] += 0.5
    source = write.write(tmp_path / "d", write.deepspec(VOCABULARY), tensors)
    _, settings = with_drafter(recorded, "trained-ends", source, slot_layout="anchor_first")
    with pytest.raises(CarryoverError, match=f"the drafter's {changed} differs"):
        released.run(settings, target="tiny", drafter="trained-ends")


def test_copies_of_the_targets_ends_may_be_rounded(recorded: Path, tmp_path: Path) -> None:
    """A bf16 drafter of an fp32 target. Its own weights keep their type."""
    tensors = write.backbone(2) | target_ends(recorded)
    tensors = {name: value.bfloat16() for name, value in tensors.items()}
    source = write.write(tmp_path / "d", write.deepspec(VOCABULARY), tensors)
    _, settings = with_drafter(recorded, "rounded", source, slot_layout="anchor_first")
    released.run(settings, target="tiny", drafter="rounded")
    ours = load_file(Paths(settings).released("tiny", "rounded") / "model.safetensors")
    assert torch.equal(ours["fc.weight"], tensors["fc.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.self_attn.g_proj.weight": torch.zeros(4, 64)}, "has unknown layers.1.*g_proj"),
        ({"fc.weight": torch.zeros(64, 64)}, "has misshapen fc.weight"),
        ({"norm.weight": None}, "lacks norm.weight"),
    ],
)
def test_other_tensors_than_the_config_promises_are_named(
    recorded: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    tensors: dict[str, Any] = write.backbone(1) | change
    present = {name: value for name, value in tensors.items() if value is not None}
    source = write.write(tmp_path / "d", write.zlab(VOCABULARY), present)
    _, settings = with_drafter(recorded, "tensors", source)
    with pytest.raises(CarryoverError, match=message):
        released.run(settings, target="tiny", drafter="tensors")


def test_a_drafter_that_carries_starts_no_baseline(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", tiny_drafter(carry=True), None, None)
    with pytest.raises(CarryoverError, match=r"reads carried rows.*baseline or control"):
        formats.read(tmp_path / "d")


def test_the_stage_is_for_released_drafters_alone(recorded: Path) -> None:
    path, _ = with_drafter(recorded, "none", recorded / "drafter")
    config = load_config(path, ["drafters.none.initialize=random"])
    with pytest.raises(CarryoverError, match="needs no released drafter"):
        released.run(config, target="tiny", drafter="none")


def test_another_drafter_at_the_same_path_is_another_input(recorded: Path, tmp_path: Path) -> None:
    source = write.write(tmp_path / "d", write.zlab(VOCABULARY), write.backbone(1))
    _, config = with_drafter(recorded, "swapped", source)
    with pytest.raises(CarryoverError, match="Run `carryover released`"):
        released_folder(config, "tiny", "swapped")
    released.run(config, target="tiny", drafter="swapped")
    folder = released_folder(config, "tiny", "swapped")
    first = input_identity(folder)
    made_with = checkpoint_config(config, "tiny", "swapped", "baseline")

    save_file(write.backbone(7), source / "model.safetensors")
    with pytest.raises(CarryoverError, match=r"holds another drafter.*Run `carryover released`"):
        released_folder(config, "tiny", "swapped")
    released.run(config, target="tiny", drafter="swapped")
    assert input_identity(released_folder(config, "tiny", "swapped")) != first
    assert checkpoint_config(config, "tiny", "swapped", "baseline") != made_with
