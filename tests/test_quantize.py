"""Integer weights: how they are made and stored, their products, the models that hold them."""

import functools
import json
import re
import types

import pytest
import torch
from cases import refused
from configs import ANY_TP, BASE, change
from file_edits import read_json
from helpers import (
    ROOT,
    StateWeights,
    last_logits,
    load_folder,
    randn,
    random_model,
    rank_logits,
    seeded,
    shard,
    shared_data,
    unequal_rows,
    write_model,
)
from quantized_models import (
    BIASED_INT4,
    INT4,
    INT8,
    NARROW,
    OLMO_INT4,
    QUANTIZED,
    TIED,
    UNQUANTIZED,
    check_quantized_model,
    exact_weights,
    in_float64,
    quantized_state,
)
from running import main_on_ranks, run_main, run_ranks
from safetensors.torch import load_file, save_file

import eval as evaluate
import generate
import quantize
import tp
from ladder.checkpoints import checkpoint, rounding, writing
from ladder.kernels import compiling, quant_kernels, quant_linear, registry


def test_int8_is_within_half_a_step_of_float64():
    w = randn(40, 96) * torch.logspace(-6, 6, 40)[:, None]
    w[3] = 0
    q, scales = rounding.to_int8(w)
    assert q.dtype == torch.int8 and scales.dtype == torch.bfloat16 and scales.shape == (40, 1)
    error = (q.double() * scales.double() - w.double()).abs()
    assert (error <= 0.5 * scales.double()).all()
    assert (scales[:, 0].double() <= 1.01 * w.double().abs().amax(1) / 127).all()
    assert (q[3] == 0).all() and q.min() >= -127


def in_groups(w, size):
    return w.double().unflatten(1, (-1, size))


@pytest.mark.parametrize("size, dtype, digits", [(32, torch.bfloat16, 6), (128, torch.float16, 2)])
def test_the_fit_of_int4_is_better_than_16_steps_over_the_range(size, dtype, digits):
    w = randn(50, 256) * torch.logspace(-digits, digits, 50)[:, None] + 3
    w[3] = 0.25  # a constant, which either dtype holds
    packed, scales, zeros = rounding.to_int4(w, size, dtype)
    assert packed.shape == (50, 128) and scales.shape == zeros.shape == (50, 256 // size)
    assert scales.dtype == zeros.dtype == dtype
    errors = in_groups(in_float64(packed, scales, zeros) - w, size).square().sum(-1)
    low, high = (f(in_groups(w, size), -1, keepdim=True) for f in (torch.amin, torch.amax))
    step = ((high - low) / 15).to(dtype).double()
    low = low.to(dtype).double()
    steps = ((in_groups(w, size) - low) / step.where(step > 0, 1.0)).round().clamp(0, 15) * step + low
    nearest = (steps - in_groups(w, size)).square().sum(-1)
    assert (errors[3] == 0).all() and (errors <= nearest * 1.001).all() and errors.sum() < 0.97 * nearest.sum()
    important = torch.ones(256).index_fill(0, torch.arange(0, 256, 16), 100.0)
    other = (in_float64(*rounding.to_int4(w, size, dtype, important)) - w).square()[:, ::16].sum()
    assert other < 0.7 * (in_float64(packed, scales, zeros) - w).square()[:, ::16].sum()


def test_errors_make_up_for_one_another():
    """Each column is rounded after those that remain were fitted anew, in float64, to what the rounded ones lack."""
    N = 20
    K = 128
    size = 32
    w = randn(N, K)
    x = randn(200, 20, seed=1) @ randn(20, K, seed=2) + 0.3 * randn(200, K, seed=3)
    x = x / x.abs().amax()  # as second_moments does
    importance, order, _ = moments = rounding.second_moments(1e19 * x[None])
    H = (x.double().T @ x.double() / len(x)).clone()
    H.diagonal().copy_(importance.double())
    assert (importance[order].diff() <= 0).all()
    packed, scales, zeros = rounding.to_compensated_int4(w, moments, size)
    fitted = rounding.to_int4(w, size, importance=importance)
    assert torch.equal(scales, fitted[1]) and torch.equal(zeros, fitted[2])
    lack = torch.zeros(N, K, dtype=torch.float64)
    expected = torch.empty(N, K, dtype=torch.float64)
    for i, k in enumerate(order.tolist()):
        done = order[:i]
        left = order[i:]
        now = w.double()[:, k]
        if i:
            now = now + (lack[:, done] @ H[done][:, left] @ torch.linalg.inv(H[left][:, left]))[:, 0]
        s = scales.double()[:, k // size]
        z = zeros.double()[:, k // size]
        expected[:, k] = ((now - z) / s).round().clamp(0, 15) * s + z
        lack[:, k] = w.double()[:, k] - expected[:, k]
    ours = in_float64(packed, scales, zeros)
    assert (ours == expected).double().mean() > 0.98  # all but ties of float32
    errors = [((each - w) @ x.double().T).square().sum() for each in (ours, expected, in_float64(*fitted))]
    assert errors[0] < 1.01 * errors[1] < 0.5 * errors[2]


TEXT = torch.randint(3, BASE.vocab_size, (4, 12), generator=seeded(5))
TABLE_KEPT = {"not_quantized": ("tok_embeddings",), "intermediate_size": 160}  # its rows are floats in that run
RUNS = zip((OLMO_INT4, INT4, BIASED_INT4, NARROW, INT4, INT4, INT4), ANY_TP[:7], strict=True)
RUNS = [change(config, **TABLE_KEPT, **changes) for config, changes in RUNS]


@pytest.mark.parametrize("config", RUNS, ids=lambda config: config.wiring)
def test_each_linear_gets_the_inputs_that_the_quantized_model_has(config, monkeypatch):
    inputs = []
    second_moments = rounding.second_moments
    monkeypatch.setattr(rounding, "second_moments", lambda x: inputs.append(x.clone()) or second_moments(x))
    read = quantize.quantized(exact_weights(config), config, TEXT)
    state = {n: read(n) for n in writing.shapes(config)}
    net = shard(config, state=state)
    theirs = []
    for module in net.modules():
        if type(module) is quant_linear.QuantLinear:
            module.register_forward_pre_hook(lambda _, args: theirs.append(args[0]))
    with torch.no_grad():
        logits = net(TEXT)
        fitted = shard(config, state=quantized_state(config))(TEXT)
        exact = random_model(change(config, quant=None, group_size=None, not_quantized=()))(TEXT)
    theirs = [x for i, x in enumerate(theirs) if i == 0 or x is not theirs[i - 1]]  # w3 has those of w1
    assert len(inputs) == len(theirs) and all(map(functools.partial(torch.allclose, atol=1e-4), inputs, theirs))
    assert (logits - exact).norm() < 0.8 * (fitted - exact).norm()


@pytest.mark.parametrize("size, dtype", [(1, torch.float16), (1e-6, torch.bfloat16), (1e7, torch.bfloat16)])
def test_scales_are_float16_unless_bfloat16_is_nearer(size, dtype):
    """Of weights so large that float16 overflows, or so small that it has few bits, in one matrix of a model."""
    state = dict(random_model(UNQUANTIZED).state_dict())
    name = "layers.1.feed_forward.w2"
    state[f"{name}.weight"] = exact = size * state[f"{name}.weight"]
    read = quantize.quantized(types.SimpleNamespace(read=state.get), INT4)
    stored = [read(f"{name}.{part}") for part in ("weight", "scales", "zeros")]
    assert stored[1].dtype == stored[2].dtype == dtype
    error = (quant_linear.dequantize(stored[0], *(t.double() for t in stored[1:])) - exact).norm()
    assert error < 0.1 * exact.double().norm()
    assert read("layers.0.feed_forward.w2.scales").dtype == torch.float16


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_older_checkpoints_have_scales_in_bfloat16(ranks):
    config = change(INT4, wiring="ladder")
    kept = ("scales", "zeros")
    state = {n: t.bfloat16() if n.endswith(kept) else t for n, t in quantized_state(config).items()}
    half = {n: t.half() if n.endswith(kept) else t for n, t in state.items()}  # which holds these exactly
    results = [run_ranks(ranks, rank_logits, config, s, torch.bfloat16) for s in (state, half)]
    for old, new in zip(*results, strict=True):
        assert (old - new).abs().max() < 0.05 * old.abs().max()
    for stored, dtype in (state, torch.bfloat16), (half, torch.float16):
        net = shard(config, None, torch.bfloat16, stored)
        assert net.layers[0].attention.wo.scales.dtype == dtype
        assert shard(config, state=stored).output.scales.dtype == torch.float32


def test_a_rank_without_rows_of_the_output_head():
    config = change(INT8, vocab_size=9)
    net = tp.load_shard(config, StateWeights(quantized_state(config)), torch.bfloat16, "cpu", 3, (1,) * 4)
    registry.use(quant_kernels.KERNELS["cpu"])
    for use in (lambda net: None), compiling.use_decode_kernels:
        use(net)
        assert net.output(randn(2, 40, 64).bfloat16()).shape == (2, 40, 0)


@pytest.mark.parametrize("config", QUANTIZED.values(), ids=QUANTIZED)
def test_a_quantized_model_computes_what_its_numbers_say(config, monkeypatch):
    monkeypatch.setattr(quant_linear, "INT8_KERNEL_ROWS", 8)  # more in prefill, fewer in decode
    monkeypatch.setattr(quant_linear, "DEQUANTIZED_AT_ONCE", 700)  # several pieces of each matrix
    for dtype, tolerance in (torch.float32, 1e-4), (torch.float16, 0.01), (torch.bfloat16, 0.06):
        check_quantized_model(config, dtype, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("config", [INT8, INT4], ids=["int8", "int4"])
def test_compiled_it_does_with_pytorchs_kernels_too(config, monkeypatch):
    monkeypatch.setattr(compiling.loading, "use_on_cpu", lambda model: None)
    check_quantized_model(change(config, n_layers=1), torch.bfloat16, 0.06, compile=True)


def logits_of_integers(world, cases, tokens, lengths, compile):
    out = []
    for config, dtype in cases:
        net = shard(config, world, dtype, quantized_state(config))
        registry.use(quant_kernels.KERNELS["cpu"])
        out.append(last_logits(net, tokens, lengths, compile=compile))
    return out


def check_ranks(shares, cases, compile=False):
    tokens, lengths = unequal_rows(UNQUANTIZED)
    ranks = run_ranks(shares, logits_of_integers, cases, tokens, lengths, compile)
    for i, (config, dtype) in enumerate(cases):
        expected = last_logits(shard(config, state=quantized_state(config)), tokens, lengths)
        tolerance = 1e-4 if dtype == torch.float32 else 0.06
        for logits in ranks:
            assert (logits[i] - expected).abs().max() < tolerance * expected.abs().max(), config


@pytest.mark.parametrize("shares", [2, 3, 4, (3, 1), (1, 2, 1)], ids=str)
def test_any_tp_computes_what_one_device_does(shares):
    """Each kind of integers, each in another wiring."""
    cases = [change(config, **changes) for config, changes in zip(QUANTIZED.values(), ANY_TP, strict=False)]
    check_ranks(shares, [(c, torch.float32) for c in cases] + [(c, torch.bfloat16) for c in (INT8, INT4)])


@pytest.mark.slow
def test_compiled_ranks_of_integers_compute_what_one_device_does():
    check_ranks(2, [(change(c, wiring="ladder"), torch.bfloat16) for c in (INT8, INT4)], compile=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with widths that all group sizes divide, and a tokenizer (the demo's, whose vocabulary it has)."""
    path = tmp_path_factory.mktemp("quantize") / "plain"
    config = change(UNQUANTIZED, dim=128, intermediate_size=256, vocab_size=1024, head_dim=16, wiring="ladder")
    write_model(path, config, dtype=torch.bfloat16)
    writing.copy_tokenizer(ROOT / "demo", path)
    return path


@pytest.mark.parametrize("mode, flags, kept, ranks", [
    ("int8", [], (), 1),
    ("int8", ["--group-size", "32", "--keep", "w1"], ("w1",), 2),
    ("int4", ["--group-size", "128", "--keep", "lm_head,w1"], ("output", "w1"), 2),
])  # fmt: skip
def test_quantize_and_generate(mode, flags, kept, ranks, folder, tmp_path, capsys, monkeypatch):
    """Several files, so that the memory is that of one; a matrix may be in two."""
    write_weights = writing.write_weights
    out = tmp_path / mode
    monkeypatch.setattr(writing, "write_weights", lambda f, s, r, shard_bytes: write_weights(f, s, r, 50_000))
    run_main(quantize, "--checkpoint", folder, "--mode", mode, *flags, "--out", out)
    printed, told = capsys.readouterr()
    assert re.match(rf"quantizing \d+ matrices, of \d.\d MB in all, to {mode} \.\.\.\n", told)
    assert "times smaller than before" in printed and f"eval.py --checkpoint {out} --compare {folder} --" in printed
    config = checkpoint.read_config(out)
    files = sorted(out.glob("model-*.safetensors"))
    assert (config.quant, config.not_quantized, config.wiring) == (mode, kept, "ladder") and len(files) > 3
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    plain = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in state.items()} == writing.shapes(config)
    assert all(torch.equal(state[n], plain[n]) for n in plain if "norm" in n or n.split(".")[-2] in kept)
    flags = ["--checkpoint", str(out), "--prompt", "Once upon", "--temperature", "0", "--max-new-tokens", "8"]
    flags += ["--json", str(tmp_path / "json")]
    if ranks > 1:
        main_on_ranks(ranks, generate.main, *flags)
    else:
        generate.main(flags)
    line = read_json(tmp_path / "json")
    assert line["quant"] == mode and len(line["tokens"][0]) == 8
    size = sum(t.nbytes for n, t in state.items() if not n.startswith("tok_embeddings"))
    assert ranks > 1 or 0 <= line["step_bytes"] - size < 2**17  # and the cache


def test_the_text_is_a_file_its_own_or_none(folder, tmp_path, capsys):
    (story := tmp_path / "story").write_text((ROOT / "demo" / "story.txt").read_text())

    def run(out, *text, source=folder):
        flags = "--checkpoint", source, "--mode", "int4", "--out", tmp_path / out, *text
        run_main(quantize, *flags)
        return load_file(tmp_path / out / "model.safetensors")["layers.0.feed_forward.w2.weight"]

    none = run("a", "--text", "none")
    file = run("b", "--text", story)
    again = run("c", "--text", story)
    own = run("d")
    assert torch.equal(file, again) and all((a != b).any() for a, b in ((none, file), (none, own), (file, own)))
    lanes = change(checkpoint.read_config(folder), wiring="spd/2", tie_embeddings=True)
    write_model(tmp_path / "lanes", lanes, dtype=torch.bfloat16)
    run("e", source=tmp_path / "lanes")
    assert "wiring spd/2: quantized without a text\n" in capsys.readouterr().err
    assert checkpoint.read_config(tmp_path / "e").int8 == ("tok_embeddings",)
    write_model(plain := tmp_path / "plain", change(lanes, wiring="standard"), dtype=torch.bfloat16)
    refused(r"plain has no tokenizer, which --text .*story needs$", run, "f", "--text", story, source=plain)
    story.write_text("Once")
    refused(r"^--text .*story has 2 tokens: give 2048, or at least 64$", run, "f", "--text", story)
    assert not (tmp_path / "f").exists()


def test_bad_checkpoints_are_one_clear_line(tmp_path):
    def run(source, *flags):
        flags = "--checkpoint", source, "--mode", "int4", "--out", tmp_path / "int4", "--group-size", "32", *flags
        run_main(quantize, *flags)

    write_model(odd := tmp_path / "odd", change(UNQUANTIZED, intermediate_size=172), dtype=torch.bfloat16)
    refused(r"^group size 32 does not divide the columns of w2 \(172\): keep w2$", run, odd)
    matrices = r"wqkv \(64\), w1 \(64\), w3 \(64\), output \(64\), w2 \(172\): keep tok_embeddings,wqkv,w1,w3,output,w2"
    refused(rf"^group size 128 does not .* tok_embeddings \(64\), {matrices}$", run, odd, "--group-size", "128")
    words = r"\(64\): use 64, or keep tok_embeddings,wqkv,w1,w3$"
    refused(words, change, TIED, group_size=128, not_quantized=("wo", "w2"))
    run(odd, "--keep", "w2")
    refused("int4 is quantized .int4.: give the original", run, tmp_path / "int4", "--out", tmp_path / "again")
    state = load_file(tmp_path / "int4" / "model.safetensors")
    name = "layers.1.feed_forward.w1.scales"
    for scales, message in (state[name][:, :1].clone(), r"is \(172, 1\), but .* \(172, 2\)"), (state[name] / 0, "NaN"):
        save_file({**state, name: scales}, tmp_path / "int4" / "model.safetensors")
        refused(f"tensor {name} .*{message}", load_folder, tmp_path / "int4")


@pytest.mark.slow
def test_a_real_checkpoint_keeps_its_perplexity(tmp_path, capsys):
    """int8 within 0.1 % of bfloat16, int4 in groups of 64 within 2 %, and better than without a text."""
    text = shared_data("tinystories-valid-first-0.8MB.txt")
    perplexity = []
    for flags in [], ["int8"], ["int4"], ["int4", "--text", "none"]:
        folder = tmp_path / "-".join(flags) if flags else ROOT / "demo"
        if flags:
            run_main(quantize, "--checkpoint", ROOT / "demo", "--mode", *flags, "--out", folder)
        capsys.readouterr()
        run_main(evaluate, "--checkpoint", folder, "--text", text, "--max-tokens", "8000")
        perplexity.append(json.loads(capsys.readouterr().out)["perplexity"])
    plain, int8, int4, fitted = perplexity
    assert int8 < 1.001 * plain and int4 < 1.02 * plain and int4 < fitted, perplexity
