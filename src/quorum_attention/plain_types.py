"""Types that are made of Python's own, by what they hold."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
"""What is printed or stored as an object of JSON."""

Keywords = dict[str, Any]
"""Keyword arguments, or fields of a record, by name."""
