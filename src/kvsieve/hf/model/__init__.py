"""Facts about a model: its parts, supported plans, and tensor parallelism."""
