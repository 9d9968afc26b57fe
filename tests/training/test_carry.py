"""What is carried and how it is told apart (the paper's Table 3), against one anchor at a time."""

import pytest
import torch

from carryover.training.attention import carried_share
from carryover.training.batch import Batch
from carryover.training.dvd import Blocks, draft_and_verify
from carryover.training.objective import draft_loss, label
from carryover.training.verify import Verifier
from tests.training.test_dvd import Rigged, continuation, recorded
from tests.training.tiny import (
    CARRIES,
    LAYERS,
    dense_draft,
    dense_next,
    dense_verify,
    norm,
    rotate,
    tiny_drafter,
    tiny_target,
)

LAYOUTS = ["fill_in", "anchor_first"]
SIZE = 4
ACCEPTED = [[0, 1, 2, 0], [3, SIZE, 0, 4]]


def rigged(target, batch: Batch) -> torch.Tensor:
    """Proposals [R, N, B] of which the target accepts ACCEPTED."""
    target.set_attn_implementation("eager")
    return torch.stack(
        [
            torch.stack(
                [
                    continuation(target, batch.token_ids[r, : a + 1], SIZE, ACCEPTED[r][n])
                    for n, a in enumerate(row)
                ]
            )
            for r, row in enumerate(batch.anchors.tolist())
        ]
    )


def second_drafts(drafter, target, batch, proposals) -> tuple[Blocks, torch.Tensor]:
    vocabulary = Rigged(drafter.head, proposals)
    blocks = draft_and_verify(drafter, vocabulary, Verifier(target, list(LAYERS)), batch)
    assert blocks.accepted.tolist() == ACCEPTED
    tokens = batch.token_ids.gather(1, blocks.anchors)
    return blocks, drafter(tokens, blocks.anchors, batch.features, blocks.carry)


def hints_of(rows, target, embedding, prefix, proposals, m) -> dict[int, torch.Tensor]:
    """By absolute position, from the rejected rows m+1..B of one branch."""
    a, hints = len(prefix) - 1, {}
    probabilities = dense_next(target, prefix, proposals)
    for q in range(m + 1, SIZE + 1):
        if rows == "draft_tokens":
            hints[a + q] = embedding[proposals[q - 1]]
        elif rows == "target_tokens":
            hints[a + q + 1] = embedding[probabilities[q - 1].argmax()]
        else:
            best = sorted(range(len(embedding)), key=lambda i: -probabilities[q - 1][i])[:5]
            total = sum(probabilities[q - 1][i] for i in best)
            hints[a + q + 1] = sum(probabilities[q - 1][i] / total * embedding[i] for i in best)
    return hints


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "rows", "distinction"),
    # The Gemma target caps its logits, which only its probabilities show.
    [*(("llama", *carry) for carry in CARRIES), ("gemma4", "target_top5", "none")],
)
@torch.no_grad()
def test_every_carry_equals_two_passes_one_anchor_at_a_time(family, layout, rows, distinction):
    target = tiny_target(family)
    drafter = tiny_drafter(layout, rows=rows, distinction=distinction)
    batch = recorded(target)
    proposals = rigged(target, batch)
    blocks, hidden = second_drafts(drafter, target, batch, proposals)
    plain = drafter(batch.token_ids.gather(1, blocks.anchors), blocks.anchors, batch.features)
    changed = []
    for r, row in enumerate(batch.anchors.tolist()):
        for n, a in enumerate(row):
            m, ids = ACCEPTED[r][n], batch.token_ids[r]
            if not blocks.valid[r, n]:
                continue
            shifted = a if m == SIZE else a + m + 1
            branch = (target, ids[: a + 1], proposals[r, n])
            if rows == "hidden_states":
                features, _ = dense_verify(*branch)
                carried = [(a + q, features[q - 1]) for q in range(m + 1, SIZE + 1)]
                hints = {}
            else:
                carried = []
                hints = hints_of(rows, target, drafter.embedding, *branch[1:], m)
            want = dense_draft(
                drafter, int(ids[shifted]), shifted, batch.features[r], carried, hints
            )
            torch.testing.assert_close(hidden[r, n], want, rtol=1e-4, atol=1e-4)
            if not torch.allclose(hidden[r, n], plain[r, n], atol=1e-3):
                changed.append(m)
    # With more accepted, nothing of the rejected rest is ahead of the next anchor's first slots.
    furthest = 2 if rows == "draft_tokens" else 3
    furthest -= rows != "hidden_states" and layout == "anchor_first"
    assert set(changed) == set(range(furthest + 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "distinction"), CARRIES)
def test_gradient_reaches_the_drafter_and_what_tells_rows_apart(layout, rows, distinction):
    target, drafter = tiny_target(), tiny_drafter(layout, rows=rows, distinction=distinction)
    own = {"embedding": {"carry_embedding"}, "projector": {"carry_projector.weight"}, "none": set()}
    parameters = dict(drafter.named_parameters())
    assert {name for name in parameters if "carry" in name} == own[distinction]
    batch = recorded(target)
    vocabulary = Rigged(drafter.head, rigged(target, batch))
    blocks = draft_and_verify(drafter, vocabulary, Verifier(target, list(LAYERS)), batch)
    carried = vars(blocks.carry).values()
    assert not any(tensor.requires_grad for tensor in carried)
    labels = label(batch, blocks, vocabulary, SIZE, gamma=4.0)
    draft_loss(drafter, vocabulary, batch, blocks, labels).loss.backward()
    for name, parameter in parameters.items():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in target.parameters())
    assert drafter.embedding.grad is None and drafter.head.grad is None


def test_invalid_blocks_carry_nothing():
    target = tiny_target()
    batch = recorded(target)
    batch.valid[:, 1:] = False
    for rows, distinction in CARRIES:
        drafter = tiny_drafter(rows=rows, distinction=distinction)
        blocks, _ = second_drafts(drafter, target, batch, rigged(target, batch))
        carry = blocks.carry
        there = carry.visible if rows == "hidden_states" else carry.exists
        assert there[:, 0].any() and not there[:, 1:].any()


def dense_share(drafter, batch, blocks, r, n) -> float:
    """Mean over heads and predicting slots, of a drafter with one layer and no q/k norms."""
    c, w = drafter.config, dict(drafter.named_parameters())
    anchor, carry = int(blocks.anchors[r, n]), blocks.carry
    token = int(batch.token_ids[r, anchor])
    size = SIZE + 1 if c.slot_layout == "fill_in" else SIZE
    name, at = "layers.0.", "layers.0.self_attn."
    keys = []  # (position, carried, [H])
    for p in range(anchor):
        keys.append((p, False, batch.features[r, p]))
    for q in range(SIZE):
        if carry.visible[r, n, q]:
            feature = carry.features[r, n, q] + w["carry_embedding"]
            keys.append((int(carry.positions[r, n, q]), True, feature))
    keys = [
        (p, there, norm(w["fc.weight"] @ f, w["hidden_norm.weight"], c.rms_norm_eps))
        for p, there, f in keys
    ]
    slots = [drafter.embedding[i] for i in [token] + [c.mask_token_id] * (size - 1)]
    slots = [norm(x, w[name + "input_layernorm.weight"], c.rms_norm_eps) for x in slots]
    keys += [(anchor + s, False, x) for s, x in enumerate(slots)]
    total, count = 0.0, 0
    for s in range(1 if c.slot_layout == "fill_in" else 0, size):
        q = (w[at + "q_proj.weight"] @ slots[s]).view(c.num_attention_heads, c.head_dim)
        for h in range(c.num_attention_heads):
            scores = []
            for p, _, x in keys:
                k = (w[at + "k_proj.weight"] @ x).view(c.num_key_value_heads, c.head_dim)
                scores.append(rotate(q[h], anchor + s, 1e4) @ rotate(k[h // 2], p, 1e4))
            weights = (torch.stack(scores) / c.head_dim**0.5).softmax(0)
            total += float(sum(v for v, key in zip(weights, keys, strict=True) if key[1]))
            count += 1
    return total / count


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_share_of_attention_on_carried_rows_equals_a_dense_softmax(layout):
    target, drafter = tiny_target(), tiny_drafter(layout, qk_norm=False)
    two_layers = drafter.layers
    batch = recorded(target)
    blocks, _ = second_drafts(drafter, target, batch, rigged(target, batch))
    drafter.layers = two_layers[:1]
    total, count = carried_share(drafter, batch, blocks).tolist()
    carrying = [
        (r, n)
        for r in range(2)
        for n in range(4)
        if blocks.valid[r, n] and ACCEPTED[r][n] < SIZE  # the others carry nothing
    ]
    assert count == len(carrying) > 2
    want = [dense_share(drafter, batch, blocks, r, n) for r, n in carrying]
    assert total == pytest.approx(sum(want), rel=1e-4)
    assert 0.05 < total / count < 0.95
    # Over layers it is the mean, and measuring leaves the drafter as it was.
    drafter.layers = two_layers
    both = carried_share(drafter, batch, blocks)[0]
    assert both == carried_share(drafter, batch, blocks)[0] and float(both) != total
    assert not any(layer.self_attn._forward_hooks for layer in two_layers)


def test_next_tokens_are_asked_for_and_do_not_change_the_verdict():
    target = tiny_target()
    batch = recorded(target)
    proposals = rigged(target, batch)
    verifier = Verifier(target, list(LAYERS))
    plain = verifier(verifier.read(batch.token_ids), batch.anchors, proposals)
    asked = verifier(verifier.read(batch.token_ids), batch.anchors, proposals, 3)
    assert plain.next is None
    assert asked.accepted.tolist() == plain.accepted.tolist() == ACCEPTED
    assert torch.equal(asked.features, plain.features)
    assert asked.next.ids.shape == asked.next.weights.shape == (2, 4, SIZE, 3)
    # Row q's best token is the greedy one for the position after it, which accepted ones are.
    right = asked.next.ids[:, :, :-1, 0] == proposals[:, :, 1:]
    for r, row in enumerate(ACCEPTED):
        for n, accepted in enumerate(row):
            if accepted:
                assert right[r, n].long().cumprod(0).sum() == accepted - 1
    torch.testing.assert_close(asked.next.weights.sum(-1), torch.ones(2, 4, SIZE))


def test_a_fully_accepted_round_leaves_every_slot_masked():
    target, drafter = tiny_target(), tiny_drafter(rows="target_top5", distinction="none")
    batch = recorded(target)
    blocks, hidden = second_drafts(drafter, target, batch, rigged(target, batch))
    assert ACCEPTED[1][1] == SIZE and not blocks.carry.exists[1, 1].any()
    plain = drafter(batch.token_ids.gather(1, blocks.anchors), blocks.anchors, batch.features)
    assert torch.equal(hidden[1, 1], plain[1, 1])
    assert not torch.equal(hidden[0, 0], plain[0, 0])
