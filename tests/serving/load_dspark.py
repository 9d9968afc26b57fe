"""Build vLLM's own DSpark drafter without an engine, and save what it holds.

    python load_dspark.py TARGET DRAFTER RESULTS

Only the V2 model runner serves method dspark, and it asks for a Triton, so that vLLM makes no whole
config for it on CPU: the drafter's is put into the target's. Up to the forward pass the rest is the
engine's: the configs, the model class that the registry gives, the weight loader.
A result: `architecture` (the class), `config` (keys of the drafter's hf_config), `aux_layers` (what
the target is asked for, ids of block inputs), `tensors` (name -> parameter).
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

KEYS = ("vocab_size", "draft_vocab_size", "markov_rank", "mask_token_id", "block_size")


def main(target: str, drafter: str, results: str) -> None:
    arguments = EngineArgs(
        model=target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
    )
    config = arguments.create_engine_config()
    arguments.speculative_config = {
        "method": "dspark",
        "model": drafter,
        "num_speculative_tokens": 4,
    }
    speculative = arguments.create_speculative_config(config.model_config, config.parallel_config)
    assert speculative is not None
    config.speculative_config = speculative
    draft = speculative.draft_model_config
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel()
        loader = get_model_loader(config.load_config)
        model = loader.create_model(config, draft)
        loader.load_weights(model, draft)
        torch.save(
            {
                "architecture": type(model).__name__,
                "config": {key: getattr(draft.hf_config, key, None) for key in KEYS},
                "aux_layers": get_eagle3_aux_layers_from_config(speculative),
                "tensors": {name: value.data for name, value in model.named_parameters()},
            },
            results,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
