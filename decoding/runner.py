"""The passes of a model, prefill and decode, over a static cache, and the Sampler, which chooses ids by their logits.

Shape letters: B batch, S sequence, V vocabulary, v this rank's part of it.
"""

import contextlib

import torch
from tqdm import tqdm

from model import VOCAB_BLOCK, SingleDevice, cache_slots
from runtime import place
from runtime.errors import InputError

PASS_TOKENS = 1024  # of all rows in one pass of a prefill: bounds the memory of activations
MIN_TOKENS = 512  # a pass of fewer is not cut: two chunks would take a CPU longer than one
BUCKET = 256  # a GPU's cache has multiples of so many slots
SINGLE = SingleDevice()
N_CHUNKS = VOCAB_BLOCK  # of the logits, which a GPU searches at the same time; it divides padded v


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


class Sampler:
    """A function from this rank's logits and the model's collectives to token ids, equal on all ranks.

    Ranks exchange only candidates, since no wiring hides a gathering of all logits. temperature: 0 is greedy. Equal
    seeds draw equal tokens, on any number of ranks. Raises InputError.
    """

    def __init__(self, temperature, top_k=None, top_p=1.0, seed=0, device="cpu"):
        low, high = 1e-6, 1e30  # float32 still distinguishes them from 0 and from infinity
        if not (temperature == 0 or low <= temperature <= high):
            raise InputError(f"temperature is {temperature} but must be 0 (greedy) or from {low} to {high}")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k} but must be a whole number, at least 1")
        if not low <= top_p <= 1:
            raise InputError(f"top_p is {top_p} but must be a number from {low} to 1")
        if not 0 <= seed < 2**63:
            raise InputError(f"seed is {seed} but must be a whole number from 0 to 2^63 - 1")
        self.temperature, self.top_k, self.top_p, self.device = temperature, top_k, top_p, device
        self.filters = top_k is not None or top_p < 1
        self.generator = torch.Generator(device).manual_seed(seed)
        # samplers with an equal key share CUDA graphs; None: not captured
        self.graph_key = "greedy" if temperature == 0 else None if self.filters else self

    def __call__(self, logits, comm=SINGLE):
        """Return token ids (...) of this rank's logits (..., v), (B, v) to draw; -1 where not all are finite."""
        greedy = self.temperature == 0
        if self.filters and not greedy:
            from decoding import likely  # only top_k and top_p need it

            return likely.draw(self, logits, comm)
        numbers, first, vocab_size = comm.local_logits(logits if greedy else logits.float())
        chunks = numbers.unflatten(-1, (N_CHUNKS, -1))
        chunk_max, chunk_argmax = chunks.max(-1)
        top, chunk = chunk_max.max(-1)
        score = (top + 0 * chunks.amin(-1).amin(-1)).double()  # 0 * -inf is NaN: finite only if all logits are
        if greedy:
            token = chunk * chunks.shape[-1] + chunk_argmax.gather(-1, chunk[..., None])[..., 0]
        else:
            weights = (numbers - top[..., None]).div_(self.temperature).exp_()
            lead, token = self.race(weights, first, vocab_size)
            score = score / self.temperature + lead.log()  # the weights are relative to this rank's top
        scores, ids = comm.all_gather(torch.stack((score, token + first), -1)).unbind(-1)
        winner = ids.gather(0, scores.argmax(0, keepdim=True))[0].long()  # of equal scores the first rank's
        return winner.where(scores.isfinite().all(0), -1)

    def race(self, weights, first, vocab_size):
        """Draw local ids (B,) with probabilities proportional to this rank's weights (B, v); returns (leads, ids).

        An exponential race among blocks of ids: a block of weight w leads by w / e, where e ~ Exp(1), and the
        largest lead wins with probability w / sum(w), also among all ranks. A second race chooses an id in the block.
        All ranks draw the same e, so the result does not depend on their number. first: this rank's first id.
        """
        n_blocks, by_block = -(-vocab_size // VOCAB_BLOCK), weights.unflatten(-1, (-1, VOCAB_BLOCK))
        e = torch.empty(len(weights), n_blocks + VOCAB_BLOCK, device=weights.device)
        e.exponential_(generator=self.generator)
        own = torch.arange(by_block.shape[1], device=weights.device) + first // VOCAB_BLOCK  # the last ones: padding
        lead, block = (by_block.sum(-1).double() / e[:, own.clamp(max=n_blocks - 1)]).max(-1)
        inside = by_block.gather(1, block[:, None, None].expand(-1, 1, VOCAB_BLOCK))[:, 0] / e[:, n_blocks:]
        return lead, block * VOCAB_BLOCK + inside.argmax(-1)
