"""Train on one text that is shared among the ranks of torchrun, one GPU for each.

torchrun --standalone --nproc-per-node 2 examples/train_ranks.py

Without GPUs the ranks compute on this machine's CPU. The model has the shape of a small
Llama and random weights. Ranks need the same weights and the same text: here all draw
them from one seed.
"""

import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from quorum_attention.integrations.transformers import register, sharded_positions
from quorum_attention.recipes import long_context

TOKENS = 2_000
STEPS = 5

on_gpus = torch.cuda.is_available()
device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpus else "cpu"
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
rank = dist.get_rank()
n_ranks = dist.get_world_size()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1_000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=TOKENS,
    use_cache=False,
)
model = AutoModelForCausalLM.from_config(config).to(device)
text = torch.randint(config.vocab_size, (1, TOKENS)).to(device)

# Before long_context: it keeps the group, and sets the budget.
register(group=dist.group.WORLD)
sharded_positions(model, group=dist.group.WORLD)
summary = long_context(model, budget="1GiB")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# A token's label is the next token. Labels are shifted before they are divided: the
# label of a rank's last token is the first token of the next rank.
labels = torch.nn.functional.pad(text[:, 1:], (0, 1), value=-100)
rows = text.tensor_split(n_ranks, dim=1)[rank]
row_labels = labels.tensor_split(n_ranks, dim=1)[rank]

if rank == 0:
    print(summary)
for step in range(STEPS):
    # Divided by the labels of the whole text, so that losses of ranks add up.
    loss = model(
        input_ids=rows,
        labels=rows,
        shift_labels=row_labels,
        num_items_in_batch=TOKENS - 1,
    ).loss
    loss.backward()
    loss = loss.detach()
    # Each rank has the gradients and the loss of its own rows.
    dist.all_reduce(loss)
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss:.4f}")
dist.destroy_process_group()
