"""Splits computed by hand."""

import torch

from icl_lens.activations import decompose


def test_two_heads_two_positions_by_hand():
    W_O = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])  # head d_head d_model: head 0 writes x, head 1 writes 10 y
    v = torch.tensor([[[[2.0], [3.0]], [[5.0], [7.0]]]])  # batch key head d_head
    pattern = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    parts = decompose.subhead_values(pattern, v, W_O)
    expected = torch.tensor([[[[0.5, 0.0], [3.75, 0.0]], [[0.0, 30.0], [0.0, 0.0]]]])
    torch.testing.assert_close(parts, expected)
    z = torch.einsum("bhk,bkhd->bhd", pattern, v)
    torch.testing.assert_close(decompose.head_outputs(z, W_O), parts.sum(2))
    chosen = decompose.selected_subhead_values(
        pattern, v, W_O, torch.tensor([0, 0, 0]), torch.tensor([1, 0, 0]), torch.tensor([0, 1, 0])
    )
    torch.testing.assert_close(chosen, torch.tensor([[0.0, 30.0], [3.75, 0.0], [0.5, 0.0]]))


def test_groups_repeat_for_their_query_heads():
    v = torch.tensor([[10.0], [20.0]])  # kv_head d_head
    assert decompose.repeat_kv(v, 4)[:, 0].tolist() == [10.0, 10.0, 20.0, 20.0]
    assert decompose.repeat_kv(v, 2) is v


def test_neurons_by_hand():
    post, W_out = torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 3.0], [0.5, 0.0]])
    torch.testing.assert_close(decompose.neuron_values(post, W_out), torch.tensor([[[2.0, 6.0], [-0.5, 0.0]]]))
