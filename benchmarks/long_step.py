"""``run.py step``, by its older name."""

import sys

from run import main

main(["step", *sys.argv[1:]])
