"""The `gpt2` command: one file for each subcommand, which parses, calls and renders."""
