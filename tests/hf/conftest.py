"""Fixtures of the tests of models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvsieve.hf.decode.linears import Linears


@pytest.fixture
def served():
    """Let the C kernel compute products of modules' linear layers for the test."""
    made = []

    def serve(*modules, **options):
        made.append(Linears(nn.Sequential(*modules), **options))
        made[-1].install()
        return made[-1]

    with torch.no_grad():
        yield serve
    for each in made:
        each.remove()
