"""Reads what --draft names, n-grams or a smaller checkpoint, and makes a Draft of it."""

import os.path
import re
from pathlib import Path
from typing import NamedTuple

from generate import load_model
from ladder.checkpoints import checkpoint
from ladder.checkpoints.compare import check_vocabulary
from ladder.decoding.speculative import Ngrams, SmallModel
from ladder.errors import InputError
from ladder.ranks.launch import World
from model import Config


class Source(NamedTuple):
    """What --draft names.

    count: how many tokens are proposed in each pass. config, folder: of the checkpoint that proposes; None for n-grams.
    """

    name: str
    count: int
    config: Config | None = None
    folder: str | None = None


def read_draft(text, config, folder):
    """Return the Source that --draft names, for a model of this config and folder (or None). Raises InputError."""
    name, count = re.fullmatch(r"(?s)(.*?)(?:@(\d{1,9}))?", text).groups(default="3")
    if not 1 <= int(count) < config.max_seq_len:
        raise InputError(f"--draft {text}: @{count} must be from 1 to the context of {config.max_seq_len}")
    source = Source(name, int(count))
    if name != "ngram":
        if not os.path.isdir(name):
            raise InputError(f"--draft {text!r} is no folder, nor is it ngram")
        source = Source(Path(name).resolve().name, int(count), checkpoint.read_config(name), name)
    check_models(f"--draft {name}", config, folder, source.config, source.folder)
    return source


def check_models(flag, config, folder=None, draft=None, draft_folder=None):
    """Raise InputError unless a model of `config` can have a draft, and one of the config `draft` can be it."""
    if config.linear_layers or (draft and draft.linear_layers):  # the state cannot forget a rejected proposal
        raise InputError(f"{flag}: a model with linear_layers neither drafts nor is drafted for: drop it")
    if draft:
        check_vocabulary(config, folder, draft, draft_folder, flag)


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
