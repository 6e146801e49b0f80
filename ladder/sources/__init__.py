"""What a checkpoint is converted from: each form has one file here, which opens it as a Source.

Shape letters of all files here: N outputs and K columns of a matrix, G groups of columns, E experts.
"""

import pkgutil

SOURCES = {  # {what is opened, for messages: module:function (path, with_tokenizer) -> Source, or None for other paths}
    "a .gguf file": "ladder.sources.gguf_file:open_gguf",
    "a llama2.c .bin file": "ladder.sources.llama2c:open_llama2c",
    "a Hugging Face folder": "ladder.sources.huggingface:open_folder",
}


class Tensors:
    """Tensors with names, which are read one at a time."""

    floats = {}  # {a quantized format: how many matrices become floats in any case}

    def names(self):
        """Return the list of names."""
        raise NotImplementedError

    def read(self, name):
        """Return a tensor or, of a matrix that can stay quantized, Integers or Fp8 (matrices.py). Raises InputError."""
        raise NotImplementedError

    def form(self, name):
        """Return the Form (matrices.py) in which a matrix can stay quantized, without reading it, or None."""


class Source(Tensors):
    """The tensors of a Llama under Hugging Face's names, with what else a checkpoint needs."""

    config = None  # the Config that the source's own settings make
    tokenizer_folder = None  # with the tokenizer's files, if there are any
    notes = ()  # lines for the user: what is ignored or left out


def open_path(path, with_tokenizer=True):
    """Return the Source of a file or folder, or None if it is neither. Raises InputError."""
    for opener in SOURCES.values():
        source = pkgutil.resolve_name(opener)(path, with_tokenizer)
        if source is not None:
            return source
