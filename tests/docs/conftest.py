import os

import torch

# The native kernel's block runs in Triton's interpreter where there is no GPU (tests/native).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
