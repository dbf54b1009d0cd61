"""Tokens that a cache still holds: as data, as a page, in a terminal."""
