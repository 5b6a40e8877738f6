"""Find the parts of a GPT-2 (embeddings, norms, attention, feed-forward) in a recorded forward pass."""
