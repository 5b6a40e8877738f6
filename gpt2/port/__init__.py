"""Work with a port, any implementation of GPT-2: record its forward pass, find its parts, load weights, diagnose its faults."""
