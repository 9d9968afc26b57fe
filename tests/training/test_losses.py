"""The fused loss against torch's own, its weights by hand, and the draft vocabulary."""

import torch
import torch.nn.functional as F

from carryover.training import losses
from carryover.training.losses import frozen_head_cross_entropy, position_weights, predict
from carryover.training.vocabulary import Vocabulary, observed_tokens


def test_loss_and_gradient_equal_torchs_cross_entropy(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 7)
    torch.manual_seed(0)
    hidden = torch.randn(30, 16, requires_grad=True)
    twin = hidden.detach().clone().requires_grad_(True)
    head, labels = torch.randn(50, 16), torch.randint(0, 50, (30,))
    weights = torch.rand(30) * (torch.rand(30) < 0.7)
    result = frozen_head_cross_entropy(hidden, head, labels, weights)
    (result.total * 2.5).backward()
    want = (F.cross_entropy(twin @ head.t(), labels, reduction="none") * weights).sum()
    (want * 2.5).backward()
    torch.testing.assert_close(result.total, want)
    torch.testing.assert_close(hidden.grad, twin.grad)
    assert result.predicted.tolist() == (twin @ head.t()).argmax(-1).tolist()
    assert predict(hidden, head).tolist() == result.predicted.tolist()


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
    assert vocabulary.propose(hidden).tolist() == [[best]]
