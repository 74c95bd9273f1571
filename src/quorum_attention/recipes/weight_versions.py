"""The versions of weights, by which a second run of a module notices that its weights
were written to since its first.

torch refuses a backward through a layer whose weights have changed. A checkpoint would
compute the layer with the changed weights, and get wrong gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.kernels.tensors import NamedTensors


@dataclass(frozen=True)
class WeightVersions:
    """The versions that weights had when they were recorded.

    Attributes:
        weights: the weights, by name.
        versions: numbers that torch counts up when a weight is written to, by name.
    """

    weights: NamedTensors
    versions: dict[str, int]

    @classmethod
    def record(cls, weights: NamedTensors) -> WeightVersions:
        """Record the versions of now. Weights of inference mode have none."""
        versions = {
            name: weight._version
            for name, weight in weights.items()
            if not weight.is_inference()
        }
        return cls(weights, versions)

    def have_changed(self) -> bool:
        """Whether a weight was written to since."""
        return any(
            self.weights[name]._version != version
            for name, version in self.versions.items()
        )
