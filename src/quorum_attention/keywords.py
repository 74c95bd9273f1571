"""Unknown keyword arguments: an error that names the option which was probably meant.

Callers come from other libraries, so their names for the same things are known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

_ANY_MASK = 'attn_mask=Mask(causal="lower_right")'
# Other libraries' names (torch, flash-attn, xformers, FlexAttention, Transformers), and
# what has that meaning here: names of options, of which a function takes the first that
# it has, or an expression, for functions that take the option that it begins with.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "alibi_slopes": ("kernel=NativeKernel(alibi_slopes=...)",),
    "attention_dropout": ("dropout_p",),
    "attention_mask": ("attn_mask",),
    "attn_bias": ("attn_mask",),
    "backend": ("kernel",),
    "batch_size": ("batch",),
    "bias": ("attn_mask",),
    "block_mask": ("attn_mask=Mask(keeps=mask_mod)",),
    "causal": ("is_causal",),
    "cu_seqlens": ("attn_mask=Mask(documents=...)", "documents"),
    "deterministic": ('kernel="native"',),
    "device": ("devices",),
    "dropout": ("dropout_p",),
    "generator": ("dropout_seed",),
    "gqa": ("enable_gqa",),
    "implementation": ("kernel",),
    "k": ("key",),
    "key_padding_mask": (
        "attn_mask=Mask(key_padding=~key_padding_mask)",
        "key_padding",
    ),
    "logits_soft_cap": ("attn_mask=Mask(softcap=...)", "softcap"),
    "mask": ("attn_mask",),
    "mask_mod": ("attn_mask=Mask(keeps=...)", "keeps"),
    "max_memory": ("budget",),
    "memory": ("budget",),
    "memory_limit": ("budget",),
    "num_heads": ("heads",),
    "num_kv_heads": ("kv_heads",),
    "num_tokens": ("n_tokens",),
    "p": ("dropout_p",),
    "q": ("query",),
    "scaling": ("scale",),
    "score_mod": ("kernel=from_score_mod(...)",),
    "seed": ("dropout_seed",),
    "seq_len": ("n_tokens",),
    "seqlen": ("n_tokens",),
    "seqlens": ("attn_mask=Mask(key_lengths=...)", "key_lengths"),
    "sinks": ("attn_mask=Mask(sinks=...)",),
    "s_aux": ("attn_mask=Mask(sinks=...)", "sinks"),
    "sliding_window": ("attn_mask=Mask(window=...)", "window"),
    "sm_scale": ("scale",),
    "softcap": ("attn_mask=Mask(softcap=...)",),
    "softmax_scale": ("scale",),
    "tokens": ("n_tokens",),
    "v": ("value",),
    "verbose": ("progress",),
    "window": ("attn_mask=Mask(window=...)",),
    "window_size": ("attn_mask=Mask(window=...)", "window"),
}
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of ``words`` that was probably meant; None if nothing is near."""
    near = get_close_matches(word, list(words), n=1)
    return near[0] if near else None


def unknown_option(function: str, name: str, options: Collection[str]) -> TypeError:
    """Return the error about a keyword argument that a function does not have.

    Args:
        function: the function's name.
        name: of the argument.
        options: the names of the arguments that the function has.
    """
    problem = f"{function}() has no {name!r}"
    for meant in _ELSEWHERE.get(name.removesuffix("_q").removesuffix("_k"), ()):
        if meant.partition("=")[0] in options:
            if name == "causal" and "attn_mask" in options:
                meant += f" (or {_ANY_MASK}, to align the last query with the last key)"
            return TypeError(f"{problem}; use {meant}")
    near = nearest(name, options)
    if near is not None:
        return TypeError(f"{problem}; did you mean {near}?")
    return TypeError(f"{problem}; it has {', '.join(options)}")


def check_names(function: str, named: Iterable[str], options: Collection[str]) -> None:
    """Check the names of keyword arguments.

    Raises:
        TypeError: one is not among ``options``; names what was probably meant.
    """
    for name in named:
        if name not in options:
            raise unknown_option(function, name, options)


def names_of(function: Callable[..., Any]) -> dict[str, None]:
    """Return the names of the arguments that a function takes by keyword, in order."""
    names: dict[str, None] = {}
    for parameter in inspect.signature(function).parameters.values():
        is_keyword = parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        if is_keyword and parameter.name != "self":
            names[parameter.name] = None
    return names


def helps_with_names(function: _Function) -> _Function:
    """Have a function, or an ``__init__``, say which keyword argument was probably
    meant."""
    options = names_of(function)
    shown_name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if not named.keys() <= options.keys():
            check_names(shown_name, named, options)
        return function(*args, **named)

    return call  # type: ignore[return-value]


def helps_with_fields(record: _Class) -> _Class:
    """Have the construction of a dataclass say which field was probably meant."""
    record.__init__ = helps_with_names(record.__init__)  # type: ignore[misc]
    return record
