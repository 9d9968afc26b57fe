"""Training forward = the dense reference that vLLM is held against, on the exported folder.

tests/serving compares every round of a real vLLM generation with `DenseDrafter`; here the module
that is trained is compared with it, through the checkpoint that `carryover export` writes.
"""

from pathlib import Path

import pytest
import torch

from carryover.drafter.checkpoint import load_into, load_tensors, observed_ids, save_drafter
from carryover.drafter.layout import proposal_positions
from carryover.drafter.model import Carry, Drafter
from carryover.training.vocabulary import Vocabulary
from tests.serving.reference import DenseDrafter
from tests.training.tiny import VOCABULARY, tiny_drafter


@pytest.mark.parametrize("distinction", ["embedding", "none"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_exported_drafter_drafts_as_trained_for_every_number_of_carried_rows(
    tmp_path, qk_norm, distinction
):
    drafter = tiny_drafter(qk_norm=qk_norm, distinction=distinction)
    size, width = drafter.config.proposals, drafter.config.feature_size
    target_head = torch.randn(VOCABULARY, 32)
    vocabulary = Vocabulary(target_head, torch.tensor([1, 4, 5, 40, 77, 96]))
    save_drafter(tmp_path, drafter, vocabulary.observed, vocabulary.head)
    reference = DenseDrafter.load(tmp_path)
    torch.manual_seed(2)
    features, rejected = torch.randn(1, 12, width), torch.randn(1, 1, size, width)
    for accepted in range(size + 1):
        first = 3
        anchor = first + accepted + 1
        carry = Carry(
            rejected,
            proposal_positions(torch.tensor([[first]]), size),
            torch.arange(1, size + 1)[None, None] > accepted,
        )
        with torch.no_grad():
            got = drafter(torch.tensor([[17]]), torch.tensor([[anchor]]), features, carry)[0, 0]
        want = reference(
            features[0, :anchor], rejected[0, 0, accepted:], 17, drafter.embedding, size
        )[1:]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        best = reference.logits(want, target_head).argmax(-1)
        proposals = vocabulary.propose(got[None, None], torch.tensor([[17]]))
        assert proposals[0, 0].tolist() == best.tolist()


@pytest.mark.parametrize(
    "carry",
    [
        {"carry": False},
        {"distinction": "embedding"},
        {"distinction": "none"},
        {"distinction": "projector"},
        {"distinction": "none", "rows": "target_top5"},
    ],
    ids=lambda carry: "-".join(map(str, carry.values())),
)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_round_trip_is_bit_exact(tmp_path: Path, carry: dict, qk_norm: bool) -> None:
    drafter = tiny_drafter(qk_norm=qk_norm, **carry).to(torch.bfloat16)
    observed = torch.tensor([0, 3, 96])
    save_drafter(tmp_path, drafter, observed, torch.randn(3, 32).bfloat16())
    config, tensors = load_tensors(tmp_path)
    assert config == drafter.config.__class__(
        **(vars(drafter.config) | {"draft_vocab_size": config.draft_vocab_size})
    )
    again = Drafter(config).to(torch.bfloat16)
    load_into(again, tensors)
    assert observed_ids(tensors).tolist() == observed.tolist()
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_what_carry_adds_to_a_baseline_changes_nothing_at_first(tmp_path: Path) -> None:
    """E_carry starts at zero and F_carry as F: both draft as rows that nothing tells apart."""
    save_drafter(tmp_path, tiny_drafter(carry=False), None, None)
    config, tensors = load_tensors(tmp_path)
    assert not config.carry and "carry_embedding" not in tensors
    hidden = {}
    torch.manual_seed(4)
    features, rejected = torch.randn(1, 9, 64), torch.randn(1, 1, 4, 64)
    positions = proposal_positions(torch.tensor([[3]]), 4)
    carry = Carry(rejected, positions, torch.ones(1, 1, 4, dtype=torch.bool))
    for distinction in ("none", "embedding", "projector"):
        drafter = Drafter(config.with_carry("hidden_states", distinction))
        load_into(drafter, tensors)
        drafter.share(torch.ones(VOCABULARY, 32).cumsum(0).cos())
        with torch.no_grad():
            hidden[distinction] = drafter(
                torch.tensor([[17]]), torch.tensor([[4]]), features, carry
            )
    assert torch.equal(hidden["none"], hidden["embedding"])
    assert torch.equal(hidden["none"], hidden["projector"])
