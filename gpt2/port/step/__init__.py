"""Diagnose a training step, as six nodes: labels, loss, gradients, clipping, update, parameters."""
