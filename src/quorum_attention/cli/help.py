"""How help looks, and the words that every command uses."""

from __future__ import annotations

import argparse

GLOSSARY = (
    "levels: chunk counts per level of cutting (none: uncut); unit: one task of one head group, "
    "loaded, computed and stored at once; n_cap: most units on the device at a time."
)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that names every default, once, and none where there is nothing to say."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help or ""
        silent = (None, False, argparse.SUPPRESS)
        if any(action.default is value for value in silent) or "default" in said:
            return action.help
        return super()._get_help_string(action) if said else "default: %(default)s"
