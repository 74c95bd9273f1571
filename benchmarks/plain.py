"""``run.py plain``, by its older name."""

import sys

from run import main

main(["plain", *sys.argv[1:]])
