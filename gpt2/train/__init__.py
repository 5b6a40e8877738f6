"""Train from scratch or fine-tune: recipe, data, optimizer, parallel processes, saved state, and the training loop."""
