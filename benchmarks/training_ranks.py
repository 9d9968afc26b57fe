"""Training with one rank and with two: one core each against one core, and against one rank on two.

The project's own launcher (`carryover train`: torchrun, DeepSpeed, gloo) trains a baseline of
SmolLM2-135M's width on random responses, several times in turn. Anchors a second are the trainer's
own (metrics.jsonl), the first interval left out. Needs two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Report, arguments, positive, ratio, summary
from benchmarks.shapes import SMOLLM2_135M
from carryover import features, target
from carryover.config import load_config
from carryover.config.precision import resolve
from carryover.paths import Paths
from tests.test_features import put_responses
from tests.tiny_target import VOCABULARY, tiny_config, write_tiny_target

# name: (ranks, cores)
SETTINGS = {"1 rank, 1 core": (1, 1), "1 rank, 2 cores": (1, 2), "2 ranks, 2 cores": (2, 2)}
RESPONSES, EVERY = 64, 5


def prepare(folder: Path, seed: int, tiny: bool) -> Path:
    """Features of random responses, by the project's own stages; returns the config file."""
    name = resolve("auto")
    dtype, shape = getattr(torch, name), SMOLLM2_135M
    write_tiny_target(folder / "source", seed=seed, dtype=dtype)
    if not tiny:  # the tokenizer stays, the model becomes as wide as the default one
        torch.manual_seed(seed)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=shape.hidden, intermediate_size=shape.inner,
                num_hidden_layers=4, num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
                max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=0,
            )
        ).to(dtype).save_pretrained(folder / "source")  # fmt: skip
    tokens = 8 if tiny else 120
    anchors = 4 if tiny else shape.anchors
    steps = (2 if tiny else 4) * EVERY
    config = tiny_config(
        folder,
        target={"dtype": name, "feature_layers": [0, 1, 2, 3]},
        drafters={
            "DFlash": {
                "kind": "dflash", "layers": shape.drafter_layers, "proposals": shape.proposals,
                "vocabulary": "full", "initialize": "random", "qk_norm": False,
            }
        },
        training={
            "precision": name, "anchors": anchors, "responses_per_step": 4, "micro_batch": 2,
            "held_out": 2, "log_every": EVERY, "evaluate_every": 10**6, "checkpoint_every": 10**6,
            "baseline": {"steps": steps, "learning_rate": 1e-3},
        },
    )  # fmt: skip
    target.run(config, target="tiny")
    put_responses(config, [(tokens // 3, tokens)] * RESPONSES)
    features.run(config, target="tiny")
    return folder / "config.yaml"


def train(base: Path, ranks: int, cores: int) -> list[float]:
    """Anchors a second of every interval but the first, of a run from step 0."""
    content = yaml.safe_load(base.read_text())
    content["training"]["ranks"] = ranks
    path = base.with_name("run.yaml")
    path.write_text(yaml.safe_dump(content))
    folder = Paths(load_config(path)).training("tiny", "DFlash", "baseline")
    shutil.rmtree(folder, ignore_errors=True)
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "carryover",
            "train",
            "--config",
            str(path),
            "--variant",
            "baseline",
        ],
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["anchors_per_s"] for row in rows if "anchors_per_s" in row][1:]


def main() -> None:
    parser = arguments("training_ranks", __doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each setting")
    chosen = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("needs two cores")
    report = Report("training_ranks", chosen.seed)
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as temporary:
        base = prepare(Path(temporary), chosen.seed, chosen.tiny)
        for _ in range(chosen.rounds):
            for name, (ranks, cores) in SETTINGS.items():
                rates = train(base, ranks, cores)
                seconds[name] += [1000 / rate for rate in rates]
                print(name, [round(rate) for rate in rates], flush=True)
    one, two = "1 rank, 1 core", "2 ranks, 2 cores"
    content: dict[str, Any] = {
        "anchors_per_s": {n: round(1000 * len(s) / sum(s), 1) for n, s in seconds.items()},
        "two_ranks_over_one_on_one_core": ratio(seconds[one], seconds[two], chosen.seed),
        "two_ranks_over_one_on_two_cores": ratio(
            seconds["1 rank, 2 cores"], seconds[two], chosen.seed
        ),
        "seconds_per_1000_anchors": {name: summary(s) for name, s in seconds.items()},
    }
    report.write(chosen.out, **content)


if __name__ == "__main__":
    main()
