"""What one reads is what runs: each edit of a function, a module or a weight takes effect in every pass.

An edit is made after a model was loaded with its kernels. Then prefill and decode compute what they do without any
kernel, and something else than before the edit.
"""

import contextlib
import functools
import inspect
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.prune
from cases import refused, slow_case
from configs import BASE, change
from file_edits import read_json
from helpers import ALONE, counted_kernels, last_logits, plain_only, randn, seeded, unequal_rows
from running import run_ranks

import generate
import model
import tp
from ladder.architectures import heads
from ladder.decoding import passes
from ladder.decoding.batch import Sampler
from ladder.decoding.drafts import of_model
from ladder.kernels import digests, quant_kernels, quant_linear, registry
from ladder.lanes import wirings
from ladder.layers import attention_inputs, norms

SHAPE = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "dim": 64, "intermediate_size": 96}
CONFIG = change(BASE, **SHAPE, wiring="ladder")
QUANTS = {
    "bfloat16": {}, "int8": {"quant": "int8"}, "int8 in groups": {"quant": "int8", "group_size": 16},
    "int4": {"quant": "int4", "group_size": 32}, "float32": {},
}  # fmt: skip


def load(quant="bfloat16", world=ALONE, **changes):
    config = change(CONFIG, **QUANTS[quant], **changes)
    net = generate.load_model(config, None, "float32" if quant == "float32" else "bfloat16", world)
    for name, weight in net.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.uniform_(0.5, 1.5, generator=seeded(len(name)))
        elif weight.dtype in (torch.bfloat16, torch.float32) and not name.endswith(("scales", "zeros")):
            weight.data *= 6  # so that each layer matters
    for linear in quant_linears(net):
        if linear.layout:
            linear.unpack()
        linear.scales.data *= 6
        if linear.zeros is not None:
            linear.zeros.data *= 6
    if not registry.is_off():
        quant_kernels.pack(net, "skinny_gemm")
    return net


def logits(net, rows=3, **how):
    """Those after a prefill and after each decode step; rows of unequal lengths."""
    tokens, lengths = unequal_rows(CONFIG)
    chosen = torch.arange(rows) % len(tokens)
    return last_logits(net, tokens[chosen], lengths[chosen], **how).float()


def check(net, edit, rows=3, changes=True, **how):
    before = logits(net, rows, **how)
    edit(net)
    edited = logits(net, rows, **how)
    with plain_only():
        plain = logits(net, rows)
    difference = (plain - before).norm(dim=(0, 2))  # of the prefill and of each step
    assert edited.isfinite().all()
    if changes:
        assert (difference > 0.1 * before.norm(dim=(0, 2))).all(), "this edit changes nothing anywhere"
        assert ((edited - plain).norm(dim=(0, 2)) < 0.3 * difference).all()
    else:
        assert (edited - plain).norm() < 0.05 * plain.norm()


# ---- Functions -------------------------------------------------------------------------------------------------------


def halved(result):
    """Half of the tensors of a result, as far as they are floats."""
    if isinstance(result, torch.Tensor):
        return result * 0.5 if result.is_floating_point() else result
    if type(result) is tuple:
        return tuple(map(halved, result))
    return result


def functions():
    """[(scope, name)] of all functions that model.py, the layers and the collectives of one device are made of."""
    scopes = [
        model,
        attention_inputs,
        norms,
        heads,
        heads.HeadAttention,
        *[value for value in vars(model).values() if inspect.isclass(value)],
    ]
    scopes += [norms.RMSNorm, quant_linear.QuantLinear, quant_linear]
    files = "model", attention_inputs.__name__, norms.__name__, quant_linear.__name__, heads.__name__
    found = {}
    for scope in scopes:
        for name, value in vars(scope).items():
            function = inspect.unwrap(value) if inspect.isfunction(value) else None
            if function is not None and function.__module__ in files and not name.startswith("_"):
                found[f"{scope.__name__}.{name}"] = scope, name
    return found


FUNCTIONS = functions()


WHOLE = [pytest.param(quant, {}, marks=[pytest.mark.slow] * (quant == "float32")) for quant in QUANTS]


@pytest.mark.parametrize("quant, own", [*WHOLE, ("bfloat16", {"heads": {"qk_norm": True}})])
def test_each_function_that_is_replaced_runs_as_it_does_without_kernels(quant, own, monkeypatch, capsys):
    """Whether it is called at all says a run of plain functions alone."""
    net = load(quant, **own)
    called = set()
    for name, (scope, attribute) in FUNCTIONS.items():
        original = vars(scope)[attribute]
        calls = []

        def replacement(*args, original=original, calls=calls, **kwargs):
            calls.append(1)
            return halved(original(*args, **kwargs))

        with monkeypatch.context() as m, torch.inference_mode():
            m.setattr(scope, attribute, replacement)
            with plain_only():
                plain = logits(net)
            expected = len(calls)
            calls[:] = []
            edited = logits(net)
            assert len(calls) == expected, f"{name} is called {len(calls)} times, not {expected}"
            assert (edited - plain).norm() < 0.05 * plain.norm(), name
            called |= {name} if expected else set()
    assert {"model.attend", "model.rotate_into_cache", "model.list_sublayers", "SingleDevice.wait"} <= called
    attention = {"Attention.forward", *([f"{heads.__name__}.norm_heads"] if own else [])}
    assert {"FeedForward.forward", "RMSNorm.forward", *attention} <= called
    said = capsys.readouterr().err
    assert quant == "float32" or "model.attend was replaced: it runs as written" in said
    name_of_attention = f"{heads.__name__}.HeadAttention.forward" if own else "model.Attention.forward"
    with counted_kernels() as counts:  # and afterwards the kernels are in use again
        logits(net)
    assert quant == "float32" or counts[name_of_attention] and counts["model.FeedForward.forward"] == 8


@pytest.mark.parametrize("name", ["model.FeedForward.forward", "model.attend", "model.Linear.forward"])
def test_a_function_that_was_edited_in_its_file_runs_as_written(name, monkeypatch, capsys):
    """As if its source was not what the kernels were made for."""
    known = read_json(registry.DIGESTS)
    assert name in known
    monkeypatch.setattr(registry.json, "loads", lambda text: {**known, name: "another"})
    net = load()
    without = {ready.kernel.name for function in registry.used for ready in function.kernels}
    assert name not in without and "ladder.layers.norms.RMSNorm.forward" in without
    assert f"{name} was changed: it runs as written" in capsys.readouterr().err
    with counted_kernels() as counts:
        logits(net)
    assert not counts[name] and ("Attention" in name or not counts["model.Attention.forward"] or "Feed" in name)


def test_the_digests_are_those_of_the_source():
    """Else kernels would be off. After a change of plain functions and kernels: python -m ladder.kernels.digests"""
    assert read_json(registry.DIGESTS) == digests.digests()


def test_comments_docstrings_and_layout_are_no_change(tmp_path, monkeypatch):
    source = "def f(x):\n    {}return {}\n"
    found = []
    for i, words in enumerate([("", "x + 1"), ("'''Words.'''\n    # more\n    ", "x+1"), ("", "x + 2")]):
        (tmp_path / f"f{i}.py").write_text(source.format(*words))
        namespace = {}
        exec(compile((tmp_path / f"f{i}.py").read_text(), str(tmp_path / f"f{i}.py"), "exec"), namespace)
        found.append(registry.digest(namespace["f"]))
    assert found[0] == found[1] != found[2] and "unknown" not in found


# ---- Modules ---------------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A low rank beside a linear, as one writes it by hand."""

    def __init__(self, linear, features_in, features_out):
        super().__init__()
        generator = seeded(0)
        self.base = linear
        self.out_features = features_out
        self.a = nn.Parameter(0.5 * torch.randn(4, features_in, generator=generator).to(torch.bfloat16))
        self.b = nn.Parameter(0.5 * torch.randn(features_out, 4, generator=generator).to(torch.bfloat16))

    def forward(self, x):
        return self.base(x) + x @ self.a.mT.to(x.dtype) @ self.b.mT.to(x.dtype)


WIDTHS = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64), "wo": (256, 64), "wqkv": (64, 512)}  # columns, rows


def parent(net, name, layer=1):
    block = net.layers[layer]
    return block.feed_forward if name in ("w1", "w2", "w3") else block.attention


def fresh(name):
    columns, rows = WIDTHS[name]
    return randn(rows, columns, seed=5) * 0.3


def hook(module, args, output):
    return output * 0.5


def pre_hook(module, args):
    return (args[0] * 0.5,)


def own_forward(linear):
    original = linear.forward
    linear.forward = types.MethodType(lambda self, x: original(x) * 0.5, linear)


def like(owner, weight):
    """In the dtype of the activations."""
    is_float32 = any(p.dtype == torch.float32 for p in owner.parameters())
    return nn.Parameter(weight.float() if is_float32 else weight.bfloat16(), requires_grad=False)


def replace_by_torch(owner, name):
    columns, rows = WIDTHS[name]
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight = like(owner, fresh(name))
    setattr(owner, name, linear)


def add_bias(owner, name):
    getattr(owner, name).bias = like(owner, torch.linspace(-1, 1, WIDTHS[name][1]))


def assign(owner, name):
    """The state of a checkpoint, with another scale."""
    linear = getattr(owner, name)
    state = {"weight": linear.weight.detach() * 0.5}
    if isinstance(linear, quant_linear.QuantLinear):
        tensors = zip(quant_linear.STORED, linear.stored(), strict=True)
        state = {key: tensor.clone() for key, tensor in tensors if tensor is not None}
        state["scales"] *= 3
    linear.load_state_dict(state, assign=True)


def set_data(owner, name):
    weight = getattr(owner, name).weight
    weight.data = weight.data.flip(0)


LINEAR_EDITS = {
    "a hook": lambda owner, name: getattr(owner, name).register_forward_hook(hook),
    "a pre-hook": lambda owner, name: getattr(owner, name).register_forward_pre_hook(pre_hook),
    "a forward of its own": lambda owner, name: own_forward(getattr(owner, name)),
    "a LoRA": lambda owner, name: setattr(owner, name, Lora(getattr(owner, name), *WIDTHS[name])),
    "PyTorch's linear": replace_by_torch,
    "a new weight": lambda owner, name: setattr(getattr(owner, name), "weight", like(owner, fresh(name))),
    "a weight's data": set_data,
    "a weight in place": lambda owner, name: getattr(owner, name).weight.data.zero_(),
    "a bias": add_bias,
    "load_state_dict(assign=True)": assign,
}  # fmt: skip


def edit_linears(edit, name):
    """Return a function that edits such a linear of both layers."""
    return lambda net: [LINEAR_EDITS[edit](parent(net, name, layer), name) for layer in (0, 1)]


@pytest.mark.parametrize("edit", LINEAR_EDITS)
@pytest.mark.parametrize("quant", QUANTS)
def test_an_edit_of_a_linear_takes_effect(edit, quant):
    for name in WIDTHS:
        check(load(quant), edit_linears(edit, name))


@pytest.mark.parametrize("rows", [1, 7, 8])
@pytest.mark.parametrize("quant", ["bfloat16", "int8", "int8 in groups", "int4"])
def test_edits_take_effect_in_any_number_of_rows(quant, rows):
    for edit, name in ("a hook", "w2"), ("a LoRA", "wqkv"), ("a bias", "w2"):
        check(load(quant), edit_linears(edit, name), rows)


def replace_norm(net):
    for block in net.layers:
        block.attention.q_norm = nn.RMSNorm(64, dtype=net.dtype)
        block.attention.q_norm.weight.data.fill_(9.0)


def set_activation(net):
    for block in net.layers:
        block.feed_forward.activation = torch.zeros_like


def replace_mlp(net):
    net.layers[0].feed_forward = net.layers[1].feed_forward = nn.Linear(64, 64, dtype=net.dtype)


def scale_heads(net):
    """A subclass whose forward is its own, as in a family of one's own."""

    class ScaledAttention(model.Attention):
        def forward(self, x, metadata, cache):
            return 0.3 * super().forward(x, metadata, cache)

    for block in net.layers:
        block.attention.__class__ = ScaledAttention


def count_otherwise(net):
    """A subclass with another helper, and the forward of its parent."""

    class Other(model.Attention):
        def count_kv_heads(self, rows):
            return 1

    for block in net.layers:
        block.attention.__class__ = Other


def parametrize(net):
    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    for block in net.layers:
        torch.nn.utils.parametrize.register_parametrization(block.feed_forward.w1, "weight", Half())


MODULE_EDITS = {
    "a norm of heads": replace_norm,
    "an activation": set_activation,
    "another MLP": replace_mlp,
    "a hook of an MLP": lambda net: [b.feed_forward.register_forward_hook(hook) for b in net.layers],
    "a hook of an attention": lambda net: [b.attention.register_forward_hook(hook) for b in net.layers],
    "a hook of a norm of heads": lambda net: [b.attention.k_norm.register_forward_hook(hook) for b in net.layers],
    "a hook of a norm": lambda net: [b.ffn_norm.register_forward_hook(hook) for b in net.layers],
    "a subclass": scale_heads,
    "a parametrization": parametrize,
}


@pytest.mark.parametrize("edit", MODULE_EDITS)
@pytest.mark.parametrize("quant", ["bfloat16", "int8", "float32"])
def test_an_edit_of_a_layer_takes_effect(edit, quant):
    if edit == "a parametrization" and quant == "int8":
        pytest.skip("of floats alone")
    own = {"heads": {"qk_norm": True}} if "norm of heads" in edit else {}
    check(load(quant, **own), MODULE_EDITS[edit])


def prune_bias(net):
    for block in net.layers:
        w2 = block.feed_forward.w2
        w2.bias = like(block, torch.linspace(-1, 1, 64))
        torch.nn.utils.prune.random_unstructured(w2, "bias", 0.5)


MODULE_EDITS["a bias that is pruned"] = prune_bias


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_hooks_of_all_modules_are_called(kind):
    net = load()
    seen = []
    register = getattr(torch.nn.modules.module, f"register_module_forward_{kind}")
    handle = register(lambda module, *_: seen.append(module))
    try:
        with torch.inference_mode():
            net(torch.tensor([[5]]), None, net.new_cache(1, 3))
    finally:
        handle.remove()
    assert {id(m) for b in net.layers for m in (b.feed_forward.w1, b.attention.wo)} <= set(map(id, seen))


def check_attention(net, x, metadata, make_cache):
    """With kernels an attention computes what it does without; returns how often each of them stood in."""
    results = []
    for context in plain_only, counted_kernels:
        with context() as counts, torch.inference_mode():
            results.append(net.layers[0].attention(x, metadata, tuple(make_cache())).float())
    assert (results[0] - results[1]).norm() < 0.02 * results[0].norm()
    return counts


def test_what_a_kernel_does_not_know_and_does_not_check_runs_as_written(capsys):
    """A cache in another order of its dimensions, none of the rope, and a pass of fewer rows than the cache."""
    net = load(n_kv_heads=2)
    x = torch.randn(1, 2, 64).bfloat16()
    metadata = attention_inputs.attention_metadata(net, torch.tensor([[2, 3]]), torch.arange(5))
    other = tuple(torch.zeros(1, 6, 2, 64).bfloat16().transpose(1, 2) for _ in "kv")
    for cache, changes in (other, {}), (net.new_cache(1, 6)[0], {"rope": None}), (net.new_cache(1, 6)[0], {}):
        check_attention(net, x, metadata._replace(**changes), lambda cache=cache: map(torch.zeros_like, cache))
    assert "does not know what it got" in capsys.readouterr().err


def test_a_fingerprint_tells_edits(monkeypatch):
    net = load()
    weight = net.layers[0].feed_forward.w1.weight
    handle = net.layers[0].feed_forward.register_forward_hook(lambda module, args, y: y)

    def same():
        return registry.same_fingerprint(before, registry.fingerprint(net))

    def set_comm():
        net.comm = model.SingleDevice()

    def other_hook():
        handle.remove()
        net.layers[0].feed_forward.register_forward_hook(lambda module, args, y: 2 * y)

    edits = [
        lambda: setattr(net, "rope_frequencies", net.rope_frequencies / 2),
        lambda: setattr(weight, "data", weight.data.clone()),
        set_comm,
        other_hook,
        lambda: monkeypatch.setattr(model.SingleDevice, "wait", lambda self, pending: pending),
        lambda: monkeypatch.setattr(model, "attend", lambda *args: args[0]),
    ]
    for edit in edits:
        before = registry.fingerprint(net)
        assert same()
        edit()
        assert not same()


def test_other_weights_of_a_functional_call_are_used():
    net = load()
    tokens = torch.tensor([[1, 5, 6]])
    with torch.inference_mode():
        before = net(tokens)
        others = {name: torch.zeros_like(p) for name, p in net.named_parameters() if name.endswith("w2.weight")}
        after = torch.func.functional_call(net, others, (tokens,))
        for block in net.layers:
            block.feed_forward.w2.weight.zero_()
        assert torch.equal(after, net(tokens)) and not torch.equal(after, before)


def test_a_subclass_with_another_helper_is_not_taken_for_its_parent():
    net = load(n_kv_heads=1)
    x = torch.randn(1, 1, 64).bfloat16()
    metadata = attention_inputs.attention_metadata(net, torch.tensor([[3]]), torch.arange(5))
    count_otherwise(net)
    with counted_kernels() as counts, torch.inference_mode():
        net.layers[0].attention(x, metadata, net.new_cache(1, 6)[0])
    assert not counts["model.Attention.forward"] and counts["model.attend"] == 1


def test_a_mask_of_ones_own_is_used():
    """One that lets tokens see later ones, and one with gaps."""
    net = load()
    x = randn(2, 3, 64).bfloat16()
    metadata = attention_inputs.attention_metadata(net, torch.tensor([[2, 3, 4], [0, 1, 2]]), torch.arange(5))
    gaps = metadata.mask & (torch.arange(5) != 1)
    gaps[1, 1, 1] = True
    for mask in gaps, torch.ones_like(metadata.mask):
        counts = check_attention(
            net, x, metadata._replace(mask=mask),
            lambda: (tensor.normal_(generator=seeded(1)) for tensor in net.new_cache(2, 6)[0]),
        )  # fmt: skip
        assert counts["model.Attention.forward"] == 1


def test_a_hook_that_would_never_run_is_refused():
    refused("a Block is never called: hook the modules in it", load().layers[0].register_forward_hook, hook)


# ---- Collectives, compiled code, gradients ---------------------------------------------------------------------------


def counted_calls(world, owner, attribute, compile, comm):
    """How often a replaced function of the collectives is called in one decode step, and the logits."""
    net = load(world=world)
    calls = []
    original = vars(owner)[attribute]

    def replacement(self, *args, **kwargs):
        calls.append(1)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(owner, attribute, replacement)
        result = logits(net, compile=compile)
    return len(calls), result


@pytest.mark.parametrize("owner, attribute, passes", [
    (tp.TensorParallel, "wait", 4), (tp.TensorParallel, "start", 4), (tp.TensorParallel, "settle", 4),
    (model.Collectives, "settle", 4),
])  # fmt: skip
def test_a_replaced_collective_is_called_for_each_sum(owner, attribute, passes):
    """Four sublayers, in a prefill and three steps."""
    for n, _ in run_ranks(2, counted_calls, owner, attribute, False, "auto"):
        assert n == 4 * passes


@pytest.mark.slow
def test_a_replaced_wait_is_traced_into_compiled_code():
    for n, compiled in run_ranks(2, counted_calls, tp.TensorParallel, "wait", True, "auto"):
        assert n >= 4
        assert torch.isfinite(compiled).all()


def logits_of_scaled_sums(world, compile):
    """Of a ladder whose start and wait hand on a scale beside the sum."""
    net = load("float32", world=world, wiring="ladder")
    start = tp.TensorParallel.start
    wait = tp.TensorParallel.wait
    with pytest.MonkeyPatch.context() as m:
        m.setattr(tp.TensorParallel, "start", lambda self, partial: (start(self, partial / 4), 4))
        m.setattr(tp.TensorParallel, "wait", lambda self, pending: pending[1] * wait(self, pending[0]))
        scaled = logits(net, compile=compile)
    return scaled, logits(net)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_a_start_may_return_what_only_its_wait_understands(compile):
    for scaled, plain in run_ranks(2, logits_of_scaled_sums, compile):
        assert torch.allclose(scaled, plain, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("edit, name", [
    ("a hook", "w2"), slow_case("a bias", "w2"),
    slow_case("a LoRA", "wqkv"), ("a new weight", "w1"),
])  # fmt: skip
def test_edits_take_effect_in_compiled_code(edit, name):
    check(load(), edit_linears(edit, name), compile=True)


@pytest.mark.slow
def test_a_runner_compiles_anew_what_was_edited_after_its_steps(capsys):
    """In the second generation of one Runner, whose first one skips all guards."""
    net = load()
    prompts = [[5, 6, 7], [8]]
    runner = generate.Runner(net, net.new_cache(2, 12), compile=True)
    sample = Sampler(0)
    first = generate.generate(runner, prompts, 5, sample).rows
    with runner.passes.unguarded():
        assert first == generate.generate(runner, prompts, 5, sample).rows
    for block in net.layers:
        block.feed_forward.w2.register_forward_hook(lambda module, args, output: output * -3)
    with runner.passes.unguarded():
        second = generate.generate(runner, prompts, 5, sample).rows
    plain = generate.generate(generate.Runner(net, net.new_cache(2, 12)), prompts, 5, sample).rows
    assert second == plain != first
    assert "the model was changed after its steps were compiled" in capsys.readouterr().err


@pytest.mark.slow
def test_a_runner_compiles_anew_after_each_of_several_edits_from_a_notebook(monkeypatch):
    """Their functions are in no file. Without an edit nothing is compiled again."""
    net = load("float32")
    prompts = [[5, 6, 7], [8]]
    runner = generate.Runner(net, net.new_cache(2, 12), compile=True)
    plain = model.mlp_sublayer
    rows = [generate.generate(runner, prompts, 5, Sampler(0)).rows]
    for source in "lambda *a: -3 * plain(*a)", "lambda *a: plain(*a).abs()":
        monkeypatch.setattr(model, "mlp_sublayer", eval(source, {"plain": plain}))
        with runner.passes.unguarded():
            rows.append(generate.generate(runner, prompts, 5, Sampler(0)).rows)
            built = runner.passes.built_for
            assert generate.generate(runner, prompts, 5, Sampler(0)).rows == rows[-1]
        assert runner.passes.built_for is built
        assert generate.generate(generate.Runner(net, net.new_cache(2, 12)), prompts, 5, Sampler(0)).rows == rows[-1]
    assert rows[0] != rows[1] != rows[2]


def test_every_weight_of_a_bfloat16_model_gets_a_gradient():
    net = load(tie_embeddings=True)
    assert net.output.weight is net.tok_embeddings.weight  # one parameter, which an optimizer steps once
    net.requires_grad_(True)
    net(torch.tensor([[1, 5, 6, 7]])).float().logsumexp(-1).sum().backward()
    missing = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert missing == []


def test_a_model_that_is_turned_into_float32_computes():
    for quant in "bfloat16", "int8", "int8 in groups", "int4":
        net = load(quant)
        before = logits(net)
        net.float()
        after = logits(net)
        assert after.dtype == torch.float32 and (after - before).norm() < 0.05 * before.norm()


def test_packed_integers_are_what_was_stored():
    for quant in "int8", "int8 in groups", "int4":
        net = load(quant)
        stored = [[None if t is None else t.clone() for t in m.stored()] for m in quant_linears(net)]
        before = logits(net)
        for linear, tensors in zip(quant_linears(net), stored, strict=True):
            assert linear.layout is not None
            linear.unpack()
            for name, tensor in zip(quant_linear.STORED, tensors, strict=True):
                assert tensor is None or torch.equal(getattr(linear, name), tensor)
        assert (logits(net) - before).norm() < 0.05 * before.norm()


def quant_linears(net):
    return [m for m in net.modules() if type(m) is quant_linear.QuantLinear]


def test_a_tied_head_in_integers_stays_its_table():
    for quant in "int8", "int8 in groups", "int4":
        net = load(quant, tie_embeddings=True)
        assert net.output.layout is not None
        before = logits(net)
        net.tok_embeddings.weight.data.copy_(net.tok_embeddings.weight.data.flip(0))
        assert net.output.weight is net.tok_embeddings.weight
        after = logits(net)
        with plain_only():
            assert (logits(net) - after).norm() < 0.05 * after.norm()
        assert (after - before).norm() > 0.5 * before.norm()


def test_plain_runs_nothing_but_what_is_written(monkeypatch):
    monkeypatch.setenv(registry.PLAIN, "1")
    net = load("int8")
    assert not registry.used and all(m.layout is None for m in quant_linears(net))
    plain = logits(net)
    monkeypatch.delenv(registry.PLAIN)
    assert (logits(load("int8")) - plain).norm() < 0.03 * plain.norm()


def test_a_cache_that_is_too_small_is_one_line():
    net = load()
    words = r"1 rows of 28 tokens do not fit a cache of 1 rows, 12 slots: make_cache"
    refused(words, generate.Generation, generate.Runner(net, net.new_cache(1, 12)), [[1] * 8], 20, None)


def test_a_wrapper_without_a_width_is_one_line():
    net = load()
    net.layers[0].attention.wqkv = Lora(net.layers[0].attention.wqkv, 64, 512)
    del net.layers[0].attention.wqkv.out_features
    refused("wqkv is a Lora without out_features", net.new_cache, 1, 12)


def test_a_wiring_with_the_mlp_first_keeps_its_norms(monkeypatch):
    """Its post-norms belong to the sublayers, not to their order; against the stream written out."""
    wiring = model.Wiring("the MLP first", (model.mlp_sublayer, model.attention_sublayer))
    monkeypatch.setitem(model.WIRINGS, "mlp-first", wiring)
    net = load("float32", wiring="mlp-first", postnorm={})
    for block in net.layers:
        block.ffn_post_norm.weight.data.fill_(3.0)
    tokens = torch.tensor([[1, 5, 6]])
    metadata = attention_inputs.attention_metadata(net, torch.arange(3)[None])
    x = net.embed(tokens)
    for block in net.layers:
        x = x + block.ffn_post_norm(block.feed_forward(block.ffn_norm(x)))
        x = x + block.attention_post_norm(block.attention(block.attention_norm(x), metadata, None))
    assert (net(tokens) - net.head(x)).abs().max() < 1e-4 * net.head(x).abs().max()


def test_a_loop_that_does_not_say_that_it_obeys_stale_takes_no_layers(monkeypatch):
    def loop(x, sublayers, comm, config):
        for h, _ in sublayers:
            x = x + comm.wait(comm.start(h(x)))
        yield x

    monkeypatch.setitem(model.WIRINGS, "mine", model.Wiring("a loop of one's own", loop=loop))
    refused("no such wiring: 'mine:1'; write mine", change, CONFIG, wiring="mine:1")
    assert change(CONFIG, wiring="mine").named_wiring.forms == ()


HOW = [{}, pytest.param({"compile": True}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("wiring", ["standard", "ladder", "pair-ladder", "spd", "delayed"])
def test_a_sublayer_that_is_replaced_in_model_runs_in_a_loaded_model(wiring, how, monkeypatch):
    """Half of each MLP is what half of w2 makes."""
    net = load("float32", wiring=wiring)
    twin = load("float32", wiring=wiring)
    before = logits(net, **how)
    for block in twin.layers:
        block.feed_forward.w2.weight.data *= 0.5
    halved_w2 = logits(twin)
    plain = model.mlp_sublayer
    monkeypatch.setattr(model, "mlp_sublayer", lambda *arguments: 0.5 * plain(*arguments))
    after = logits(net, **how)
    assert (after - halved_w2).abs().max() < 1e-4 * after.abs().max()
    assert (after - before).abs().max() > 0.1 * after.abs().max()


@pytest.mark.slow
def test_a_loop_of_lanes_that_is_replaced_is_compiled_anew(monkeypatch):
    net = load("float32", wiring="delayed")
    runner = generate.Runner(net, net.new_cache(1, 8), compile=True)
    before = runner.passes.built_for
    monkeypatch.setattr(wirings, "delayed_loop", model.residual_loop)
    runner.passes.renew()
    assert not registry.same_fingerprint(before, runner.passes.built_for)


class Forbids(model.SingleDevice):
    """Even ids are never chosen."""

    def gather_logits(self, logits):
        return logits.index_fill(-1, torch.arange(0, logits.shape[-1], 2), -1e9)


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("settings", [(0,), (1.0,), (1.0, 20), (1.0, None, 0.9)], ids=str)
def test_a_collectives_that_gathers_logits_in_its_own_way_chooses_by_them(settings, draft):
    net = load()
    net.comm = Forbids()
    runner = generate.Runner(net, net.new_cache(2, 42))
    if draft:
        runner.draft = of_model(draft, 3, runner, CONFIG.vocab_size)
    rows = generate.generate(runner, [[5, 7, 9, 5, 7, 9, 5, 7], [8]], 30, Sampler(*settings)).rows
    assert all(i % 2 for row in rows for i in row)


def test_functions_of_one_name_are_wirings_of_their_own(monkeypatch):
    """As in a sweep from a notebook; against w2 that is scaled."""
    for scale in 0.5, 2.0:

        def scaled(*arguments, scale=scale):
            return scale * model.mlp_sublayer(*arguments)

        scaled.__qualname__ = "scaled"  # as of a function of a file
        monkeypatch.setitem(globals(), "scaled", scaled)
        wiring = model.Wiring("a sweep", (model.attention_sublayer, scaled))
        monkeypatch.setitem(model.WIRINGS, "sweep-half" if scale < 1 else "sweep-twice", wiring)
    for name, scale in ("sweep-half", 0.5), ("sweep-twice", 2.0):
        twin = load("float32", wiring="standard")
        for block in twin.layers:
            block.feed_forward.w2.weight.data *= scale
        assert torch.allclose(logits(load("float32", wiring=name)), logits(twin), atol=1e-4)


def negated(x, weight, bias=None):
    return -(x @ weight.mT)


def edit_between_runners(world, edit):
    """(Rows before an edit of functions, after it, and eager ones), the first two compiled, by a Runner each."""
    net = load("bfloat16", world=world)

    def rows(compile):
        runner = generate.Runner(net, net.new_cache(2, 12), compile=compile)
        return generate.generate(runner, [[5, 6, 7], [8]], 5, Sampler(0)).rows

    before = rows(True)
    with pytest.MonkeyPatch.context() as m, contextlib.ExitStack() as hooks:
        if edit == "F.linear":
            m.setattr(torch.nn.functional, "linear", negated)
        elif edit == "start":
            start = tp.TensorParallel.start
            m.setattr(tp.TensorParallel, "start", lambda self, partial: start(self, -partial))
        else:
            hooks.callback(nn.modules.module.register_module_forward_hook(negate_linears).remove)
        return before, rows(True), rows(False)


def negate_linears(module, args, output):
    return -output if isinstance(module, nn.Linear) else None


@pytest.mark.slow
@pytest.mark.parametrize("ranks, edit", [(1, "F.linear"), (1, "global hook"), (2, "start")])
def test_a_later_runner_compiles_what_was_edited_before_it(ranks, edit):
    """Where the compiler has code of the same model from an earlier Runner."""
    for before, after, eager in run_ranks(ranks, edit_between_runners, edit):
        assert after == eager != before


@pytest.mark.slow
def test_a_later_runner_keeps_what_was_compiled_for_the_same_functions(monkeypatch):
    resets = []
    torch.compiler.reset()
    monkeypatch.setattr(passes, "_functions", {})  # what other tests have edited meanwhile
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    for wiring in "ladder", "standard":
        net = load(wiring=wiring, n_layers=1)
        for _ in range(2):
            runner = generate.Runner(net, net.new_cache(1, 8), compile=True)
            generate.generate(runner, [[5, 6, 7]], 4, Sampler(0))
    assert not resets


def test_a_class_of_a_file_without_a_name_has_a_fingerprint():
    """As importlib loads one that is not entered into sys.modules."""
    net = load()
    net.comm = type("Own", (model.SingleDevice,), {"__module__": "nowhere"})()
    assert registry.same_fingerprint(registry.fingerprint(net), registry.fingerprint(net))


@pytest.mark.parametrize("path", ["feed_forward.w2", "ffn_norm", "attention_norm", "attention.wo"])
def test_a_weight_that_is_a_property_is_used(path):
    """In a subclass that inherits forward."""

    def edit(net):
        for block in net.layers:
            module = block.get_submodule(path)
            half = property(lambda self: -0.5 * self._parameters["weight"])
            module.__class__ = type("Half", (type(module),), {"weight": half})

    check(load(), edit)


def test_a_decorated_sublayer_or_loop_runs_as_it_is(monkeypatch):
    calls = []

    def counted(function):
        @functools.wraps(function)
        def call(*arguments):
            calls.append(function)
            return function(*arguments)

        return call

    sublayers = counted(model.attention_sublayer), counted(model.mlp_sublayer)
    monkeypatch.setitem(model.WIRINGS, "counted", model.Wiring("", sublayers, loop=counted(model.residual_loop)))
    net = load("float32", wiring="counted")
    net(torch.tensor([[1, 5, 6]]))
    assert len(calls) == 1 + 2 * len(net.layers)


@pytest.mark.parametrize("changes", [{}, {"postnorm": {}}], ids=str)
@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_an_edit_of_settle_runs_for_each_sublayer(wiring, changes, monkeypatch):
    net = load("float32", wiring=wiring, **changes)
    plain = model.Collectives.settle
    calls = []

    def counted(self, x, pending, newer=()):
        calls.append(x)
        return plain(self, x, pending, newer)

    monkeypatch.setattr(model.Collectives, "settle", counted)
    net(torch.tensor([[1, 5, 6]]))
    assert len(calls) == 2 * len(net.layers)


@pytest.mark.parametrize("wiring", ["ladder", "delayed", "farskip"])
def test_a_loop_that_is_replaced_in_model_runs_in_a_loaded_model(wiring, monkeypatch):
    """This one leaves the first sublayer out."""
    mixture = {"n_experts": 4, "experts_per_token": 2, "expert_size": 16} if wiring == "farskip" else None
    net = load("float32", wiring=wiring, mixture=mixture)
    before = logits(net)
    plain = model.residual_loop
    monkeypatch.setattr(model, "residual_loop", lambda x, sublayers, *rest: plain(x, sublayers[1:], *rest))
    after = logits(net)
    assert (after - before).abs().max() > 0.1 * before.abs().max()
    assert change(CONFIG, wiring="ladder:1").layer_wirings[1].stale == 1  # the loop still takes layers
