"""The protocol of what a checkpoint is converted from, and the table of its forms.

Shape letters of all files here: N outputs and K columns of a matrix, G groups of columns, E experts.
"""

import pkgutil

from ladder.sources.matrices import Tensors

SOURCES = {  # {what is opened, for messages: module:function (path, with_tokenizer) -> Source, or None for other paths}
    "a .gguf file": "ladder.sources.gguf_file:open_gguf",
    "a Hugging Face folder": "ladder.sources.huggingface:open_folder",
    "a llama2.c .bin file": "ladder.sources.llama2c:open_llama2c",  # the last one, since it takes any file
}


class Source(Tensors):
    """The tensors of a Llama under Hugging Face's names, with what else a checkpoint needs."""

    config = None  # the Config that the source's own settings make; each source sets it
    tokenizer_folder = None  # with the tokenizer's files, if there are any
    notes = ()  # lines for the user: what is ignored or left out


def open_path(path, with_tokenizer=True):
    """Return the Source of a file or folder, or None if it is neither. Raises InputError."""
    for opener in SOURCES.values():
        source = pkgutil.resolve_name(opener)(path, with_tokenizer)
        if source is not None:
            return source
