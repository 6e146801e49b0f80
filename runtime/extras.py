"""How the core finds an extra: by name, and only when something of it is asked for."""

import importlib
import importlib.util

from runtime.errors import InputError


def load(name, what):
    """Return the package extras.NAME, whose import adds to the tables of the core.

    Raises InputError, which says that `what` needs it, if this copy of the project is without that folder.
    """
    if importlib.util.find_spec("extras") is None or importlib.util.find_spec(f"extras.{name}") is None:
        raise InputError(f"{what} needs the folder extras/{name}, which this copy does not have")
    return importlib.import_module(f"extras.{name}")
