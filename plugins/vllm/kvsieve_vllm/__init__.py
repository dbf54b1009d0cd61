"""Plugin for vLLM: plans on its engine, with its own pages and blocks."""
