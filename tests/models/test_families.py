"""Rows of the matrix: composite models carry both parts, and newer ones are left out of older releases."""

from __future__ import annotations

import pytest
import torch
import transformers

import tiny_models
from tiny_models import Family


def test_every_family_of_this_release_has_a_configuration():
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    assert [family.name for family in tiny_models.available() if family.model_type not in known] == []
    names = [family.name for family in tiny_models.FAMILIES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("version, there", [("5.18.2", False), ("5.19.0", True), ("5.20.1.dev0", True), ("6.0", True)])
def test_a_family_is_there_since_a_release(version, there):
    assert (Family("new", "New", since="5.19").why_not_in(version) is None) is there
    assert Family("old", "Old").why_not_in(version) is None
    assert (Family("failing", "Failing", broken="5.19.0").why_not_in(version) is None) is (version != "5.19.0")


def test_a_composite_model_takes_overrides_for_its_text_part():
    model = tiny_models.build("mistral3", dtype=torch.float64, num_hidden_layers=2, attn_implementation="eager")
    assert model.config.text_config.num_hidden_layers == 2 and len(model.get_decoder().layers) == 2
    assert model.config.vision_config.num_hidden_layers == 1 and model.dtype == torch.float64
    assert {model.config._attn_implementation, model.config.text_config._attn_implementation} == {"eager"}
    assert not model.config.tie_word_embeddings
    again = tiny_models.build("mistral3", dtype=torch.float64)
    assert again.config.text_config.num_hidden_layers == 4
