"""Edits of a conversation in a cache: tokens removed, replaced, inserted or moved without a new prefill of all."""
