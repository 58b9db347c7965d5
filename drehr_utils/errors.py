"""Errors that a user can act on."""

from __future__ import annotations


class DataError(ValueError):
    """Input that can't be used. The message names file, row and field, and says what to do; never a note's text."""
