"""Errors that a user can act on."""

from __future__ import annotations


class DataError(ValueError):
    """Input that can't be used. The message names file, row and field, and says what to do; never a note's text."""

    def __init__(self, message: str):
        super().__init__(message if len(message) <= 1500 else f"{message[:1500]} ...")  # it may quote a field
