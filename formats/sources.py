"""Files that are no safetensors: names() and read(name), under Hugging Face's names; what is not read is not loaded."""

import math
import pickletools
import re
import zipfile

import numpy as np
import torch

from formats import checkpoint
from formats.checkpoint import check_file, first_line
from model import InputError

# What a pickled state dict may call. weights_only lets more through, some of it able to take all memory.
CALLS = r"collections OrderedDict|torch._utils (_rebuild_tensor_v2|_rebuild_parameter)|torch \w+Storage"
MOST_PICKLED = 2**24  # bytes


def check_calls(file):
    """Raise ValueError when the pickle in an open file calls anything but CALLS."""
    for code, argument, _ in pickletools.genops(file):
        if code.name in ("GLOBAL", "STACK_GLOBAL", "INST") and not re.fullmatch(CALLS, argument or code.name):
            raise ValueError(f"it calls {argument or code.name!r}, which is no part of a state dict")


def load_pickle(path):
    """{name: tensor} of a file of torch.save, memory-mapped; a ValueError, and errors of libraries, for others.

    The calls are looked at first, then run by PyTorch's own reader of weights alone.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            pickles = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if packed or len(pickles) != 1 or pickles[0].file_size > MOST_PICKLED:
                raise ValueError("it is not as torch.save packs a state dict")
            with archive.open(pickles[0]) as f:
                check_calls(f)
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    else:  # as PyTorch wrote files before 1.6, without a zip archive: read whole
        with open(path, "rb") as f:
            for _ in range(5):  # a number, a version, the system, the state dict, the names of its storages
                check_calls(f)
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise ValueError("it holds no state dict")
    for name, tensor in found.items():
        plain = isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not plain or not isinstance(name, str) or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"its {name!r} is no tensor with a number of its own for each place")
    return found


class PickledWeights:
    """pytorch_model.bin, one file or an index of shards."""

    def __init__(self, folder):
        single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
        names = [single.name] if single.is_file() else sorted(set(checkpoint.read_weight_map(index).values()))
        self.tensors = {}
        for name in names:
            if not (folder / name).is_file():
                raise InputError(f"{folder / name} is missing, but {index.name} names it: download it again")
            try:
                self.tensors.update(load_pickle(folder / name))
            except Exception as e:  # the readers of pickles and archives raise whatever the bytes lead them to
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
        check_file(path)
        header = np.fromfile(path, np.int32, 7)
        if len(header) < 7:
            raise InputError(f"{path} is no llama2.c checkpoint: it is shorter than its header")
        D, hidden, L, N, K, V, context = (int(i) for i in header)
        if min(D, hidden, L, N, K, context) < 1 or V == 0 or D % N or N % K:
            raise InputError(f"{path} is no llama2.c checkpoint: its header reads {header.tolist()}")
        H = D // N
        values = {
            "n_layers": L, "n_heads": N, "n_kv_heads": K, "head_dim": H, "dim": D, "intermediate_size": hidden,
            "vocab_size": abs(V), "max_seq_len": context, "tie_embeddings": V > 0, "bos_id": 1,
            "eos_ids": (1, 2),  # its training texts are separated by BOS
        }  # fmt: skip
        self.config = checkpoint.make_config(values, path)
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
        expected = 28 + 4 * sum(math.prod(shape) for _, shape in layout)
        if path.stat().st_size != expected:
            raise InputError(
                f"{path} is {path.stat().st_size} bytes, but its header asks for {expected}: copy it again"
            )
        data, self.tensors, at = np.memmap(path, np.float32, "r", offset=28), {}, 0
        for name, shape in layout:
            array = data[at : at + math.prod(shape)].reshape(shape)
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
