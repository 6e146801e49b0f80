"""What --draft names: n-grams, a smaller checkpoint, or the model's own weights in another wiring."""

import copy
import os.path
import re
from pathlib import Path
from typing import NamedTuple

from extras.drafts.speculative import ModelDraft, Ngrams, SmallModel
from extras.runner import like
from formats import checkpoint
from formats.compare import check_vocabulary
from formats.fields import wiring_name
from model import WIRINGS, Config, rewired
from runtime.errors import InputError
from runtime.launch import World


class Source(NamedTuple):
    """What --draft names.

    count: proposals of a pass. config: of the model that proposes, None for n-grams. folder: its checkpoint, None for
    the model's own weights.
    """

    name: str
    count: int
    config: Config | None = None
    folder: str | None = None


def read_draft(text, config, folder, tp_size):
    """Return the Source of --draft for a model of this config. folder: the model's, or None. Raises InputError."""
    name, count = re.fullmatch(r"(?s)(.*?)(?:@(\d{1,9}))?", text).groups(default="3")
    if not 1 <= int(count) < config.max_seq_len:
        raise InputError(f"--draft {text}: @{count} must be from 1 to the context of {config.max_seq_len}")
    source = Source(name, int(count))
    if name.startswith("wiring:"):
        source = source._replace(config=wiring_of(config, name, tp_size))
    elif name != "ngram":
        if not os.path.isdir(name):
            raise InputError(f"--draft {text!r} is no folder, nor is it ngram or wiring:NAME")
        source = Source(Path(name).resolve().name, int(count), checkpoint.read_config(name), name)
    check_models(f"--draft {name}", config, folder, source.config, source.folder)
    return source


def check_models(flag, config, folder=None, draft=None, draft_folder=None):
    """Raise InputError unless a model of a config can be drafted for, and one of the config `draft`, if any, drafts."""
    if config.linear_layers or (draft and draft.linear_layers):  # a state cannot forget a proposal that is rejected
        raise InputError(f"{flag}: a model with linear_layers neither drafts nor is drafted for: drop it")
    if draft:
        check_vocabulary(config, folder, draft, draft_folder, flag)


def wiring_of(config, name, tp_size):
    """Return the config in the wiring that --draft wiring:NAME names, in the lanes of the weights. Raises InputError.

    Without lanes in its config, a checkpoint has as many lanes as there are ranks.
    """
    try:
        named, lanes = rewired(config, name.removeprefix("wiring:")).parsed, config.fixed_lanes or tp_size
        if named.lanes is None and WIRINGS[named.name].depends_on_lanes:
            named = named._replace(lanes=config.fixed_lanes)
        draft = rewired(config, wiring_name(*named))
    except InputError as e:
        raise InputError(f"--draft {name}: {e}") from None
    if (draft.fixed_lanes or lanes) != lanes:
        raise InputError(f"--draft {name} needs the weights in {draft.fixed_lanes} lanes, one a rank; here are {lanes}")
    if draft.mlps != config.mlps and lanes > 1:
        raise InputError(f"--draft {name} has other shards of the shared expert than {config.wiring}: name another")
    pairs = zip(draft.layer_wirings, config.layer_wirings, strict=True)
    if missing := {norm for drafts, own in pairs for norm in {*drafts.norms} - {*own.norms}}:
        raise InputError(f"--draft {name} needs {min(missing)}, which {config.wiring} has not")
    if draft.wiring_key == config.wiring_key:
        raise InputError(f"--draft {name} is the wiring that the model runs in: name another")
    return draft


def rewire(model, config):
    """Return the model of the same weights in the wiring of another config."""
    model = copy.copy(model)
    model.config = config
    return model


def build(job, runner, load_model):
    """Return the Draft that a cli.Job asks for, to help the model of its Runner. load_model: generate.py's."""
    source, alone = job.draft_source, World(0, 1, job.world.device)  # its own weights are not sharded
    if source.config is None:
        return Ngrams(source.count)
    if source.folder is None:
        return ModelDraft(source.count, like(runner, rewire(runner.model, source.config), runner.cache))
    return SmallModel(source.count, like(runner, load_model(source.config, source.folder, job.args.dtype, alone)))


def of_model(draft, count, runner):
    """Return the Draft that complete()'s `draft` asks for, "ngram" or a model, to help the model of a Runner."""
    check_models("draft", runner.model.config, draft=None if draft == "ngram" else draft.config)
    return Ngrams(count) if draft == "ngram" else SmallModel(count, like(runner, draft))
