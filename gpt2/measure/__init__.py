"""Measurements shared by all comparisons: metrics, text scores, windows over a text, recorded intermediates of a forward pass."""
