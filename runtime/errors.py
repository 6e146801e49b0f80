"""Errors that a user can mend: bad input, or an extra that this copy of the project lacks."""

import importlib
import importlib.util


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""


def load_extra(name, what):
    """Return the package extras.NAME, whose import adds to the tables of the core.

    Raises InputError, which says that `what` needs it, if this copy of the project is without that folder.
    """
    if importlib.util.find_spec("extras") is None or importlib.util.find_spec(f"extras.{name}") is None:
        raise InputError(f"{what} needs the folder extras/{name}, which this copy does not have")
    return importlib.import_module(f"extras.{name}")
