"""Tokens still in a cache: as data, as an HTML page, in a terminal."""
