"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint demo --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint demo --prompt "Once upon a time"
"""

# From main to a token. Every rank runs all of it, and all choose the same token:
#
#   main                        reads the flags, meets the other ranks, loads, prints
#     load_model                this rank's shard of the weights, and the collectives that sum over the ranks
#     Generation.__iter__       a batch of prompts, until each row has ended
#       Runner.prefill          runs the prompts through the model, chunk by chunk, and fills the cache
#       Runner.make_step        chooses what makes a step, one of:
#         Runner.step           on a CPU: decode (the model reads one token of each row), sample, and read the ids
#         AsyncScheduler        on a GPU: the same, but the next step starts before the ids of this one are read, and a
#                               step, the choice of its ids included, is one replay of a CUDA graph
#         a draft               several tokens of a row at once: one pass verifies what a smaller model has proposed
#
# The function `sample` says how a token is chosen. Its kernel (ladder/decoding/fast_sampling.py) computes the same ids,
# but ranks send each other less than all logits. With a draft and a temperature the rule is another one
# (ladder/decoding/speculative.py), unless `sample` was edited.
#
# Kernels compute what functions marked @plain say. If you edit such a function, it runs as you wrote it, and one line
# says so (docs/change-it.md).

import functools
import os
import time

import ladder.openmp  # noqa: F401 (before torch loads)

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ladder.checkpoints import checkpoint
from ladder.command_line import flags, prompts, report
from ladder.command_line.job import Job
from ladder.decoding import batch, fast_sampling
from ladder.decoding.passes import Passes
from ladder.errors import InputError
from ladder.kernels import registry
from ladder.memory import keep_freed_memory
from ladder.progress import progress
from ladder.ranks import launch
from model import VOCAB_BLOCK, cache_size, cache_slots, dummy_slot
from tp import TensorParallel, load_shard

CHUNK_TOKENS = 1024  # the most in a chunk of a prefill, all rows together: bounds the memory of activations
# To cut a chunk of fewer tokens in two would make it slower. Where sums take long, as ladder/ranks/meeting.py measures,
# this holds for much shorter chunks only.
MIN_SPLIT_TOKENS = 512
MIN_SPLIT_TOKENS_OVER_A_SLOW_LINK = 16


def load_model(config, folder, dtype, world):
    """Return the model with this rank's weights and its collectives.

    config: a Config, as checkpoint.read_config reads it from config.json. folder: of the weights, None for random ones.
    world: this rank and the others, as launch.join returns them: rank, tp_size, shares, device, process group.
    """
    load_weights = config.named_wiring.loader(world.shares) or load_shard
    if world.device.type == "cpu":
        keep_freed_memory()
    with world.together():  # raises an InputError of one rank on all of them
        weights = checkpoint.open_weights(folder, config, world.device)
        dtype = checkpoint.chosen_dtype(dtype, weights if folder else None)
        model = load_weights(config, weights, dtype, world.device, world.rank, world.shares)
        model.checkpoint = world.contents(folder)
    progress.at("preparation", timed=False)  # for ladder/ranks/watch.py: to wait for slower ranks now is no hang
    use_kernels(model, world)
    if world.group is not None:
        model.comm = TensorParallel(config, world.shares, world.group)
        model.comm.slow_link = world.has_slow_link()
    return model


def use_kernels(model, world):
    """Let kernels stand in for functions that are marked @plain; on a GPU only for integers and some architectures."""
    quant = model.config.quant
    if world.device.type == "cpu":
        from ladder.kernels.cpu.loading import use_on_cpu

        use_on_cpu(model)
        if quant == "fp8":
            world.say("fp8 on a CPU computes what a GPU does, but slowly: int8 is fast here")
    elif quant or model.config.architecture:
        from ladder.kernels.quant_kernels import use_on_gpu

        use_on_gpu(model)
    registry.use([fast_sampling.KERNEL])


# ---- How a token is chosen -------------------------------------------------------------------------------------------


@registry.plain
def sample(logits, comm, sampler):
    """Return the next id of each row (B,), by this rank's logits (B, v); -1 where some logits are not finite.

    All ranks must choose the same ids. comm: the model's Collectives. sampler: a Sampler (ladder/decoding/batch.py) has
    the settings, and random(), whose numbers are equal on all ranks.
    """
    logits = comm.gather_logits(logits).float()  # (B, V)
    finite = logits.isfinite().all(-1)  # a change that makes some -inf, such as forbidden ids, goes below
    if sampler.greedy:
        ids = logits.argmax(-1)  # of equal logits, the first
    elif sampler.filters:
        ids = draw_filtered(logits, sampler)
    else:
        ids = draw(logits, sampler)
    return ids.where(finite, -1)


def draw(logits, sampler):
    """Draw an id of each row (B,) by the softmax of its logits (B, V) / temperature.

    It is an exponential race: w / e, where e ~ Exp(1), is the largest with probability w / sum(w). A race of blocks of
    ids comes first, then one of the ids in the block, so that V / 16 + 16 random numbers do, not V. All ranks draw the
    same e and hold whole blocks, so that the kernel lets each race its own and sends only (score, id).
    """
    B, V = logits.shape
    weights = ((logits - logits.amax(-1, keepdim=True)) / sampler.temperature).exp()
    blocks = F.pad(weights, (0, -V % VOCAB_BLOCK)).unflatten(-1, (-1, VOCAB_BLOCK))
    n_blocks = blocks.shape[1]
    e = sampler.random(torch.Tensor.exponential_, B, n_blocks + VOCAB_BLOCK)
    block = (blocks.sum(-1).double() / e[:, :n_blocks]).argmax(-1)
    inside = blocks[torch.arange(B, device=block.device), block] / e[:, n_blocks:]
    return block * VOCAB_BLOCK + inside.argmax(-1)


def draw_filtered(logits, sampler):
    """Draw an id of each row (B,) by its logits (B, V), among the likeliest ones that top_k, top_p and min_p leave."""
    B, V = logits.shape
    logits, order = logits.sort(descending=True, stable=True)
    weights = ((logits.double() - logits[:, :1]) / sampler.temperature).exp()  # of the likeliest: 1
    least = logits[:, min(sampler.top_k, V) - 1, None]
    weights = weights.masked_fill((logits < least) | (weights < sampler.min_p), 0)
    likelier = weights.cumsum(-1) - weights  # the mass of the likelier ids, for top-p
    weights = weights.masked_fill(likelier >= sampler.top_p * weights.sum(-1, keepdim=True), 0)
    mass = weights.cumsum(-1)
    drawn = sampler.random(torch.Tensor.uniform_, B, 1) * mass[:, -1:]
    return order.gather(-1, (mass <= drawn).sum(-1, keepdim=True))[:, 0]


# ---- The passes of a model -------------------------------------------------------------------------------------------


class Runner:
    """A model with its static cache, and its prefill and decode.

    compile, compile_prefill: whether torch.compile makes the decode steps and the prefill (ladder/decoding/passes.py).
    splits: into how many parts a chunk of the prefill is cut, of which one computes while another's partials are
    summed. None: choose_splits decides.
    """

    def __init__(self, model, cache, compile=False, compile_prefill=False, splits=None):
        self.model = model
        self.device = model.device
        self.cache = cache
        self.chunk_tokens = CHUNK_TOKENS
        self.splits = splits
        self.shows_progress = False  # whether a long prefill has a progress bar at a terminal
        self.draft = None  # of ladder/decoding/drafts.py, which then makes the steps
        # passes.prefill and passes.decode: Transformer.forward, or all of it by torch.compile; on a GPU in CUDA graphs
        self.passes = Passes(model, compile, compile_prefill)

    @torch.inference_mode()
    def prefill(self, tokens, lengths, cached_tokens=0):
        """Return logits (B, v) after the last token of each row. tokens (B, S), lengths (B,): as pad makes them.

        The padding of a shorter row fills slots behind its last token; decode overwrites these before it reads them.
        cached_tokens: how many of each row's first tokens are in the cache already, fewer than the row has.
        """
        if not self.model.config.rewindable:  # a linear layer's state cannot be taken up in the middle
            cached_tokens = 0
        last_index = lengths - 1
        logits = None
        for start, chunk in self.prefill_chunks(tokens, cached_tokens):
            positions = cache_length = None  # of the first chunk: all rows begin at position 0
            if start:
                cache_length = start + chunk.shape[1]
                positions = torch.arange(start, cache_length, device=tokens.device).expand(len(tokens), -1)
            # only the chunk with a row's last token counts: earlier logits are replaced, and later ones dropped
            # -1: the row ended in an earlier chunk, and what comes of it is not kept
            last_here = (last_index - start).clamp(-1, chunk.shape[1] - 1)
            splits = self.choose_splits(*chunk.shape)
            new = self.passes.prefill(chunk, positions, self.cache, cache_length, last_here, splits)[:, 0]
            logits = new if logits is None else torch.where((last_index >= start)[:, None], new, logits)
        return logits

    def prefill_chunks(self, tokens, start):
        """Yield (the index of its first token, a chunk (B, s)) of tokens (B, S) from index `start` on.

        A chunk has at most chunk_tokens tokens, those of all rows together.
        """
        B, S = tokens.shape
        width = max(1, self.chunk_tokens // B)
        starts = range(start, S, width)
        if len(starts) > 8 and self.shows_progress:
            starts = tqdm(starts, "prefill", leave=False, unit="chunk", disable=None)  # None: shown at a terminal
        for first in starts:
            if first:
                progress.at("prefill from token", first)
            yield first, tokens[:, first : first + width]

    @torch.inference_mode()
    def decode(self, tokens, positions, longest):
        """Return the logits (B, S, v) after each of S new tokens (B, S) of each row, the first at its position (B,).

        longest: how many tokens the longest row has after this pass. A draft may propose tokens beyond the cache, whose
        logits are garbage.
        """
        positions = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        positions = positions.clamp(max=dummy_slot(self.cache))
        return self.passes.decode(tokens, positions, self.cache, self.cache_length(longest))

    def step(self, sequences, done, sampler):
        """Return [[the next id] of each row], after its last token, which is not in the cache yet.

        Drafts, and AsyncScheduler on a GPU, have steps of their own, with the same arguments. done: which rows have
        ended, for drafts.
        """
        tokens, positions, longest = batch.last_tokens(sequences, self.device)
        logits = self.decode(tokens, positions, longest)[:, 0]
        return sample(logits, self.model.comm, sampler)[:, None].tolist()

    def make_step(self, cached_tokens=0):
        """Return step(sequences, done, sampler) -> [the new ids of each row]. To be called once, before the prefill.

        What was compiled or captured is made anew if somebody has changed the model, and a draft, which has a cache of
        its own, begins. sequences: the ids of each row so far. done: which rows have ended. With a draft, a step may
        return several ids.
        """
        self.passes.renew()
        if self.draft:
            self.draft.begin(cached_tokens)
            return functools.partial(self.draft.step, self)
        if self.device.type == "cpu":
            return self.step
        from ladder.decoding.async_scheduling import AsyncScheduler

        return AsyncScheduler(self)

    def cache_length(self, longest):
        """Return how many slots of the cache a pass reads. longest: tokens of the longest row after it.

        On a GPU, where each size is a CUDA graph of its own, rounded up to a multiple of a quarter of the next power of
        two, or of BUCKET if that is larger: 513 to 768, 769 to 1024. At most the cache.
        """
        unit = 1 if self.device.type == "cpu" else max(batch.BUCKET, 2 ** ((longest - 1).bit_length() - 2))
        return min(-(-longest // unit) * unit, dummy_slot(self.cache))

    def choose_splits(self, B, S):
        """Return into how many parts to cut a chunk of S tokens of B rows.

        Two, where one part can compute while the other's sums travel: among several CPUs, unless the prefill is
        compiled, which then waits for both at once. On several GPUs this is untried.
        """
        if self.splits:
            return min(S, self.splits)
        can_overlap = self.device.type == "cpu" and self.model.comm.tp_size > 1 and not self.passes.compiles_prefill
        least = MIN_SPLIT_TOKENS_OVER_A_SLOW_LINK if self.model.comm.slow_link else MIN_SPLIT_TOKENS
        return min(S, 2) if can_overlap and least <= B * S else 1

    def like(self, model, cache=None):
        """Return a Runner of another model, compiled alike, with this cache or one of its own of the same size."""
        cache = cache or model.new_cache(len(self.cache[0][0]), cache_slots(self.cache))
        return Runner(model, cache, self.passes.compiles_decode, self.passes.compiles_prefill, self.splits)


# ---- Generation ------------------------------------------------------------------------------------------------------


class Generation:
    """Continues every prompt, a row each, until its own end-of-sequence, max_new_tokens or the end of the context.

    Iterate over it, once: each step yields a list with the new ids of each row, empty for a row that is done. The
    caller may stop early. decode_s does not count the time that the caller takes between steps. On a GPU the next step
    runs meanwhile, so that a slow caller makes decode_s too small.

    runner: its cache has a row for each prompt, with slots for max_new_tokens behind the longest. prompts: non-empty
    lists of token ids, of any lengths. sampler: a Sampler, an argument of `sample`. cached_tokens: see Runner.prefill.
    Raises InputError if the cache is too small; the iteration does, too, if logits are not finite.
    """

    def __init__(self, runner, prompts, max_new_tokens, sampler, eos_ids=(), cached_tokens=0):
        self.runner = runner
        self.prompts = prompts
        self.sampler = sampler
        self.eos_ids = eos_ids
        self.cached_tokens = cached_tokens
        context = runner.model.config.max_seq_len
        self.sequences = [list(prompt) for prompt in prompts]  # with the new ids, end-of-sequence included
        self.rows = [[] for _ in prompts]  # the new ids of each row, without end-of-sequence
        self.max_lengths = [min(len(prompt) + max_new_tokens, context) for prompt in prompts]
        rows, slots = cache_size(runner.cache)
        longest = max(self.max_lengths)
        if len(prompts) != rows or longest > slots:  # n tokens need n - 1 slots, and one is the dummy slot
            needed = f"{len(prompts)} rows of {longest} tokens do not fit a cache of {rows} rows, {slots} slots"
            raise InputError(f"{needed}: make_cache(model, {len(prompts)}, {longest}) makes one")
        self.finish_reasons = [None] * len(prompts)  # "stop" (end-of-sequence) or "length" of a row that is done
        self.steps = 0  # of decode
        self.prefill_s = 0.0  # seconds to the first tokens
        self.decode_s = 0.0  # seconds in all later steps

    @torch.inference_mode()
    def __iter__(self):
        runner = self.runner
        step = runner.make_step(self.cached_tokens)
        with progress.doing("prefill") as clock:
            logits = runner.prefill(*batch.pad(self.prompts, runner.device), self.cached_tokens)
            ids = sample(logits, runner.model.comm, self.sampler)
            new = self.take(ids[:, None].tolist())  # tolist waits for the device
        self.prefill_s = clock.seconds
        yield new
        while not all(self.finish_reasons):
            self.steps += 1
            with progress.doing("decode step", self.steps) as clock:
                new = self.take(step(self.sequences, self.finish_reasons, self.sampler))
            self.decode_s += clock.seconds
            yield new

    def take(self, new):
        """Add the ids of a step to each row's sequence, up to its end; return them without end-of-sequence."""
        return [[token for token in ids if self.add(row, token)] for row, ids in enumerate(new)]

    def add(self, row, token):
        """Add an id to a row's sequence, unless that has ended; return whether it is one of the row's new ids."""
        if self.finish_reasons[row]:
            return False
        if token == -1:  # sample's mark of logits that are not finite
            where = f"row {row} in step {len(self.rows[row])}"
            raise InputError(f"the logits of {where} are NaN or infinite: see --dtype")
        self.sequences[row].append(token)
        if token in self.eos_ids:
            self.finish_reasons[row] = "stop"
            return False
        self.rows[row].append(token)
        if len(self.sequences[row]) >= self.max_lengths[row]:
            self.finish_reasons[row] = "length"
        return True

    @property
    def new_tokens(self):
        """The most new tokens of any row, end-of-sequence included."""
        return max(len(sequence) - len(prompt) for sequence, prompt in zip(self.sequences, self.prompts, strict=True))


def generate(*args, **kwargs):
    """Run a Generation to its end and return it."""
    generation = Generation(*args, **kwargs)
    for _ in generation:
        pass
    return generation


# ---- The command line ------------------------------------------------------------------------------------------------
# What measures belongs into bench.py, or into a script of its own that calls make_runner and iterates over a
# Generation, as main does.


def parse_generation_flags(description, argv=None):
    """Return the values of the flags. Those that other scripts have as well are in ladder/command_line/flags.py."""
    p = flags.Parser(description)
    g = p.add_argument_group("model")
    flags.add_model_flags(g, required=True)
    words = 'torch.compile the decode step, with "all" the prefill too; on a CPU it takes a minute and gains a little'
    g.add_argument("--compile", nargs="?", const="decode", **flags.one_of(("decode", "all")), help=words)
    words = "run the plain functions as written, without faster kernels in their place; also $LADDER_PLAIN=1"
    g.add_argument("--plain", action="store_true", help=words)
    flags.add_rank_flags(g, sharded=True)
    flags.add_wiring_flags(p)
    prompts.add_prompt_flags(p)
    g = p.add_argument_group("generation")
    g.add_argument("--max-new-tokens", type=flags.count, default=200, metavar="N", help="each row stops at its own end")
    words = "0: greedy, 1: the model's"
    g.add_argument("--temperature", type=flags.number(float, 0), default=0.8, metavar="T", help=words)
    g.add_argument("--top-k", type=flags.count, metavar="K", help="sample among the K likeliest tokens, e.g. 50")
    words = "... among the likeliest of mass P, e.g. 0.95"
    g.add_argument("--top-p", type=flags.number(float, 0, 1), default=1.0, metavar="P", help=words)
    seed = flags.number(int, -(2**63), 2**64 - 1)
    g.add_argument("--seed", type=seed, default=0, metavar="S", help="of sampling and prompts")
    words = "speculative decoding: a smaller checkpoint, or the text's own n-grams, propose K (3) tokens at a time, "
    words += "e.g. ngram@4"
    g.add_argument("--draft", metavar="(DIR|ngram)[@K]", help=words)
    flags.add_json_flag(g)
    args = p.parse_args(argv)
    if args.plain:
        os.environ[registry.PLAIN] = "1"
    return args


def make_runner(job):
    """Load the model of a Job, and compile it if asked for; returns (its Runner, {"load_s", "compile_s"}: seconds)."""
    start = time.perf_counter()
    args = job.args
    world = job.world
    compile_decode = args.compile is not None
    compile_prefill = args.compile == "all"
    model = load_model(job.config, args.checkpoint, args.dtype, world)
    # job.slots: for the longest prompt and its new tokens, within the context; make_cache adds the dummy slot
    cache = batch.make_cache(model, len(job.prompts), job.slots, in_buckets=compile_decode)
    with world.together():
        runner = Runner(model, cache, compile_decode, compile_prefill)
        runner.shows_progress = world.rank == 0
        if job.draft_source:
            from ladder.decoding import drafts

            runner.draft = drafts.build(job, runner)
    seconds = {"load_s": time.perf_counter() - start, "compile_s": 0.0}
    if compile_decode or runner.passes.graphs:
        from ladder.kernels import compiling

        seconds["compile_s"] = compiling.warm_up_aloud(runner, job)
    return runner, seconds


def main(argv=None):
    args = parse_generation_flags(__doc__, argv)
    world = launch.join(args.device, vars(args))  # this rank and the others: rank, shares, device, group
    job = Job(args, world)  # reads config.json, with --wiring, and the prompts: config, tokenizer, prompts, sampler
    runner, seconds = make_runner(job)
    if prompts.is_chat(args):
        from ladder.text.terminal import chat_on_terminal

        return chat_on_terminal(job, runner)
    show_prompt = args.chat is None
    printer = prompts.Printer(world.rank, job.prompts, job.tokenizer, job.max_new_tokens, show_prompt)
    generation = Generation(runner, job.prompts, job.max_new_tokens, job.sampler, job.config.eos_ids)
    with runner.passes.unguarded():  # make_runner has compiled all shapes: torch.compile need not look again
        for ids in generation:
            printer.push(ids)
    result = report.result(job, generation, printer.finish(generation.rows)) | seconds
    world.say(report.summary(result))
    report.append(args.json, result, world)


if __name__ == "__main__":
    import generate  # this file as others import it: else there would be a __main__.Runner and a generate.Runner

    launch.run(generate.main)
