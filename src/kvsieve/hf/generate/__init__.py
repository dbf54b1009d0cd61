"""Generation under a plan, and its statistics."""
