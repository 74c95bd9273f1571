"""The first step of a training, in a fresh process: what is tried in it is none of the model's."""

from __future__ import annotations

import pytest
from helpers_processes import run_python

pytest.importorskip("transformers")

STEP = """
import sys, torch, transformers
from quorum_attention.integrations.transformers import register

register(min_tokens=0)
torch.manual_seed(0)
config = transformers.CONFIG_MAPPING[sys.argv[1]](
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, use_cache=False,
)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="quorum")
ids = torch.randint(50, (2, 41))
found = []
# Ours first, in its first call; then eager attention, of the same weights.
for name in ("quorum", "eager"):
    model.set_attn_implementation(name)
    model.train().zero_grad()
    model.gradient_checkpointing_enable()
    model(input_ids=ids, labels=ids).loss.backward()
    found.append([p.grad.clone() for p in model.parameters()])
for ours, eager in zip(*found, strict=True):
    torch.testing.assert_close(ours, eager, atol=2e-6, rtol=1e-4)
torch.optim.SGD(model.parameters(), 0.1).step()
print("trained")
"""


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_with_gradient_checkpointing(kind: str) -> None:
    done = run_python(STEP, kind, imported="transformers")
    assert done.stdout.endswith("trained\n"), done.stderr[-2000:]
