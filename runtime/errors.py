"""Why a run ends: errors that a user can mend, such as a missing extra, and what ranks find out about each other."""

import importlib
import importlib.util


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""


class Verdict(Exception):
    """Why ranks that cannot go on are ended, in one line."""


class StoreLost(Verdict):
    """torchrun's store does not answer."""


def find_extra(name):
    """Return the package extras.NAME, whose import adds to the tables of the core, or None without that folder."""
    spec = importlib.util.find_spec("extras") and importlib.util.find_spec(f"extras.{name}")
    return importlib.import_module(f"extras.{name}") if spec and spec.origin else None  # without origin: no __init__.py


def load_extra(name, what):
    """Return find_extra(name). Raises InputError, which says that `what` needs it, if it is not there."""
    if (extra := find_extra(name)) is None:
        raise InputError(f"{what} needs the folder extras/{name}, which this copy does not have")
    return extra
