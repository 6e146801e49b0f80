"""The drafts of a Runner: made from what --draft names, or from what complete() is given."""

import dataclasses

from generate import load_model
from ladder.command_line.draft_flag import check_models
from ladder.decoding.speculative import Ngrams, SmallModel
from ladder.errors import InputError
from ladder.ranks.world import World


def build(job, runner):
    """Return the Draft that a Job asks for. runner: of the model that it is to help."""
    source = job.draft_source
    alone = World(0, 1, job.world.device)  # each rank loads the whole draft model
    if source.config is None:
        return Ngrams(source.count)
    model = load_model(source.config, source.folder, job.args.dtype, alone)
    return SmallModel(source.count, runner.like(model), runner.model.config.vocab_size)


def of_model(draft, count, runner, n_tokens=0):
    """Return the Draft for complete()'s argument `draft`, "ngram" or a model. runner: of the model that it helps.

    n_tokens: how many the tokenizer has, if it is known. The draft's table may be padded otherwise than the model's.
    """
    if draft != "ngram" and not hasattr(draft, "config"):
        raise InputError(f"draft is {draft!r} but must be None, 'ngram' or a model")
    config = runner.model.config
    small = None if draft == "ngram" else draft.config
    if small and 0.95 * small.vocab_size <= n_tokens <= small.vocab_size:  # as load_tokenizer demands it
        small = dataclasses.replace(small, vocab_size=config.vocab_size)
    check_models("draft", config, draft=small)
    return Ngrams(count) if draft == "ngram" else SmallModel(count, runner.like(draft), config.vocab_size)
