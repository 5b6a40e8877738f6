"""Train from scratch or fine-tune: recipe, data, optimizer, parallel processes, state, and the one loop."""
