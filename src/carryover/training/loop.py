"""The training loop of one rank: baseline, control, or carryover (parallel DVD)."""

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carryover.artifacts import atomic_path
from carryover.config import Config
from carryover.drafter.checkpoint import load_into, load_tensors, observed_ids, save_drafter
from carryover.drafter.initialize import initialize_from_target, initialize_random, new_config
from carryover.drafter.model import Carry, Drafter
from carryover.errors import CarryoverError
from carryover.paths import Paths
from carryover.progress import Progress
from carryover.target import load_target
from carryover.training import checkpoints
from carryover.training.attention import carried_share
from carryover.training.batch import Batch, collate
from carryover.training.dvd import Blocks, draft_and_verify
from carryover.training.objective import TERMS, Labels, Totals, draft_loss, label
from carryover.training.recorded import open_recorded
from carryover.training.result import checkpoint_config
from carryover.training.sampling import generator, split, step_rows
from carryover.training.verify import Reading, Verifier
from carryover.training.vocabulary import Vocabulary, observed_tokens

log = logging.getLogger(__name__)


class _Objective(nn.Module):
    """What DeepSpeed wraps: the drafter, called for its loss."""

    def __init__(self, drafter: Drafter, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.drafter = drafter
        self.vocabulary = vocabulary

    def forward(
        self, batch: Batch, blocks: Blocks, labels: Labels, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        totals = draft_loss(self.drafter, self.vocabulary, batch, blocks, labels, scales)
        return totals.loss, totals.as_vector()


class Trainer:
    """One drafter variant in training on this rank."""

    def __init__(self, config: Config, target: str, drafter: str, variant: str) -> None:
        self.config, self.variant = config, variant
        self.settings = config.training
        self.paths = Paths(config)
        self.folder = self.paths.training(target, drafter, variant)
        self.subset = checkpoint_config(config, target, drafter, variant)
        self.phase_name = "baseline" if variant == "baseline" else "further"
        self.phase = getattr(self.settings, self.phase_name)
        self.carries = variant == "carryover"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.started = datetime.now(UTC)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if self.settings.attention == "flex" and self.device.type != "cuda":
            raise CarryoverError(
                "training.attention: flex has no gradient on CPU", "Set it to auto."
            )
        self.dtype = getattr(torch, self.settings.precision)

        self.store = open_recorded(config, target)
        self.rows, self.held_out = split(len(self.store), self.settings.held_out, config.seed)
        model: Any = load_target(self.paths.target(target), self.dtype)[0]
        model.to(self.device)
        self.gamma = self.settings.decay_gamma
        losses = getattr(self.settings.losses, config.drafters[drafter].kind).model_dump()
        self.factors = [losses.get(term, 0.0) for term in TERMS]
        # The recorded features do not hold the last block's output, from which p follows.
        self.compares = any(self.factors[1:])
        self.drafter, self.vocabulary = self._build(model, target, drafter)
        self.proposals = self.drafter.config.proposals
        self.verifier = None
        if self.carries or self.compares or self.settings.features == "online":
            self.verifier = Verifier(
                model, list(self.drafter.config.target_layer_ids), self.settings.attention
            )
        self.objective = _Objective(self.drafter, self.vocabulary)
        self.engine = self._engine()

    def _build(self, model: Any, target: str, drafter: str) -> tuple[Drafter, Vocabulary]:
        head = model.get_output_embeddings().weight.detach()
        embedding = model.get_input_embeddings().weight.detach()
        wanted = self.config.drafters[drafter]
        starts_anew = self.variant == "baseline" and not wanted.released
        if starts_anew:
            observed = None
            if wanted.vocabulary == "observed":
                observed = observed_tokens(map(self.store.token_ids, self.rows))
            drafter_config = new_config(
                model,
                feature_layers=self.config.targets[target].feature_layers,
                mask_token_id=self.config.targets[target].mask_token_id,
                layers=wanted.layers,
                proposals=wanted.proposals,
                slot_layout=wanted.slot_layout,
                blocks=wanted.blocks,
                rope_theta=wanted.rope_theta,
                qk_norm=wanted.qk_norm,
                draft_vocab_size=None if observed is None else len(observed),
                markov_rank=wanted.markov_rank if wanted.kind == "markov" else 0,
                confidence=self.factors[TERMS.index("confidence")] > 0,
            )
            module = Drafter(drafter_config)
            initialize_random(module, self.config.seed)
            if wanted.initialize == "target_last_layers":
                initialize_from_target(module, model)
        else:
            # Control and carryover go on from the baseline, with a fresh optimizer and scheduler
            # (paper, Table 4); a baseline may go on from a released drafter.
            folder = self.paths.training(target, drafter, "baseline") / "final"
            if self.variant == "baseline":
                folder = self.paths.released(target, drafter)
            drafter_config, tensors = load_tensors(folder)
            observed = observed_ids(tensors)
            if self.carries:
                carry = self.config.carry
                drafter_config = drafter_config.with_carry(carry.rows, carry.distinction)
            module = Drafter(drafter_config)
            load_into(module, tensors)
            if self.carries and self.config.carry.embedding_init == "normal":
                noise = generator(self.config.seed, "carry_embedding")
                torch.nn.init.normal_(module.carry_embedding, std=0.02, generator=noise)
        vocabulary = Vocabulary(head, observed, drafter_config.final_logit_softcapping)
        module.share(embedding)
        module.kernel = self.settings.attention
        return module, vocabulary

    def _engine(self) -> Any:
        import deepspeed

        settings = self.settings
        per_rank = settings.responses_per_step // self.world
        warmup = max(1, round(settings.warmup_ratio * self.phase.steps))
        total = self.phase.steps

        def rate(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

        engine, _, _, _ = deepspeed.initialize(
            model=self.objective,
            model_parameters=[p for p in self.objective.parameters() if p.requires_grad],
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
            config={
                "train_micro_batch_size_per_gpu": settings.micro_batch,
                "gradient_accumulation_steps": per_rank // settings.micro_batch,
                "gradient_clipping": settings.clip,
                "bf16": {"enabled": settings.precision == "bfloat16"},
                "zero_optimization": {"stage": settings.zero_stage, "overlap_comm": False},
                "optimizer": {
                    "type": "AdamW",
                    "params": {
                        "lr": self.phase.learning_rate,
                        "weight_decay": settings.weight_decay,
                        "torch_adam": True,
                    },
                },
                "steps_per_print": 10**9,
            },
        )
        if settings.zero_stage == 3 and self.drafter.markov_head is not None:
            # The loss reads this weight outside of the module that owns it.
            weight = self.drafter.markov_head.markov_w2.weight
            deepspeed.zero.register_external_parameter(self.objective, weight)
        return engine

    def run(self) -> None:
        """Train to the last step, resuming from the newest intact checkpoint."""
        step = checkpoints.load_newest(self.engine, self.folder, config=self.subset)
        if step and self.rank == 0:
            log.warning("%s: resuming at step %d of %d", self.variant, step, self.phase.steps)
        metrics = _Metrics(self.folder / "metrics.jsonl", step, enabled=self.rank == 0)
        if step == 0:
            metrics.write(step=0, **self.evaluate())
        window: list[Tensor] = []
        clock = time.perf_counter()
        with (
            Progress(self.phase.steps, "step", self.variant, done=step)
            if self.rank == 0
            else _Silent() as progress
        ):
            while step < self.phase.steps:
                window.append(self.step(step))
                step += 1
                if step % self.settings.log_every == 0 or step == self.phase.steps:
                    total = torch.stack(window).sum(0)
                    dist.all_reduce(total)
                    seconds, clock = time.perf_counter() - clock, time.perf_counter()
                    report = Totals.report(total[:-1], self.proposals, self.factors)
                    report |= {
                        "anchors_per_s": total[-1].item() / seconds,
                        "learning_rate": self.engine.get_lr()[0],
                        "gradient_norm": float(self.engine.get_global_grad_norm() or 0.0),
                    }
                    window.clear()
                    if not math.isfinite(report["loss"]):
                        raise CarryoverError(
                            f"the loss of {self.variant} is {report['loss']} at step {step}",
                            "Lower training.*.learning_rate and train again.",
                        )
                    metrics.write(step=step, **report)
                    progress.update(
                        0,
                        loss=f"{report['loss']:.3f}",
                        tau=f"{report['expected_acceptance_length']:.2f}",
                        anchors=f"{report['anchors_per_s']:.0f}/s",
                    )
                progress.update(1)
                if step % self.settings.evaluate_every == 0 or step == self.phase.steps:
                    metrics.write(step=step, **self.evaluate())
                    clock = time.perf_counter()
                if step % self.settings.checkpoint_every == 0 or step == self.phase.steps:
                    checkpoints.save(
                        self.engine,
                        self.folder,
                        step,
                        config=self.subset,
                        seed=self.config.seed,
                        started=self.started,
                        keep=self.settings.keep_checkpoints,
                    )
        metrics.close()
        self._save_final()

    def step(self, step: int) -> Tensor:
        """One optimizer step; returns this rank's sums (Totals, then the number of anchors)."""
        prepared = [self.prepare(batch) for batch in self._micro_batches(step)]
        weights = torch.stack([labels.summed_weights() for _, _, labels in prepared]).sum(0)
        dist.all_reduce(weights)
        # DeepSpeed averages over ranks and micro-batches; each term is a mean over the summed
        # weights of the whole step, so that neither changes the gradient.
        scales = weights.new_tensor(self.factors) * self.world * len(prepared)
        scales = scales / weights.clamp(min=1e-9)
        sums = []
        for batch, blocks, labels in prepared:
            loss, vector = self.engine(batch, blocks, labels, scales)
            self.engine.backward(loss)
            self.engine.step()
            sums.append(torch.cat((vector, batch.valid.sum().double().view(1))))
        return torch.stack(sums).sum(0)

    def prepare(self, batch: Batch) -> tuple[Batch, Blocks, Labels]:
        """Where to draft, and what has to be predicted there."""
        batch, reading = self._read(batch)
        blocks = self._blocks(batch, reading)
        return batch, blocks, self._label(batch, blocks, reading)

    def _read(self, batch: Batch) -> tuple[Batch, Reading | None]:
        """The target's one pass over the responses, where the training needs it; online, with the
        features that it gives."""
        if self.verifier is None:
            return batch, None
        reading = self.verifier.read(batch.token_ids)
        if self.settings.features == "online":
            # Rounded as features on disk are.
            batch = replace(batch, features=reading.features.bfloat16().to(self.dtype))
        return batch, reading

    def _blocks(self, batch: Batch, reading: Reading | None) -> Blocks:
        """Drafts at the sampled anchors, or where parallel DVD takes them."""
        if self.carries and self.verifier is not None:
            return draft_and_verify(self.drafter, self.vocabulary, self.verifier, batch, reading)
        return Blocks(batch.anchors, batch.valid)

    def _label(self, batch: Batch, blocks: Blocks, reading: Reading | None) -> Labels:
        hidden = reading.hidden if self.compares and reading is not None else None
        return label(batch, blocks, self.vocabulary, self.proposals, self.gamma, hidden)

    def _micro_batches(self, step: int) -> Iterator[Batch]:
        settings, seed = self.settings, self.config.seed
        rows = step_rows(self.rows, step, settings.responses_per_step, seed)
        # Similar lengths share a micro-batch: less padding.
        rows.sort(key=lambda row: (self.store.tokens[row], row))
        size = settings.micro_batch
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        for index in range(self.rank, len(groups), self.world):
            # Control and carryover train at the same anchors: one seed for both.
            yield self._collate(groups[index], index * size, seed, self.phase_name, step)

    def _collate(self, rows: list[int], first: int, seed: int, *parts: int | str) -> Batch:
        """`first` is the place of rows[0] among all; with the rest it decides the anchors drawn, so
        that micro-batches and ranks do not."""
        batch = collate(
            [self.store[row] for row in rows],
            anchors=self.settings.anchors,
            max_length=self.settings.max_length,
            generators=[generator(seed, *parts, first + i) for i in range(len(rows))],
        )
        return batch.to(self.device, self.dtype)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out loss and accuracy without carry; with carry beside it for carryover.

        The carried and the uncarried draft start at the same shifted anchors. Where rows are
        carried, `held_out_carry_attention` is their share of the attention.
        """
        if not self.held_out:
            return {}
        sums: dict[str, Tensor] = {}
        share = torch.zeros(2, dtype=torch.float64, device=self.device)
        size = self.settings.micro_batch
        groups = [self.held_out[i : i + size] for i in range(0, len(self.held_out), size)]
        for index in range(self.rank, len(groups), self.world):
            batch = self._collate(groups[index], index * size, self.config.seed, "held-out")
            batch, reading = self._read(batch)
            drafts = {"held_out": Blocks(batch.anchors, batch.valid)}
            if self.carries:
                drafted = self._blocks(batch, reading)
                drafts["held_out_carry_on"] = drafted
                drafts["held_out_carry_off"] = Blocks(drafted.anchors, drafted.valid)
                if isinstance(drafted.carry, Carry):
                    share += carried_share(self.drafter, batch, drafted)
            for name, blocks in drafts.items():
                labels = self._label(batch, blocks, reading)
                _, vector = self.objective(batch, blocks, labels, torch.ones(len(TERMS)))
                sums[name] = sums.get(name, 0) + vector
        result: dict[str, Any] = {}
        names = ["held_out"] + (["held_out_carry_on", "held_out_carry_off"] if self.carries else [])
        for name in names:
            vector = sums.get(name, Totals.nothing(self.proposals).to(self.device))
            dist.all_reduce(vector)
            report = Totals.report(vector, self.proposals, self.factors)
            result |= {f"{name}_{term}": report[term] for term in TERMS if term in report}
            result[f"{name}_loss"] = report["loss"]
            result[f"{name}_accuracy"] = report["accuracy"]
            result[f"{name}_acceptance_length"] = report["expected_acceptance_length"]
        if self.carries and self.drafter.config.carry_rows == "hidden_states":
            dist.all_reduce(share)
            result["held_out_carry_attention"] = (share[0] / share[1].clamp(min=1)).item()
        return result

    def _save_final(self) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters(
            list(self.drafter.parameters()), enabled=self.settings.zero_stage == 3
        ):
            if self.rank == 0:
                observed = self.vocabulary.observed
                head = None if observed is None else self.vocabulary.head
                save_drafter(self.folder / "final", self.drafter, observed, head)
        dist.barrier()


class _Silent:
    """The progress bar of ranks other than the first."""

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, n: int = 1, **postfix: Any) -> None: ...


class _Metrics:
    """metrics.jsonl: one object a row; rows after the step that is resumed from are dropped."""

    def __init__(self, path: Path, step: int, enabled: bool) -> None:
        self._file = None
        if not enabled:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists() and step:
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    break
                if row["step"] <= step:
                    kept.append(line + "\n")
        with atomic_path(path) as temporary:
            temporary.write_text("".join(kept))
        self._file = path.open("a")

    def write(self, **row: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
