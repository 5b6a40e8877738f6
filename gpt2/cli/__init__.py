"""The `gpt2` command: one file per subcommand, which parses arguments, calls the library and prints the result."""
