"""Open a checkpoint by its MODEL name (config, tensors, tokenizer, files), and write models to files."""
