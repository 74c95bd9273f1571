"""python -m quorum_attention.cli"""

import sys

from quorum_attention.cli import main

sys.exit(main())
