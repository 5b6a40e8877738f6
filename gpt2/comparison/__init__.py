"""Compare two models or several: weights, activations, next-token distributions, and text."""
