"""Sampling is a pure function of seed and step, covers every response, and stays inside them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from carryover.features.store import Recorded
from carryover.training.batch import collate, sample_anchors
from carryover.training.sampling import generator, split, step_rows


@given(rows=st.integers(2, 60), count=st.integers(1, 20), seed=st.integers(0, 5))
def test_epochs_visit_every_row_once(rows, count, seed):
    names = list(range(100, 100 + rows))
    seen: list[int] = []
    step = 0
    while len(seen) < 2 * rows:
        picked = step_rows(names, step, count, seed)
        assert len(picked) == count
        seen += picked
        step += 1
    assert sorted(seen[:rows]) == names
    assert sorted(seen[rows : 2 * rows]) == names


def test_split_is_disjoint_complete_and_seeded():
    train, held = split(50, 8, seed=3)
    assert len(held) == 8
    assert sorted(train + held) == list(range(50))
    assert split(50, 8, seed=3) == (train, held)
    assert split(50, 8, seed=4) != (train, held)


@given(
    prompt=st.integers(1, 30), response=st.integers(1, 40), count=st.integers(1, 30),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_anchors_are_distinct_response_tokens_with_a_successor(prompt, response, count, seed):
    length = prompt + response
    anchors = sample_anchors(prompt, length, count, generator(seed)).tolist()
    assert anchors == sorted(set(anchors))
    assert all(prompt <= a <= length - 2 for a in anchors)
    assert len(anchors) == min(count, max(0, response - 1))
    assert anchors == sample_anchors(prompt, length, count, generator(seed)).tolist()


def test_a_response_that_is_cut_inside_its_prompt_has_no_anchors():
    assert sample_anchors(9, 9, 4, generator(0)).tolist() == []
    assert sample_anchors(9, 6, 4, generator(0)).tolist() == []


def test_collate_cuts_pads_and_marks():
    def response(length, prompt):
        ids = torch.arange(length)
        return Recorded(
            "r", "d", ids, prompt, torch.arange(length * 2.0).view(length, 2).bfloat16()
        )

    batch = collate(
        [response(12, 3), response(5, 4)],
        anchors=4,
        max_length=9,
        generators=[generator(1), generator(2)],
    )
    assert batch.lengths.tolist() == [9, 5]
    assert batch.token_ids.tolist() == [list(range(9)), [0, 1, 2, 3, 4, 0, 0, 0, 0]]
    assert batch.valid.sum(1).tolist() == [4, 0]
    assert batch.features[1, 5:].abs().sum() == 0
    assert all(3 <= a <= 7 for a in batch.anchors[0].tolist())
