"""Collectives beside those of the core: each file of this folder adds its own to tp.COLLECTIVES."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
