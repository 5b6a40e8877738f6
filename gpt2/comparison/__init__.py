"""Compare two models: weights, activations, next-token distributions, and text."""
