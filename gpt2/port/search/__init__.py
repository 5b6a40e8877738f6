"""Go through what a program has computed, node by node, and explain what is not as it must be."""
