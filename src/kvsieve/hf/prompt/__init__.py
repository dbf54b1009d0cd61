"""Reading prompts: checks, chunks, and the drivers of plans that read them in passes of their own."""
