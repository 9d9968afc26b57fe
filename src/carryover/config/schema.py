"""The config's schema: every key, its type, its default and what it means.

Defaults equal config/config.yaml, which a test checks; config/schema.json is generated from here
(`carryover config --schema`) and is checked too.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from carryover.config.precision import resolve
from carryover.config.stages import stage_subset

GENERATED_DATASETS = (
    "HumanEval",
    "chat",
    "math",
    "code",
    "translation",
    "qa",
    "rag",
    "summarization",
    "tool",
)

_PACKAGE = re.compile(r"package:[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_HUB = re.compile(r"hub:[A-Za-z0-9][\w.-]*(/[\w.-]+)?@[\w./-]+")
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _check_after(value: str, scheme: str) -> None:
    if not value.removeprefix(scheme).strip():
        raise ValueError(f"nothing follows {scheme!r}, found {value!r}")


def _check_pinned(value: str) -> None:
    if not _HUB.fullmatch(value):
        fix = "write hub:ID@REVISION with a pinned revision, best a commit"
        raise ValueError(f"{fix}, found {value!r}")


def _target_source(value: str) -> str:
    if value.startswith("package:"):
        if not _PACKAGE.fullmatch(value):
            fix = "write package:NAME==VERSION with a pinned version"
            raise ValueError(f"{fix}, found {value!r}")
    elif value.startswith("hub:"):
        _check_pinned(value)
    elif value.startswith("path:"):
        _check_after(value, "path:")
    else:
        raise ValueError(
            f"expected package:NAME==VERSION, hub:ID@REVISION or path:DIR, found {value!r}"
        )
    return value


def _evaluation_source(value: str) -> str:
    if value.startswith("path:"):
        _check_after(value, "path:")
    elif value not in ("generated", "hub"):
        raise ValueError(f"expected generated, path:FILE or hub, found {value!r}")
    return value


def _initialize(value: str) -> str:
    if value.startswith("path:"):
        _check_after(value, "path:")
    elif value.startswith("hub:"):
        _check_pinned(value)
    elif value not in ("random", "target_last_layers"):
        raise ValueError(
            f"expected random, target_last_layers, path:DIR or hub:ID@REVISION, found {value!r}"
        )
    return value


def _layers(value: list[int]) -> list[int]:
    if any(layer < 0 for layer in value):
        raise ValueError(f"layers count from 0, so none is negative, found {value}")
    if value != sorted(set(value)):
        raise ValueError(f"layers must rise, each one once, found {value}")
    return value


def _unique(value: list[Any]) -> list[Any]:
    repeated = [item for index, item in enumerate(value) if item in value[:index]]
    if repeated:
        raise ValueError(f"each entry at most once, found {repeated[0]!r} again")
    return value


class KeyProblems(ValueError):
    """Problems between the keys of a section: (dotted key within the section, what is wrong)."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))


Name = Annotated[str, Field(pattern=_NAME)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
# `auto` is resolved when the config is read, so that it decides what results are called.
Dtype = Annotated[Literal["auto", "bfloat16", "float32"], AfterValidator(resolve)]


class Section(BaseModel):
    """Strict: no unknown keys, no conversions (a quoted number is no number), no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Target(Section):
    source: Annotated[str, AfterValidator(_target_source)] = Field(
        description="Where the model is from: package:NAME==VERSION | hub:ID@REVISION | path:DIR."
    )
    dtype: Dtype = Field(
        default="auto",
        validate_default=True,
        description="Weights and inference of the target: auto (bfloat16 where this machine "
        "multiplies it fast, else float32) | bfloat16 | float32.",
    )
    feature_layers: Annotated[list[int], Field(min_length=1), AfterValidator(_layers)] = Field(
        description="0-based block outputs given to the drafter, in this order."
    )
    mask_token_id: CountOrZero = Field(
        description="The id that fills the slots to be drafted; one that no text uses."
    )
    thinking: bool = Field(
        default=False, description="Passed to the chat template as enable_thinking."
    )


class Drafter(Section):
    kind: Literal["dflash", "markov"] = Field(
        description="dflash (parallel block drafter) | markov (with a first-order correction)."
    )
    layers: Count = Field(default=2, description="Drafter blocks.")
    proposals: Count = Field(default=7, description="B: tokens proposed a round.")
    slot_layout: Literal["fill_in", "anchor_first"] = Field(
        default="fill_in",
        description="fill_in (slot k predicts anchor+k) | anchor_first (anchor+k+1).",
    )
    markov_rank: Count = Field(
        default=256, description="Rank of the first-order correction head (markov only)."
    )
    vocabulary: Literal["full", "observed"] = Field(
        default="observed",
        description="full (share the target's head) | observed (tokens of the training responses; "
        "of a released drafter, those it has).",
    )
    initialize: Annotated[str, AfterValidator(_initialize)] = Field(
        default="target_last_layers",
        description="random | target_last_layers | path:DIR | hub:ID@REVISION (a released "
        "drafter: docs/warm-start.md).",
    )
    blocks: Literal["qwen3", "gemma4"] = Field(
        default="qwen3",
        description="Transformer blocks: qwen3 | gemma4 (DeepSpec's for Gemma 4; slot_layout "
        "anchor_first, qk_norm true).",
    )
    rope_theta: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="Base of the rotary position embeddings; null: the target's."
    )
    qk_norm: bool = Field(
        default=False,
        description="Normalise queries and keys, as Qwen3 does; false: not, as Llama.",
    )

    @property
    def released(self) -> bool:
        """Whether `initialize` names a released drafter."""
        return self.initialize.startswith(("path:", "hub:"))

    @model_validator(mode="after")
    def _gemma_blocks(self) -> Self:
        problems = []
        if self.blocks == "gemma4" and self.slot_layout != "anchor_first":
            message = (
                f"{self.slot_layout} does not go with blocks: gemma4, which vLLM serves with its "
                "dspark method alone; set slot_layout to anchor_first, or blocks to qwen3"
            )
            problems.append(("slot_layout", message))
        if self.blocks == "gemma4" and not self.qk_norm:
            message = (
                "blocks: gemma4 always normalise queries and keys; set qk_norm to true, or "
                "blocks to qwen3"
            )
            problems.append(("qk_norm", message))
        if problems:
            raise KeyProblems(problems)
        return self

    @model_validator(mode="after")
    def _servable(self) -> Self:
        # DeepSpec's DFlash is anchor-first, and served with vLLM's dspark method.
        if self.kind == "dflash" and self.slot_layout == "anchor_first" and not self.released:
            raise KeyProblems(
                [
                    (
                        "slot_layout",
                        "anchor_first does not go with kind: dflash, since vLLM's dflash method "
                        "refuses it; set slot_layout to fill_in, or kind to markov",
                    )
                ]
            )
        return self


class TrainPrompts(Section):
    source: Literal["generated", "hub"] = Field(
        default="generated",
        description="generated (written by carryover.prompts) | hub (the paper's data sets).",
    )
    count: Count = Field(default=1200, description="Training prompts over all kinds or data sets.")


class EvaluationPrompts(Section):
    source: Annotated[str, AfterValidator(_evaluation_source)] = Field(
        default="generated",
        description="generated | path:FILE (a jsonl with `subset` and `prompt`) | hub (the "
        "paper's benchmark).",
    )
    datasets: Annotated[list[Name], Field(min_length=1), AfterValidator(_unique)] = Field(
        default=list(GENERATED_DATASETS), description="Evaluation sets, in the report's order."
    )
    prompts_per_dataset: Count = Field(
        default=20, description="Written per set; the benchmark may take fewer."
    )

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        if self.source != "generated":
            return self
        unknown = [name for name in self.datasets if name not in GENERATED_DATASETS]
        if unknown:
            known = ", ".join(GENERATED_DATASETS)
            message = f"source: generated has no {', '.join(unknown)}; it has {known}"
            raise KeyProblems([("datasets", message)])
        return self


class Prompts(Section):
    train: TrainPrompts = Field(
        default_factory=TrainPrompts, description="Prompts that the target answers for training."
    )
    evaluation: EvaluationPrompts = Field(
        default_factory=EvaluationPrompts, description="Prompts of the benchmark, never trained on."
    )


class Responses(Section):
    temperature: NotNegative = Field(
        default=0.0, description="Sampling temperature of the recorded responses; 0 is greedy."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Nucleus sampling; 1 is off."
    )
    top_k: CountOrZero = Field(default=0, description="Top-k sampling; 0 is off.")
    max_tokens: Count = Field(default=40, description="Longest response, in tokens.")
    max_model_len: Count = Field(
        default=1024, description="Longest prompt and response together, in tokens."
    )
    max_num_seqs: Count = Field(default=128, description="Prompts decoded together.")
    shard_size: Count = Field(
        default=400, description="Prompts a shard; a crash loses at most one shard."
    )

    @model_validator(mode="after")
    def _response_fits(self) -> Self:
        _check_fits(self.max_tokens, self.max_model_len)
        return self


class Features(Section):
    batch_tokens: Count = Field(default=4096, description="Tokens a forward pass.")
    shard_tokens: Count = Field(default=65536, description="Tokens a file.")


class Baseline(Section):
    steps: CountOrZero = Field(
        default=750, description="Optimizer steps; 0 leaves a released drafter as it is."
    )
    learning_rate: Positive = Field(default=1.0e-3, description="Peak learning rate.")


class Further(Section):
    steps: Count = Field(default=60, description="Optimizer steps on top of the baseline.")
    learning_rate: Positive = Field(default=2.0e-4, description="Peak learning rate.")


class DFlashLosses(Section):
    cross_entropy: NotNegative = Field(
        default=1.0, description="Cross-entropy against the recorded tokens."
    )
    distribution: NotNegative = Field(
        default=0.0, description="L1 distance of the drafter's distribution from the target's."
    )

    @model_validator(mode="after")
    def _drafts(self) -> Self:
        if not self.cross_entropy and not self.distribution:
            message = "cross_entropy and distribution are both 0, so nothing would teach drafting"
            raise KeyProblems([("cross_entropy", message)])
        return self


class MarkovLosses(DFlashLosses):
    cross_entropy: NotNegative = Field(
        default=0.1, description="Cross-entropy against the recorded tokens."
    )
    distribution: NotNegative = Field(
        default=0.9, description="L1 distance of the drafter's distribution from the target's."
    )
    confidence: NotNegative = Field(
        default=1.0,
        description="Cross-entropy of the confidence head against the acceptance probability; "
        "0: no such head.",
    )


class Losses(Section):
    dflash: DFlashLosses = Field(
        default_factory=DFlashLosses, description="Of drafters of kind dflash."
    )
    markov: MarkovLosses = Field(
        default_factory=MarkovLosses, description="Of drafters of kind markov; as in DeepSpec."
    )


class Training(Section):
    nodes: Count = Field(default=1, description="Machines.")
    ranks: Count = Field(default=1, description="Processes a node; on CPU over gloo.")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1, description="DeepSpeed ZeRO 0-3."
    )
    precision: Dtype = Field(
        default="auto",
        validate_default=True,
        description="auto | bfloat16 (with fp32 masters) | float32.",
    )
    features: Literal["cached", "online"] = Field(
        default="cached",
        description="cached (written once by the stage features) | online (the target's forward "
        "pass in every step, nothing on disk).",
    )
    attention: Literal["auto", "dense", "flex", "grouped"] = Field(
        default="auto",
        description="Kernel of block attention: auto (flex on CUDA; on CPU dense with gradients, "
        "grouped without) | dense | flex | grouped.",
    )
    max_length: Annotated[int, Field(ge=2)] = Field(
        default=384, description="Tokens of prompt and response; longer ones are cut."
    )
    anchors: Count = Field(default=32, description="Anchors a response.")
    responses_per_step: Count = Field(
        default=2, description="Responses an optimizer step, over all ranks."
    )
    micro_batch: Count = Field(default=2, description="Responses a forward pass and rank.")
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.04, description="Part of the steps in which the learning rate rises."
    )
    weight_decay: NotNegative = Field(default=0.0, description="AdamW's weight decay.")
    clip: Positive = Field(default=1.0, description="Largest norm of the gradient.")
    decay_gamma: Positive = Field(
        default=4.0, description="Loss weight of position k: exp(-(k-1)/gamma)."
    )
    losses: Losses = Field(
        default_factory=Losses,
        description="What each term counts; each is a mean over the weighted positions.",
    )
    held_out: CountOrZero = Field(default=32, description="Responses kept for validation.")
    log_every: Count = Field(default=25, description="Steps between two rows of metrics.")
    evaluate_every: Count = Field(default=250, description="Steps between two validations.")
    checkpoint_every: Count = Field(default=125, description="Steps between two checkpoints.")
    keep_checkpoints: Count = Field(default=2, description="Checkpoints kept; older ones go.")
    baseline: Baseline = Field(
        default_factory=Baseline, description="The drafter without carry, from its initial weights."
    )
    further: Further = Field(
        default_factory=Further,
        description="control and carryover: the same steps after the baseline, a fresh optimizer.",
    )

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        together = self.nodes * self.ranks * self.micro_batch
        if self.responses_per_step % together:
            product = f"{self.nodes} * {self.ranks} * {self.micro_batch} = {together}"
            raise KeyProblems(
                [
                    (
                        "responses_per_step",
                        f"{self.responses_per_step} is not a multiple of "
                        f"nodes * ranks * micro_batch = {product}",
                    )
                ]
            )
        return self


class Carry(Section):
    rows: Literal["hidden_states", "draft_tokens", "target_tokens", "target_top5"] = Field(
        default="hidden_states",
        description="What is carried: hidden_states (the paper) | draft_tokens | target_tokens "
        "| target_top5.",
    )
    distinction: Literal["embedding", "none", "projector"] = Field(
        default="embedding",
        description="How carried rows are told apart: embedding (E_carry) | none | projector.",
    )
    embedding_init: Literal["zeros", "normal"] = Field(
        default="zeros", description="E_carry at the start: zeros | normal."
    )

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> Self:
        if self.rows != "hidden_states" and self.distinction != "none":
            message = (
                f"{self.distinction} tells carried rows apart, and rows: {self.rows} replaces mask "
                "tokens and carries none; set distinction to none, or rows to hidden_states"
            )
            raise KeyProblems([("distinction", message)])
        if self.embedding_init != "zeros" and self.distinction != "embedding":
            message = (
                f"{self.embedding_init} is for E_carry, which distinction: {self.distinction} does "
                "not have; set embedding_init to zeros, or distinction to embedding"
            )
            raise KeyProblems([("embedding_init", message)])
        return self


class Benchmark(Section):
    temperatures: Annotated[list[NotNegative], Field(min_length=1), AfterValidator(_unique)] = (
        Field(default=[0], description="Sampling temperatures; a file of rows for each.")
    )
    prompts: Count = Field(default=4, description="Prompts of each dataset.")
    max_tokens: Count = Field(default=24, description="Generated tokens a prompt.")
    warmup_prompts: CountOrZero = Field(
        default=1, description="Prompts run and not counted, per variant."
    )
    dtype: Dtype = Field(
        default="auto",
        validate_default=True,
        description="Weights and inference of target and drafter: auto | bfloat16 | float32.",
    )
    max_model_len: Count = Field(
        default=1024, description="Longest prompt and response together, in tokens."
    )
    enforce_eager: bool = Field(
        default=True,
        description="true: no torch.compile (a start costs 10 s instead of 80 s).",
    )
    kv_cache_gib: Positive = Field(default=0.1, description="KV cache of each engine, in GiB.")
    interleave: bool = Field(
        default=True,
        description="All variants' engines alive, prompts in turn: drift cancels in ratios.",
    )

    @model_validator(mode="after")
    def _response_fits(self) -> Self:
        _check_fits(self.max_tokens, self.max_model_len)
        return self


class Report(Section):
    bootstrap_samples: Count = Field(
        default=2000, description="Samples of the paired bootstrap over prompts."
    )
    confidence: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.95, description="Level of the confidence intervals."
    )


class Config(Section):
    """Settings of a whole run, from prompts to report."""

    results_dir: Annotated[str, Field(min_length=1)] = Field(
        default="results", description="Where everything is written; relative to the repository."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=42, description="One seed; every random choice derives from it."
    )
    targets: Annotated[dict[Name, Target], Field(min_length=1)] = Field(
        description="Frozen models to draft for; the key names folders and table rows."
    )
    drafters: Annotated[dict[Name, Drafter], Field(min_length=1)] = Field(
        description="One trained drafter of each kind for every target."
    )
    prompts: Prompts = Field(default_factory=Prompts, description="Where the prompts come from.")
    responses: Responses = Field(
        default_factory=Responses, description="The target answers every training prompt."
    )
    features: Features = Field(
        default_factory=Features,
        description="Hidden states of feature_layers on prompt and response.",
    )
    training: Training = Field(default_factory=Training, description="Training of the drafters.")
    carry: Carry = Field(default_factory=Carry, description="Carried rows; variant carryover only.")
    benchmark: Benchmark = Field(
        default_factory=Benchmark, description="Speed and acceptance, measured in vLLM."
    )
    report: Report = Field(default_factory=Report, description="Tables and figures.")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        train, training = self.prompts.train, self.training
        per_dataset = self.prompts.evaluation.prompts_per_dataset
        rest = train.count - training.held_out
        wrong = []
        if rest <= 0:
            wrong.append(
                (
                    "training.held_out",
                    f"{training.held_out} leaves nothing to train on; it must be below "
                    f"prompts.train.count ({train.count})",
                )
            )
        elif rest < training.responses_per_step:
            wrong.append(
                (
                    "training.responses_per_step",
                    f"{training.responses_per_step} is more than the {rest} responses that "
                    "prompts.train.count - training.held_out leave",
                )
            )
        untrained = [name for name, drafter in self.drafters.items() if not drafter.released]
        if training.baseline.steps == 0 and untrained:
            wrong.append(
                (
                    "training.baseline.steps",
                    f"0 leaves drafters.{untrained[0]} untrained; only with "
                    f"drafters.{untrained[0]}.initialize: path:DIR or hub:ID@REVISION is there a "
                    "drafter without training",
                )
            )
        if self.benchmark.prompts > per_dataset:
            wrong.append(
                (
                    "benchmark.prompts",
                    f"{self.benchmark.prompts} is more than "
                    f"prompts.evaluation.prompts_per_dataset ({per_dataset})",
                )
            )
        if wrong:
            raise KeyProblems(wrong)
        return self

    def stage(
        self,
        name: str,
        target: str | None = None,
        drafter: str | None = None,
        variant: str | None = None,
    ) -> dict[str, Any]:
        """The part of the config that decides a stage's result, as plain data.

        It goes into manifests and Snakemake's params. It holds what decides the stages before it
        too, and leaves out what only decides speed, memory or logging.

        Args:
            name: a stage, i.e. a subcommand: target, prompts, responses, features, train, export,
                benchmark, report, released; or train_prompts, evaluation_prompts for half of
                prompts.
            target: key of `targets`; not for prompts and report.
            drafter: key of `drafters`; for released, train, export and benchmark.
            variant: baseline, control or carryover; for train and export.

        Raises CarryoverError where a name is unknown, ValueError where one is not given.
        """
        return stage_subset(self, name, target, drafter, variant)


def _check_fits(max_tokens: int, max_model_len: int) -> None:
    if max_tokens >= max_model_len:
        limit = f"it must be below max_model_len ({max_model_len})"
        raise KeyProblems([("max_tokens", f"{max_tokens} leaves no room for a prompt; {limit}")])
