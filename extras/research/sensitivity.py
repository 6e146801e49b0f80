"""What each layer of a standard model alone costs in another wiring: eval.py --sensitivity."""

from tqdm import tqdm

from formats.wiring_text import wiring_name
from model import WIRINGS, parse_wiring, rewired
from runtime.errors import InputError


def alone(config, wiring, layer):
    """Return the Config with only this layer (of a pair: and the next) in a wiring; InputError unless standard."""
    parsed = parse_wiring(wiring)
    if config.wiring != "standard" or parsed.parameter is not None:
        raise InputError(f"--sensitivity takes a standard model and a wiring NAME, not {config.wiring} and {wiring}")
    layers = tuple(range(layer, layer + WIRINGS[parsed.name].blocks))
    return rewired(config, wiring_name(*parsed._replace(parameter=layers)))


def table(model, nats, loss, wiring, show):
    """Return (results as a dict, a table in words): loss(model) with only layer i of a standard model in a wiring, for
    each i; of a pair layers i, i + 1.

    nats: the loss of the standard model. Raises InputError as alone() does.
    """
    own, losses, head = model.config, [], f"{wiring} layer"
    configs = [alone(own, wiring, i) for i in range(own.n_layers + 1 - WIRINGS[parse_wiring(wiring).name].blocks)]
    for config in tqdm(configs, desc="sensitivity", unit="layer", delay=1, disable=None if show else True):
        model.config = config
        losses.append(loss(model))
    model.config = own
    rows = [f"{head}  nats per token", f"{'none':>{len(head)}}  {nats:14.4f}"]
    for i in sorted(range(len(losses)), key=losses.__getitem__):
        rows.append(f"{i:{len(head)}}  {losses[i]:14.4f}  {losses[i] - nats:+.4f}")
    return {"sensitivity_wiring": wiring, "sensitivity": losses}, "\n".join(rows)
