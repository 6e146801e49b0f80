"""Mixtures of experts: against a naive float64 model and transformers, on ranks, compiled, in integers."""

import contextlib
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from cases import refused, slow_case
from collective_order import eager_order, generated_code, order_in_code, squeeze
from configs import BASE, change
from decoding_runs import bench_flags, cell_texts
from file_edits import change_tensors, edit_config
from gpu import OnAGpu
from helpers import ALONE, random_model, rank_logits, seeded, shard, unequal_rows, write_model
from hf_folders import TOKENS, check_family, check_parity, convert_hf, hf_model
from parity import check_against_the_reference
from quantized_models import check_quantized_twin, in_float64
from reference import MixtureReference
from running import run_main, run_ranks
from safetensors.torch import load_file, save_file

import quantize
import tp
from extras.export import to_hf
from extras.measure import exposed, link
from generate import Runner
from ladder.architectures import experts
from ladder.architectures.mixture import Mixture, MoE
from ladder.checkpoints import checkpoint
from ladder.checkpoints.random_weights import RandomWeights
from ladder.decoding.batch import pad
from ladder.kernels import quant_linear, registry
from ladder.kernels.cpu import skinny_gemm
from ladder.memory import step_bytes
from ladder.ranks.collectives import collective
from model import rewired

MIXTURE = change(
    BASE,
    n_heads=15,
    n_kv_heads=5,
    mixture={"n_experts": 5, "experts_per_token": 2, "expert_size": 36, "dense_layers": (1,)},
)
SHARED = change(MIXTURE, mixture={"shared_expert_size": 28, "shared_expert_gate": True, "dense_layers": ()})
WIRINGS = "standard", "ladder", "ladder:1", "parallel-ladder", "pair", "farskip"
CONFIGS = [change(config, wiring=w) for config in (MIXTURE, SHARED) for w in WIRINGS]
FARSKIP = [  # dense layers first, in the middle, last
    change(config, wiring="farskip", mixture={"dense_layers": dense})
    for config in (MIXTURE, SHARED) for dense in ((0,), (1,), (2,), (0, 2))
]  # fmt: skip
CONFIGS += [config for config in FARSKIP if config not in CONFIGS]
CONFIGS += [  # in some layers, or of some sublayers, only
    change(SHARED, n_layers=5, mixture={"dense_layers": dense}, wiring=wiring)
    for wiring in ("farskip:2", "farskip:1-2", "farskip-attention", "farskip-mlp:1,3") for dense in ((), (0,))
]  # fmt: skip


def config_id(config):
    mixture = config.find(Mixture)
    return f"{config.wiring}, shared {mixture.shared_expert_size}, dense {mixture.dense_layers}"


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_matches_the_naive_float64_reference(config, renormalize):
    config = change(config, mixture={"renormalize_experts": renormalize})
    check_against_the_reference(config, MixtureReference)


def test_farskip_is_a_ladder_without_shared_experts_and_dense_layers():
    plain = change(MIXTURE, mixture={"dense_layers": ()})
    state = random_model(plain).state_dict()
    tokens = torch.arange(20).view(2, 10)
    ladder, farskip = (shard(rewired(plain, name), state=state)(tokens) for name in ("ladder", "farskip"))
    assert torch.equal(ladder, farskip)
    for config in SHARED, MIXTURE:
        logits = []
        for wiring in "ladder", "farskip":
            with torch.no_grad():
                logits.append(random_model(rewired(config, wiring))(unequal_rows(config)[0]))
        assert (logits[0] - logits[1]).abs().max() > 0.1
    refused("^wiring farskip is for a mixture of experts$", rewired, BASE, "farskip")


def test_farskip_waits_for_a_dense_layer_alone(fake_world):
    """Between mixtures a sum is still on its way while the next sublayer computes and starts its own."""
    config = change(SHARED, n_layers=4, wiring="farskip", mixture={"dense_layers": (1,)})
    order = "c start1 c start2 wait1 c start3 wait2 c start4 wait3 wait4"
    order += " c start5 c start6 wait5 c start7 wait6 c start8 wait7 wait8"
    assert eager_order(config, output=(0.0, None)) == order
    compiled = order_in_code(generated_code(config, fake_world(0, 2), 2, 1, torch.float32))
    assert squeeze(compiled) == f"{order} c"  # and the output head


SLOW = pytest.mark.slow


@pytest.mark.parametrize("ranks, compile, splits", [
    (2, False, None), ((2, 1), False, 2), (3, False, None), slow_case(4, False, None),
    *(slow_case(ranks, *how) for ranks in (2, (2, 1), 4) for how in ((True, None), (False, 2))),
])  # fmt: skip
def test_ranks_compute_the_same(ranks, compile, splits):
    for config in CONFIGS if not compile else CONFIGS[-1:]:
        for logits in run_ranks(ranks, functools.partial(rank_logits, config=config, compile=compile, splits=splits)):
            assert (logits - rank_logits(None, config)).abs().max() < 1e-4, config.wiring


def stream_of(world, name, steps):
    """The sums of different partials, as a model's stream would have them."""
    world.group = world.dist_group or dist.group.WORLD
    world.group = collective(name)(world)
    comm = tp.TensorParallel(BASE, world.shares, world.group)
    generator = seeded(world.rank)
    x = torch.zeros(3, 4096, dtype=torch.bfloat16)
    for _ in range(steps):
        x = comm.settle(x, comm.start(torch.randn(3, 4096, generator=generator).bfloat16()))
    return x


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["auto", "library"])
def test_every_rank_gets_the_same_bits(ranks, name):
    """Else a router could choose other experts on one rank than on another."""
    first, *others = run_ranks(ranks, stream_of, name, 40)
    assert first.std() > 1 and all(torch.equal(x, first) for x in others)


def test_equal_scores_and_an_expert_that_nobody_chose():
    moe = MoE(MIXTURE.dim, dataclasses.replace(MIXTURE.find(Mixture), experts_per_token=3))
    for weight in moe.parameters():
        torch.nn.init.normal_(weight, 0, 0.2)
    torch.nn.init.zeros_(moe.router.weight)  # a tie of all: whichever three are chosen, all tokens get the same ones
    x = torch.randn(2, 5, 48)
    with torch.no_grad():
        y = moe(x)
        assert torch.allclose(y[0, :1], moe(x[:1, :1])[0], atol=1e-6)
        chosen = moe.router(x.flatten(0, 1)).softmax(-1).topk(3)[1]
        assert (chosen == chosen[0]).all()  # so two experts have no token
        each = [moe.experts(x.flatten(0, 1), torch.full((10, 1), int(e)))[:, 0] for e in chosen[0]]
        assert torch.allclose(y.flatten(0, 1), sum(each) / 3, atol=1e-5)


def test_farskip_has_other_shards_than_a_ladder(tmp_path):
    config = change(BASE, mixture={"n_experts": 3, "experts_per_token": 2, "expert_size": 16, "shared_expert_size": 32})
    write_model(tmp_path, config)
    words = bench_flags(tmp_path, "--batch", 2, "--dtype", "float32", "--eager", "--wiring", "ladder", "farskip")
    for wiring, _, mine, alone in run_ranks(2, cell_texts, words)[0]:
        assert mine == alone, wiring


# ---------------------------------------------------------------------------------------------------------------------
# Integers


def test_a_step_reads_the_experts_that_its_tokens_choose():
    net = random_model(MIXTURE)
    c = MIXTURE
    mixture = c.find(Mixture)
    one, three, drafted = (step_bytes(net, net.new_cache(n, 8), 0, more) for n, more in [(1, 0), (3, 0), (1, 2)])
    more = (c.n_layers - 1) * mixture.n_experts * 3 * c.dim * mixture.expert_size * 4 * ((1 - 0.6**3) - 0.4)
    assert three == drafted == pytest.approx(one + more)


def test_a_limit_counts_the_experts_that_its_tokens_choose():
    world = link.emulate(ALONE, link.FREE, 2)
    net = tp.load_shard(MIXTURE, RandomWeights(MIXTURE, "cpu"), torch.float32, "cpu", 0, (1, 1))
    net.comm = tp.TensorParallel(MIXTURE, (1, 1), world.group)
    runner = Runner(net, net.new_cache(2, 8))
    prompts = pad([[5, 6], [7]], "cpu")
    sizes = {name: weight.nbytes for name, weight in net.named_parameters() if ".feed_forward." in name}
    expected = sum(size * (1 - 0.6**2 if ".experts." in name else 1) for name, size in sizes.items())
    assert exposed.make_case("decode", runner, *prompts, world).n_bytes[1] == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("ranks, wiring", [(1, "ladder"), (2, "ladder"), (3, "farskip")])
def test_integers_are_their_dequantized_twin(mode, ranks, wiring, tmp_path):
    config = change(SHARED, dim=64, mixture={"expert_size": 96, "shared_expert_size": 64})  # no MLP of 100 neurons
    config = change(config, wiring=wiring, head_dim=16, n_heads=12, n_kv_heads=4)
    names = check_quantized_twin(config, random_model(config).state_dict(), mode, ranks, tmp_path)
    assert {"layers.0.feed_forward.experts.w2.scales", "layers.0.feed_forward.router.weight"} <= names
    assert "layers.0.feed_forward.router.scales" not in names


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def random_experts(bits, E, N, K, generator):
    """The matrices of E experts as operators take them: one tensor, or integers with their scales and zeros."""
    if bits == 16:
        return [torch.randn(E, N, K, generator=generator).mul(K**-0.5).bfloat16()]
    if bits == 8:
        weight = torch.randint(-127, 128, (E, N, K), generator=generator, dtype=torch.int8)
        return [weight, torch.rand(E, N, 1, generator=generator).div(5000).bfloat16()]
    scales, zeros = torch.randn(2, E, N, K // 8, generator=generator).mul(0.1).bfloat16()
    if bits == 6:  # which the integers of 8 bits in groups are packed in
        weight = torch.randint(-32, 32, (E, N, K), generator=generator, dtype=torch.int8)
        return [weight, scales.half(), zeros.half()]
    return [torch.randint(0, 256, (E, N, K // 2), generator=generator).to(torch.uint8), scales, zeros]


def in_double(matrices):
    return [t.double() if t.is_floating_point() else t for t in matrices]


@pytest.mark.parametrize("bits", [16, 8, 6, 4])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_few_rows_experts_against_float64(tokens, bits, threads):
    """Sizes that fill no panel; experts with one token, with more than eight, and with none."""
    E = 7
    D = 64
    neurons = 40
    k = 3
    skinny_gemm.build()
    generator = seeded(tokens)
    x = torch.randn(tokens, D, generator=generator).bfloat16()
    chosen = torch.stack([torch.randperm(E - 1, generator=generator)[:k] for _ in range(tokens)])
    exact = []
    floats = []
    packed = []
    forms = []
    for N, K in (neurons, D), (neurons, D), (D, neurons):
        w = random_experts(bits, E, N, K, generator)
        exact.append(in_double(w))
        floats.append(w[0].double() if bits == 16 else in_float64(*w))
        integers = (*w, None)[:3]
        form = skinny_gemm.form_of(*integers) if bits == 6 else None
        out = torch.empty(skinny_gemm.packed_shape(*integers, form) if bits < 16 else (), dtype=torch.uint8)
        packed.append(skinny_gemm.pack(*integers, out, form) if bits < 16 else w[0])
        forms.append(form.code if form else bits)
        if form:
            linear = quant_linear.QuantLinear((E, N, K), "int8", 8)
            linear.pack(skinny_gemm.layout_of(form), packed=packed[-1])
            assert all(map(torch.equal, linear.stored(), w))
    expected = torch.stack([torch.stack([one(x[t].double(), floats, e) for e in chosen[t]]) for t in range(tokens)])
    y = torch.ops.ladder.skinny_gemm_experts(x, chosen, *packed, neurons, D, forms, [])
    assert ((y - expected).norm(dim=-1) <= 0.01 * expected.norm(dim=-1)).all()
    assert (y - expected).abs().max() < 0.01 * expected.abs().max()
    y = torch.ops.ladder.experts(x.double(), chosen, *exact, [])
    assert (y - expected).abs().max() < 1e-6 * expected.abs().max()


def one(x, matrices, e):
    """What expert e makes of a token."""
    w1, w3, w2 = (matrix[e] for matrix in matrices)
    gate = w1 @ x
    return w2 @ (gate / (1 + (-gate).exp()) * (w3 @ x))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("ranks", [1, 5, 7])
def test_products_for_a_gpu_take_the_shards_of_any_number_of_ranks(ranks, bits):
    """On a CPU, where grouped_mm asks for rows of whole 16 bytes, too."""
    E = 5
    D = 64
    neurons = 96
    k = 2
    generator = seeded(ranks)
    x = torch.randn(8, D, generator=generator).bfloat16()
    config = change(MIXTURE, mixture={"expert_size": neurons})
    chosen = torch.stack([torch.randperm(E - 1, generator=generator)[:k] for _ in x])
    w1, w3, w2 = (random_experts(bits, E, N, K, generator) for N, K in [(neurons, D)] * 2 + [(D, neurons)])
    expected = torch.ops.ladder.experts(x.double(), chosen, *map(in_double, (w1, w3, w2)), [])
    grouped = gathered = every = 0
    for rank in range(ranks):
        a, b = tp.shard_plan(config, rank, (1,) * ranks)["experts.w2"][1][0]
        columns = [slice(None) if t.shape[2] == 1 else slice(*(i * t.shape[2] // neurons for i in (a, b))) for t in w2]
        own = [[t[:, a:b].contiguous() for t in w] for w in (w1, w3)]
        own.append([t[..., part].contiguous() for t, part in zip(w2, columns, strict=True)])
        grouped += experts.experts_on_a_gpu(x, chosen, *own).double()
        gathered += experts.gathered(x, chosen, *own).double()
        every += experts.every(x, chosen, *own).double()
    for result in grouped, gathered, every:
        assert (result - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("kind, tokens, compiles, way", [
    (OnAGpu, 1, True, "gathered"), (OnAGpu, 2, True, "every"), (OnAGpu, 128, True, "every"), (OnAGpu, 129, True, None),
    (OnAGpu, 2, False, None), (torch.Tensor, 2, True, None),
])  # fmt: skip
def test_a_gpu_s_compiled_step_waits_for_nothing(kind, tokens, compiles, way, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiles)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a build for CPUs has none
    for name in "gathered", "every":
        monkeypatch.setattr(experts, name, lambda *args, name=name: calls.append(name))
    x = torch.zeros(tokens, 8).as_subclass(kind)
    chosen = torch.zeros(tokens, 2, dtype=torch.long)
    registry.use(experts.GPU_KERNELS)
    with torch.inference_mode(), contextlib.suppress(TypeError):  # what has been replaced returns nothing
        experts.Experts(8, 16, 4)(x, chosen)
    assert calls == [way] * bool(way)


WIDE = change(
    SHARED,
    dim=128,
    head_dim=64,
    n_heads=4,
    n_kv_heads=4,
    wiring="ladder",
    mixture={"expert_size": 96, "shared_expert_size": 64},
)


@pytest.mark.parametrize("mode", ["bfloat16", "int8", "int4"])
@SLOW
def test_compiled_decode_is_the_eager_one(mode, tmp_path):
    folder = tmp_path / "bfloat16"
    state = random_model(WIDE).state_dict()  # a router that is sure: rounding must not choose other experts
    state = {name: 8 * weight if name.endswith("router.weight") else weight for name, weight in state.items()}
    write_model(folder, WIDE, state, torch.bfloat16)
    if mode != "bfloat16":
        options = ["--group-size", "32", "--keep", "w2"] if mode == "int4" else []
        folder = tmp_path / mode
        run_main(quantize, "--checkpoint", tmp_path / "bfloat16", "--mode", mode, *options, "--out", folder)
    how = {"state": load_file(folder / "model.safetensors"), "dtype": torch.bfloat16}
    logits = functools.partial(rank_logits, config=checkpoint.read_config(folder), **how)
    eager, compiled = (run_ranks(2, functools.partial(logits, compile=compile)) for compile in (False, True))
    assert (eager[0] - compiled[0]).abs().max() < 0.1 * eager[0].std()
    assert torch.equal(compiled[0], compiled[1])


# ---------------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("config", [MIXTURE, SHARED], ids=config_id)
def test_a_gradient_passes_through_the_experts(config):
    """Against a model in float64 whose MLPs compute every expert for every token."""
    moe = MoE(config.dim, config.find(Mixture)).double()
    for weight in moe.parameters():
        torch.nn.init.normal_(weight, 0, 0.3)
    experts.make_differentiable(moe, compiles=False)
    x = torch.randn(2, 6, 48).double()
    weight = torch.randn(2, 6, 48).double()
    gradients = []
    for forward in moe, every_expert(moe):
        moe.zero_grad()
        (forward(x) * weight).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in moe.named_parameters()})
    for name, gradient in gradients[1].items():
        assert gradient.abs().max() > 0 and torch.allclose(gradients[0][name], gradient, atol=1e-5), name


def every_expert(moe):
    def forward(x):
        scores = moe.router(x).softmax(-1)
        chosen = scores >= scores.topk(moe.k).values[..., -1:]
        weights = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
        w1 = moe.experts.w1.weight
        w3 = moe.experts.w3.weight
        w2 = moe.experts.w2.weight
        hidden = F.silu(torch.einsum("bsd,eid->bsei", x, w1)) * torch.einsum("bsd,eid->bsei", x, w3)
        y = torch.einsum("bsei,edi,bse->bsd", hidden, w2, weights)
        return y if moe.shared_expert is None else y + moe(x, apart=True)[1]

    return forward


# ---------------------------------------------------------------------------------------------------------------------
# Families

WINDOW = {"use_sliding_window": True, "sliding_window": 7}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
FAMILIES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "sliding_window": 7}),
    "qwen2": ("Qwen2MoeConfig", {
        **EXPERTS, **WINDOW, "shared_expert_intermediate_size": 28, "decoder_sparse_step": 2, "max_window_layers": 2}),
    "qwen3": ("Qwen3MoeConfig", {
        **EXPERTS, **WINDOW, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1], "max_window_layers": 2}),
    "qwen3, dense": ("Qwen3MoeConfig", {"num_experts": 0}),
    "granite": ("GraniteMoeConfig", {
        "num_local_experts": 5, "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "logits_scaling": 0.25,
        "residual_multiplier": 0.6, "attention_multiplier": 0.2, "tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_transformers(family, tmp_path):
    check_family(hf_model(FAMILIES[family]), tmp_path, greedy=False)


def test_fused_experts_are_read_as_separate_ones(tmp_path):
    theirs = hf_model(FAMILIES["qwen3"])
    theirs.save_pretrained(tmp_path / "hf")
    state = {name: weight.contiguous() for name, weight in theirs.state_dict().items()}
    assert any("gate_up_proj" in name for name in state)
    save_file(state, tmp_path / "hf/model.safetensors", {"format": "pt"})
    check_parity(convert_hf(tmp_path, "ours"), theirs)


@pytest.mark.parametrize("family", ["mixtral", "qwen2", "qwen3"])
def test_export_gives_back_the_family(family, tmp_path):
    class_name, changes = FAMILIES[family]
    theirs = hf_model((class_name, changes | {"use_sliding_window": False, "sliding_window": None}))
    theirs.save_pretrained(tmp_path / "hf")
    convert_hf(tmp_path, "ours")
    run_main(to_hf, tmp_path / "ours", "--out", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert type(back) is type(theirs)
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, theirs(TOKENS).logits)
    words = "a model with mixture has no Hugging Face form"
    refused(words, run_main, to_hf, tmp_path / "ours", "--ladder", "--out", tmp_path / "ladder")


SEPARATE = {f"{e}.{name}_proj.weight": None for e in range(5) for name in ("gate", "up")}


@pytest.mark.parametrize(
    "changes, tensors, words",
    [
        ({"num_experts_per_tok": 6}, {}, "num_experts_per_tok is 6 but must be from 1 to 5"),
        ({"num_local_experts": 4}, {}, r"gate.weight: shape \(5, 48\) does not make the \(4, 48\)"),
        ({"moe_intermediate_size": 35}, {}, r"experts.gate_proj.weight: .* does not make the \(5, 35, 48\)"),
        ({}, {"3.up_proj.weight": None}, r"experts.up_proj.weight has the experts \[0, 1, 2, 4\]"),
        ({}, {"gate_up_proj": torch.zeros(5, 72, 48)}, "both .*_proj.weight and .*_proj.weight: drop"),
        ({}, {"1.down_proj.weight": torch.zeros(48)}, "0.mlp.experts.down_proj.weight: .*equal size, but got"),
        ({}, {**SEPARATE, "gate_up_proj": torch.zeros(5)}, "0.mlp.experts.gate_proj.weight: .*out of range"),
    ],
)
def test_bad_experts_are_one_line(changes, tensors, words, tmp_path):
    hf_model(FAMILIES["qwen3"]).save_pretrained(tmp_path / "hf")
    edit_config(tmp_path / "hf", **changes)
    change_tensors(tmp_path / "hf", {f"model.layers.0.mlp.experts.{name}": value for name, value in tensors.items()})
    refused(words, convert_hf, tmp_path, "ours")


@pytest.mark.parametrize(
    "changes, words",
    [
        *(({"wiring": wiring}, "not for mixtures") for wiring in ("spd", "delayed:1", "desync:4")),
        ({"mixture": {"experts_per_token": 6}}, "experts_per_token is 6 but must be from 1 to 5"),
        ({"mixture": {"dense_layers": (3,)}}, "dense_layers takes layers from 0 to 2"),
        ({"mixture": {"shared_expert_gate": True}}, "shared_expert_gate needs a shared_expert_size"),
        ({"mlp_bias": True}, "mlp_bias is not for a mixture"),
        ({"activation": "gelu_tanh"}, "activation gelu_tanh is not for a mixture"),
        (
            {"mixture": {"shared_expert_size": 28}, "postnorm": {}, "wiring": "farskip"},
            "farskip is not for models with postnorm",
        ),
        (
            {"quant": "int4", "group_size": 32, "dim": 64, "mixture": {"expert_size": 32}, "not_quantized": ("wo",)},
            "w2 .100.: keep w2",
        ),
    ],
)
def test_bad_configs_are_one_line(changes, words):
    refused(words, change, MIXTURE, **changes)


def test_a_rank_without_eight_neurons_is_refused():
    config = change(MIXTURE, mixture={"expert_size": 24})
    refused("cannot shard 24 neurons in groups of 8: use 1 to 3", tp.shard_plan, config, 0, (1,) * 4)
