"""What --draft names: n-grams, or a smaller checkpoint."""

import os.path
import re
from pathlib import Path
from typing import NamedTuple

from ladder.checkpoints import checkpoint
from ladder.checkpoints.compare import check_vocabulary
from ladder.errors import InputError
from model import Config


class Source(NamedTuple):
    """What --draft names.

    count: proposals of a pass. config, folder: of the checkpoint that proposes, None for n-grams.
    """

    name: str
    count: int
    config: Config | None = None
    folder: str | None = None


def read_draft(text, config, folder):
    """Return the Source of --draft for a model of this config. folder: the model's, or None. Raises InputError."""
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
    """Raise InputError unless a model of a config can be drafted for, and one of the config `draft`, if any, drafts."""
    for each in (config, draft or config):
        if not each.rewindable:  # it cannot forget a proposal that is rejected
            names = " and ".join(a.name for a in each.architecture if not a.rewindable)
            raise InputError(f"{flag}: a model with {names} attention neither drafts nor is drafted for: drop it")
    if draft:
        check_vocabulary(config, folder, draft, draft_folder, flag, any_padding=True)
