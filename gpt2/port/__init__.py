"""Somebody else's GPT-2: record its forward pass, find its parts, fill it with weights, name its faults."""
