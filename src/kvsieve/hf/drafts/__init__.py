"""Drafts of an answer's next tokens, which one pass of the model verifies."""
