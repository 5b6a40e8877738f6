"""Diagnose a torch module: its weights, what it computes in one pass, and how it behaves from call to call."""
