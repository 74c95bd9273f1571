"""``run.py versions``, by its older name."""

import sys

from run import main

main(["versions", *sys.argv[1:]])
