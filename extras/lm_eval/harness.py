"""lm-eval's model interface on this project's model, in any wiring, quantized or not, with any number of ranks.

lm-eval chooses the texts, cuts a pair into context and continuation, and computes the metrics; Model, below, answers
its requests. Shape letters: model.py.
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
from decoding.sampling import pad
from evaluation.score import float_chunks
from formats.checkpoint import first_line
from runtime.errors import InputError

MAX_LOGITS_BYTES = 2**28  # of a batch, where no batch size is given
MAX_CACHE_BYTES = 2**30  # likewise


def batches(items, rows, max_tokens):
    """Yield lists of items, given as (length, item), longest first: of `rows`, or of what fits max_tokens padded."""
    items = sorted(items, key=lambda pair: pair[0], reverse=True)
    with tqdm(total=len(items), desc="tasks", unit="text", delay=1, disable=None) as bar:
        while items:
            batch = items[: rows or max(1, max_tokens // items[0][0])]
            yield [item for _, item in batch]
            items = items[len(batch) :]
            bar.update(len(batch))


def log_likelihood(logits, targets):
    """Return (the sum of log p of targets (n,), whether each is the likeliest token), given logits (n, V)."""
    total, is_greedy = 0.0, True
    for chunk, tokens in float_chunks(logits, targets):
        total -= F.cross_entropy(chunk, tokens, reduction="none").double().sum().item()
        is_greedy &= bool((chunk.argmax(-1) == tokens).all())
    if not math.isfinite(total):
        raise InputError(f"a text of a task has the log-likelihood {total}: the model's logits are NaN or infinite")
    return total, is_greedy


class Model(TemplateLM):
    """A model as lm-eval asks it. Every rank gets every request, so that to lm-eval each is the only one.

    batch: rows at a time, or None for as many as MAX_LOGITS_BYTES and MAX_CACHE_BYTES allow.
    """

    def __init__(self, model, tokenizer, batch=None):
        super().__init__()
        self.model, self.text, self.batch = model, tokenizer, batch
        self._device, self.max_length = model.device, model.config.max_seq_len

    @property
    def eot_token_id(self):
        return self.model.config.eos_ids[0] if self.model.config.eos_ids else self.text.bos_id

    @property
    def prefix_token_id(self):
        return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

    def tok_encode(self, string, add_special_tokens=None, **_):
        """Return the ids of a text, in which special tokens may stand by name, as in transformers."""
        ids = self.text.encode_markup(string)
        if add_special_tokens is False or self.text.bos_id is None or ids[:1] == [self.text.bos_id]:
            return ids
        return [self.text.bos_id, *ids]

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, **_):
        """Return [(log p(continuation | context), whether greedy decoding gives it)] for (_, context, continuation).

        A text longer than the model's context loses its beginning.
        """
        questions = {}  # {the tokens that the model reads: [(request, continuation)]}; several may share a row
        for i, (_, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-self.max_length - 1 :]
            questions.setdefault(tuple(tokens[:-1]), []).append((i, continuation))
        answers, max_tokens = [None] * len(requests), MAX_LOGITS_BYTES // (4 * self.model.config.vocab_size)
        for batch in batches([(len(tokens), tokens) for tokens in questions], self.batch, max_tokens):
            logits = self.model.comm.gather_logits(self.model(pad(batch, self.device)[0]))  # (B, S, V)
            for row, tokens in zip(logits, batch, strict=True):
                for i, continuation in questions[tokens]:
                    targets = torch.tensor(continuation, dtype=torch.long, device=self.device)
                    answers[i] = log_likelihood(row[len(tokens) - len(targets) : len(tokens)], targets)
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return [log p(text)], in windows of the whole context that do not overlap, except the last."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (logp, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += logp
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Return [the new text, up to the first stop string] for (text, settings); equal settings share batches."""
        by_settings, texts, c = {}, [None] * len(requests), self.model.config
        for i, request in enumerate(requests):
            prompt, settings = request.args
            ids = self.tok_encode(prompt) or [self.prefix_token_id]
            by_settings.setdefault(json.dumps(settings, sort_keys=True), []).append((i, ids))
        max_tokens = MAX_CACHE_BYTES // (2 * c.n_layers * c.n_kv_heads * c.head_dim * 4)
        for settings, prompts in by_settings.items():
            stops, n_new, sampler = self.generation(json.loads(settings))
            cut = [(i, ids[-(self.max_length - n_new) :]) for i, ids in prompts]
            for batch in batches([(len(ids) + n_new, (i, ids)) for i, ids in cut], self.batch, max_tokens):
                order, contexts = zip(*batch, strict=True)
                for i, text in zip(order, self.continuations(contexts, n_new, stops, sampler), strict=True):
                    texts[i] = text
        return texts

    def generation(self, settings):
        """Return (stop strings, number of new tokens, Sampler); raise InputError for settings that are unknown here."""
        left = dict(normalize_gen_kwargs(settings))
        stops, n_new = [stop for stop in left.pop("until") if stop], left.pop("max_gen_toks")
        if n_new >= self.max_length:
            raise InputError(
                f"a task's max_gen_toks {n_new} leaves no room in the model's context of {self.max_length}"
            )
        is_sampled, temperature = left.pop("do_sample"), left.pop("temperature", 1.0)
        limits = left.pop("top_k", None) or None, left.pop("top_p", None) or 1.0
        if left:
            raise InputError(f"a task asks for {next(iter(left))} in generating, which is not implemented")
        return stops, n_new, generate.Sampler(temperature if is_sampled else 0, *limits, device=self.device)

    def continuations(self, prompts, n_new, stops, sampler):
        """Return the texts that follow some prompts, lists of ids, each up to its first stop string."""
        tails, ended = [[] for _ in prompts], [False] * len(prompts)
        longest = 4 + max((len(stop.encode()) for stop in stops), default=0)  # tokens: each is at least a byte

        def has_ended(new_ids):
            for i, ids in enumerate(new_ids):
                tails[i] = tails[i][-longest:] + ids
                text = self.text.decode(tails[i])
                ended[i] = ended[i] or not ids or any(stop in text for stop in stops)
            return all(ended)

        cache = generate.make_cache(self.model, len(prompts), max(map(len, prompts)) + n_new)
        runner = generate.Runner(self.model, cache)
        rows, *_ = generate.generate(runner, prompts, n_new, sampler, self.model.config.eos_ids, has_ended)
        return [postprocess_generated_text(self.text.decode(row), stops, None) for row in rows]


@contextlib.contextmanager
def output_of_rank_0(show):
    """Send what lm-eval and its libraries print to stderr, or, on the other ranks, nowhere."""
    with open(os.devnull, "w") as nowhere:
        target = sys.stderr if show else nowhere
        with contextlib.redirect_stdout(target), contextlib.redirect_stderr(target):
            yield


def load_tasks(names, folder=None, shots=None, show=True):
    """Return lm-eval's task dict for names of tasks and groups, its own or those of yaml files in a folder.

    shots: examples in a prompt, unless a task insists on none; None: as each task says. Raises InputError.
    """
    random.seed(0)  # as lm-eval does: all ranks must ask the same
    np.random.seed(1234)
    with output_of_rank_0(show):
        try:
            manager = folder and TaskManager(include_path=folder, include_defaults=False)
            if not (manager and set(names) <= set(manager.all_subtasks)):
                manager = TaskManager(include_path=folder)  # with lm-eval's own, which takes seconds to read
            tasks = manager.load(names)
        except Exception as e:  # each library has its own: unknown names, missing data, wrong yaml
            raise InputError(f"--tasks {','.join(names)}: {first_line(e)}") from None
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=1234)
    return tasks


def run(lm, tasks, limit=None, show=True):
    """Return ({"tasks": {task: {"metric,filter": value}}, settings}, lm-eval's table) of `limit` documents a task."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's pool would inherit signal handlers; 1,000 draws need none
    with output_of_rank_0(show):
        result = evaluate(lm, tasks, limit=limit, bootstrap_iters=1000, log_samples=False)
    rows = result["results"].items()
    scores = {task: {k: v for k, v in row.items() if "," in k and v != "N/A"} for task, row in rows}
    settings = {"num_fewshot": result["n-shot"], "limit": limit, "lm_eval": lm_eval.__version__}
    return {"tasks": scores, **settings}, make_table(result).rstrip()
