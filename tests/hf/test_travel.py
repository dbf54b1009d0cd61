"""Per-token arguments of layers travel with the tokens, positions of several axes too."""

from __future__ import annotations

import torch

from kvsieve.hf.forward.travel import Arguments


def test_positions_of_several_axes_are_joined_and_narrowed():
    tables, axes = torch.rand(2, 5, 4), torch.arange(30).view(3, 2, 5)
    arguments = Arguments(5)
    arguments.note([tables, axes])
    earlier = torch.rand(2, 3, 4), torch.arange(100, 118).view(3, 2, 3)
    arguments.join([earlier], lambda parts: torch.cat(parts, 1))
    rows = torch.tensor([[0, 4, 7], [1, 2, 3]])
    arguments.narrow(rows, 8)
    given = arguments.deeper({"position_embeddings": tables, "position_ids": axes, "flag": True})
    whole = torch.cat([earlier[1], axes], 2)
    for row in range(2):
        assert torch.equal(given["position_ids"][:, row], whole[:, row, rows[row]])
        assert torch.equal(given["position_embeddings"][row], torch.cat([earlier[0], tables], 1)[row, rows[row]])
    assert given["flag"] is True
