"""A tiny random Llama with a byte tokenizer and a chat template, and a config that targets it."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from carryover.artifacts import write_manifest
from carryover.config import Config, load_config
from carryover.paths import Paths
from carryover.prompts.prompt import Prompt, stable_id
from carryover.prompts.stage import write_prompts

DEFAULT = Path(__file__).parents[1] / "config" / "config.yaml"
SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|mask|>"]
MASK_ID = 3
VOCABULARY = 320
LAYERS = 4
HIDDEN = 64
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, after SPECIALS; the first of these ends a sequence."""
    symbols = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=SPECIALS[1:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_tiny_target(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint and return its folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        # The CPU attention kernel of vLLM takes heads of 32 and up.
        head_dim=32,
        max_position_embeddings=512,
        # Larger than usual, so that the random logits are far apart and greedy decoding has no
        # ties that rounding could turn.
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.to(dtype)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def tiny_config(
    folder: Path, *, target: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]
) -> Config:
    """The default config with one target, `tiny`, from `folder/source`; results in `folder`.

    `target` and `sections` (e.g. responses={"max_tokens": 8}) replace single keys.
    """
    content = yaml.safe_load(DEFAULT.read_text())
    content["results_dir"] = str(folder / "results")
    content["targets"] = {
        "tiny": {
            "source": f"path:{folder / 'source'}",
            "dtype": "float32",
            "feature_layers": [0, 2],
            "mask_token_id": MASK_ID,
            "thinking": False,
            **(target or {}),
        }
    }
    for name, keys in sections.items():
        content[name].update(keys)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_config(path)


def put_prompts(
    config: Config, path: Path, texts: Sequence[str], dataset: str, part: str = "evaluation_prompts"
) -> list[Prompt]:
    """Write `texts` as if the prompts stage had; `part` of the config decides them."""
    prompts = [Prompt(id=stable_id(dataset, t), dataset=dataset, prompt=t) for t in texts]
    write_prompts(path, prompts)
    write_manifest(
        path,
        stage="prompts",
        config=config.stage(
            "train_prompts" if path == Paths(config).train_prompts() else "evaluation_prompts"
        ),
        started=datetime.now(UTC),
        seed=config.seed,
    )
    return prompts


def put_train_prompts(config: Config, texts: Sequence[str]) -> list[Prompt]:
    """Write `texts` as the training prompts."""
    return put_prompts(config, Paths(config).train_prompts(), texts, "chat", "train_prompts")
