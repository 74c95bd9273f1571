"""A parser of arguments that says what was probably meant. The commands are listed in
``cli``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from quorum_attention.keywords import nearest


class Parser(argparse.ArgumentParser):
    """A parser that refuses an unknown option or command before anything else is
    checked, with its own usage and the nearest name.

    argparse itself reports an unknown option of a command last, with the usage of the
    program.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See ``argparse``."""
        words = list(sys.argv[1:] if args is None else args)
        commands = self._commands()
        for word in words:
            if word == "--":
                break
            if commands and not word.startswith("-"):
                self._check_command(word, list(commands))
                break  # what follows is the command's
            if word.startswith("--"):
                self._check_option(word.partition("=")[0])
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown and commands:
            commands[namespace.command].error(f"too many words: {' '.join(unknown)}")
        return namespace, unknown

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        """The parsers of the commands by name; none of a command's own parser."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def _check_command(self, word: str, commands: list[str]) -> None:
        if word in commands:
            return
        near = nearest(word, commands)
        meant = (
            f"did you mean {near}?" if near else f"commands are {', '.join(commands)}"
        )
        self.error(f"there is no command {word!r}; {meant}")

    def _check_option(self, word: str) -> None:
        options = list(self._option_string_actions)
        if any(
            option.startswith(word) for option in options
        ):  # argparse completes what is unique
            return
        near = nearest(word, options)
        meant = f"did you mean {near}?" if near else f"see {self.prog} --help"
        self.error(f"there is no option {word}; {meant}")
