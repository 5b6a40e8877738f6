"""The `gpt2` command: each subcommand's file parses arguments, calls the library and prints the result."""
