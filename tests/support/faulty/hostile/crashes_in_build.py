"""Fails while it is built, with a message of several lines."""


def build(checkpoint_dir):
    raise RuntimeError("Error(s) in loading state_dict:\n\tMissing key(s): 'a', 'b'\n\tsize mismatch for c: [1, 2] and [2, 1]")
