"""Shapes for benchmarks: the config.json files of published models by short names, or a file of one's own."""

import dataclasses
import re
from pathlib import Path

from ladder.checkpoints.checkpoint import read_json
from ladder.errors import InputError, did_you_mean
from ladder.ranks.world import say
from ladder.sources.huggingface import read_config

SIZES = Path(__file__).with_suffix(".json")  # {a name: what its config.json says}


def named_size(text):
    """Return the Config of NAME[:N][:QUANT], such as 8b, 8b:4 or 8b:4:int8. Raises InputError.

    NAME: of SIZES, or a Hugging Face config.json. N: that many layers of it. QUANT: fp8, int8, int4, or the latter two
    with :GROUP_SIZE. It has no eos_ids, since random weights should not end a text.
    """
    pattern = r"(.*?)(?::([1-9]\d*))?(?::(fp8|int[84])(?::(\d+))?)?"
    name, n_layers, quant, group_size = re.fullmatch(pattern, text, re.DOTALL).groups()
    sizes = read_json(SIZES)
    if name.endswith(".json"):
        values = read_json(Path(name))
    elif name in sizes:
        values = sizes[name]
    else:
        names = ", ".join(sorted(sizes))
        words = f"give NAME, NAME:N with N layers, or NAME:N:int8, int4 or fp8, of {names}, or of a config.json"
        raise InputError(f"--model {text} is no size: {words}{did_you_mean(name.partition(':')[0], sizes)}")
    if values.get("quantization_config"):
        raise InputError(f"--model {name}: quantization_config is not read; name a form instead, e.g. {name}:int8")
    hf, config = read_config(values, f"--model {name}", generated={})
    if hf["ignored"]:
        say(f"ignored in {name}, since transformers does not read it: {', '.join(hf['ignored'])}")
    n_layers = int(n_layers or config.n_layers)
    if n_layers > config.n_layers:
        raise InputError(f"--model {text} asks for {n_layers} layers, but {name} has {config.n_layers}")
    if quant == "int4":
        group_size = group_size or 64
    return dataclasses.replace(
        config,
        n_layers=n_layers,
        architecture=tuple(each.of_first_layers(n_layers) for each in config.architecture),
        quant=quant,
        group_size=group_size and int(group_size),
        bos_id=None,
        eos_ids=(),
    )
