"""``run.py first``, by its older name."""

import sys

from run import main

main(["first", *sys.argv[1:]])
