"""``python -m gpt2``: the same as the ``gpt2`` command."""

import sys

from .cli.main import main

sys.exit(main())
