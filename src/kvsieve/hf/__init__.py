"""The only package that touches transformers' internals."""
