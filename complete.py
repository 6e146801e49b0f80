"""Load a checkpoint and complete texts from Python. With torchrun all ranks do the same, in launch.run(main)."""

import functools
import zlib

import ladder.openmp  # noqa: F401 (before torch loads)

from generate import Generation, Runner, load_model
from ladder.checkpoints import checkpoint
from ladder.checkpoints.checkpoint import DTYPES
from ladder.command_line.prompts import fit
from ladder.decoding.batch import Sampler, make_cache
from ladder.errors import InputError
from ladder.progress import progress
from ladder.ranks import launch
from ladder.ranks.world import choose_device, rank_and_size
from ladder.text.tokenizer import TextStream, load_tokenizer
from model import rewired

join = functools.cache(launch.join)  # the ranks meet only once, however many models are loaded


def load(folder, device=None, dtype=None, wiring=None):
    """Return (model, tokenizer) of a checkpoint folder; the tokenizer is None if the folder has none.

    device: e.g. "cpu" or "cuda"; by default cuda if there is a GPU. dtype: a name in DTYPES; by default the
    checkpoint's own. wiring: e.g. "ladder:16"; by default the checkpoint's own. Raises InputError.
    """
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype is {dtype!r} but must be one of {', '.join(DTYPES)}")
    world = join(device)
    with world.together():
        config = rewired(checkpoint.read_config(folder), wiring)
    world.agree({"dtype": dtype, "wiring": config.wiring}, checkpoint=folder)
    model = load_model(config, folder, dtype, world)
    return model, load_tokenizer(folder, config.vocab_size)


def complete(
    model, tokenizer, prompts, max_new_tokens=200, temperature=0.8, top_k=None, top_p=1.0, seed=0, compile=False,
    draft=None, proposals=3, stream=False,
):  # fmt: skip
    """Return the text that follows each of the prompts, a list of texts, up to its end-of-sequence token.

    stream: if True, return an iterator instead, which after each step yields a list of the new text of each prompt.
    draft: None, "ngram", or a smaller model with the same vocabulary, which proposes `proposals` tokens at a time.
    Raises InputError, also for ranks that do not ask for the same, or give another model.
    """
    asked = {name: value for name, value in locals().items() if name not in ("model", "tokenizer", "prompts", "draft")}
    if tokenizer is None:
        raise InputError("tokenizer is None: the checkpoint has none, so there is no text to complete")
    if type(proposals) is not int or proposals < 1:
        raise InputError(f"proposals is {proposals!r} but must be a whole number, at least 1")
    if type(stream) is not bool:
        raise InputError(f"stream is {stream!r} but must be True or False")
    if isinstance(prompts, str):
        raise InputError("prompts is one text: give a list of texts")
    if not prompts:
        raise InputError("prompts is empty: give one text or more")
    if not all(prompts):
        raise InputError(f"prompts[{list(map(bool, prompts)).index(False)}] is an empty text")
    device = choose_device(str(model.device))  # selects it, if it is a GPU
    sampler = Sampler(temperature, top_k, top_p, seed, device)
    rows = [tokenizer.encode(text) for text in prompts]
    if model.comm.tp_size > 1:
        from ladder.ranks.meeting import JoinedWorld

        progress.at("comparison of the ranks")  # for ladder/ranks/watch.py: one that does not ask keeps the others here
        asked["tokens of the prompts"] = zlib.crc32(str(rows).encode())
        asked |= {"model": identity(model), "draft": identity(draft)}
        JoinedWorld(*rank_and_size(), device).agree(asked)
    _, slots = fit(max_new_tokens, rows, model.config.max_seq_len)
    cache = make_cache(model, len(rows), slots, in_buckets=compile)  # so that calls of similar lengths share a graph
    runner = Runner(model, cache, compile)
    if draft is not None:
        from ladder.decoding import drafts

        runner.draft = drafts.of_model(draft, proposals, runner, tokenizer.vocab_size)
    generation = Generation(runner, rows, max_new_tokens, sampler, model.config.eos_ids)
    texts = pieces(tokenizer, generation)
    return texts if stream else ["".join(text) for text in zip(*texts, strict=True)]


def identity(model):
    """Return what all ranks of a model have alike, though their shards differ; a draft that is no model as it is.

    That is the contents of the checkpoint that load_model read, dtypes, wiring and config. Edits of weights that were
    made after loading are not compared.
    """
    if not hasattr(model, "config"):
        return model
    dtypes = ", ".join(sorted({checkpoint.dtype_name(weight.dtype) for weight in model.parameters()}))
    config = zlib.crc32(str(model.config).encode())
    return f"{getattr(model, 'checkpoint', None)}, {dtypes}, {model.config.wiring}, config {config:08x}"


def pieces(tokenizer, generation):
    """Yield, after each step of a Generation, the new text of each row, without splitting a character."""
    streams = [TextStream(tokenizer, prompt) for prompt in generation.prompts]
    for new in generation:
        yield [stream.push(ids) for stream, ids in zip(streams, new, strict=True)]
    yield [stream.flush() for stream in streams]
