"""Replace modules of a model by others with the same weights."""


def swap(model, make):
    """Replace every submodule by make(name, submodule), where name is its last one. None leaves it as it is."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if (new := make(name, module)) is not None:
                setattr(parent, name, new)


def recast(module, subclass):
    """Make a module one of a subclass that differs only in its methods; returns the module."""
    module.__class__ = subclass
    return module
