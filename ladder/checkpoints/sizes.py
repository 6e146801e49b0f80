"""Named sizes with random weights, for benchmarks: generate.py --model."""

import dataclasses
import math
import re

import torch

from ladder.architectures.heads import Heads
from ladder.architectures.latent import Latent
from ladder.architectures.linear import LinearAttention
from ladder.architectures.mixture import Mixture
from ladder.architectures.postnorm import PostNorm
from ladder.errors import InputError, did_you_mean
from model import Config, build


def _llama3(n_layers, n_heads, head_dim, dim, intermediate_size, factor=8.0, tie_embeddings=False):
    rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return Config(
        n_layers, n_heads, 8, head_dim, dim, intermediate_size, 128256, 131072, 1e-5, 500000.0,
        {"factor": factor, **rope}, tie_embeddings,
    )  # fmt: skip


def _deepseek_experts(**more):
    return Mixture(64, 6, 1408, shared_expert_size=2816, dense_layers=(0,), **more)


DEEPSEEK_YARN = {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}
DEEPSEEK_YARN["original_max_position_embeddings"] = 4096
YARN = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}
GPT_OSS_YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.1 * math.log(32) + 1}
GPT_OSS_YARN |= {"original_max_position_embeddings": 4096, "truncate": False}
SIZES = {  # shapes for benchmarks; they have no eos_ids, since random weights should not end a text
    "1b": _llama3(16, 32, 64, 2048, 8192, factor=32.0, tie_embeddings=True),  # Llama 3.2 1B
    "3b": _llama3(28, 24, 128, 3072, 8192, factor=32.0, tie_embeddings=True),  # Llama 3.2 3B
    "8b": _llama3(32, 32, 128, 4096, 14336),  # Llama 3.1 8B
    "qwen3-4b": Config(
        36, 32, 8, 128, 2560, 9728, 151936, 40960, 1e-6, 1e6, tie_embeddings=True,
        architecture=(Heads(qk_norm=True),),
    ),
    "gemma3-12b": Config(
        48, 16, 8, 256, 3840, 15360, 262208, 131072, 1e-6, 1e6, {"factor": 8.0}, True, norm="rms+1",
        activation="gelu_tanh", embedding_scale=3840**0.5, architecture=(PostNorm(), Heads(
            qk_norm=True, window_rope_theta=1e4, sliding_window=1024,
            window_layers=tuple(i for i in range(48) if (i + 1) % 6),
        )),
    ),
    "phi4-mini": Config(  # without its longrope, whose factors do not change the time of a step
        32, 24, 8, 128, 3072, 8192, 200064, 131072, tie_embeddings=True, rotary_dim=96,
    ),
    "ministral3-8b": Config(
        34, 32, 8, 128, 4096, 14336, 131072, 262144, 1e-5, 1e6, {**YARN, "original_max_position_embeddings": 16384},
        architecture=(Heads(llama4_beta=0.1),),
    ),
    "glm4-9b": Config(  # GLM-4-9B-0414
        40, 32, 2, 128, 4096, 13696, 151552, 32768, rotary_dim=64, architecture=(PostNorm(),), qkv_bias=True,
    ),
    "34b": Config(48, 64, 8, 128, 8192, 22016, 32000, 16384, rope_theta=1e6),  # CodeLlama 34B
    "70b": _llama3(80, 64, 128, 8192, 28672),  # Llama 3.1 70B
    # BLOOM 176B as the Ladder Residual paper times it: a Llama block of BLOOM's width with a gated MLP of 3.5 D
    "176b": Config(70, 112, 112, 128, 14336, 50176, 250880, 8192, rope_theta=500000.0),
    "405b": _llama3(126, 128, 128, 16384, 53248),  # Llama 3.1 405B
    "30b-a3b": Config(  # Qwen3 30B-A3B
        48, 32, 4, 128, 2048, 6144, 151936, 40960, 1e-6, 1e6,
        architecture=(Mixture(128, 8, 768), Heads(qk_norm=True)),
    ),
    "mixtral-8x7b": Config(
        32, 32, 8, 128, 4096, 14336, 32000, 32768, 1e-5, 1e6,
        architecture=(Mixture(8, 2, 14336),),
    ),
    "instella": Config(  # Instella-MoE 16B-A3B
        27, 16, 16, 128, 2048, 10944, 128896, 32768, 1e-6, 8e6, DEEPSEEK_YARN, rotary_dim=32,
        wiring="farskip",
        architecture=(
            Latent(512, 96, 32, 128, gate=True, query_scale=(0.1 * math.log(40) + 1) ** 2),
            _deepseek_experts(router="sigmoid", expert_scale=2.5),
        ),
    ),
    "deepseek-v2-lite": Config(
        27, 16, 16, 192, 2048, 10944, 102400, 163840, 1e-6, 1e4, DEEPSEEK_YARN, rotary_dim=64,
        architecture=(
            Latent(512, 128, 64, 128, query_scale=(0.0707 * math.log(40) + 1) ** 2),
            _deepseek_experts(router="softmax in float32", renormalize_experts=False),
        ),
    ),
    "glm-4.5-air": Config(
        46, 96, 8, 128, 4096, 10944, 151552, 131072, 1e-5, 1e6, rotary_dim=64, qkv_bias=True,
        architecture=(Mixture(128, 8, 1408, shared_expert_size=1408, dense_layers=(0,), router="sigmoid"),),
    ),
    "gpt-oss-20b": Config(
        24, 64, 8, 64, 2880, 2880, 201088, 131072, 1e-5, 150000.0, GPT_OSS_YARN, qkv_bias=True, wo_bias=True,
        architecture=(
            Mixture(32, 4, 2880, clamped_swiglu=True),
            Heads(sinks=True, sliding_window=128, window_layers=tuple(range(0, 24, 2))),
        ),
    ),
    "qwen3.6-27b": Config(
        64, 24, 4, 256, 5120, 17408, 248320, 262144, 1e-6, 1e7, rotary_dim=64, norm="rms+1",
        architecture=(
            LinearAttention(tuple(i for i in range(64) if (i + 1) % 4), 16, 48, 128, 128, 4),
            Heads(qk_norm=True, gate=True),
        ),
    ),
    "laneformer-2b": Config(  # the width is inferred from its 2.3 B parameters and an MLP of 4 D
        15, 32, 16, 96, 3072, 12288, 32000, 4096, wiring="laneformer-4/8",
        architecture=(Heads(sliding_window=512, window_layers=tuple(range(10))),),
    ),
}  # fmt: skip


def named_size(text):
    """Return the Config of NAME[:N][:QUANT]: N layers of one of SIZES; QUANT: fp8, int8, int4, or the
    latter two with :GROUP_SIZE."""
    match = re.fullmatch(r"([\w.-]+?)(?::([1-9]\d*))?(?::(fp8|int[84](?::\d+)?))?", text)
    config = SIZES.get(match and match[1])
    if config is None or int(match[2] or 1) > config.n_layers:
        names = ", ".join(sorted(SIZES))
        words = f"give NAME, NAME:N with N layers, or NAME:N:int8, int4 or fp8, of {names}"
        words += did_you_mean(text.partition(":")[0], SIZES) if config is None else ""
        raise InputError(f"--model {text} is no size, or asks for too many layers: {words}")
    quant, _, size = (match[3] or "").partition(":")
    group_size = int(size or 64) if size or quant == "int4" else None
    n_layers = int(match[2] or config.n_layers)
    changes = {"n_layers": n_layers, "quant": quant or None, "group_size": group_size}
    changes["architecture"] = tuple(each.of_first_layers(n_layers) for each in config.architecture)
    return dataclasses.replace(config, **changes)


class RandomWeights:
    """Random weights in place of checkpoint.Weights: matrices from N(0, 0.02), biases of 0, norms of factor 1.

    Integers are drawn evenly and e4m3 from N(0, 64), with scales that give their floats the same standard deviation.
    """

    def __init__(self, config, device, seed=0):
        self.parameters = dict(build(config).named_parameters())
        self.norm = float(config.norm != "rms+1")
        self.generator = torch.Generator(device).manual_seed(seed)

    def read(self, name):
        return self.parameters[name]  # on the device "meta": only its shape and dtype count

    def fill(self, target, name, dim=0, ranges=None):
        if target.dim() == 1:
            target.fill_(0.0 if name.endswith("bias") else 1.0 if "out_norm" in name else self.norm)
        elif name.endswith(("scales", "zeros")):
            stored = self.parameters[name.rpartition(".")[0] + ".weight"].dtype
            scale = {torch.uint8: 12**0.5 / 15, torch.int8: 12**0.5 / 254}.get(stored, 1 / 64) * 0.02
            middle = 7.5 if stored == torch.uint8 else 0
            target.fill_(scale if name.endswith("scales") else -middle * scale)
        elif target.dtype == torch.float8_e4m3fn:
            numbers = torch.empty(target.shape, dtype=torch.bfloat16, device=target.device)
            target.copy_(numbers.normal_(0, 64, generator=self.generator).clamp_(-448, 448))
        elif not target.is_floating_point():
            low, high = (0, 256) if target.dtype == torch.uint8 else (-127, 128)
            target.random_(low, high, generator=self.generator)
        else:
            target.normal_(0, 0.02, generator=self.generator)
