"""The drafts of a Runner: made from what --draft names, or from what complete() is given."""

from generate import load_model
from ladder.command_line.draft_flag import check_models
from ladder.decoding.speculative import Ngrams, SmallModel
from ladder.ranks.world import World


def build(job, runner):
    """Return the Draft that a Job asks for. runner: of the model that it is to help."""
    source, alone = job.draft_source, World(0, 1, job.world.device)  # each rank loads the whole draft model
    if source.config is None:
        return Ngrams(source.count)
    return SmallModel(source.count, runner.like(load_model(source.config, source.folder, job.args.dtype, alone)))


def of_model(draft, count, runner):
    """Return the Draft for complete()'s argument `draft`, "ngram" or a model. runner: of the model that it helps."""
    check_models("draft", runner.model.config, draft=None if draft == "ngram" else draft.config)
    return Ngrams(count) if draft == "ngram" else SmallModel(count, runner.like(draft))
