"""Diagnose what another program wrote: the tensors of one forward pass, or its logits alone."""
