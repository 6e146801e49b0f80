"""Which layers to rewire? Those that change the model's predictions least, added one at a time; nothing is trained.

python -m extras.training.choose --checkpoint DIR --text FILE --layers 8
python -m extras.training.choose --checkpoint DIR --text FILE --layers 16 --link pcie --gpu h100 --tp 8 --plot loss.png

A layer's cost is the KL divergence from the original, in nats per token, of a model in which it is rewired, too. The
layers below the first rewired one are not computed again. Every other window of the text is for choosing, and the
losses that are printed are those of the others. Retraining (adapt.py) then takes --wiring with the printed wiring.
"""

import torch
import torch.nn.functional as F
from tqdm import tqdm

import eval as evaluate
import generate
from extras.measure import advise, link, plot
from extras.training import partials
from ladder import outputs
from ladder.checkpoints import checkpoint, writing
from ladder.command_line import flags
from ladder.command_line.flags import count, number
from ladder.decoding.batch import pad
from ladder.errors import InputError, naming
from ladder.layers.attention_inputs import attention_metadata
from ladder.ranks import launch
from ladder.text.tokenizer import load_tokenizer
from ladder.wiring_text import wiring_name
from model import find_wiring, interleave, rewired

LOGITS_AT_ONCE = 2**24


class Scorer:
    """Scores wirings of single layers on rows of token ids against the model's own wiring.

    model: a model.Transformer on one device. name: the text of a wiring without layers, such as ladder or ladder-2.
    """

    def __init__(self, model, rows, name):
        self.model = model
        self.original = model.config
        self.name = name
        tokens, lengths = pad(rows, model.device)
        self.tokens = tokens[:, :-1]
        self.targets = tokens[:, 1:]
        self.counts = torch.arange(self.targets.shape[1], device=model.device) < lengths[:, None] - 1
        with torch.inference_mode():
            positions = torch.arange(self.tokens.shape[1], device=model.device).expand(self.tokens.shape)
            self.metadata = attention_metadata(model, positions)
            self.embedded = model.embed(self.tokens)
        self.base = frozenset(), []  # the layers rewired so far, and the partials of their model
        self.logp = [logp for logp, _ in self.log_probabilities(self.base[0], self.base[1])]

    def wiring(self, layers):
        """Return the wiring's text for these layers."""
        name, _, stale, lanes = rewired(self.original, self.name).parsed
        return wiring_name(name, sorted(layers), stale, lanes) if layers else self.original.wiring

    @torch.inference_mode()
    def log_probabilities(self, layers, recorded=None):
        """Yield (log p (n, V), targets (n,)) of some of the counted tokens at a time. recorded: as in partials.loop."""
        config = rewired(self.original, self.wiring(layers))
        done, known = self.base
        first = min(done ^ set(layers), default=config.n_layers)
        known = known[: partials.sublayers_below(config, first)] if known else ()
        (x,) = interleave([partials.loop(self.model, config, self.embedded, self.metadata, known, recorded)])
        x = self.model.norm(x)[self.counts]
        targets = self.targets[self.counts]
        for part, ids in zip(
            *(y.split(max(1, LOGITS_AT_ONCE // config.vocab_size)) for y in (x, targets)), strict=True
        ):
            yield self.model.logits(part).float().log_softmax(-1), ids

    def score(self, layers):
        """Return (KL divergence from the original, -log p), both in nats per token, with these layers rewired."""
        kl = nats = 0.0
        for p, (q, targets) in zip(self.logp, self.log_probabilities(layers), strict=True):
            kl += F.kl_div(q, p, reduction="sum", log_target=True).item()
            nats += F.nll_loss(q, targets, reduction="sum").item()
        return kl / self.counts.sum().item(), nats / self.counts.sum().item()

    def keep(self, layers):
        """Let later scores begin from the partials of the model with these layers rewired."""
        recorded = []
        next(self.log_probabilities(layers, recorded))
        self.base = frozenset(layers), recorded


def choose(scorer, n):
    """Return ([layer, ...] in the order in which they were added, {layer: KL of each alone}).

    Each time that layer is added with which the KL divergence grows least. What a layer added when it was last tried
    is taken as the least that it adds now, so that few are tried again; that is usually so, but not certain.
    """
    alone = {}
    for layer in tqdm(range(scorer.original.n_layers), "each layer alone", disable=None):
        alone[layer] = scorer.score({layer})[0]
    chosen = []
    now = 0.0
    growth = dict(alone)
    for _ in tqdm(range(n), "choosing", disable=None):
        tried = {}
        while growth.keys() - tried.keys():
            layer = min(growth.keys() - tried.keys(), key=growth.get)
            if tried and growth[layer] >= min(tried.values()):
                break
            tried[layer] = growth[layer] = (scorer.score({*chosen, layer})[0] if chosen else alone[layer]) - now
        best = min(tried, key=tried.get)
        chosen.append(best)
        now += growth.pop(best)
        scorer.keep(chosen)
    return chosen, alone


def parse(argv):
    p = flags.Parser(__doc__)
    from_two = number(int, 2)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="the folder whose layers to choose from")
    p.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to score, of the kind it will see")
    p.add_argument("--layers", type=count, required=True, metavar="N", help="how many to rewire, e.g. 8")
    p.add_argument("--wiring", default="ladder", metavar="NAME[-K]", help="how to rewire them (default: ladder)")
    p.add_argument("--max-tokens", type=from_two, default=2000, metavar="N", help="of the text (default: 2000)")
    p.add_argument("--window", type=from_two, default=256, metavar="N", help="tokens of a window (default: 256)")
    p.add_argument("--dtype", **flags.one_of(checkpoint.DTYPES), help="default: the checkpoint's own")
    flags.add_rank_flags(p, comm=False)
    p.add_argument("--plot", metavar="FILE", help="draw the losses as a .png or .svg")
    flags.add_json_flag(p, "the results")
    g = p.add_argument_group("predicted speed")
    g.add_argument("--link", type=link.parse, metavar="LINK", help=f"between the ranks: {link.LINK_FORMS}")
    g.add_argument("--tp", type=from_two, default=8, metavar="N", help="ranks (default: 8)")
    g.add_argument("--batch", type=count, default=1, metavar="B", help="rows (default: 1)")
    g.add_argument("--gpu", **flags.one_of(advise.GPUS), default="h100", help="of each rank (default: h100)")
    return p.parse_args(argv)


def speeds(own, wirings, dtype, args):
    """Return how many times as fast as the model's own wiring each of these decodes over args.link, as predicted."""
    args.tflops = None
    context = min(advise.FILLED_SLOTS, own.max_seq_len)
    machine = advise.choose_machine(args)
    work = advise.decode_work(own, dtype, args.tp, args.batch, context)
    configs = [rewired(own, wiring) for wiring in (own.wiring, *wirings)]
    times = [advise.times_of(c, work, dtype, args.tp, args.batch, machine, args.link) for c in configs]
    own_seconds, *seconds = (advise.step_seconds(*pair)[0] for pair in zip(configs, times, strict=True))
    return [own_seconds / each for each in seconds]


def read(args):
    """Return (the model's Config, rows of token ids to choose by, rows to report). Raises InputError."""
    config = writing.read_original(args.checkpoint)
    with naming("--wiring"):
        chosen = rewired(config, args.wiring)
        wired = chosen.named_wiring
        if (
            chosen.parsed.parameter is not None
            or not wired.takes_layers
            or wired.layers_per_input > 1
            or wired.reads_partials
            or wired.left_out() != find_wiring("standard")
            or config.named_wiring != rewired(config, "standard").named_wiring
        ):
            raise InputError(
                f"{args.wiring} of {config.wiring}: layers are chosen one by one, for a standard model "
                "and a wiring such as ladder or ladder-2, without its layers"
            )
    if args.layers > config.n_layers:
        raise InputError(f"--layers {args.layers}: the model has {config.n_layers}")
    tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
    if tokenizer is None:
        raise InputError(f"{args.checkpoint} has no tokenizer")
    documents, _ = evaluate.read_documents(args, tokenizer)
    size = min(args.window, config.max_seq_len)
    rows = [ids[i : i + size] for ids in documents for i in range(0, len(ids) - 1, size)]
    return config, rows[::2], rows[1::2] or rows


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args))
    if not world.alone:
        raise InputError("layers are chosen by one process: start it without torchrun")
    config, rows, others = read(args)
    model = generate.load_model(config, args.checkpoint, args.dtype, world)
    chosen, alone = choose(Scorer(model, rows, args.wiring), args.layers)
    scorer = Scorer(model, others, args.wiring)
    n = config.n_layers
    sets = {"chosen": chosen, "last": [*range(n - 1, -1, -1)], "first": [*range(n)]}
    sets = {name: [sorted(order[:i]) for i in range(1, args.layers + 1)] for name, order in sets.items()}
    original = scorer.score(())[1]
    curves = {name: [scorer.score(layers) for layers in each] for name, each in sets.items()}
    ends = {name: (scorer.wiring(each[-1]), *curves[name][-1]) for name, each in sets.items()}
    times = speeds(config, [wiring for wiring, *_ in ends.values()], model.dtype, args) if args.link else [None] * 3
    print("each layer alone, KL divergence: " + ", ".join(f"{layer} {kl:.4f}" for layer, kl in alone.items()))
    print(f"original: {original:.4f} nats per token, of {sum(map(len, others)) - len(others)} tokens")
    for (name, (wiring, kl, nats)), speed in zip(ends.items(), times, strict=True):
        words = f"{name} {args.layers}: {nats:.4f} nats ({nats - original:+.4f}), KL divergence {kl:.4f}"
        print(words + (f", predicted {speed:.2f} times as fast over {args.link.name}" if speed else "") + f": {wiring}")
    if args.plot:
        series = {name: enumerate([original, *(nats for _, nats in each)]) for name, each in curves.items()}
        title = f"{args.checkpoint}, layers as {args.wiring}, not retrained"
        plot.draw(args.plot, title, series, xlabel="layers rewired", ylabel="nats per token")
    if args.json:
        line = {"checkpoint": config.wiring, "order": chosen, "alone": alone, "original": original, "curves": curves}
        outputs.append_line(args.json, line)
    print(f"--wiring {ends['chosen'][0]}")


if __name__ == "__main__":
    launch.run(main)
