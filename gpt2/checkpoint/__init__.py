"""A MODEL name becomes a checkpoint: config, tensors by name, tokenizer, files, revision; and back to files."""
