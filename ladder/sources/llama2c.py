"""Reads files of llama2.c. Only the tensors that are read are loaded."""

import math

import numpy as np
import torch

from ladder.checkpoints import checkpoint
from ladder.errors import InputError, naming
from ladder.layers.attention_inputs import unpaired
from ladder.sources.source import Source


def open_llama2c(path, with_tokenizer=True):
    """Return the Source of a file, or None for another path: a file has no name by which to know it."""
    return Llama2cWeights(path) if path.is_file() else None


class Llama2cWeights(Source):
    """A legacy file of llama2.c, memory-mapped: 7 int32 of config, then float32 tensors, each stacked over the layers.

    Its rotary embeddings turn neighbouring dimensions, so q and k are reordered (see `unpaired`). Raises InputError if
    the header makes no sense or does not match the size of the file.
    """

    def __init__(self, path):
        header = np.fromfile(path, np.int32, 7).tolist()
        numbers = [*header[:5], *map(abs, header[5:6]), *header[6:]]  # the size of the vocabulary may be negative
        if len(header) < 7 or min(numbers) < 1 or max(numbers) > checkpoint.LARGEST_NUMBER[int]:  # such as text
            words = "is no GGUF file and no llama2.c file (of safetensors give the folder)"
            raise InputError(f"{path} {words}: its header reads {header}")
        D, hidden, L, N, K, V, context = header
        H = D // N
        values = {
            "n_layers": L, "n_heads": N, "n_kv_heads": K, "head_dim": H, "dim": D, "intermediate_size": hidden,
            "vocab_size": abs(V), "max_seq_len": context, "tie_embeddings": V > 0, "bos_id": 1,
            "eos_ids": (1, 2),  # its training texts are separated by BOS
        }  # fmt: skip
        with naming(path):
            self.config = checkpoint.make_config(values)
        layout = {
            "model.embed_tokens": (abs(V), D), "input_layernorm": (L, D), "self_attn.q_proj": (L, N * H, D),
            "self_attn.k_proj": (L, K * H, D), "self_attn.v_proj": (L, K * H, D), "self_attn.o_proj": (L, D, N * H),
            "post_attention_layernorm": (L, D), "mlp.gate_proj": (L, hidden, D), "mlp.down_proj": (L, D, hidden),
            "mlp.up_proj": (L, hidden, D), "model.norm": (D,),
            "rope": (2, context, H // 2),  # cosines and sines, recomputed, not read
        } | ({"lm_head": (-V, D)} if V < 0 else {})  # fmt: skip
        size = path.stat().st_size
        expected = 28 + 4 * sum(map(math.prod, layout.values()))
        if size != expected:
            raise InputError(f"{path} is {size} bytes, but its header asks for {expected}: copy it again")
        data = np.memmap(path, np.float32, "r", offset=28)
        self.tensors = {}
        at = 0
        for name, shape in layout.items():
            array = data[at : at + math.prod(shape)].reshape(shape)
            at += array.size
            if name.startswith(("model.", "lm_head")):
                self.tensors[f"{name}.weight"] = array
            elif name != "rope":
                self.tensors |= {f"model.layers.{i}.{name}.weight": array[i] for i in range(L)}

    def names(self):
        return list(self.tensors)

    def read(self, name):
        tensor = torch.from_numpy(self.tensors[name].copy())
        return unpaired(tensor, self.config.head_dim) if "q_proj" in name or "k_proj" in name else tensor
