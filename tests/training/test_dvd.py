"""Parallel DVD against one anchor at a time with the target's ordinary forward (Algorithm 2)."""

import pytest
import torch

from carryover.drafter.attention import LEAST_GROUP, Visible
from carryover.training import verify
from carryover.training.batch import Batch
from carryover.training.dvd import draft_and_verify
from carryover.training.objective import draft_loss, label
from carryover.training.verify import Verifier
from carryover.training.vocabulary import Vocabulary
from tests.training.tiny import (
    LAYERS,
    VOCABULARY,
    dense_draft,
    dense_verify,
    tiny_drafter,
    tiny_target,
)


def recorded(target, rows=2, length=16, seed=5) -> Batch:
    """Responses that the target might have given, with its features at every position."""
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCABULARY - 1, (rows, length))
    target.set_attn_implementation("eager")
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    return Batch(
        token_ids=ids,
        lengths=torch.full((rows,), length),
        features=torch.cat([states[i + 1] for i in LAYERS], -1),
        anchors=torch.tensor([[2, 5, 9, 14], [3, 7, 11, 13]]),
        valid=torch.ones(rows, 4, dtype=torch.bool),
    )


class Rigged(Vocabulary):
    """Proposes the target's own continuation for the first m positions, then something else."""

    def __init__(self, head, proposals):
        super().__init__(head, None)
        self.forced = proposals

    def propose(self, hidden, anchor_tokens, markov=None):
        return self.forced


def continuation(target, prefix, count, wrong_from):
    ids = prefix
    for k in range(1, count + 1):
        with torch.no_grad():
            best = int(target(ids[None]).logits[0, -1].argmax())
        ids = torch.cat((ids, torch.tensor([(best + 1) % VOCABULARY if k > wrong_from else best])))
    return ids[-count:]


FAMILIES = ["llama", "qwen3", "qwen3, sliding", "gemma4, sliding"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("together", [7, 4, 1])  # anchors
def test_verification_equals_an_ordinary_forward_of_each_branch(family, together, monkeypatch):
    size, rows = 4, 2
    monkeypatch.setattr(verify, "CHUNK_TOKENS", together * size * rows)
    grouped = []
    mask = Visible.grouped_mask
    monkeypatch.setattr(
        Visible, "grouped_mask", lambda *arguments: grouped.append(1) or mask(*arguments)
    )
    target = tiny_target(family)
    ids = recorded(target, rows, length=24).token_ids
    # Before, at and behind the first position that a window leaves out.
    anchors = torch.tensor([[0, 1, 2, 9, 14, 17, 22], [3, 5, 7, 11, 13, 19, 21]])
    wanted = [[0, 1, 2, 3, 4, 2, 1], [4, 3, 0, 1, 4, 4, 2]]
    target.set_attn_implementation("eager")
    proposals = torch.stack(
        [
            torch.stack(
                [
                    continuation(target, ids[r, : a + 1], size, wanted[r][n])
                    for n, a in enumerate(row)
                ]
            )
            for r, row in enumerate(anchors.tolist())
        ]
    )
    want = [
        [dense_verify(target, ids[r, : a + 1], proposals[r, n]) for n, a in enumerate(row)]
        for r, row in enumerate(anchors.tolist())
    ]
    verifier = Verifier(target, list(LAYERS))
    got = verifier(verifier.read(ids), anchors, proposals)
    assert bool(grouped) == (together >= LEAST_GROUP)
    for r in range(rows):
        for n in range(anchors.shape[1]):
            torch.testing.assert_close(got.features[r, n], want[r][n][0], rtol=1e-4, atol=1e-4)
            right = want[r][n][1] == proposals[r, n]
            assert got.accepted[r, n] == right.cumprod(0).sum() == wanted[r][n]


def test_dvd_equals_two_passes_one_anchor_at_a_time():
    target, drafter = tiny_target(), tiny_drafter()
    batch = recorded(target)
    size = drafter.config.proposals
    wanted = [[0, 1, 2, 0], [3, size, 1, 4]]
    target.set_attn_implementation("eager")
    proposals = torch.stack(
        [
            torch.stack(
                [
                    continuation(target, batch.token_ids[r, : a + 1], size, wanted[r][n])
                    for n, a in enumerate(batch.anchors[r].tolist())
                ]
            )
            for r in range(2)
        ]
    )
    truth = [
        [
            dense_verify(target, batch.token_ids[r, : a + 1], proposals[r, n])
            for n, a in enumerate(row)
        ]
        for r, row in enumerate(batch.anchors.tolist())
    ]
    vocabulary = Rigged(drafter.head, proposals)
    blocks = draft_and_verify(drafter, vocabulary, Verifier(target, list(LAYERS)), batch)
    assert blocks.accepted.tolist() == wanted
    hidden = drafter(
        batch.token_ids.gather(1, blocks.anchors), blocks.anchors, batch.features, blocks.carry
    )
    loss = torch.tensor(0.0)
    weight = 0.0
    length = batch.token_ids.shape[1]
    for r in range(2):
        for n, a in enumerate(batch.anchors[r].tolist()):
            m = wanted[r][n]
            shifted = a if m == size else a + m + 1
            assert bool(blocks.valid[r, n]) == (shifted + 1 < length)
            if shifted + 1 >= length:
                continue
            assert int(blocks.anchors[r, n]) == shifted
            rows = [(a + k, truth[r][n][0][k - 1]) for k in range(m + 1, size + 1)]
            want = dense_draft(
                drafter, int(batch.token_ids[r, shifted]), shifted, batch.features[r], rows
            )
            torch.testing.assert_close(hidden[r, n], want, rtol=2e-4, atol=2e-4)
            for k in range(1, size + 1):
                if shifted + k < length:
                    w = 2.718281828459045 ** (-(k - 1) / 3.0)
                    log_p = (drafter.head @ want[k - 1]).log_softmax(0)
                    loss = loss - w * log_p[batch.token_ids[r, shifted + k]]
                    weight += w
    labels = label(batch, blocks, vocabulary, size, gamma=3.0)
    totals = draft_loss(drafter, vocabulary, batch, blocks, labels)
    torch.testing.assert_close(totals.loss, loss, rtol=1e-4, atol=1e-3)
    assert float(totals.weights[0]) == pytest.approx(weight, rel=1e-5)


def test_gradient_reaches_the_drafter_and_nothing_else():
    target, drafter = tiny_target(), tiny_drafter()
    batch = recorded(target)
    batch.features.requires_grad_(True)
    vocabulary = Vocabulary(drafter.head, None)
    blocks = draft_and_verify(drafter, vocabulary, Verifier(target, list(LAYERS)), batch)
    assert not blocks.carry.features.requires_grad
    labels = label(batch, blocks, vocabulary, drafter.config.proposals, gamma=4.0)
    draft_loss(drafter, vocabulary, batch, blocks, labels).loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in target.parameters())
    assert drafter.embedding.grad is None and vocabulary.head.grad is None


def test_padding_changes_nothing():
    target, drafter = tiny_target(), tiny_drafter()
    batch = recorded(target)
    vocabulary = Vocabulary(drafter.head, None)
    verifier = Verifier(target, list(LAYERS))
    padded = Batch(
        token_ids=torch.nn.functional.pad(batch.token_ids, (0, 5)),
        lengths=batch.lengths,
        features=torch.nn.functional.pad(batch.features, (0, 0, 0, 5)),
        anchors=torch.nn.functional.pad(batch.anchors, (0, 2)),
        valid=torch.nn.functional.pad(batch.valid, (0, 2)),
    )
    results = []
    for b in (batch, padded):
        blocks = draft_and_verify(drafter, vocabulary, verifier, b)
        labels = label(b, blocks, vocabulary, 4, 4.0)
        results.append(draft_loss(drafter, vocabulary, b, blocks, labels).as_vector())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-4)
