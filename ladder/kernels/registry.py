"""Which kernels stand in for which plain functions of Python, and what makes them stand back.

What you read is what runs: a function that is marked @plain is what the model computes. A kernel takes the same
arguments and computes the same faster. It stands in for the plain function only as long as all of this is true:

-   The source is what the kernel was made for: that of the plain function and of the project's functions that it calls.
    digests.json has a digest of each, and use() compares them when a model is loaded.
-   None of these functions was replaced since, as in model.attend = my_attend. Each pass of a model, or each call that
    is part of none, compares their code.
-   The kernel knows the modules and tensors of this call. It checks their types, hooks, biases and shapes itself, and
    returns None where there is anything else; an error that it raises makes it stand back as well, with a line.
-   No gradient is asked for, since kernels have none.

Otherwise the plain function runs, and if somebody changed something, one line says so.

`python -m ladder.kernels.digests` writes digests.json anew, for whoever has changed a plain function and its kernels
alike. $LADDER_PLAIN=1, which generate.py --plain sets, lets no kernel stand in.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import pkgutil
import sys
import textwrap
import types
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

from ladder.errors import first_line

ROOT = Path(__file__).parents[2]  # of the project, whose functions have digests
DIGESTS = Path(__file__).with_name("digests.json")  # {"model.attend": digest of its source, ...}
PLAIN_NAMES = "plain", "registry.plain"  # the decorator in a source
PLAIN = "LADDER_PLAIN"  # the environment variable that lets no kernel stand in


class Kernel(NamedTuple):
    """A function that may stand in for a plain one."""

    name: str  # of the plain function, e.g. "model.FeedForward.forward"
    function: Callable  # of the same arguments; returns None where it stands back
    about: str  # what it gains, e.g. "few rows are about twice as fast"
    calls: tuple[str, ...] = ()  # plain functions of submodules that it stands in for as well: "model.Linear.forward"
    compiles: bool = True  # whether it stands in in compiled code as well
    may_refuse: bool = True  # whether the plain function may run after it has failed


@dataclasses.dataclass(slots=True)
class ReadyKernel:
    """A Kernel in use, with what is compared."""

    kernel: Kernel
    function: Callable  # the kernel's
    calls: list  # the Calls of its plain function
    current: Callable  # namespaces -> the code of these functions as it is now
    namespaces: types.SimpleNamespace
    known: tuple  # their code as it was
    owner: type | None  # the class of its module, if the plain function calls other methods of that
    methods: frozenset  # their names
    classes: list  # of the modules that are called
    is_current: bool = False  # whether no function was replaced, in the pass that is under way


in_pass = False  # whether a pass of a whole model is under way, in which is_current holds


def plain(function):
    """Mark a plain function, for which a kernel may stand in (a decorator)."""

    @functools.wraps(function)
    def call(*arguments, **named):
        for ready in call.kernels:
            if in_pass:
                usable = ready.is_current and not torch.is_grad_enabled()
            else:
                usable = may_stand_in(ready, arguments, named)
            if usable and (ready.owner is None or has_known_methods(ready, arguments[0], call.kernels)):
                try:
                    result = ready.function(*arguments, **named)
                except REFUSALS as error:
                    result = refusal(ready, error)
                if result is not None:
                    return result
        return call.__wrapped__(*arguments, **named)  # looked up at the call, so that a notebook may reload it

    call.kernels = ()
    return call


PLAIN_CALL = plain(lambda: None).__code__  # of all functions that are marked @plain

# what a kernel raises for what it does not know and did not check, such as a cache in another order
REFUSALS = RuntimeError, IndexError, TypeError, AttributeError, KeyError


def refusal(ready, error):
    """Say that a kernel stands back because of an error. Raises the error again if the kernel may not."""
    if not ready.kernel.may_refuse or isinstance(error, torch.OutOfMemoryError):
        raise error
    say_once(f"{off(ready.kernel)}: it does not know what it got ({type(error).__name__}: {first_line(error)})")


def begin_pass():
    """Begin the pass of a whole model, for whose layers functions are compared once; return whether this began one."""
    global in_pass
    if in_pass or torch.compiler.is_compiling() or torch.is_grad_enabled() or has_transforms():
        return False
    for function in used:
        for ready in function.kernels:
            ready.is_current = is_current(ready)
    in_pass = True
    return True


begin_pass._dynamo_marked_constant = True  # see is_current_when_compiling


def end_pass(begun):
    """End a pass, if begin_pass returned that it began one."""
    global in_pass
    if begun:
        in_pass = False


def may_stand_in(ready, arguments, named):
    """Return whether none of the functions was replaced, and no gradient is asked for."""
    if ready.kernel.may_refuse and torch.is_grad_enabled() and needs_gradient((*arguments, *named.values())):
        return False  # all others are collectives, which have a gradient
    if torch.compiler.is_compiling():
        return ready.kernel.compiles and is_current_when_compiling(ready)
    return is_current(ready) and not has_transforms()


def has_known_methods(ready, module, kernels):
    """Return whether a module has no methods but those of the class that the kernel was made for.

    kernels: all of the plain function; a subclass that inherits it may have one of its own among them.
    """
    if type(module) is ready.owner and ready.methods.isdisjoint(module.__dict__):
        return True
    if type(module) is not ready.owner and any(type(module) is other.owner for other in kernels):
        return False
    say_once(f"a {type(module).__name__} may have functions of its own: {off(ready.kernel)}")
    return False


def is_current(ready):
    """Return whether none of the functions that a kernel stands in for was replaced; say which, if any."""
    if not has_replaced(ready):
        return calls_are_plain(ready)
    for call, code in zip(ready.calls, ready.known, strict=False):
        if code_of(call) is not code:
            say_once(f"{call.name} was replaced: it runs as written, and {off(ready.kernel)}", key=call.name)
    return False


def is_current_when_compiling(ready):
    return is_current(ready)


# what torch.compiler.assume_constant_result does, which imports the compiler
is_current_when_compiling._dynamo_marked_constant = True


MODULE_CALL = nn.Module.__call__


def calls_are_plain(ready):
    """Return whether calling a module is what PyTorch makes of it: no hooks of all modules, and no modes."""
    plain_calls = all(kind.__call__ is MODULE_CALL for kind in ready.classes)
    if plain_calls and not has_global_hooks() and not torch._C._len_torch_function_stack():
        return True
    say_once(f"modules have global hooks, a __call__ or a function mode: {off(ready.kernel)}", key="calls")
    return False


def has_global_hooks():
    """Return whether there are hooks of all modules, which a kernel for several modules would not call."""
    return bool(nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks)


def has_transforms():
    """Return whether a transform of torch.func, or forward-mode differentiation, is under way."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def code_of(call):
    """Return the code of a Call's function as it is now, or what stands in its place."""
    value = getattr(call.namespace, call.attribute, None)
    value = getattr(value, "__wrapped__", value)
    return getattr(value, "__code__", value)


def needs_gradient(arguments):
    """Return whether autograd follows an argument, a tensor of a tuple, or a parameter of a module."""
    for argument in arguments:
        if isinstance(argument, nn.Module):
            tensors = argument.parameters()
        else:
            tensors = argument if isinstance(argument, tuple | list) else (argument,)
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            return True
    return False


def off(kernel):
    """Return what the loss of a kernel means, for a line."""
    return f"the kernel of {kernel.name} is off ({kernel.about})"


def say_once(text, key=None):
    """Print a line on stderr, on rank 0, unless one was printed with this key, by default the text."""
    from ladder.ranks.world import say

    key = key or text
    if key not in said:
        said.add(key)
        say(text)


say_once._dynamo_marked_constant = True  # so that traced code may call it
said = set()  # the keys of say_once
used = {}  # {plain function that has kernels: None}, in their order
watched = {}  # {name of a plain function: what is_edited compares, and what it returned}

# ---- The kernels in use ----------------------------------------------------------------------------------------------


def use(kernels):
    """Let Kernels stand in, in this process, where the source is what they were made for; say where it is not."""
    if is_off():
        return
    off_for = {}  # {a function that was changed: the Kernels that are off for it}
    for kernel in kernels:
        function = pkgutil.resolve_name(kernel.name)
        if any(ready.kernel == kernel for ready in getattr(function, "kernels", ())):
            continue
        calls = functions_of(kernel)
        changed = changed_functions(calls)
        for name in changed:
            off_for.setdefault(name, []).append(kernel)
        if not changed and hasattr(function, "kernels"):
            function.kernels += (make_ready(kernel, calls),)
            used[function] = None
    for name, without in off_for.items():
        names = ", ".join(dict.fromkeys(kernel.name for kernel in without))
        gains = "; ".join(dict.fromkeys(kernel.about for kernel in without))
        say_once(f"{name} was changed: it runs as written, without the kernels of {names} ({gains})", key=name)


def changed_functions(calls):
    """Return the names of the Calls whose source is not what the kernels were made for."""
    digests = json.loads(DIGESTS.read_text())
    return [call.name for call in calls if call.is_ours and digests.get(call.name) != digest(call.function)]


def is_in_use(kernel):
    """Return whether a kernel stands in now, where it is asked for something besides the calls of its function."""
    function = pkgutil.resolve_name(kernel.name)
    if getattr(function, "__code__", None) is not PLAIN_CALL:  # another function was put in its place
        return False
    return any(ready.kernel == kernel and is_current(ready) for ready in function.kernels)


def is_edited(kernel):
    """Return whether a kernel's plain function, or one that it calls, is not what the kernel was made for.

    Whether it is in use does not matter: --plain is no edit.
    """
    if getattr(pkgutil.resolve_name(kernel.name), "__code__", None) is not PLAIN_CALL:
        return True
    ready, edited = watched.get(kernel.name, (None, False))
    if ready is None or has_replaced(ready):
        calls = functions_of(kernel)
        ready = make_ready(kernel, calls)
        edited = bool(changed_functions(calls))
        watched[kernel.name] = ready, edited
    return edited


def has_replaced(ready):
    """Return whether any of the functions that a kernel stands in for was replaced since it is in use."""
    try:
        return ready.current(ready.namespaces) != ready.known
    except AttributeError:  # something without code was put in a function's place
        return True


def is_off():
    """Return whether no kernel is wanted."""
    return os.environ.get(PLAIN, "") not in ("", "0")


def is_unchanged(name):
    """Return whether a function's source is what a kernel was made for; say it if it is not."""
    if is_off():
        return False
    same = json.loads(DIGESTS.read_text()).get(name) == digest(pkgutil.resolve_name(name))
    if not same:
        say_once(f"{name} was changed: it runs as written, slower", key=name)
    return same


def fingerprint(model):
    """Return what an edit of a model in this process changes; what was compiled or captured before does not know of it.

    That is its modules, and the functions that run in it. Two fingerprints are compared by same_fingerprint.
    """
    return fingerprint_of_modules(model) + fingerprint_of_functions(files_of(model))


def fingerprint_of_modules(model):
    """Return a model's part of the fingerprint: its modules' types, tensors, hooks and attributes, its collectives."""
    parts = [type(model.comm)]
    for module in model.modules():
        names = [name for name in module.__dict__ if name != "comm" or module is model]  # lanes get one in each pass
        parts += [type(module), *(module.__dict__[name] for name in names)]
        parts += [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._modules.values()]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            parts += [tensor] if tensor is None else [tensor, tensor.data_ptr(), tensor.dtype, tensor.shape]
    return parts


def files_of(model):
    """Return the files, as modules of Python, that define a model's classes and its wirings' functions."""
    definitions = [type(model.comm), *map(type, model.modules())]
    for wiring in {*model.config.layer_wirings}:
        definitions += [wiring.loop, *wiring.block_sublayers]
    files = {sys.modules.get(each.__module__) for each in definitions}
    return frozenset(files - {None})  # of what was typed in, or loaded without a name


def fingerprint_of_functions(files):
    """Return the functions and methods that some files define, those that PyTorch calls, and hooks of all modules."""
    parts = [MODULE_CALL, *vars(torch.nn.functional).values()]
    parts += [*nn.modules.module._global_forward_hooks.values(), *nn.modules.module._global_forward_pre_hooks.values()]
    for file in files:
        scopes = [file, *(value for value in vars(file).values() if inspect.isclass(value))]
        for scope in scopes:  # the compiler itself adds names with __ to a file, and changes methods of torch's classes
            names = [name for name in vars(scope) if scope is not file or not name.startswith("__")]
            if getattr(scope, "__module__", scope.__name__).startswith("torch."):
                names = [name for name in names if name == "forward"]
            functions = [function for name in names if callable(function := underlying(vars(scope)[name]))]
            parts += [*functions, *(getattr(function, "__code__", None) for function in functions)]
    return parts


def same_fingerprint(a, b):
    """Return whether two fingerprints are of the same model: numbers are compared by value, all else by identity."""
    by_value = int, float, str, tuple, torch.Size
    return len(a) == len(b) and all(x is y or (type(x) in by_value and x == y) for x, y in zip(a, b, strict=True))


def has_hooks(model):
    """Return whether any module of a model has a hook, which runs Python in each pass."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- What a plain function calls, and its digest ---------------------------------------------------------------------


class Call(NamedTuple):
    """A function or a constant, and where the plain functions look it up."""

    name: str  # "model.attend"
    namespace: object  # the module model
    attribute: str  # "attend"
    function: object
    is_ours: bool  # whether it is part of this project, and so has a digest


def functions_of(kernel):
    """Return the Calls of a Kernel: its plain function, those in `calls`, and all that these call in turn."""
    calls = {}
    for name in (kernel.name, *kernel.calls):
        path, _, attribute = name.rpartition(".")
        _add_call(calls, pkgutil.resolve_name(path), attribute)
    return list(calls.values())


def _add_call(calls, namespace, attribute):
    module = namespace.__name__ if inspect.ismodule(namespace) else f"{namespace.__module__}.{namespace.__qualname__}"
    name = f"{module}.{attribute}"
    value = getattr(namespace, attribute)
    if name in calls:
        return
    function = underlying(value)
    calls[name] = Call(name, namespace, attribute, value, not module.startswith("torch."))
    if not inspect.isfunction(function) or not calls[name].is_ours:
        return
    scope = sys.modules[function.__module__]
    owner = namespace if inspect.isclass(namespace) else None  # the class of a method, which may be inherited
    with contextlib.suppress(OSError, SyntaxError):  # without a source its digest is unknown, too
        _add_calls_in(calls, syntax_tree(function.__code__), scope, owner)


def _add_calls_in(calls, tree, scope, owner):
    """Add what a function calls. scope: its module. owner: the class of a method, or None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()" and inspect.isclass(owner):
            parents = [parent for parent in owner.__mro__[1:] if node.attr in vars(parent)]
            if parents and callable_in_project(vars(parents[0])[node.attr]):
                _add_call(calls, parents[0], node.attr)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            namespace = owner if node.value.id == "self" else getattr(scope, node.value.id, None)
            is_own = callable_in_project(inspect.getattr_static(namespace, node.attr, None))
            if is_own or namespace is torch.nn.functional:
                _add_call(calls, namespace, node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in vars(scope):
            value = vars(scope)[node.id]
            if callable_in_project(value) or isinstance(value, int | float | str | tuple):
                _add_call(calls, scope, node.id)


def callable_in_project(value):
    """Return whether a value is a function or a property of this project."""
    function = underlying(value)
    if not inspect.isfunction(function):
        return False
    path = Path(function.__code__.co_filename)
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts


def underlying(value):
    """Return the function behind a property or a decorator, or the value itself."""
    value = value.fget if isinstance(value, property) else value
    return inspect.unwrap(value) if inspect.isfunction(value) else value


@functools.cache  # kernels have functions in common
def syntax_tree(code):
    """Return the syntax tree of a function's code without docstrings and @plain. Raises OSError if it has no source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    definition = tree.body[0]
    if isinstance(definition, ast.FunctionDef):
        definition.decorator_list = [d for d in definition.decorator_list if ast.unparse(d) not in PLAIN_NAMES]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def digest(value):
    """Return the digest of a function's source, comments, docstrings and layout aside, or of a constant."""
    function = underlying(value)
    try:
        text = ast.unparse(syntax_tree(function.__code__)) if inspect.isfunction(function) else repr(function)
    except (OSError, SyntaxError):  # a function without a file, such as a lambda that was typed in
        return "unknown"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def make_ready(kernel, calls):
    """Return the ReadyKernel of a Kernel."""
    others = [call for call in calls if call.name != kernel.name or hasattr(call.function, "__wrapped__")]
    namespaces = types.SimpleNamespace()
    paths = []
    for i, call in enumerate(others):
        setattr(namespaces, f"of{i}", call.namespace)
        code = ".__code__" if inspect.isfunction(call.function) else ""
        wrapped = ".__wrapped__" if hasattr(call.function, "__wrapped__") else ""
        paths.append(f"of{i}.{call.attribute}{wrapped}{code}")
    current = attrgetter(*paths, "__class__", "__class__")  # of two or more paths it makes a tuple
    owner = pkgutil.resolve_name(kernel.name.rpartition(".")[0])
    helpers = [call for call in others if call.name != kernel.name and call.namespace is owner]
    methods = frozenset(call.attribute for call in helpers if inspect.isclass(owner))
    owner = owner if methods else None
    scopes = [call.namespace for call in calls if inspect.isclass(call.namespace)]
    classes = [scope for scope in scopes if issubclass(scope, nn.Module)]
    known = current(namespaces)
    return ReadyKernel(kernel, kernel.function, others, current, namespaces, known, owner, methods, classes)
