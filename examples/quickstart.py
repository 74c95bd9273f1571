"""Attention inside a memory budget, forward and backward, and what it did.

python examples/quickstart.py
"""

import torch

import quorum_attention as qa

query, key, value = (torch.randn(1, 8, 4_096, 64, requires_grad=True) for _ in range(3))
report = qa.Report()
out = qa.attention(query, key, value, is_causal=True, budget="34MiB", report=report)
out.sum().backward()
print(report)
print("output", tuple(out.shape), "gradient of the keys", tuple(key.grad.shape))
