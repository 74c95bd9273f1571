"""Attention task by task, as the equations say it: no slots, no streams, no planner.

What the package computes in many ways is this. Tensors are one head's: query, key,
value and out (n, d), lse (n,).
"""

from __future__ import annotations

import torch

from quorum_attention.decomposition import Decomposition


def attention_by_tasks(query, key, value, decomposition, is_causal=False):
    """Return (out, lse) of self-attention, one task after the other."""
    out = torch.zeros_like(value)
    lse = torch.full_like(query[:, 0], -torch.inf)
    for task in decomposition.tasks():
        for rows, columns, hidden in rectangles_of(task, is_causal):
            part, part_lse = plain_attention(
                query[rows], key[columns], value[columns], hidden
            )
            merged_lse = torch.logaddexp(lse[rows], part_lse)
            weight = torch.exp(lse[rows] - merged_lse)[:, None]
            part_weight = torch.exp(part_lse - merged_lse)[:, None]
            out[rows] = weight * out[rows] + part_weight * part
            lse[rows] = merged_lse
    return out, lse


def gradients_by_tasks(
    query, key, value, out, lse, grad_out, decomposition, is_causal=False
):
    """Return the gradients of query, key and value: those of all tasks add up."""
    scale = query.shape[-1] ** -0.5
    grad_query = torch.zeros_like(query)
    grad_key = torch.zeros_like(key)
    grad_value = torch.zeros_like(value)
    delta = (grad_out * out).sum(-1, keepdim=True)
    for task in decomposition.tasks():
        for rows, columns, hidden in rectangles_of(task, is_causal):
            scores = plain_scores(query[rows], key[columns], hidden)
            weights = torch.exp(
                scores - lse[rows, None]
            )  # of whole rows: lse is the global one
            grad_weights = grad_out[rows] @ value[columns].T
            grad_scores = scale * weights * (grad_weights - delta[rows])
            grad_query[rows] += grad_scores @ key[columns]
            grad_key[columns] += grad_scores.T @ query[rows]
            grad_value[columns] += weights.T @ grad_out[rows]
    return grad_query, grad_key, grad_value


def rectangles_of(task, is_causal):
    """Yield tokens of queries, tokens of keys, and the pairs of a causal square that
    are hidden."""
    positions = [p for span in task.spans for p in range(span.start, span.stop)]
    tokens = torch.tensor(positions, dtype=torch.long)
    for rectangle in task.rectangles(is_causal):
        rows = tokens[rectangle.query_start : rectangle.query_stop]
        columns = tokens[rectangle.key_start : rectangle.key_stop]
        hidden = torch.zeros(len(rows), len(columns), dtype=torch.bool)
        if rectangle.causal:
            hidden = torch.ones_like(hidden).triu(1)
        yield rows, columns, hidden


def plain_attention(query, key, value, hidden):
    """Return (out, lse) of one rectangle: what FlashAttention computes in a call."""
    scores = plain_scores(query, key, hidden)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[:, None]) @ value, lse


def plain_scores(query, key, hidden):
    """Return the scaled products of a rectangle; hidden pairs have -inf."""
    scores = query.shape[-1] ** -0.5 * query @ key.T
    return scores.masked_fill(hidden, -torch.inf)


def main() -> None:
    """Print the largest differences from torch's own attention."""
    torch.manual_seed(0)
    n_tokens, head_dim = 1000, 16
    inputs = torch.randn(3, n_tokens, head_dim, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn(n_tokens, head_dim, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    expected_grads = torch.autograd.grad(expected, inputs, grad_out)[0]

    query, key, value = inputs.detach()
    decomposition = Decomposition(n_tokens, levels=(7, 3))
    out, lse = attention_by_tasks(query, key, value, decomposition, is_causal=True)
    grads = gradients_by_tasks(
        query, key, value, out, lse, grad_out, decomposition, is_causal=True
    )

    print(f"tasks: {decomposition.n_tasks}")
    print(f"output: {(out - expected).abs().max():.0e}")
    print(f"gradients: {(torch.stack(grads) - expected_grads).abs().max():.0e}")


if __name__ == "__main__":
    main()
