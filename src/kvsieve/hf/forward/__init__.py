"""One forward pass of a model under a plan."""
