"""``python -m gpt2``: the same as the ``gpt2`` command."""

import sys

from gpt2.cli.main import main

sys.exit(main())
