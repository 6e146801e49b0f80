"""Errors that a user can mend."""


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""
