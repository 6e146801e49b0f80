"""The passes of a model: prefill and decode, over a static cache.

Shape letters: B batch, S sequence, V vocabulary, v this rank's part of it.
"""

import contextlib

import torch
from tqdm import tqdm

from model import cache_slots
from runtime import place

PASS_TOKENS = 1024  # of all rows in one pass of a prefill: bounds the memory of activations
MIN_TOKENS = 512  # a pass of fewer is not cut: two chunks would take a CPU longer than one
BUCKET = 256  # a GPU's cache has multiples of so many slots


@torch.inference_mode()  # for tensors made outside of it, the compiler would make a second graph
def pad(prompts, device):
    """Return (tokens (B, S), lengths (B,)) of prompts of any lengths, padded on the right."""
    rows = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens.to(device), torch.tensor([len(p) for p in prompts], device=device)


def last_tokens(sequences, device):
    """Return the arguments of Runner.decode for sequences of ids of which all but the last token is in the cache."""
    tokens = torch.tensor([ids[-1:] for ids in sequences], device=device)
    positions = torch.tensor([len(ids) - 1 for ids in sequences], device=device)
    return tokens, positions, max(map(len, sequences))


def make_cache(model, batch, length, in_buckets=False):
    """Return a cache for rows of up to `length` tokens. in_buckets: in whole buckets, as a GPU always gets it.

    No step reads the last slot: a slice of all slots would be compiled as another graph. longrope chooses its factors
    by the number of the others; BUCKET divides its original context, so rounding up never crosses it.
    """
    if in_buckets or model.device.type != "cpu":
        length = -(-length // BUCKET) * BUCKET
    return model.new_cache(batch, length + 1)


class Runner:
    """A model with its cache, and its prefill and decode, each compiled if asked for.

    A plain decode step is next_tokens: the model, then the sampler. On a GPU decoding/run_ahead.py starts the next step
    before the ids of the last one are read; compiled, a step there is the replay of a CUDA graph.

    decode_model, prefill_model: the model, or what torch.compile made of it; called as Transformer.forward.
    chunks: of each pass of the prefill; one computes while another's partials are summed. None: see choose_chunks.
    Raises InputError if compiling needs a C++ compiler and there is none.
    """

    def __init__(self, model, cache, compile=False, compile_prefill=False, chunks=None):
        self.model, self.cache, self.device, self.chunks = model, cache, model.device, chunks
        self.pass_tokens, self.shows_progress = PASS_TOKENS, False  # of a long prefill, at a terminal
        self.compiles, self.compiles_prefill = compile, compile_prefill
        self.decode_model = self.prefill_model = model
        if compile or compile_prefill:
            from runtime import compiling  # not in a plain run: it imports the compiler

            self.decode_model, self.prefill_model = compiling.compiled(model, compile, compile_prefill)
        self.graphs = self.decode_model if compile and self.device.type == "cuda" else None

    def with_model(self, model, cache=None):
        """Return a Runner of another model, compiled alike, with this cache or one of its own of the same size."""
        cache = cache or model.new_cache(len(self.cache[0][0]), cache_slots(self.cache))
        return Runner(model, cache, self.compiles, self.compiles_prefill, self.chunks)

    @torch.inference_mode()
    def prefill(self, tokens, lengths, cached_tokens=0):
        """Return logits (B, v) after the last token of each row, from passes of at most pass_tokens tokens of all rows.

        tokens (B, S), lengths (B,): as pad makes them. cached_tokens: so many of each row, but not all, are in the
        cache.
        """
        B, S = tokens.shape
        if self.model.config.linear_layers:  # whose state cannot be rewound to after these
            cached_tokens = 0
        last, logits, width = lengths - 1, None, max(1, self.pass_tokens // B)
        starts = range(cached_tokens, S, width)
        if len(starts) > 8 and self.shows_progress:
            starts = tqdm(starts, "prefill", leave=False, unit="pass", disable=None)  # None: shown at a terminal
        for start in starts:
            piece, positions, filled = tokens[:, start : start + width], None, None
            if start:
                place.at("prefill from token", start)
                filled = start + piece.shape[1]
                positions = torch.arange(start, filled, device=tokens.device).expand(B, -1)
            select = (last - start).clamp(-1, piece.shape[1] - 1)  # -1: this row ended in an earlier pass
            chunks = self.choose_chunks(*piece.shape)
            new = self.prefill_model(piece, positions, self.cache, filled, select, chunks)[:, 0]
            logits = new if logits is None else torch.where((last >= start)[:, None], new, logits)
        return logits

    @torch.inference_mode()
    def decode(self, tokens, positions, longest):
        """Return logits (B, S, v) after each of a few more tokens (B, S) of each row, the first at its position (B,).

        longest: tokens of the longest row after this pass, as for cache_length. Of tokens beyond the cache, which a
        draft may propose, the logits are garbage.
        """
        positions = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        positions = positions.clamp(max=cache_slots(self.cache) - 1)
        return self.decode_model(tokens, positions, self.cache, self.cache_length(longest))

    def next_tokens(self, sequences, sample):
        """Return the next ids (B,), on the device, of sequences of which all but the last token is in the cache."""
        return sample(self.decode(*last_tokens(sequences, self.device))[:, 0], self.model.comm)

    def plain_step(self):
        """Return what runs the passes of one generation: next_tokens, or on a GPU a RunAhead."""
        if self.device.type == "cpu":
            return self.next_tokens
        from decoding.run_ahead import RunAhead

        return RunAhead(self)

    def cache_length(self, longest):
        """Return how many slots of the cache a pass reads that takes the longest row to `longest` tokens.

        On a GPU each is a CUDA graph of its own, so there are 2 for each doubling; the last one is the whole cache.
        """
        unit = 1 if self.device.type == "cpu" else max(BUCKET, 2 ** ((longest - 1).bit_length() - 2))
        return min(-(-longest // unit) * unit, cache_slots(self.cache) - 1)

    def choose_chunks(self, B, S):
        """Return the number of chunks for a prefill pass of S tokens of B rows."""
        on_cpus = self.device.type == "cpu" and self.model.comm.tp_size > 1  # on GPUs nobody has measured a gain
        overlaps = not self.compiles_prefill  # compiled, it waits for the chunks' sums at once: docs/exact.md
        worth_it = on_cpus and overlaps and B * S >= MIN_TOKENS
        return min(S, self.chunks or (2 if worth_it else 1))

    def unguarded(self):
        """Return a context for shapes that warm_up has compiled: it skips guards, 0.5 ms a step of 16 layers."""
        if (self.compiles or self.compiles_prefill) and self.device.type == "cpu":
            return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        return contextlib.nullcontext()
