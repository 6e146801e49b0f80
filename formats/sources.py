"""Files that are no safetensors: names() and read(name), under Hugging Face's names; what is not read is not loaded."""

import pickle
import zipfile

import numpy as np
import torch

import checkpoint
from checkpoint import first_line
from model import Config, InputError


class PickledWeights:
    """pytorch_model.bin, one file or an index of shards, memory-mapped."""

    def __init__(self, folder):
        single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
        names = [single.name] if single.is_file() else sorted(set(checkpoint.read_weight_map(index).values()))
        self.tensors = {}
        for name in names:
            if not (folder / name).is_file():
                raise InputError(f"{folder / name} is missing, but {index.name} names it: download it again")
            mmap = zipfile.is_zipfile(folder / name)  # PyTorch wrote other files before 1.6: these are read whole
            try:
                self.tensors.update(torch.load(folder / name, map_location="cpu", mmap=mmap, weights_only=True))
            except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as e:
                raise InputError(f"{folder / name} is truncated or no PyTorch file: {first_line(e)}") from None

    def names(self):
        return list(self.tensors)

    def read(self, name):
        return self.tensors[name]


class Llama2cWeights:
    """A llama2.c legacy file: 7 int32 of config, then float32 tensors, each stacked over the layers, memory-mapped.

    Its rotary embeddings turn neighbours (2i, 2i + 1) where ours turn (i, i + H/2): read() reorders the rows of q, k.
    """

    def __init__(self, path):
        header = np.fromfile(path, np.int32, 7)
        if len(header) < 7:
            raise InputError(f"{path} is no llama2.c checkpoint: it is shorter than its header")
        D, hidden, L, N, K, V, context = (int(i) for i in header)
        if min(D, hidden, L, N, K, context) < 1 or V == 0 or D % N or N % K:
            raise InputError(f"{path} is no llama2.c checkpoint: its header reads {header.tolist()}")
        H = D // N
        self.config = Config(
            L, N, K, H, D, hidden, abs(V), context, tie_embeddings=V > 0, bos_id=1,
            eos_ids=(1, 2),  # its training texts are separated by BOS
        )  # fmt: skip
        layout = [
            ("model.embed_tokens.weight", (abs(V), D)),
            ("input_layernorm.weight", (L, D)),
            ("self_attn.q_proj.weight", (L, N * H, D)),
            ("self_attn.k_proj.weight", (L, K * H, D)),
            ("self_attn.v_proj.weight", (L, K * H, D)),
            ("self_attn.o_proj.weight", (L, D, N * H)),
            ("post_attention_layernorm.weight", (L, D)),
            ("mlp.gate_proj.weight", (L, hidden, D)),
            ("mlp.down_proj.weight", (L, D, hidden)),
            ("mlp.up_proj.weight", (L, hidden, D)),
            ("model.norm.weight", (D,)),
            ("rope cosines and sines", (2, context, H // 2)),  # recomputed, not read
        ] + [("lm_head.weight", (-V, D))] * (V < 0)
        expected = 28 + 4 * sum(int(np.prod(shape)) for _, shape in layout)
        if path.stat().st_size != expected:
            raise InputError(
                f"{path} is {path.stat().st_size} bytes, but its header asks for {expected}: copy it again"
            )
        data, self.tensors, at = np.memmap(path, np.float32, "r", offset=28), {}, 0
        for name, shape in layout:
            array = data[at : at + int(np.prod(shape))].reshape(shape)
            at += array.size
            if name.startswith(("model.", "lm_head.")):
                self.tensors[name] = array
            elif not name.startswith("rope"):
                self.tensors.update({f"model.layers.{i}.{name}": array[i] for i in range(L)})

    def names(self):
        return list(self.tensors)

    def read(self, name):
        tensor = torch.from_numpy(self.tensors[name].copy())
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.unflatten(0, (-1, self.config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return tensor
