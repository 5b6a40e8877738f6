"""Judge whether a device computes GPT-2's operators as precisely as its arithmetic allows."""
