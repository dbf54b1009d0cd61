"""GGUF files: their headers, checked, and models over the weights in them."""
