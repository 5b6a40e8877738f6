"""Run the ``gpt2`` command as ``python -m gpt2``."""

import sys

from gpt2.cli.main import main

sys.exit(main())
