"""python -m quorum_attention: the command line."""

import sys

from quorum_attention.cli import main

if __name__ == "__main__":
    sys.exit(main())
