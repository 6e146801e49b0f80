"""Tasks of lm-evaluation-harness on this project's model, in any wiring, quantized or not, with any number of ranks.

Needs lm_eval, which no other file imports. lm-eval's own code chooses the texts, cuts a pair into context and
continuation, and computes the metrics; this file computes the answers.
"""

import contextlib
import json
import math
import os
import random
import sys

import lm_eval
import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tqdm import tqdm

import generate
from evaluation.score import pieces
from formats.checkpoint import first_line
from runtime.errors import InputError

LOGITS = 2**28  # bytes of a batch's logits, where no batch size is given
CACHE = 2**30  # bytes of its KV cache


def by_length(items, rows, width):
    """Yield batches of items of (length, item), longest first, of `rows` items or, if that is None, `width` tokens."""
    items = sorted(items, key=lambda pair: pair[0], reverse=True)
    while items:
        n = rows or max(1, width // items[0][0])
        yield [item for _, item in items[:n]]
        items = items[n:]


class Model(TemplateLM):
    """A model as lm-eval asks it. Every rank gets every request, so to lm-eval each is the only one.

    batch: rows at a time, or None for as many as LOGITS and CACHE allow.
    """

    def __init__(self, model, tokenizer, batch=None):
        super().__init__()
        self.model, self.text, self.rows = model, tokenizer, batch
        self._device, self.max_length = model.device, model.config.max_seq_len

    @property
    def eot_token_id(self):
        return self.model.config.eos_ids[0] if self.model.config.eos_ids else self.text.bos_id

    @property
    def prefix_token_id(self):
        return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

    def tok_encode(self, string, add_special_tokens=None, **_):
        """Return the ids of a text; as in transformers, it may hold special tokens by name, BOS at its start too."""
        ids = self.text.encode_markup(string)
        if add_special_tokens is False or self.text.bos_id is None or ids[:1] == [self.text.bos_id]:
            return ids
        return [self.text.bos_id, *ids]

    def loglikelihood(self, requests, disable_tqdm=False):
        return super().loglikelihood(requests, disable_tqdm or not sys.stderr.isatty())

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """Return [(log p(continuation | context), whether greedy decoding gives it)] for (_, context, continuation).

        What does not fit the model's context is cut from the left.
        """
        asked = {}  # tokens that the model reads: [(request, continuation)]. Choices of one token each share a row.
        for i, (_, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-self.max_length - 1 :]
            asked.setdefault(tuple(tokens[:-1]), []).append((i, continuation))
        answers = [None] * len(requests)
        width = LOGITS // (4 * self.model.config.vocab_size)
        batches = by_length([(len(tokens), tokens) for tokens in asked], self.rows, width)
        for batch in tqdm(batches, desc="likelihoods", unit="batch", delay=1, disable=disable_tqdm or None):
            logits = self.model.comm.gather_logits(self.model(generate.pad(batch, self.device)[0]))  # (B, S, V)
            for row, tokens in zip(logits, batch, strict=True):
                for i, continuation in asked[tokens]:
                    part = row[len(tokens) - len(continuation) : len(tokens)]
                    answers[i] = likelihood(part, torch.tensor(continuation, dtype=torch.long, device=self.device))
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return [log p(text)], in windows of the whole context that do not overlap, except the last."""
        parts, owners = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                parts.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (logp, _) in zip(owners, self._loglikelihood_tokens(parts, disable_tqdm), strict=True):
            totals[i] += logp
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Return [the new text, up to the first stop string] for (text, settings); equal settings share batches."""
        kinds, texts = {}, [None] * len(requests)
        for i, request in enumerate(requests):
            prompt, settings = request.args
            ids = self.tok_encode(prompt) or [self.prefix_token_id]
            kinds.setdefault(json.dumps(settings, sort_keys=True), []).append((i, ids))
        c, itemsize = self.model.config, self.model.dtype.itemsize
        width = CACHE // (2 * c.n_layers * c.n_kv_heads * c.head_dim * itemsize)
        for kind, prompts in kinds.items():
            stops, new, sample = self.settings(json.loads(kind))
            prompts = [(i, ids[-(self.max_length - new) :]) for i, ids in prompts]
            batches = by_length([(len(ids) + new, (i, ids)) for i, ids in prompts], self.rows, width)
            for batch in tqdm(batches, desc="generating", unit="batch", delay=1, disable=disable_tqdm or None):
                rows, contexts = zip(*batch, strict=True)
                for i, text in zip(rows, self.continued(contexts, new, stops, sample), strict=True):
                    texts[i] = text
        return texts

    def settings(self, settings):
        """Return (stop strings, new tokens, sampler); raises InputError for a setting that is not implemented."""
        given = dict(normalize_gen_kwargs(settings))
        stops, new = [stop for stop in given.pop("until") if stop], given.pop("max_gen_toks")
        if new >= self.max_length:
            raise InputError(f"a task's max_gen_toks {new} leaves no room in the model's context of {self.max_length}")
        sampled, temperature = given.pop("do_sample"), given.pop("temperature", 1.0)
        top = given.pop("top_k", None) or None, given.pop("top_p", None) or 1.0
        if given:
            raise InputError(f"a task asks for {next(iter(given))} in generating, which is not implemented")
        return stops, new, generate.Sampler(temperature if sampled else 0, *top, device=self.device)

    def continued(self, prompts, new, stops, sample):
        """Return the texts that follow some prompts, each up to its first stop string."""
        tails, ended = [[] for _ in prompts], [False] * len(prompts)
        most = 4 + max((len(stop.encode()) for stop in stops), default=0)  # a token is at least a byte

        def has_ended(fresh):
            for i, ids in enumerate(fresh):
                tails[i] = tails[i][-most:] + ids
                text = self.text.decode(tails[i])
                ended[i] = ended[i] or not ids or any(stop in text for stop in stops)
            return all(ended)

        cache = generate.make_cache(self.model, len(prompts), max(map(len, prompts)) + new)
        runner = generate.Runner(self.model, cache)
        rows, *_ = generate.generate(runner, prompts, new, sample, self.model.config.eos_ids, has_ended)
        return [postprocess_generated_text(self.text.decode(row), stops, None) for row in rows]


def likelihood(logits, wanted):
    """Return (the sum of log p of the tokens wanted (n,), whether each is the likeliest) by logits (n, V)."""
    total, greedy = 0.0, True
    for part, tokens in pieces(logits, wanted):
        total -= F.cross_entropy(part, tokens, reduction="none").double().sum().item()
        greedy &= bool((part.argmax(-1) == tokens).all())
    if not math.isfinite(total):
        raise InputError(f"a text of a task has the log-likelihood {total}: the model's logits are NaN or infinite")
    return total, greedy


def load_tasks(names, folder=None, shots=None):
    """Return lm-eval's task dict of names of tasks and groups, its own or those of yaml files in a folder.

    shots: examples in a prompt, except where a task insists on none; None: as each task says. Raises InputError.
    """
    random.seed(0)  # as lm-eval does: all ranks must ask the same
    np.random.seed(1234)
    try:
        manager = folder and TaskManager(include_path=folder, include_defaults=False)
        if not (manager and set(names) <= set(manager.all_subtasks)):
            manager = TaskManager(include_path=folder)  # with lm-eval's own, which takes seconds to read
        tasks = manager.load(names)
    except Exception as e:  # an unknown name, data that is nowhere, a wrong yaml file: each library has its own errors
        raise InputError(f"--tasks {','.join(names)}: {first_line(e)}") from None
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=1234)
    return tasks


@contextlib.contextmanager
def one_voice(first):
    """Let only the first rank write, to stderr: on each rank lm-eval and its libraries print bars and warnings."""
    with open(os.devnull, "w") as nothing:
        to = sys.stderr if first else nothing
        with contextlib.redirect_stdout(to), contextlib.redirect_stderr(to):
            yield


def run(lm, tasks, limit=None):
    """Return (lm-eval's scores {task: {"metric,filter": value}} and settings, its table) of `limit` documents each."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's pool would inherit signal handlers; 1,000 draws need none
    found = evaluate(lm, tasks, limit=limit, bootstrap_iters=1000, log_samples=False)
    scores = {task: {k: v for k, v in row.items() if "," in k and v != "N/A"} for task, row in found["results"].items()}
    about = {"num_fewshot": found["n-shot"], "limit": limit, "lm_eval": lm_eval.__version__}
    return {"tasks": scores, **about}, make_table(found).rstrip()
