"""Verify our model against the reference implementation, transformers, on the same files."""
