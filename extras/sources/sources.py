"""Files that are no safetensors: names() and read(name); what is not read is not loaded."""

import zipfile

import torch

from formats import checkpoint
from runtime.errors import InputError


class PickledWeights:
    """pytorch_model.bin, one file or an index of shards; memory-mapped, but for the format before PyTorch 1.6."""

    def __init__(self, folder):
        single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
        self.tensors = {}
        for path in [single] if single.is_file() else checkpoint.shards(index):
            try:
                self.tensors |= torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
            except Exception as e:  # the readers of pickles and archives raise whatever the bytes lead them to
                reason = type(e).__name__  # its message may advise to load the file unsafely
                raise InputError(f"{path} is missing, truncated or no PyTorch state dict: {reason}") from None

    def names(self):
        return list(self.tensors)

    def read(self, name):
        return self.tensors[name]
