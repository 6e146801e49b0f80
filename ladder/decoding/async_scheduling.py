"""Plain decoding on a GPU, which gets the next step before the host has read the ids of the last one."""

import torch

from ladder.decoding.batch import last_tokens


class AsyncScheduler:
    """Runner.step of one generation, a step ahead: the tokens and positions of each step stay on the GPU.

    Compiled, a step and the choice of its tokens are the replay of one CUDA graph.
    """

    def __init__(self, runner):
        self.runner, self.ahead = runner, None  # ahead: what advance returned for the step in flight

    def __call__(self, sequences, done, sample):
        """Return [[the next id of a row], ...]. After the first call only the lengths of the sequences count."""
        runner, longest = self.runner, max(map(len, sequences))
        if self.ahead is None:
            self.ahead = self.advance(*last_tokens(sequences, runner.device)[:2], longest, sample)
        ids, *inputs = self.ahead
        read = ids.to("cpu", non_blocking=True, copy=True)  # the next step may overwrite them
        copied = torch.cuda.current_stream(runner.device).record_event()
        self.ahead = self.advance(*inputs, min(longest + 1, runner.model.config.max_seq_len), sample)
        copied.synchronize()
        return read[:, None].tolist()

    @torch.inference_mode()
    def advance(self, tokens, positions, longest, sample):
        """Return (the ids (B,) that follow tokens (B, 1) at positions (B,), the tokens and the positions after them).

        longest: as for Runner.cache_length. The replay of a graph overwrites the last result.
        """
        runner = self.runner
        length, end = runner.cache_length(longest), runner.model.config.max_seq_len - 1  # done rows count on up to it
        key = runner.graphs and getattr(sample, "graph_key", None)  # None: sampling is not captured
        decode = runner.graphs.step if key else runner.decode_model

        def step(tokens, positions):
            ids = sample(decode(tokens, positions[:, None], runner.cache, length)[:, 0], runner.model.comm)
            tokens.copy_(ids.clamp(min=0)[:, None])  # -1, not finite, ends the generation as soon as it is read
            positions.add_(1).clamp_(max=end)
            return ids, tokens, positions

        if not key:
            return step(tokens, positions)
        return runner.graphs.replay((tokens, positions), (length, key), step, runner.cache, sample.generator)
