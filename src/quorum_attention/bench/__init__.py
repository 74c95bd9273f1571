"""The paper's experiments on the machine at hand: ``quorum-attention bench``
(docs/bench.md)."""
