"""The reference's own numbers on a few tokens, written to a file that any other program can compare itself with."""
