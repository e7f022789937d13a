"""``python -m encodepool_operator`` is the command ``encodepool``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
