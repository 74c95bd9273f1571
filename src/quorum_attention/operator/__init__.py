"""Attention as one operator of torch's: what a trace sees instead of Python that plans
and runs.

``torch.ops.quorum_attention.attention`` is the forward, ``attention_backward`` the
gradients. The forward is registered as ``quorum_attention::flash_attn``, which others'
checkpoints recognise. Both know the shapes of their results (for fake tensors) and how
many operations torch counts for them, the forward its derivative. They are used where a
call is traced (torch.compile, torch.export, make_fx, fake tensors), where selective
checkpoints choose among operators, or where operations are counted. All else calls
``autograd`` directly, which is quicker and knows torch.func.

Calls are planned and run when the graph runs: a budget holds then, and settings
(``using``) are those of then. The forward returns which settings those were, as a
tensor, for its backward.
"""

from quorum_attention.operator.traced_call import as_operator

__all__ = ["as_operator"]
