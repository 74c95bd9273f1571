"""``run.py accuracy``, by its older name."""

import sys

from run import main

main(["accuracy", *sys.argv[1:]])
