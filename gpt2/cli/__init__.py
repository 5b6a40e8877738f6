"""The `gpt2` command: each subcommand's file parses arguments, calls the library and prints the result."""

import signal
import threading

EARLY = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if EARLY:  # until `main` is imported, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
