"""Parallel DVD over random responses, anchors and acceptance: what holds for all of them."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carryover.training.batch import Batch
from carryover.training.dvd import draft_and_verify
from carryover.training.objective import draft_loss, label
from carryover.training.verify import ATTENTION, Verifier
from carryover.training.vocabulary import Vocabulary
from tests.training.test_dvd import Rigged, continuation
from tests.training.tiny import (
    LAYERS,
    VOCABULARY,
    dense_draft,
    dense_verify,
    tiny_drafter,
    tiny_target,
)

SIZE = 3


@st.composite
def responses(draw):
    """Token ids of one response, and its anchors, ascending, each with what is accepted there."""
    length = draw(st.integers(2, 14))
    ids = draw(st.lists(st.integers(0, VOCABULARY - 2), min_size=length, max_size=length))
    where = st.lists(st.integers(0, length - 2), min_size=1, max_size=3, unique=True)
    anchors = sorted(draw(where))
    return ids, [(a, draw(st.integers(0, SIZE))) for a in anchors]


def batch_of(target, given, padding: int) -> Batch:
    rows, longest = len(given), max(len(ids) for ids, _ in given) + padding
    most = max(len(anchors) for _, anchors in given) + (padding > 0)
    batch = Batch(
        token_ids=torch.zeros(rows, longest, dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids, _ in given]),
        features=torch.zeros(rows, longest, 32 * len(LAYERS)),
        anchors=torch.zeros(rows, most, dtype=torch.int64),
        valid=torch.zeros(rows, most, dtype=torch.bool),
    )
    target.set_attn_implementation("eager")
    for r, (ids, anchors) in enumerate(given):
        text = torch.tensor(ids)
        with torch.no_grad():
            states = target(text[None], output_hidden_states=True).hidden_states
        batch.token_ids[r, : len(ids)] = text
        batch.features[r, : len(ids)] = torch.cat([states[i + 1][0] for i in LAYERS], -1)
        for n, (anchor, _) in enumerate(anchors):
            batch.anchors[r, n], batch.valid[r, n] = anchor, True
    return batch


def proposals_of(target, given, shape) -> torch.Tensor:
    """Of which the target accepts what was drawn; zeros where there is no anchor."""
    proposals = torch.zeros(*shape, SIZE, dtype=torch.int64)
    for r, (ids, anchors) in enumerate(given):
        for n, (a, m) in enumerate(anchors):
            proposals[r, n] = continuation(target, torch.tensor(ids[: a + 1]), SIZE, m)
    return proposals


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(responses(), min_size=1, max_size=3),
    st.sampled_from(["fill_in", "anchor_first"]),
    st.integers(0, 2),
)
def test_every_anchor_is_drafted_as_if_it_were_alone(given, layout, padding):
    target, drafter = tiny_target(), tiny_drafter(layout, proposals=SIZE)
    batch = batch_of(target, given, padding)
    proposals = proposals_of(target, given, batch.anchors.shape)
    vocabulary = Rigged(drafter.head, proposals)
    blocks = draft_and_verify(drafter, vocabulary, Verifier(target, list(LAYERS)), batch)
    tokens = batch.token_ids.gather(1, blocks.anchors)
    with torch.no_grad():
        hidden = drafter(tokens, blocks.anchors, batch.features, blocks.carry)
    carried = blocks.carry.visible.sum(-1)
    assert int(carried.max()) <= SIZE
    assert not blocks.valid[~batch.valid].any() and not carried[~blocks.valid].any()
    target.set_attn_implementation("eager")
    for r, (ids, anchors) in enumerate(given):
        text = torch.tensor(ids)
        for n, (a, m) in enumerate(anchors):
            assert int(blocks.accepted[r, n]) == m
            shifted = a if m == SIZE else a + m + 1
            assert bool(blocks.valid[r, n]) == (shifted + 1 < len(ids))
            if not blocks.valid[r, n]:
                continue
            assert int(blocks.anchors[r, n]) == shifted
            assert int(carried[r, n]) == SIZE - m
            features, _ = dense_verify(target, text[: a + 1], proposals[r, n])
            rows = [(a + q, features[q - 1]) for q in range(m + 1, SIZE + 1)]
            want = dense_draft(drafter, ids[shifted], shifted, batch.features[r], rows)
            torch.testing.assert_close(hidden[r, n], want, rtol=1e-3, atol=1e-3)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(responses(), min_size=2, max_size=4), st.integers(0, 3))
def test_responses_that_share_a_batch_add_up_to_each_alone(given, padding):
    """Never across: loss, labels and counts of a batch are the sums over its responses."""
    target, drafter = tiny_target(), tiny_drafter(proposals=SIZE)
    verifier, vocabulary = Verifier(target, list(LAYERS)), Vocabulary(drafter.head, None)

    def sums(some, padding):
        batch = batch_of(target, some, padding)
        target.set_attn_implementation(ATTENTION)
        blocks = draft_and_verify(drafter, vocabulary, verifier, batch)
        labels = label(batch, blocks, vocabulary, SIZE, 4.0)
        return draft_loss(drafter, vocabulary, batch, blocks, labels).as_vector()

    together = sums(given, padding)
    apart = torch.stack([sums([one], 0) for one in given]).sum(0)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
