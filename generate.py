"""Generate text with a Llama-type model, tensor-parallel, in any residual wiring.

python generate.py --checkpoint demo --prompt "Once upon a time"
torchrun --standalone --nproc_per_node=2 generate.py --checkpoint demo --prompt "Once upon a time"
"""

# Every rank runs main. A decode step (Runner.new_step) is the model, then the Sampler (decoding/batch.py): each rank
# picks candidates from its part of the vocabulary; all gather them and, by the same --seed, choose the same token.

import contextlib
import functools
import os
import time

if __name__ == "__main__":  # before torch loads OpenMP, whose spinning threads stall a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from tqdm import tqdm

from decoding.batch import BUCKET, last_tokens, make_cache, pad
from formats import checkpoint
from model import cache_slots
from runtime import cli, launch, report
from runtime.errors import InputError, find_extra, load_extra, progress  # progress: what this rank is doing
from tp import TensorParallel, load_shard

PASS_TOKENS = 1024  # the most in a pass of a prefill, all rows together: bounds the memory of activations
MIN_TOKENS = 512  # a shorter pass is not cut in two chunks, which would take a CPU longer


def load_model(config, folder, dtype, world):
    """Return the model with this rank's weights and its collectives. folder: None for random weights."""
    load, lanes = load_shard, config.fixed_lanes  # 8 for spd/8
    if config.named_wiring.model or (lanes and world.shares != (1,) * lanes):  # a Laneformer; several lanes on a rank
        load = load_extra("lanes", f"wiring {config.wiring}").load_lanes
    if world.device.type == "cpu":
        launch.keep_freed_memory()
    with world.together():  # raises an InputError of one rank on all of them
        weights = checkpoint.open_weights(folder, config, world.device)
        dtype = checkpoint.chosen_dtype(dtype, weights if folder else None)
        model = load(config, weights, dtype, world.device, world.rank, world.shares)
    progress.at("preparation", timed=False)  # untimed: waiting for slower ranks is no hang
    if config.quant:
        from kernels import int_linear

        if world.device.type == "cuda":
            find_extra("gpu")  # adds its kernels to the table
        int_linear.use_kernels(model, world.device.type)
    if world.group is not None:
        model.comm = TensorParallel(config, world.shares, world.group)  # extras/lanes wraps it
    return model


# ---- The passes of a model -------------------------------------------------------------------------------------------


class Runner:
    """A model with its static cache, and its prefill and decode, each compiled if asked for.

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
        self.graphs = self.decode_model if compile and self.device.type == "cuda" else None  # for RunAhead
        self.draft = None  # one of extras/drafts, which then makes the steps

    @torch.inference_mode()
    def prefill(self, tokens, lengths, cached_tokens=0):
        """Return logits (B, v) after the last token of each row. tokens (B, S), lengths (B,): as pad makes them.

        Runs passes of at most pass_tokens tokens, all rows together; forward cuts a pass in chunks that overlap.
        cached_tokens: how many of each row's first tokens are in the cache, fewer than it has.
        """
        B, S = tokens.shape
        if self.model.config.linear_layers:  # whose state cannot be rewound
            cached_tokens = 0
        last_index, logits = lengths - 1, None
        width = max(1, self.pass_tokens // B)  # tokens of a row in a pass
        starts = range(cached_tokens, S, width)
        if len(starts) > 8 and self.shows_progress:
            starts = tqdm(starts, "prefill", leave=False, unit="pass", disable=None)  # None: shown at a terminal
        for start in starts:
            inputs = tokens[:, start : start + width]
            positions = cache_length = None  # of a first pass, which reads no cache
            if start:
                progress.at("prefill from token", start)
                cache_length = start + inputs.shape[1]
                positions = torch.arange(start, cache_length, device=tokens.device).expand(B, -1)
            # only the pass with a row's last token counts: earlier logits are replaced, later ones dropped
            select = (last_index - start).clamp(-1, inputs.shape[1] - 1)  # -1: this row ended in an earlier pass
            chunks = self.choose_chunks(*inputs.shape)
            new = self.prefill_model(inputs, positions, self.cache, cache_length, select, chunks)[:, 0]
            logits = new if logits is None else torch.where((last_index >= start)[:, None], new, logits)
        return logits

    @torch.inference_mode()
    def decode(self, tokens, positions, longest):
        """Return the logits (B, S, v) after each of S new tokens (B, S) of each row, the first at its position (B,).

        longest: tokens of the longest row after this pass. A draft may propose tokens beyond the cache: their logits
        are garbage.
        """
        positions = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        positions = positions.clamp(max=cache_slots(self.cache) - 1)  # the scrap slot
        return self.decode_model(tokens, positions, self.cache, self.cache_length(longest))

    def step(self, sequences, done, sample):
        """Return [[the next id] of each row], after its last token, which is not in the cache yet. done: for drafts."""
        tokens, positions, longest = last_tokens(sequences, self.device)
        logits = self.decode(tokens, positions, longest)[:, 0]
        return sample(logits, self.model.comm)[:, None].tolist()

    def new_step(self, cached_tokens=0):
        """Return step(sequences, done, sample) -> [the new ids of each row], for one generation, before its prefill.

        done: which rows have ended. With a draft, a step may return several ids of a row. On a GPU, a step starts the
        next one before it reads its own ids, and is a CUDA graph if compiled (decoding/run_ahead.py).
        """
        if self.draft:
            self.draft.begin(cached_tokens)
            return functools.partial(self.draft.step, self)
        if self.device.type == "cpu":
            return self.step
        from decoding.run_ahead import RunAhead

        return RunAhead(self)

    def cache_length(self, longest):
        """Return how many slots of the cache a pass reads. longest: tokens of the longest row after it.

        On a GPU rounded up, e.g. 513 to 768 and 769 to 1024, at most the cache: each size is a CUDA graph of its own.
        """
        unit = 1 if self.device.type == "cpu" else max(BUCKET, 2 ** ((longest - 1).bit_length() - 2))
        return min(-(-longest // unit) * unit, cache_slots(self.cache) - 1)

    def choose_chunks(self, B, S):
        """Return the number of chunks for a prefill pass of S tokens of B rows."""
        on_cpus = self.device.type == "cpu" and self.model.comm.tp_size > 1  # on GPUs: untried
        overlaps = not self.compiles_prefill  # compiled, all chunks' sums are waited for together: docs/exact.md
        worth_it = on_cpus and overlaps and B * S >= MIN_TOKENS
        return min(S, self.chunks or (2 if worth_it else 1))

    def unguarded(self):
        """Return a context for shapes that warm_up has compiled: it skips guards, 0.5 ms a step of 16 layers."""
        if (self.compiles or self.compiles_prefill) and self.device.type == "cpu":
            return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        return contextlib.nullcontext()


# ---- Generation ------------------------------------------------------------------------------------------------------


class Generation:
    """Continues every prompt, a row each, until its own end-of-sequence, max_new_tokens or the end of the context.

    Iterate over it, once: each step yields a list with the new ids of each row, empty for a row that is done. The
    caller may stop early. What it does between steps is not timed; on a GPU the next step runs meanwhile.

    runner: its cache has slots for the longest prompt and max_new_tokens. prompts: non-empty lists of token ids, of any
    lengths. sample: a Sampler, or without a draft any callable like it. cached_tokens: see Runner.prefill. The
    iteration raises InputError if logits are not finite.
    """

    def __init__(self, runner, prompts, max_new_tokens, sample, eos_ids=(), cached_tokens=0):
        self.runner, self.prompts, self.sample = runner, prompts, sample
        self.eos_ids, self.cached_tokens = eos_ids, cached_tokens
        context = runner.model.config.max_seq_len
        self.sequences = [list(prompt) for prompt in prompts]  # with the new ids, end-of-sequence included
        self.rows = [[] for _ in prompts]  # the new ids of each row, without end-of-sequence
        self.ends = [min(len(prompt) + max_new_tokens, context) for prompt in prompts]
        self.finish_reasons = [None] * len(prompts)  # "stop" (end-of-sequence) or "length" of a row that is done
        self.steps = 0  # of decode
        self.prefill_s = self.decode_s = 0.0  # seconds: to the first tokens; in all later steps

    @torch.inference_mode()
    def __iter__(self):
        runner, step = self.runner, self.runner.new_step(self.cached_tokens)
        progress.at("prefill")
        start = time.perf_counter()
        logits = runner.prefill(*pad(self.prompts, runner.device), self.cached_tokens)
        new = self.take(self.sample(logits, runner.model.comm)[:, None].tolist())  # tolist waits for the device
        self.prefill_s = time.perf_counter() - start
        yield new
        while not all(self.finish_reasons):
            start = time.perf_counter()
            self.steps += 1
            progress.at("decode step", self.steps)
            new = self.take(step(self.sequences, self.finish_reasons, self.sample))
            self.decode_s += time.perf_counter() - start
            yield new

    def take(self, new):
        """Add the ids of a step to each row's sequence, up to its end; return them without end-of-sequence."""
        taken = [[] for _ in new]
        for row, ids in enumerate(new):
            for token in ids:
                if self.finish_reasons[row]:
                    break
                if token == -1:  # Sampler's mark of logits that are not finite
                    where = f"row {row} in step {len(self.rows[row])}"
                    raise InputError(f"the logits of {where} are NaN or infinite: see --dtype")
                self.sequences[row].append(token)
                if token in self.eos_ids:
                    self.finish_reasons[row] = "stop"
                    break
                self.rows[row].append(token)
                taken[row].append(token)
                if len(self.sequences[row]) >= self.ends[row]:
                    self.finish_reasons[row] = "length"
        progress.at("output", timed=False)  # the caller may pause
        return taken

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


def load(job):
    """Load what a cli.Job asks for; returns (its Runner, {"load_s", "compile_s"}: seconds)."""
    args, world, start = job.args, job.world, time.perf_counter()
    model = load_model(job.config, args.checkpoint, args.dtype, world)
    cache = make_cache(model, len(job.prompts), job.slots)
    with world.together():
        runner = Runner(model, cache, compile=args.compile is not None, compile_prefill=args.compile == "all")
        runner.shows_progress = world.rank == 0
        if job.draft_source:
            runner.draft = load_extra("drafts", "--draft").build(job, runner, load_model)
    seconds = {"load_s": time.perf_counter() - start, "compile_s": 0.0}
    if args.compile:
        from runtime import compiling

        world.say("compiling ...")
        seconds["compile_s"] = compiling.warm_up(runner, job.prompts, job.max_new_tokens, job.sample)
    return runner, seconds


def main(argv=None):
    args = cli.parse_generation_flags(__doc__, argv)
    world = launch.join(args.device, vars(args))  # this rank and the others: rank, shares, device, group
    job = cli.Job(args, world)
    runner, seconds = load(job)
    if cli.is_chat(args):
        return load_extra("chat", "--chat without a prompt").chat_on_terminal(job, runner, Generation)
    printer = cli.Printer(world.rank, job.prompts, job.tokenizer, job.max_new_tokens, show_prompt=args.chat is None)
    generation = Generation(runner, job.prompts, job.max_new_tokens, job.sample, job.config.eos_ids)
    with runner.unguarded():
        for ids in generation:
            printer.push(ids)
    result = report.result(job, generation, printer.finish(generation.rows)) | seconds
    world.say(report.summary(result))
    report.append(args.json, result, world)


if __name__ == "__main__":
    launch.run(main)
