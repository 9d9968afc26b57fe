"""Runs jobs in vLLM and writes down what happened: `python run_engine.py JOBS.json RESULTS.pt`.

A process of its own, since vLLM binds threads and patches torch. The engines of all jobs live in
this process, one after another, so that the drafter can be watched at work. The environment chooses
the model runner, V1 or V2.

A job (keys, all but the first optional):
    target, drafter   folders; without a drafter the target generates by itself
    llm               further arguments of vllm.LLM
    worker            false: leave out worker_cls
    prompts           lists of token ids
    sampling          arguments of vllm.SamplingParams
    grammars          a regular expression a prompt, or null, that its output has to match
    continue_from     index of an earlier job that generated the true continuations; proposals
    accepted          are then edited such that accepted[k] of them are right in a request's round k
    record            keep every round's states
    watch_kv          with each round, what it did to the KV cache
    speculative       further keys of speculative_config
    unsalted          draw probabilistic drafts with stock vLLM's noise
A result: `error` (one line) or `outputs` (a list of ids a prompt), `rounds`, `accepted`, `drafts`,
`hooks` (how many watch the samplers), `proposer` (its class).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from carryover.errors import CarryoverError
from carryover.serving.plugin import WORKER

LLM_ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "block_size": 32,  # KV cache block: several a request
    "kv_cache_memory_bytes": 32 << 20,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "generation_config": "vllm",
    "seed": 0,
}


class CacheWatch:
    """What a draft does to the KV cache of target and drafter."""

    def __init__(self, runner: Any) -> None:
        layers = runner.compilation_config.static_forward_context
        own = runner.drafter._draft_attn_layer_names
        caches = {name: layer.kv_cache for name, layer in layers.items()}
        # Of each layer [blocks, kv_heads, positions of a block, keys and values].
        self.target = [cache for name, cache in caches.items() if name not in own]
        self.drafter = [caches[name] for name in own]

    def addresses(self) -> dict[str, list[tuple[int, int]]]:
        """Memory of every block of every layer: first byte, and the byte after the last."""
        blocks = {
            owner: [block for cache in caches for block in cache]
            for owner, caches in (("target", self.target), ("drafter", self.drafter))
        }
        assert all(block.is_contiguous() for found in blocks.values() for block in found)
        return {
            owner: [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in found]
            for owner, found in blocks.items()
        }

    def copies(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [c.clone() for c in self.target], [c.clone() for c in self.drafter]

    def changed(self, before: tuple[list[torch.Tensor], list[torch.Tensor]]) -> dict[str, bool]:
        return {
            owner: not all(map(torch.equal, old, new))
            for owner, old, new in (
                ("target", before[0], self.target),
                ("drafter", before[1], self.drafter),
            )
        }

    def checksums(self, blocks: list[int]) -> list[str]:
        """Of the target's keys and values in each block, all layers."""
        found = []
        for block in blocks:
            digest = hashlib.sha256()
            for cache in self.target:
                digest.update(cache[block].numpy().tobytes())
            found.append(digest.hexdigest())
        return found


class Recorder:
    """Watches a drafter: notes each round's inputs and states, and edits its proposals."""

    def __init__(self, llm: LLM, job: dict[str, Any], continuations: list[list[int]] | None):
        core = llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.drafter = self.runner.drafter
        self.prompts = [tuple(prompt) for prompt in job["prompts"]]
        self.accepted = job.get("accepted")
        self.continuations = continuations
        self.rounds: list[dict[str, Any]] = []
        self.turns = [0] * len(self.prompts)
        self.states: torch.Tensor | None = None
        self.carried: torch.Tensor | None = None
        self.keys: list[int] = []
        self.cache = CacheWatch(self.runner) if job.get("watch_kv") else None
        self.propose = self.drafter.propose
        self.first_pass = self.drafter.set_inputs_first_pass
        self.drafter.propose = self.watch_propose
        self.drafter.set_inputs_first_pass = self.watch_first_pass
        self.drafter.model.register_forward_hook(self.watch_states)

    def watch_states(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.states = output.clone()

    def watch_first_pass(self, **arguments: Any) -> Any:
        self.carried = getattr(self.drafter, "_carried", None)
        inputs = self.first_pass(**arguments)
        self.keys = inputs[2].seq_lens.tolist()
        return inputs

    def watch_propose(self, **arguments: Any) -> torch.Tensor:
        caches = self.cache.copies() if self.cache else None
        proposals = self.propose(**arguments).clone()
        kept: dict[str, Any] = {}
        if self.cache is not None and caches is not None:
            kept["changed"] = self.cache.changed(caches)
        metadata = arguments["common_attn_metadata"]
        starts = metadata.query_start_loc.tolist()
        ids = self.runner.input_batch.req_ids
        rejected = arguments["num_rejected_tokens_gpu"]
        block = 1 + self.drafter.num_speculative_tokens
        for row in range(len(ids)):
            prompt = tuple(self.runner.requests[ids[row]].prompt_token_ids)
            request = self.prompts.index(prompt)
            count = 0 if rejected is None else int(rejected[row])
            first, end = starts[row], starts[row + 1]
            anchor_position = int(arguments["target_positions"][end - 1]) + 1 - count
            assert self.states is not None
            if self.cache is not None:
                # Whole blocks before the anchor: the target has computed and committed them.
                whole = anchor_position // self.drafter.block_size
                blocks = metadata.block_table_tensor[row, :whole].tolist()
                kept["committed"] = self.cache.checksums(blocks)
            self.rounds.append(
                {
                    "request": request,
                    "rejected": arguments["target_token_ids"][end - count : end].tolist(),
                    "carried": 0 if self.carried is None else int(self.carried[row]),
                    "verified": arguments["target_token_ids"][first:end].tolist(),
                    "anchor": int(arguments["next_token_ids"][row]),
                    "anchor_position": anchor_position,
                    "states": self.states[row * block : (row + 1) * block].clone(),
                    "proposals": proposals[row].tolist(),
                    "batch": len(ids),
                    "keys": self.keys[row],
                    "context_slots": self.drafter._context_slot_mapping_buffer[first:end].tolist(),
                    "block_slots": self.drafter._slot_mapping_buffer[
                        row * block : (row + 1) * block
                    ].tolist(),
                }
                | kept
            )
            if self.continuations is not None:
                self.edit(proposals[row], request, anchor_position)
        self.carried = None
        return proposals

    def edit(self, proposals: torch.Tensor, request: int, anchor_position: int) -> None:
        assert self.continuations is not None and self.accepted is not None
        index = anchor_position - len(self.prompts[request])
        truth = self.continuations[request][index + 1 :]
        if index < 0 or len(truth) <= len(proposals):
            return
        right = self.accepted[self.turns[request] % len(self.accepted)]
        self.turns[request] += 1
        proposals[:right] = torch.tensor(truth[:right])
        if right < len(proposals) and proposals[right] == truth[right]:
            proposals[right] = truth[right] - 1 if truth[right] else 1


class RecorderV2(Recorder):
    """The same for the V2 model runner, whose drafter is a speculator."""

    def __init__(self, llm: LLM, job: dict[str, Any], continuations: list[list[int]] | None):
        core = llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.drafter = self.runner.speculator
        self.prompts = [tuple(prompt) for prompt in job["prompts"]]
        self.accepted = job.get("accepted")
        self.continuations = continuations
        self.rounds: list[dict[str, Any]] = []
        self.turns = [0] * len(self.prompts)
        self.cache = None
        self.propose = self.drafter.propose
        self.drafter.propose = self.watch_propose
        self.drafter.model.register_forward_hook(self.watch_states)

    def watch_propose(self, batch: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        proposals = self.propose(batch, *arguments, **options).clone()
        num_sampled, num_rejected, last_sampled, next_prefill = arguments[4:8]
        carried = getattr(self.drafter, "_carried", None)
        requests, width = self.runner.req_states, self.drafter.num_query_per_req
        for row in range(batch.num_reqs):
            index = int(batch.idx_mapping[row])
            length = int(requests.prompt_len.np[index])
            prompt = tuple(requests.all_token_ids.gpu[index, :length].tolist())
            request = self.prompts.index(prompt)
            count = int(num_rejected[row])
            first, end = batch.query_start_loc_np[row : row + 2].tolist()
            anchor_position = int(batch.positions[end - 1]) + 1 - count
            anchor = last_sampled[index, 0] if num_sampled[row] else next_prefill[0, index]
            assert self.states is not None
            self.rounds.append(
                {
                    "request": request,
                    "rejected": batch.input_ids[end - count : end].tolist(),
                    "carried": 0 if carried is None else int(carried[row]),
                    "verified": batch.input_ids[first:end].tolist(),
                    "anchor": int(anchor),
                    "anchor_position": anchor_position,
                    "states": self.states[row * width : (row + 1) * width].clone(),
                    "proposals": proposals[row].tolist(),
                    "batch": batch.num_reqs,
                }
            )
            if self.continuations is not None:
                self.edit(proposals[row], request, anchor_position)
        return proposals


def run(job: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    arguments = LLM_ARGUMENTS | {"model": job["target"]} | job.get("llm", {})
    if "drafter" in job:
        arguments.setdefault(
            "speculative_config",
            {
                "method": "dflash",
                "model": job["drafter"],
                "num_speculative_tokens": job.get("proposals", 7),
            }
            | job.get("speculative", {}),
        )
    if job.get("worker", True):
        arguments["worker_cls"] = WORKER
    try:
        llm = LLM(**arguments)
    except CarryoverError as error:
        return {"error": str(error)}
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    source = job.get("continue_from")
    recorder = None
    if job.get("record") or source is not None:
        continuations = None if source is None else earlier[source]["outputs"]
        watcher = RecorderV2 if hasattr(runner, "speculator") else Recorder
        recorder = watcher(llm, job, continuations)
    if job.get("unsalted"):
        runner.speculator._salt_seeds = lambda requests: None
    settings = {"temperature": 0, "max_tokens": 40, "detokenize": False} | job.get("sampling", {})
    sampling = [
        SamplingParams(
            **settings,
            structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
        )
        for regex in job.get("grammars", [None] * len(job["prompts"]))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "rounds": recorder.rounds if recorder else [],
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens"),
        "drafts": counts.get("vllm:spec_decode_num_drafts"),
        "preemptions": counts.get("vllm:num_preemptions"),
        "addresses": recorder.cache.addresses() if recorder and recorder.cache else None,
        "hooks": sum(
            len(getattr(sampler, "_forward_hooks", ()))
            + len(getattr(sampler, "_forward_pre_hooks", ()))
            for sampler in (runner.sampler, getattr(runner, "rejection_sampler", runner.sampler))
        ),
        "proposer": type(getattr(runner, "drafter", None)).__name__,
    }


def main(jobs_file: str, results_file: str) -> None:
    results: list[dict[str, Any]] = []
    for job in json.loads(Path(jobs_file).read_text()):
        # What is there now stays. vLLM collects garbage ten times an engine, and each time would
        # look through all that it has imported, for most of the time that the engine takes.
        gc.freeze()
        results.append(run(job, results))
        gc.collect()  # the engine
    torch.save(results, results_file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
