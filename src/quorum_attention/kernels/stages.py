"""Compiles a Triton kernel by Triton's stages alone, for a device that is given.

A process that compiles its first kernel in the usual way first hashes all of Triton's files (its
library has 400 MB), to name what it caches, and has a C compiler build the tools that launch
kernels. That takes several times as long as compiling (docs/planner.md). What is kept on disk here
has a name of its own and is launched by the driver (``binaries.py``), so it needs neither: a kernel
goes from its source through Triton's own passes to ``ptxas``. The same code comes out, bit for bit
(tests/kernels/test_stages.py). Triton 3.6 and 3.7 have these stages; where another version has
others, whoever asks gets an error and compiles in the usual way.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from quorum_attention.kernels.launches import Launch

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}
_ALIGNED = 16
# Settings of Triton that only say where files are.
PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR")


def compiled(function: Any, launch: Launch, capability: tuple[int, int]) -> Any:
    """What Triton's ``CompiledKernel`` of ``launch`` would say of itself: metadata, src and asm.

    Tensors are taken to lie at multiples of 16.

    Args:
        function: the kernel, a ``triton.JITFunction``.
        capability: the compute capability of the device, which need not be here.

    Raises:
        ValueError: a number or a setting that Triton should see to itself.
        Exception: whatever another version of Triton raises; what compiling raises.
    """
    others = [name for name in os.environ if name.startswith("TRITON_") and name not in PLACES]
    if others:
        raise ValueError(f"Triton has settings that may change what comes out: {sorted(others)}")
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    source = ASTSource(function, *_specialised(function, launch))
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend = make_backend(target)
    options = backend.parse_options({})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(),
        context,
    )  # fmt: skip
    metadata: dict[str, Any] = {"target": target, **options.__dict__}
    for stage in list(stages.values())[list(stages).index(source.ext) :]:
        made = stage(made, metadata)
    assert list(stages)[-1] == "cubin"
    return SimpleNamespace(
        metadata=SimpleNamespace(**metadata), src=source, asm={"cubin": bytes(made)}
    )


_Attributes = dict[tuple[int], list[list[object]]]


def _specialised(
    function: Any, launch: Launch
) -> tuple[dict[str, str], dict[tuple[int], object], _Attributes]:
    """Types by name, constants by position, and what is known of arguments, as Triton works them
    out of a launch."""
    signature: dict[str, str] = {}
    attributes: _Attributes = {}
    for at, (parameter, value) in enumerate(
        zip(function.params, launch.arguments, strict=False)  # constants follow
    ):
        aligned = not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name], aligned = "fp32", False
        else:
            if value >= 2**31 or (aligned and value == 1):
                raise ValueError(f"{parameter.name} = {value} is compiled for in another way")
            signature[parameter.name] = "i32"
            aligned = aligned and value % _ALIGNED == 0
        if aligned:
            attributes[at,] = [["tt.divisibility", _ALIGNED]]
    constants: dict[tuple[int], object] = {}
    first = len(launch.arguments)
    for at, (parameter, constant) in enumerate(
        zip(function.params[first:], launch.constants, strict=True), first
    ):
        signature[parameter.name] = "constexpr"
        constants[at,] = constant
    return signature, constants, attributes
