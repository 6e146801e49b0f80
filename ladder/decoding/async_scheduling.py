"""Decoding on a GPU without drafts: the GPU gets the next step before the host has read the ids of the last one."""

import torch

import generate
from ladder.decoding import fast_sampling
from ladder.decoding.batch import last_tokens


class AsyncScheduler:
    """Does what Runner.step does, for one generation, but always one step ahead.

    The tokens and positions of each step stay on the GPU. A step and its sampling are one replay of a CUDA graph, if it
    can hold them. It holds no generate.sample that somebody has changed, whose Python would only run in the capture.
    """

    def __init__(self, runner):
        self.runner = runner
        self.ahead = None  # what advance returned for the step in flight

    def __call__(self, sequences, done, sampler):
        """Return [[the next id] of each row]. After the first call, only the lengths of the sequences are used."""
        runner = self.runner
        longest = max(map(len, sequences))
        if self.ahead is None:
            self.ahead = self.advance(*last_tokens(sequences, runner.device)[:2], longest, sampler)
        ids, *inputs = self.ahead
        host_ids = ids.to("cpu", non_blocking=True, copy=True)  # a copy, since the next step may overwrite them
        copied = torch.cuda.current_stream(runner.device).record_event()
        self.ahead = self.advance(*inputs, min(longest + 1, runner.model.config.max_seq_len), sampler)
        copied.synchronize()
        return host_ids[:, None].tolist()

    @torch.inference_mode()
    def advance(self, tokens, positions, longest, sampler):
        """Return (the ids (B,) after tokens (B, 1) at positions (B,), and the tokens and positions of the next step).

        longest: as in Runner.cache_length. The next replay of a graph overwrites the result.
        """
        runner = self.runner
        length = runner.cache_length(longest)
        end = runner.model.config.max_seq_len - 1  # done rows count up to it
        comm = runner.model.comm
        captures = runner.passes.graphs and "gathers" not in comm.on_host and not fast_sampling.is_edited()
        captures = captures and fast_sampling.gathers_as_known(comm)
        key = captures and sampler.graph_key  # None: sampling is not captured in a graph
        decode = runner.passes.graphs.step if key else runner.passes.decode

        def step(tokens, positions):
            logits = decode(tokens, positions[:, None], runner.cache, length)[:, 0]
            ids = generate.sample(logits, runner.model.comm, sampler)
            tokens.copy_(ids.clamp(min=0)[:, None])  # -1, not finite, ends the generation once read
            positions.add_(1).clamp_(max=end)
            return ids, tokens, positions

        if not key:
            return step(tokens, positions)
        return runner.passes.graphs.replay((tokens, positions), (length, key), step, runner.cache, sampler.generator)
