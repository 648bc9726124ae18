"""Other projects' tolerances: complete, traceable, and with a bound that is the arithmetic it says."""

import pytest
import torch

from fp4ep.parity.peers import PEERS, PeerTolerance, peers_for
from fp4ep.reference.scheme import Weights

EXPECTED = torch.tensor([0.0, -2.0, 3.0], dtype=torch.bfloat16)


@pytest.mark.parametrize("weights", Weights, ids=lambda weights: weights.name)
def test_every_family_has_peers_of_every_project(weights):
    assert {peer.project for peer in peers_for(weights)} == {"FlashInfer", "vLLM", "SGLang", "TensorRT-LLM"}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.project}-{peer.test.rpartition('/')[2]}")
def test_a_row_says_where_it_is_from_and_what_it_demands(peer):
    assert peer.weights
    assert peer.test.endswith(".py")
    assert "{" not in peer.test
    assert peer.seen
    assert 0 < peer.share <= 1
    assert (peer.atol is None) == (peer.rtol is None)
    assert peer.atol is not None or peer.other


@pytest.mark.parametrize(
    ("atol", "rtol", "bound"),
    [
        (0.5, 0.25, [0.5, 1.0, 1.25]),
        (0.5, None, [0.5, 0.5, 0.5]),
        (None, 0.25, [0.0, 0.5, 0.75]),
        (0.0, 0.0, [0.0] * 3),
    ],
)
def test_allowed_is_atol_plus_rtol_times_magnitude(atol, rtol, bound):
    allowed = PeerTolerance("x", (Weights.BF16,), "x.py", atol, rtol).allowed(EXPECTED)
    assert torch.equal(allowed, torch.tensor(bound))


def test_no_bound_per_element_is_none():
    assert PeerTolerance("x", (Weights.BF16,), "x.py", None, None).allowed(EXPECTED) is None
