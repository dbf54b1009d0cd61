"""One prefill for many plans, or for many questions."""
