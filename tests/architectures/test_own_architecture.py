"""An architecture that somebody adds: what quantization, the loader and the conversion make of its modules."""

import dataclasses

import pytest
import torch
import torch.nn as nn
from cases import refused
from configs import BASE
from file_edits import take_state
from hf_folders import config_from_values, convert, hf_model
from safetensors.torch import save_file

from ladder import architectures
from ladder.architectures import Architecture
from ladder.checkpoints import checkpoint
from ladder.kernels.quant_linear import QuantLinear
from ladder.sources import families
from ladder.sources.matrices import Renamed, multiply
from model import Linear, build


class HeadNorm(nn.Module):
    """Its weight has two dimensions, as a linear's has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 64))

    def forward(self, x):
        return x * self.weight.flatten()[: x.shape[-1]]


class DoubledLinear(Linear):
    """A linear with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class NamedLinear(Linear):
    """One that inherits it."""


class Stack(nn.Module):
    """Its weight has three dimensions, as that of experts has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 64, 64))

    def forward(self, x):
        return x @ self.weight[0]


@dataclasses.dataclass(frozen=True)
class Own(Architecture):
    name = "own"
    with_modules: bool = False

    def complete_block(self, config, block):
        if self.with_modules:
            block.head_norm = HeadNorm()
            block.doubled = DoubledLinear(64, 64, False)
            block.named = NamedLinear(64, 64, False)
            block.stack = Stack()
            block.homonym = type("Linear", (DoubledLinear,), {"forward": lambda self, x: x})(64, 64, False)

    def hf_weights(self, source, config, hf):
        return ScaledNorm(source)


class ScaledNorm(Renamed):
    """The tensors of a source, with the last norm times 3."""

    def join(self, name, tensor):
        return multiply(tensor, 3.0) if name == "model.norm.weight" else tensor


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(architectures.ARCHITECTURES, "own", f"{__name__}:Own")


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_modules_with_a_forward_of_their_own_are_not_quantized(quant):
    block = build(dataclasses.replace(BASE, quant=quant, architecture=(Own(with_modules=True),))).layers[0]
    assert type(block.head_norm) is HeadNorm and type(block.doubled) is DoubledLinear
    assert not isinstance(block.stack, QuantLinear) and not isinstance(block.homonym, QuantLinear)
    assert type(block.named) is QuantLinear and type(block.attention.wo) is QuantLinear


def test_a_number_without_a_dimension_is_loaded(tmp_path):
    save_file({"scale": torch.tensor(1.5)}, tmp_path / "model.safetensors")
    target = torch.empty(())
    checkpoint.Weights(tmp_path).fill(target, "scale")
    assert target == 1.5


@pytest.mark.parametrize("prefix", ["model.", "", "model.language_model."])
def test_hf_weights_sees_one_form_of_names(prefix, tmp_path, monkeypatch):
    """The names in a folder's files have several prefixes."""
    hf_model("llama, yarn").save_pretrained(tmp_path / "hf")
    plain = convert(tmp_path / "hf", tmp_path / "plain")
    state = take_state(tmp_path / "hf")
    renamed = {name.replace("model.", prefix): tensor for name, tensor in state.items()}
    save_file(renamed, tmp_path / "hf" / "model.safetensors")
    set_family(monkeypatch, values={"own": {}})
    scaled = convert(tmp_path / "hf", tmp_path / "scaled")
    assert (scaled.norm.weight - 3 * plain.norm.weight).abs().max() < 1e-6


def set_family(monkeypatch, **changes):
    monkeypatch.setitem(families.FAMILIES, "llama", families.FAMILIES["llama"]._replace(**changes))


VALUES = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
VALUES |= {"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64}


def test_a_family_of_parallel_blocks_takes_ladder_layers(tmp_path, monkeypatch):
    set_family(monkeypatch, values={"wiring": "parallel"})
    assert config_from_values(tmp_path, VALUES).wiring == "parallel"
    assert config_from_values(tmp_path, {**VALUES, "ladder_layers": 1}).wiring == "parallel-ladder:1"


def test_a_family_may_allow_only_one_value_of_a_key_that_others_read(tmp_path, monkeypatch):
    """As Arcee's AFM does, whose activation is part of an architecture of its own."""
    set_family(monkeypatch, only={"hidden_act": "relu2"})
    assert config_from_values(tmp_path, {**VALUES, "hidden_act": "relu2"})
    refused(
        "hidden_act 'gelu' is not supported, only 'relu2' is",
        config_from_values,
        tmp_path,
        VALUES | {"hidden_act": "gelu"},
    )
