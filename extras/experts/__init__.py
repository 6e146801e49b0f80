"""Mixtures of experts, which the core imports for a config with n_experts, and their wiring farskip."""

from extras.experts import farskip
from extras.experts.huggingface import ExpertWeights, values_from_hf
from extras.experts.kernels import Experts, make_differentiable
from extras.experts.layer import MoE, check, chosen_share, mlps
from formats.sizes import SIZES
from model import WIRINGS, Config, Wiring

__all__ = [
    "ExpertWeights", "Experts", "MoE", "check", "chosen_share", "make_differentiable", "mlps", "values_from_hf",
]  # fmt: skip

WIRINGS["farskip"] = Wiring(
    "a ladder that misses no shared expert (of a mixture)", farskip.APART, stale=1,
    loop=farskip.farskip_loop, n_means=None,
)  # fmt: skip
SIZES["30b-a3b"] = Config(  # Qwen3 30B-A3B
    48, 32, 4, 128, 2048, 6144, 151936, 40960, 1e-6, 1e6, qk_norm=True, n_experts=128, experts_per_token=8,
    expert_size=768,
)  # fmt: skip
SIZES["mixtral-8x7b"] = Config(
    32, 32, 8, 128, 4096, 14336, 32000, 32768, 1e-5, 1e6, n_experts=8, experts_per_token=2, expert_size=14336,
)  # fmt: skip
