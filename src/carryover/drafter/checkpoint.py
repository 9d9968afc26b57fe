"""Drafter folders: config.json and model.safetensors, as vLLM and other projects load them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from carryover.artifacts import atomic_path, write_json
from carryover.drafter.config import DrafterConfig
from carryover.drafter.model import Drafter
from carryover.errors import CarryoverError

EMBEDDING, HEAD, MAP = "embed_tokens.weight", "lm_head.weight", "d2t"
CARRY_EMBEDDING, CARRY_PROJECTOR = "carry_embedding", "carry_projector.weight"


def save_drafter(
    folder: Path,
    drafter: Drafter,
    observed: Tensor | None,
    head: Tensor | None,
    embedding: Tensor | None = None,
) -> None:
    """Write a drafter folder.

    observed: [V_d] int64 ascending target ids of a reduced draft vocabulary (None: the whole one,
    the target's head is shared at load); head: [V_d, H], the target's rows for them; embedding:
    [V, H], the target's, where a copy is to be in the folder.
    """
    tensors = {name: value.detach().contiguous() for name, value in drafter.state_dict().items()}
    config = drafter.config
    if not config.qk_norm:
        # The format requires them; the plugin leaves them out of the computation.
        for i in range(config.num_hidden_layers):
            for norm in ("q_norm", "k_norm"):
                name = f"layers.{i}.self_attn.{norm}.weight"
                tensors[name] = torch.ones(config.head_dim, dtype=drafter.fc.weight.dtype)
    if _unmarked_rows(config):
        # Served as an E_carry of zeros, which is the same: nothing is added before F.
        tensors[CARRY_EMBEDDING] = torch.zeros(config.feature_size, dtype=drafter.fc.weight.dtype)
    for name, copy in ((HEAD, head), (EMBEDDING, embedding)):
        if copy is not None:
            tensors[name] = copy.detach().contiguous()
    if observed is not None:
        # vLLM's convention: target id = draft id + d2t[draft id].
        tensors[MAP] = observed - torch.arange(len(observed), device=observed.device)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt"})
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config.to_json(dtype))


def _unmarked_rows(config: DrafterConfig) -> bool:
    return (
        config.carry and config.carry_rows == "hidden_states" and config.carry_distinction == "none"
    )


def load_tensors(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors of a drafter folder; CarryoverError where a file is missing or broken."""
    try:
        config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text()))
        return config, load_file(folder / "model.safetensors")
    except CarryoverError:
        raise
    except Exception as error:
        raise CarryoverError(
            f"{folder} is no readable drafter folder ({str(error).splitlines()[0]})",
            "Export the drafter again with `carryover export`.",
        ) from error


def observed_ids(tensors: dict[str, Tensor]) -> Tensor | None:
    """Target ids [V_d] of a reduced draft vocabulary, None for a full one."""
    if MAP not in tensors:
        return None
    return tensors[MAP] + torch.arange(len(tensors[MAP]))


def load_into(drafter: Drafter, tensors: dict[str, Tensor]) -> None:
    """Copy a checkpoint's tensors into a drafter.

    What carry adds may be absent (a baseline that goes on with carry): E_carry keeps its initial
    value, F_carry starts as F, with which it is no distinction at first. Any other missing or
    unexpected tensor is refused by name.
    """
    own = drafter.state_dict()
    ignored = {EMBEDDING, HEAD, MAP}
    if not drafter.config.qk_norm:
        ignored |= {n for n in tensors if n.endswith(("q_norm.weight", "k_norm.weight"))}
    if _unmarked_rows(drafter.config):
        ignored |= {CARRY_EMBEDDING}
    given = {name: value for name, value in tensors.items() if name not in ignored}
    if CARRY_PROJECTOR in own and "fc.weight" in given:
        given.setdefault(CARRY_PROJECTOR, given["fc.weight"])
    missing = set(own) - set(given) - {CARRY_EMBEDDING}
    unexpected = set(given) - set(own)
    wrong = {n for n in set(own) & set(given) if own[n].shape != given[n].shape}
    for what, names in (("lacks", missing), ("has unknown", unexpected), ("has misshapen", wrong)):
        if names:
            raise CarryoverError(
                f"the drafter checkpoint {what} {', '.join(sorted(names)[:4])}",
                "It was made for another drafter configuration; train or export it again.",
            )
    drafter.load_state_dict(given, strict=False)
