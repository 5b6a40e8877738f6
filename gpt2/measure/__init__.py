"""What all judges share: metrics, language scores, windows over a text, recorded intermediates of a forward pass."""
