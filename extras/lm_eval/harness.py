"""lm-eval's model interface on this project's model, in any wiring, quantized or not, with any number of ranks.

lm-eval chooses the texts, cuts a pair into context and continuation, and computes the metrics.
"""

import contextlib
import io
import json
import os
import random
import sys
from collections import defaultdict

import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tqdm import tqdm

import generate
from decoding.sampling import pad
from formats.checkpoint import first_line
from runtime.errors import InputError

MAX_BYTES = 2**28  # of the logits or the cache of a batch, where no batch size is given


class Model(TemplateLM):
    """A model as lm-eval asks it. Every rank gets every request, so that to lm-eval each is the only one.

    batch: rows at a time, or None for as many as MAX_BYTES allows.
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

    def batches(self, items, bytes_of_token, n_new=0):
        """Yield lists of items, tuples that begin with token ids, longest first. n_new: tokens that each row grows."""
        items = sorted(items, key=lambda item: len(item[0]), reverse=True)
        with tqdm(total=len(items), desc="tasks", unit="text", delay=1, disable=None) as bar:
            while items:
                rows = self.batch or max(1, MAX_BYTES // (bytes_of_token * (len(items[0][0]) + n_new)))
                yield items[:rows]
                bar.update(len(items[:rows]))
                items = items[rows:]

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, **_):
        """Return [(log p(continuation | context), whether greedy decoding gives it)] for (_, context, continuation).

        A text longer than the model's context loses its beginning.
        """
        questions, answers = defaultdict(list), [None] * len(requests)
        for i, (_, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-self.max_length - 1 :]
            questions[tuple(tokens[:-1])].append((i, continuation))  # several may share a row
        for batch in self.batches(questions.items(), 4 * self.model.config.vocab_size):
            logits = self.model.comm.gather_logits(self.model(pad([tokens for tokens, _ in batch], self.device)[0]))
            for row, (tokens, asked) in zip(logits, batch, strict=True):  # row: (S, V)
                for i, continuation in asked:
                    targets = torch.tensor(continuation, dtype=torch.long, device=self.device)
                    logp = row[len(tokens) - len(targets) : len(tokens)].float().log_softmax(-1)
                    total = logp.gather(-1, targets[:, None]).double().sum()
                    if not total.isfinite():
                        raise InputError(f"a text of a task has the log-likelihood {total}: logits are not finite")
                    answers[i] = total.item(), bool((logp.argmax(-1) == targets).all())
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return [log p(text)], in windows of the whole context that do not overlap, except the last."""
        windows = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((i, *make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for (i, *_), (logp, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += logp
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Return [the new text, up to the first stop string] for (text, settings); equal settings share batches."""
        by_settings, texts, c = defaultdict(list), {}, self.model.config
        for i, request in enumerate(requests):
            prompt, settings = request.args
            ids = self.tok_encode(prompt) or [self.prefix_token_id]
            by_settings[json.dumps(settings, sort_keys=True)].append((ids, i))
        for settings, prompts in by_settings.items():
            stops, n_new, sampler = self.generation(json.loads(settings))
            cut = [(ids[-(self.max_length - n_new) :], i) for ids, i in prompts]
            for batch in self.batches(cut, 8 * c.n_layers * c.n_kv_heads * c.head_dim, n_new):
                ids, order = zip(*batch, strict=True)
                texts |= zip(order, self.continuations(ids, n_new, stops, sampler), strict=True)
        return [texts[i] for i in range(len(requests))]

    def generation(self, settings):
        """Return (stop strings, number of new tokens, Sampler); raise InputError for settings that are unknown here."""
        left = dict(normalize_gen_kwargs(settings))
        stops, n_new = [stop for stop in left.pop("until") if stop], left.pop("max_gen_toks")
        if n_new >= self.max_length:
            raise InputError(f"a task's max_gen_toks {n_new} leaves no room in the context of {self.max_length}")
        temperature = left.pop("temperature", 1.0) if left.pop("do_sample") else 0
        limits = left.pop("top_k", None) or None, left.pop("top_p", None) or 1.0
        if left:
            raise InputError(f"a task asks for {next(iter(left))} in generating, which is not implemented")
        return stops, n_new, generate.Sampler(temperature, *limits, device=self.device)

    def continuations(self, prompts, n_new, stops, sampler):
        """Return the texts that follow some prompts, lists of ids, each up to its first stop string."""
        written = [[] for _ in prompts]

        def have_ended(new_ids):
            for row, ids in zip(written, new_ids, strict=True):
                row += ids
            texts = [self.text.decode(row) for row in written]
            return all(not ids or any(stop in text for stop in stops) for ids, text in zip(new_ids, texts, strict=True))

        cache = generate.make_cache(self.model, len(prompts), max(map(len, prompts)) + n_new)
        runner = generate.Runner(self.model, cache)
        rows, *_ = generate.generate(runner, prompts, n_new, sampler, self.model.config.eos_ids, have_ended)
        return [postprocess_generated_text(self.text.decode(row), stops, None) for row in rows]


@contextlib.contextmanager
def output_of_rank_0(show):
    """Send what lm-eval and its libraries print to stderr, or, on the other ranks, nowhere."""
    target = sys.stderr if show else io.StringIO()
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
