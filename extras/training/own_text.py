"""Text that a teacher writes itself, at temperature 1, to retrain on: adapt.py --own-text."""

import functools
import os

import numpy as np
from tqdm import tqdm

import generate
from extras.training import sharding
from extras.training.data import TOKEN
from ladder.decoding.batch import Sampler, make_cache
from ladder.errors import InputError
from ladder.text.tokenizer import load_tokenizer

ROWS = 64  # documents that are written at once
FIRST_DOCUMENT = 2**31  # the index of the first of them; those of --text have lower ones


def opening(tokenizer, config, folder):
    """Return the ids with which each document begins: what a chat template puts before a user's words, or else BOS.

    Raises InputError if there is neither.
    """
    if tokenizer.template:
        one, other = (tokenizer.chat([{"role": "user", "content": text}], answer=False) for text in ("A", "Z"))
        same = os.path.commonprefix([one, other])
        if same and same != one:
            return same
    if config.bos_id is None:
        raise InputError(f"--own-text: {folder} has neither a chat template nor a BOS token to begin with")
    return [config.bos_id]


def write(path, config, args, world):
    """Let the teacher write documents of args.seq_len tokens to the file `path`, more than args.own_text tokens.

    Each begins with `opening` and goes on beyond every end-of-sequence: of a chat, to the answer that follows the
    question. The file grows by ROWS documents at a time, so that a run that was killed goes on with the next ones. All
    ranks compute; rank 0 writes.
    """
    size = args.seq_len
    n = args.own_text // args.seq_len + 1
    bytes_of_batch = ROWS * size * TOKEN.itemsize
    there = path.stat().st_size if world.rank == 0 and path.exists() else 0
    (there,) = map(int, sharding.summed([there], world))
    if there >= n * size * TOKEN.itemsize:
        return
    with world.together():
        prompt = opening(load_tokenizer(args.distill, config.vocab_size), config, args.distill)
        if len(prompt) >= size:
            raise InputError(f"--seq-len {size} is no longer than the {len(prompt)} tokens that begin each document")
    done = there // bytes_of_batch
    model = generate.load_model(config, args.distill, args.compute_dtype, world)

    @functools.lru_cache(1)  # all batches but the last one have as many rows
    def runner_of(rows):
        return generate.Runner(model, make_cache(model, rows, size))

    for batch in tqdm(range(done, -(-n // ROWS)), "writing", unit="batch", disable=None if world.rank == 0 else True):
        rows = min(ROWS, n - batch * ROWS)
        sample = Sampler(1.0, seed=(args.seed * 1_000_003 + batch) % 2**64, device=world.device)
        sequences = generate.generate(runner_of(rows), [prompt] * rows, size - len(prompt), sample).sequences
        tokens = np.empty((rows, size), TOKEN)
        tokens["id"] = sequences
        tokens["document"] = FIRST_DOCUMENT + batch * ROWS + np.arange(rows)[:, None]
        with world.together():  # nobody reads the file before it is complete
            if world.rank == 0:
                with open(path, "r+b" if path.exists() else "wb") as f:
                    f.truncate(batch * bytes_of_batch)  # of a batch that was being written
                    f.seek(0, os.SEEK_END)
                    tokens.tofile(f)
