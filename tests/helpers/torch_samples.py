"""Writes torch's own samples of ``scaled_dot_product_attention`` to a file: see
test_torch_samples.

Run as a program, in a process of its own: importing torch's testing modules changes
settings of the whole process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db


def main(path: str) -> None:
    """Save (dtype, requires_grad, args, kwargs) of all, and calls that are to raise, in
    words."""
    (op,) = (
        one for one in op_db if one.name == "nn.functional.scaled_dot_product_attention"
    )
    samples: list[Any] = []
    for dtype in sorted(op.dtypes, key=str):
        for requires_grad in (False, True):
            torch.manual_seed(len(samples))
            makers = [op.sample_inputs]
            if op.reference_inputs_func is not None:
                makers.append(op.reference_inputs)
            for make in makers:
                for one in make("cpu", dtype, requires_grad=requires_grad):
                    call = ((one.input, *one.args), one.kwargs)
                    samples.append((dtype, requires_grad, *_detached(*call)))
    errors = (
        []
        if op.error_inputs_func is None
        else [str(one) for one in op.error_inputs("cpu")]
    )
    torch.save({"samples": samples, "errors": errors}, path)


def _detached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def plain(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    return tuple(map(plain, args)), {
        name: plain(value) for name, value in kwargs.items()
    }


if __name__ == "__main__":
    main(sys.argv[1])
