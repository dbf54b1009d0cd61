"""Checkpoints with weights packed into blocks once, and mapped from kvsieve's cache directory afterwards."""

from kvsieve.models.packed.load import load_packed, packed_dir

__all__ = ["load_packed", "packed_dir"]
