"""The drafter's forward against a dense reference, and what a block may see."""

from typing import Any

import pytest
import torch

from carryover.drafter import layout
from carryover.drafter.attention import Visible, block_attention
from carryover.drafter.config import DrafterConfig
from carryover.drafter.initialize import new_config
from carryover.drafter.model import Carry, Drafter
from tests.training.tiny import VOCABULARY, dense_draft, tiny_drafter, tiny_target


@pytest.mark.parametrize("slot_layout", ["fill_in", "anchor_first"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_forward_equals_dense_reference_for_every_accepted_count(slot_layout, qk_norm):
    drafter = tiny_drafter(slot_layout, qk_norm)
    proposals, length = drafter.config.proposals, 11
    torch.manual_seed(3)
    features = torch.randn(2, length, drafter.config.feature_size)
    first = torch.tensor([[1, 3, 4], [2, 5, 0]])
    accepted = torch.tensor([[0, 2, proposals], [1, 3, 0]])
    rejected = torch.randn(2, 3, proposals, drafter.config.feature_size)
    anchors = torch.where(accepted == proposals, first, first + accepted + 1)
    tokens = torch.randint(0, VOCABULARY, anchors.shape)
    carry = Carry(
        features=rejected,
        positions=layout.proposal_positions(first, proposals),
        visible=layout.carried_rows(accepted, proposals),
    )
    with torch.no_grad():
        got = drafter(tokens, anchors, features, carry)
        for r in range(2):
            for n in range(3):
                m, a = int(accepted[r, n]), int(first[r, n])
                rows = [(a + k, rejected[r, n, k - 1]) for k in range(m + 1, proposals + 1)]
                want = dense_draft(
                    drafter, int(tokens[r, n]), int(anchors[r, n]), features[r], rows
                )
                torch.testing.assert_close(got[r, n], want, rtol=1e-4, atol=1e-4)


def test_without_carry_equals_carry_of_nothing():
    drafter = tiny_drafter()
    features = torch.randn(1, 9, drafter.config.feature_size)
    anchors, tokens = torch.tensor([[2, 6]]), torch.tensor([[5, 7]])
    nothing = Carry(
        torch.randn(1, 2, 4, drafter.config.feature_size),
        layout.proposal_positions(anchors, 4),
        torch.zeros(1, 2, 4, dtype=torch.bool),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            drafter(tokens, anchors, features), drafter(tokens, anchors, features, nothing)
        )


def test_a_block_does_not_see_its_anchor_or_later_features_or_other_blocks():
    drafter = tiny_drafter()
    features = torch.randn(1, 9, drafter.config.feature_size)
    anchors, tokens = torch.tensor([[3, 6]]), torch.tensor([[5, 7]])
    changed = features.clone()
    changed[:, 3:] += 1.0
    with torch.no_grad():
        before = drafter(tokens, anchors, features)[0, 0]
        torch.testing.assert_close(drafter(tokens, anchors, changed)[0, 0], before)
        other = drafter(torch.tensor([[5, 9]]), torch.tensor([[3, 4]]), features)[0, 0]
        torch.testing.assert_close(other, before)
        changed = features.clone()
        changed[:, 2] += 1.0
        assert not torch.allclose(drafter(tokens, anchors, changed)[0, 0], before)


def test_layouts_by_hand():
    anchors = torch.tensor([10])
    assert layout.slots("fill_in", 3) == 4
    assert layout.slots("anchor_first", 3) == 3
    assert layout.slot_positions(anchors, "fill_in", 3).tolist() == [[10, 11, 12, 13]]
    assert layout.slot_positions(anchors, "anchor_first", 3).tolist() == [[10, 11, 12]]
    assert layout.proposal_positions(anchors, 3).tolist() == [[11, 12, 13]]
    assert layout.block_inputs(torch.tensor([5]), 99, "fill_in", 3).tolist() == [[5, 99, 99, 99]]
    # fill_in: the slot AT position a+k predicts it; anchor_first: the slot before it does.
    positions = layout.slot_positions(anchors, "fill_in", 3)[0]
    assert positions[layout.predicting_slots("fill_in", 3)].tolist() == [11, 12, 13]
    positions = layout.slot_positions(anchors, "anchor_first", 3)[0]
    assert positions[layout.predicting_slots("anchor_first", 3)].tolist() == [10, 11, 12]
    carried = layout.carried_rows(torch.tensor([0, 2, 3]), 3).tolist()
    assert carried == [[True] * 3, [False, False, True], [False] * 3]


def test_hints_by_hand():
    """Anchor 10, B = 4. Accepted m, the next anchor is the correction at 11 + m.

    m = 0: rejected rows 1..4 stood at 11..14. Next anchor 11, which predicts 12..15.
    m = 2: rejected rows 3, 4 stood at 13, 14. Next anchor 13, which predicts 14..17.
    """
    accepted = torch.tensor([0, 2, 3, 4])

    def rows(ahead, slot_layout):
        return layout.hinting_rows(accepted, ahead, slot_layout, 4).tolist()

    # Slots 1..4 predict the next anchor's 1..4. Draft tokens: row q is for 10 + q.
    assert rows(0, "fill_in") == [
        [0, 2, 3, 4, 0],  # 12, 13, 14; row 1 is for 11, the correction's place; none for 15
        [0, 4, 0, 0, 0],  # 14
        [0, 0, 0, 0, 0],  # row 4 is for 14, the correction's place
        [0, 0, 0, 0, 0],  # nothing was rejected
    ]
    # The target's: row q is for 11 + q.
    assert rows(1, "fill_in") == [
        [0, 1, 2, 3, 4],  # 12 .. 15
        [0, 3, 4, 0, 0],  # 14, 15
        [0, 4, 0, 0, 0],  # 15; the next anchor is 14
        [0, 0, 0, 0, 0],
    ]
    # Slots 0..3 predict 1..4, and slot 0 keeps the anchor: the first hint has no place.
    assert rows(0, "anchor_first") == [[0, 3, 4, 0], [0] * 4, [0] * 4, [0] * 4]
    assert rows(1, "anchor_first") == [[0, 2, 3, 4], [0, 4, 0, 0], [0] * 4, [0] * 4]


KERNELS = [
    ("dense", "cpu"),
    ("flex", "cpu"),
    ("grouped", "cpu"),
    pytest.param("dense", "cuda", marks=pytest.mark.gpu),
    pytest.param("flex", "cuda", marks=pytest.mark.gpu),
    pytest.param("grouped", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("kernel", "device"), KERNELS)
@pytest.mark.parametrize("per_query", [(1, 4), (4, 4), (4, 1)], ids=["context", "both", "own"])
@pytest.mark.parametrize("blocks", [3, 8])  # too few to be grouped, and two groups
def test_block_attention_equals_one_softmax_over_concatenated_keys(
    kernel, device, per_query, blocks
):
    torch.manual_seed(0)
    dim = 8 if device == "cpu" else 16  # the least that the compiled kernel takes
    q = torch.randn(2, blocks, 4, 6, dim)
    context_k, context_v = torch.randn(2, 5, 2, dim), torch.randn(2, 5, 2, dim)
    own_k, own_v = torch.randn(2, blocks, 7, 2, dim), torch.randn(2, blocks, 7, 2, dim)
    context_visible = torch.rand(2, blocks, per_query[0], 5) < 0.5
    own_visible = torch.rand(2, blocks, per_query[1], 7) < 0.5
    own_visible[..., 0] = True
    differentiable = (kernel, device) != ("flex", "cpu")  # which torch does not offer
    inputs = [
        x.to(device).requires_grad_(differentiable) for x in (q, context_k, context_v, own_k, own_v)
    ]
    visible = Visible(context_visible.to(device), own_visible.to(device), kernel)
    got = block_attention(*inputs, visible, 0.3)
    plain = [x.clone().requires_grad_() for x in (q, context_k, context_v, own_k, own_v)]
    pq, pck, pcv, pok, pov = plain
    rows = []
    for r in range(2):
        for n in range(blocks):
            for s in range(4):
                for h in range(6):
                    k = torch.cat((pck[r, :, h // 3], pok[r, n, :, h // 3]))
                    v = torch.cat((pcv[r, :, h // 3], pov[r, n, :, h // 3]))
                    seen = torch.cat(
                        (
                            context_visible[r, n, s % per_query[0]],
                            own_visible[r, n, s % per_query[1]],
                        )
                    )
                    scores = (k @ pq[r, n, s, h] * 0.3)[seen]
                    rows.append(scores.softmax(0) @ v[seen])
    want = torch.stack(rows).view(q.shape)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    if not differentiable:
        return
    gradients = torch.autograd.grad(got.sin().sum(), inputs)
    for g, w in zip(gradients, torch.autograd.grad(want.sin().sum(), plain), strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "length", "kv_heads", "grouping"),
    [
        (12, 46, 2, (6, 2)),
        (13, 46, 6, (7, 2)),  # one block and some keys of padding; a key head for each query head
        (8, 41, 2, (4, 2)),
        (8, 64, 1, (8, 1)),
        (5, 1, 2, None),  # nothing to share
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_attention_equals_dense(blocks, length, kv_heads, grouping, dtype):
    torch.manual_seed(0)
    q = torch.randn(2, blocks, 4, 6, 16)
    context = torch.randn(2, 2, length, kv_heads, 16)
    own = torch.randn(2, 2, blocks, 7, kv_heads, 16)
    seen = torch.rand(2, blocks, 1, length) < 0.5, torch.rand(2, blocks, 4, 7) < 0.5
    seen[1][..., 0] = True
    grouped = Visible(*seen, "grouped")
    inputs = [x.to(dtype) for x in (q, *context, *own)]
    got = block_attention(*inputs, grouped)
    wide = [x.double() for x in inputs]
    want = block_attention(*wide, Visible(*seen, "dense"))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 if dtype == q.dtype else 0.02)
    keys = {(4, grouping[0], dtype)} if grouping else {(dtype,)}
    assert set(grouped._masks) == keys
    if grouping:
        assert grouped._masks[4, grouping[0], dtype].shape[0] == 2 * grouping[1]


def test_one_mask_serves_every_kernel_and_type() -> None:
    visible = Visible(torch.ones(1, 4, 1, 9) > 0, torch.ones(1, 4, 1, 2) > 0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float32):
        for size in (2, 3):
            q = torch.zeros(1, 4, size, 2, 8, dtype=dtype)
            k, own = torch.zeros(1, 9, 2, 8, dtype=dtype), torch.ones(1, 4, 2, 2, 8, dtype=dtype)
            for kernel in ("dense", "grouped", "flex"):
                visible.kernel = kernel
                out = block_attention(q, k, k, own, own, visible)
                # Scores are equal, so the mean over 11 keys, of which two have ones.
                assert (out - 2 / 11).abs().max() < 0.01


def test_auto_learns_with_dense_and_reads_with_grouped_on_cpu() -> None:
    visible = Visible(torch.ones(1, 4, 1, 9) > 0, torch.ones(1, 4, 1, 2) > 0)
    assert visible.chosen(torch.device("cuda")) == "flex"
    assert visible.chosen(torch.device("cpu")) == "dense"
    with torch.no_grad():
        assert visible.chosen(torch.device("cpu")) == "grouped"


@pytest.mark.parametrize("slot_layout", ["fill_in", "anchor_first"])
def test_all_kernels_draft_the_same(slot_layout):
    drafter = tiny_drafter(slot_layout)
    size = drafter.config.proposals
    torch.manual_seed(5)
    features = torch.randn(2, 12, drafter.config.feature_size)
    anchors = torch.tensor([[1, 4, 7, 3], [2, 0, 9, 9]])
    accepted = torch.tensor([[0, 2, size, 1], [1, 3, 0, 2]])
    carry = Carry(
        features=torch.randn(2, 4, size, drafter.config.feature_size),
        positions=layout.proposal_positions(anchors, size),
        visible=layout.carried_rows(accepted, size),
    )
    tokens = torch.randint(0, VOCABULARY, anchors.shape)
    drafts = []
    for kernel in ("dense", "flex", "grouped"):
        drafter.kernel = kernel
        with torch.no_grad():
            drafts.append(drafter(tokens, anchors, features, carry))
    torch.testing.assert_close(drafts[1], drafts[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drafts[2], drafts[0], rtol=1e-4, atol=1e-5)


def test_the_base_of_rope_is_the_targets_unless_one_is_given() -> None:
    target = tiny_target("llama")
    options: dict[str, Any] = {
        "feature_layers": [0], "mask_token_id": 5, "layers": 1, "proposals": 4,
        "slot_layout": "fill_in", "qk_norm": True, "draft_vocab_size": None,
    }  # fmt: skip
    own = target.config.rope_parameters["rope_theta"]
    assert new_config(target, **options).rope_theta == own != 5e5
    config = new_config(target, **options, rope_theta=5e5)
    assert Drafter(config).layers[0].self_attn.rotary.theta == 5e5
    assert DrafterConfig.from_json(config.to_json("float32")) == config
