"""What a Runner calls for a pass: the model as written, what torch.compile made of it, or CUDA graphs of it."""

import contextlib
import weakref

import torch

from ladder.kernels import registry

# The compiler keeps what it made, for any later torch.compile of the same code. So this keeps what it was made for.
_functions = {}  # {files: registry.fingerprint_of_functions(files)}
_models = weakref.WeakKeyDictionary()  # {model: registry.fingerprint_of_modules(model)}


def forget_old_code(model):
    """Let the compiler forget its code if any function, or the model, was changed since it compiled that."""
    same = registry.same_fingerprint
    changed = model in _models and not same(_models[model], registry.fingerprint_of_modules(model))
    changed |= any(not same(parts, registry.fingerprint_of_functions(files)) for files, parts in _functions.items())
    if changed:
        torch.compiler.reset()
        torch.compiler.set_stance("default")  # and not that of unguarded(), up to the end of its block
        _functions.clear()
        _models.clear()


def remember_code(model):
    """Keep what the compiler makes code for from now on. It must have been imported: that changes some of it."""
    files = registry.files_of(model)
    _functions[files] = registry.fingerprint_of_functions(files)
    _models[model] = registry.fingerprint_of_modules(model)


class Passes:
    """The prefill and the decode step of a model, which are made anew when somebody has changed the model.

    prefill, decode: the model, or what torch.compile made of it; called as Transformer.forward. On a GPU CUDA graphs of
    decode steps are captured, also of those that are not compiled: `graphs`, else None.
    Raises InputError if compiling needs a C++ compiler and there is none.
    """

    def __init__(self, model, compiles_decode, compiles_prefill):
        self.model = model
        self.compiles_decode = compiles_decode
        self.compiles_prefill = compiles_prefill
        self.compiles = compiles_decode or compiles_prefill
        self.build()

    def build(self):
        """Make prefill and decode of the model as it is now."""
        model = self.model
        self.prefill = model
        self.decode = model
        self.graphs = None
        if self.compiles:
            from ladder.kernels import compiling  # not in a plain run: it imports the compiler

            forget_old_code(model)
            self.decode, self.prefill = compiling.compiled(model, self.compiles_decode, self.compiles_prefill)
            remember_code(model)
        if model.device.type == "cuda" and "sums" not in model.comm.on_host and self.may_capture():
            from ladder.kernels.cuda_graphs import Graphs

            self.graphs = self.decode if self.compiles_decode else Graphs(model)
            self.decode = self.graphs
        self.built_for = registry.fingerprint(model) if self.compiles or self.graphs else None

    def may_capture(self):
        """Return whether CUDA graphs may hold steps. What hooks do in Python would only run while one is captured."""
        if not self.compiles_decode and registry.has_hooks(self.model):
            registry.say_once("the model has hooks: decode steps run without CUDA graphs, thus slower")
            return False
        return self.compiles_decode or not registry.is_off()

    def renew(self):
        """Compile or capture anew what was made before somebody changed the model: it would not know of that.

        What counts as a change is in registry.fingerprint: modules, their tensors, hooks and attributes, and functions.
        """
        if self.built_for and not registry.same_fingerprint(self.built_for, registry.fingerprint(self.model)):
            registry.say_once("the model was changed after its steps were compiled or captured: that is done anew")
            self.build()

    def unguarded(self):
        """Return a context for shapes that warm_up has compiled: it skips guards, 0.5 ms a step of 16 layers."""
        if self.compiles and self.model.device.type == "cpu":
            return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        return contextlib.nullcontext()
