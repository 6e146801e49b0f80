"""Load a checkpoint and complete texts, from Python: on one device, without a process group or an exit."""

from decoding.sampling import Sampler
from formats import checkpoint
from formats.checkpoint import DTYPES
from formats.tokenizer import load_tokenizer
from generate import BUCKET, Runner, generate, load_model, make_cache
from model import rewired
from runtime import launch, terminal
from runtime.errors import InputError
from runtime.launch import World


def load(folder, device=None, dtype=None, wiring=None):
    """Return (model, tokenizer or None) of a checkpoint folder.

    device: "cpu", "cuda", ... or None. dtype: a name of DTYPES or None. wiring: another than the checkpoint's, e.g.
    "ladder:16". Raises InputError.
    """
    config = rewired(checkpoint.read_config(folder), wiring)
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype is {dtype!r} but must be one of {', '.join(DTYPES)}")
    model = load_model(config, folder, dtype, World(0, 1, launch.choose_device(device)))
    return model, load_tokenizer(folder, config.vocab_size)


def complete(
    model, tokenizer, prompts, max_new_tokens=200, temperature=0.8, top_k=None, top_p=1.0, seed=0, compile=False,
    draft=None, proposals=3, prefill_chunks=None,
):  # fmt: skip
    """Continue each of some texts on one device; returns the new texts. The README has an example.

    draft: None, "ngram", or a smaller model of the same vocabulary, which proposes `proposals` tokens at a time. A row
    ends at max_new_tokens, or where the model's context does. prefill_chunks: see Runner. Raises InputError.
    """
    if tokenizer is None:
        raise InputError("tokenizer is None: the checkpoint has none, so there is no text to complete")
    if proposals < 1:
        raise InputError(f"proposals is {proposals} but must be a whole number, at least 1")
    if prefill_chunks is not None and prefill_chunks < 1:
        raise InputError(f"prefill_chunks is {prefill_chunks} but must be None or a whole number, at least 1")
    if isinstance(prompts, str) or not prompts or not all(prompts):
        raise InputError("prompts is one text, empty, or has an empty text: give a list of texts")
    device = launch.choose_device(str(model.device))  # CUDA's current one now
    sample = Sampler(temperature, top_k, top_p, seed, device)
    rows = [tokenizer.encode(text) for text in prompts]
    slots = max(map(len, rows)) + terminal.fit(max_new_tokens, rows, model.config.max_seq_len) + 1
    if compile:  # in whole buckets, so that calls of about the same length share a graph
        slots = -(-slots // BUCKET) * BUCKET

    def new_runner(model, cache=None):
        return Runner(model, cache or make_cache(model, len(rows), slots + proposals), compile, chunks=prefill_chunks)

    runner, drafter = new_runner(model), None
    if draft is not None:
        from decoding import speculative

        drafter = speculative.of_model(draft, proposals, runner, new_runner)
    added = generate(runner, rows, max_new_tokens, sample, model.config.eos_ids, draft=drafter).rows
    return [tokenizer.continuation(prompt, row) for prompt, row in zip(rows, added, strict=True)]
