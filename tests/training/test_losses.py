"""The fused losses against dense ones, their weights by hand, and the draft vocabulary."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from carryover.training import losses
from carryover.training.losses import (
    Correction,
    TargetStates,
    best,
    frozen_head_loss,
    log_totals,
    position_weights,
    predict,
    soft_cap,
)
from carryover.training.vocabulary import Vocabulary, observed_tokens


def test_loss_and_gradient_equal_torchs_cross_entropy(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 7)
    torch.manual_seed(0)
    hidden = torch.randn(30, 16, requires_grad=True)
    twin = hidden.detach().clone().requires_grad_(True)
    head, labels = torch.randn(50, 16), torch.randint(0, 50, (30,))
    weights = torch.rand(30) * (torch.rand(30) < 0.7)
    result = frozen_head_loss(hidden, head, labels, weights)
    (result.total * 2.5).backward()
    want = (F.cross_entropy(twin @ head.t(), labels, reduction="none") * weights).sum()
    (want * 2.5).backward()
    torch.testing.assert_close(result.total, want)
    torch.testing.assert_close(hidden.grad, twin.grad)
    assert result.predicted.tolist() == (twin @ head.t()).argmax(-1).tolist()
    assert predict(hidden, head).tolist() == result.predicted.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_first_is_the_best(dtype):
    logits = torch.randint(0, 3, (40, 3000), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert best(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    result = frozen_head_loss(
        torch.eye(40, dtype=dtype), logits.t(), torch.zeros(40, dtype=torch.int64), torch.ones(40)
    )
    assert result.predicted.tolist() == best(logits).tolist()


@pytest.mark.parametrize("size", [30.0, 500.0, 1000.0])
def test_losses_of_large_logits_keep_their_small_part(size):
    """Also of those whose own exponential overflows."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    head = torch.tensor([[size], [-size], [size - 1]])
    for label, want in ((0, 0.3132617), (1, 2 * size + 0.3132617), (2, 1.3132617)):
        result = frozen_head_loss(hidden, head, torch.tensor([label]), torch.ones(1))
        assert result.cross_entropy.item() == pytest.approx(want, rel=1e-6)
        result.total.backward()
    # q is 1 / (1 + 1/e) of the first and the rest of the third.
    mean = size - 0.2689414
    assert hidden.grad.item() == pytest.approx(3 * mean - (size - size + size - 1), rel=1e-6)


def dense(hidden, head, observed, labels, latent, correction, states, cap=None):
    """One position at a time over the target's whole vocabulary, where q is 0 outside `observed`.

    The two parts of the drafter's logits are capped each by itself. Returns cross-entropies, L1
    distances and acceptance probabilities, [M] each.
    """

    def capped(x):
        return x if cap is None else cap * (1 - 2 / (1 + (2 * x / cap).exp()))

    columns = []
    for i, state in enumerate(states):
        z = capped(head[observed] @ hidden[i]) + capped(correction @ latent[i])
        inside = z.exp() / z.exp().sum()
        q = torch.zeros(len(head)).index_put((observed,), inside)
        p = capped(head @ state).exp() / capped(head @ state).exp().sum()
        columns.append(
            torch.stack((-inside[labels[i]].log(), (q - p).abs().sum(), torch.minimum(p, q).sum()))
        )
    return torch.stack(columns, 1)


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_both_terms_and_all_gradients_equal_the_dense_ones(cap, reduced, chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", chunk)
    torch.manual_seed(0)
    head = torch.randn(40, 8)
    observed = torch.tensor([0, 3, 4, 11, 12, 30, 39]) if reduced else torch.arange(40)
    hidden, latent = torch.randn(14, 8), torch.randn(14, 3)
    correction = torch.randn(len(observed), 3)
    leaves = [x.requires_grad_(True) for x in (hidden, latent, correction)]
    twins = [x.detach().clone().requires_grad_(True) for x in leaves]
    labels = torch.randint(0, len(observed), (14,))
    weights, target_weights = torch.rand(14), torch.rand(14) * (torch.rand(14) < 0.7)
    positions, rows = torch.randn(5, 8), torch.randint(0, 5, (14,))
    target = TargetStates(positions, rows, log_totals(positions, head, cap) if reduced else None)
    result = frozen_head_loss(
        hidden, head[observed], labels, weights, Correction(latent, correction), target,
        target_weights, cap,
    )  # fmt: skip
    (result.total * 1.5).backward()
    cross_entropy, distance, acceptance = dense(
        twins[0], head, observed, labels, twins[1], twins[2], positions[rows], cap
    )
    want = (cross_entropy * weights + distance * target_weights).sum()
    (want * 1.5).backward()
    torch.testing.assert_close(result.total, want)
    torch.testing.assert_close(result.cross_entropy, cross_entropy)
    torch.testing.assert_close(result.acceptance, acceptance)
    torch.testing.assert_close(2 * (1 - result.acceptance), distance)
    for got, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(got.grad, twin.grad, rtol=1e-4, atol=1e-5)


def test_capped_cross_entropy_alone_equals_torchs(monkeypatch):
    """Without a Markov head and without a target: a capped target's DFlash drafter."""
    torch.manual_seed(0)
    hidden = torch.randn(30, 16, requires_grad=True)
    twin = hidden.detach().clone().requires_grad_(True)
    head, labels, weights = torch.randn(50, 16), torch.randint(0, 50, (30,)), torch.rand(30)
    totals = []
    for chunk in (7, 512):
        monkeypatch.setattr(losses, "CHUNK", chunk)
        totals.append(frozen_head_loss(hidden, head, labels, weights, cap=2.0).total)
    torch.testing.assert_close(totals[0], totals[1])
    totals[0].backward()
    logits = 2.0 * torch.tanh(twin @ head.t() / 2.0)
    want = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    want.backward()
    torch.testing.assert_close(totals[0], want)
    torch.testing.assert_close(hidden.grad, twin.grad)


def test_a_cap_by_hand():
    capped = soft_cap(torch.tensor([0.0, 30.0, -30.0, 1e4]), 30.0)
    torch.testing.assert_close(capped, torch.tensor([0.0, 22.8478248, -22.8478248, 30.0]))
    assert soft_cap(torch.tensor([50.0]), None).item() == 50.0


def test_mass_outside_the_draft_vocabulary_is_distance_and_never_accepted():
    """p = (1/2, 1/4, 1/4), and a drafter that knows tokens 0 and 1 draws them with 3/4 and 1/4."""
    head = torch.tensor([[2.0], [1.0], [1.0]]).log()
    states = TargetStates(torch.ones(1, 1), torch.tensor([0]), log_totals(torch.ones(1, 1), head))
    correction = Correction(torch.ones(1, 1), torch.tensor([[1.5], [1.0]]).log())
    result = frozen_head_loss(
        torch.ones(1, 1), head[:2], torch.tensor([0]), torch.zeros(1), correction, states,
        torch.ones(1),
    )  # fmt: skip
    assert result.acceptance.item() == pytest.approx(1 / 2 + 1 / 4)
    assert result.total.item() == pytest.approx(1 / 4 + 0 + 1 / 4)


class LivingBytes(TorchDispatchMode):
    """The most bytes that the tensors made under it took at once."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.made = [made for made in self.made if made() is not None]
        storages = [made().untyped_storage() for made in self.made]
        living = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(living.values()))
        return result


@pytest.mark.parametrize("markov", [False, True])
def test_memory_is_that_of_one_chunk_of_logits_however_many_there_are(markov, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 16)
    vocabulary, width = 3000, 4
    head = torch.randn(vocabulary, width)

    def peak(rows):
        hidden = torch.randn(rows, width, requires_grad=True)
        labels, weights = torch.randint(0, vocabulary, (rows,)), torch.rand(rows)
        more = {}
        if markov:
            latent = torch.randn(rows, 2, requires_grad=True)
            weight = torch.randn(vocabulary, 2, requires_grad=True)
            states = TargetStates(torch.randn(rows, width), torch.arange(rows), None)
            more = {"correction": Correction(latent, weight), "target": states}
            more |= {"target_weights": weights}
        with LivingBytes() as living:
            frozen_head_loss(hidden, head, labels, weights, **more).total.backward()
        return living.peak

    one, many = peak(16), peak(160)
    assert one > 16 * vocabulary * 4
    assert many < one + 160 * 100  # what is kept of a row is not of the vocabulary's size


def test_position_weights_by_hand():
    valid = torch.tensor([[True, True, True], [True, False, False]])
    want = torch.tensor([[1.0, 0.7788008, 0.6065307], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(position_weights(valid, gamma=4.0), want)


def test_a_reduced_vocabulary_maps_both_ways_and_knows_what_it_lacks():
    observed = observed_tokens([torch.tensor([9, 2, 9]), torch.tensor([4])])
    assert observed.tolist() == [2, 4, 9]
    head = torch.randn(12, 3)
    vocabulary = Vocabulary(head, observed)
    assert vocabulary.draft_ids(torch.tensor([2, 3, 9])).tolist() == [0, -1, 2]
    assert vocabulary.target_ids(torch.tensor([0, 2])).tolist() == [2, 9]
    hidden = head[4][None, None] * 10 / head[4].norm()
    best = max((2, 4, 9), key=lambda i: float(head[i] @ hidden[0, 0]))
    assert vocabulary.propose(hidden, torch.tensor([[0]])).tolist() == [[best]]
