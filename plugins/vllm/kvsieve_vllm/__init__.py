"""A plugin for vLLM: plans that its engine can carry, on its own pages and blocks."""
