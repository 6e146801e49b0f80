"""Do the tests see a mistake? Each mutant is one, and the named tests should fail with it.

python tests/mutants.py [WORD ...]     # default: all; else those whose file or texts hold one of the words

Every mutant gets a temporary copy of the tree. Ends with 1 if one survives, or if its old text is not there just once.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

ORDER, NAIVE = "wiring -k order_of_the_plain_loop", "wiring -k naive_float64"
SEAM, SAID, FUNCTION = "wiring -k comes_after_the_start", "wiring -k said_to_be", "wiring -k one_function"
DECODE, ROPE = "model -k 'prefill_and_decode and not compiled'", "model -k 'rope_frequencies or some_families'"
FORKS = "cuda_dry -k forks"
RANKS, PLAN = "tp -k 'test_all_ranks_compute_what_one_device_does and 2'", "tp -k plan_gives"
SUMS, MESSAGES = "shared_memory -k 'test_sums and 3'", "shared_memory -k 'random_messages and 400'"
INT8_SUMS = "int8_sums -k of_the_integers"
ONE_SHOT = "one_shot -k own_from_start_to_wait"
FEW_INT = "quantize -k 'exact_up_to_rounding or three_products'"
TURNS, PARTS = "wiring -k other_parts_compute", "tp -k 'prefill_in_parts and 2'"
CHUNKS, ENDS, SAMPLING = "generate -k in_chunks", "generate -k own_end", "generate -k 'top_k or equal_seeds'"
UNLIKE = "generate -k 'chooses_alike and 131-ranks'"
ALIKE = "generate -k 'chooses_alike and (131 or 17-4)'"
MARKED, ACCEPTED = "numbers -k sampler_marks", "speculative -k accepted_or_replaced"
BANDS = "training -k in_bands"
DCP, LOSS = "adapt -k killed_at", "adapt -k loss_is_the_naive"
RANKS_TRAIN = "adapt -k 'ranks_give and 2'"
LANES = "tp -k 'test_lanes_compute and 2'"
LANEFORMER = "laneformer -k 'number and two'"
NATS, BY_HAND, SHARD = "eval -k nats_and", "advise -k made_by_hand", "advise -k largest_shard"

MUTANTS = [  # (file, old text, new text, tests)
    ("model.py", "while len(pending) > stale:  # standard", "while pending:  # standard", ORDER),
    ("model.py", "if stale or next_stale:", "if stale:", SEAM),
    ("model.py", "*_, xs = zip(*streams, strict=True)", "xs = [[*stream][-1] for stream in streams]", TURNS),
    ("model.py", "        yield  # to other lanes, and to other parts of the prompt: take_turns\n", "", TURNS),
    ("model.py", "            yield\n", "", TURNS),
    ("model.py", "            causal = False\n", "", PARTS),
    ("model.py", "xs = take_turns(streams)\n", "xs = take_turns(streams)[::-1]\n", PARTS),
    ("measure/clock.py", "clock, config) for _ in range(parts)", "clock, config)", "link -k on_the_clock_parts"),
    ("model.py", "len(own) - stale)", "len(own) - 1)", RANKS),
    ("model.py", "block.ffn_norm(x + y)", "block.ffn_norm(x)", NAIVE),
    ("formats/config.py", "range(max(-1, n - parameter), n)", "range(parameter)", ORDER),
    ("model.py", " or i == len(sublayers)", "", RANKS),
    ("model.py", "x / comm.tp_size + h(x)", "x + h(x)", RANKS),
    ("formats/config.py", "return self.wirings, self.period", "return self.wiring, self.period", FUNCTION),
    ("formats/config.py", '(1 - keep) / s["factor"]', '(1 - keep) * s["factor"]', ROPE),
    ("model.py", "if i in config.nope_layers", "if False", ROPE),
    ("model.py", "keys > positions[..., None] - window", "keys >= positions[..., None] - window", ROPE),
    ("model.py", "windowed if i in config.window_layers else metadata", "windowed", ROPE),
    ("model.py", "positions[:, None] if cache is None else", "", "training -k packed_documents"),
    ("kernels/few_rows.cpp", "(stop - window, 0)", "(stop - window - 1, 0)", "cpu -k few_positions"),
    ("model.py", "b * cos + a * sin", "b * cos - a * sin", NAIVE),
    ("model.py", "<= at[..., None]", "< at[..., None]", DECODE),
    ("model.py", "cache[1][metadata.rows, :, metadata.positions]", "cache[1][:, :, metadata.positions[0]]", DECODE),
    ("model.py", "[:, None, None].expand(B, 1, G, S, T)", "[:, None, :, None].expand(B, 1, S, G, T)", CHUNKS),
    ("tp.py", "[-(-n * sum(shares[:r]) // sum(shares))", "[n * sum(shares[:r]) // sum(shares)", PLAN),
    ("tp.py", "share(G, sharers.index(rank), [", "share(G, 0, [", PLAN),
    ("tp.py", "[shares[r] for r in sharers]", "[1 for r in sharers]", "tp -k shares_say"),
    ("tp.py", "sum(shares) / min(shares)", "len(shares)", "tp -k cut_finer"),
    ("tp.py", "= parts[group.rank()][0],", "= parts[0][1] * group.rank(),", UNLIKE),
    ("tp.py", "x[..., :n]", "x", UNLIKE),
    ("tp.py", "-(-max(self.sizes) // BLOCK) * BLOCK", "logits.shape[-1]", UNLIKE),
    ("tp.py", "None if lanes[i][0] == 0 else []", "None", RANKS),
    ("tp.py", '{kind}", tensor[start:stop])', '{kind}", tensor[: stop - start])', RANKS),
    ("tp.py", "return torch.ops.ladder.settle(x, pending, after)",
     "return x if pending is None else x + self.wait(pending)",
     "wiring -k 'test_compiled_code_keeps_the_order_of_the_loop and ladder'"),
    ("tp.py", "\n    torch.ops._c10d_functional.wait_tensor(pending)",
     "\n    torch.ops._c10d_functional.wait_tensor(after)", FORKS),
    ("tp.py", "\n    torch.ops._c10d_functional.wait_tensor(pending)",
     "\n    [torch.ops._c10d_functional.wait_tensor(p) for p in (pending, after)]", FORKS),
    ("tp.py", "        return x + pending\n", "        return x\n", FORKS),
    ("kernels/few_rows.py", "query % S", "query // S", "cuda_dry -k split_keys"),
    ("kernels/few_rows.py", "key > position - window", "key >= position - window", "cuda_dry -k split_keys"),
    ("kernels/shared_memory.cpp",
     "if (piece >= static_cast<uint64_t>(slots_)) await(&Progress::read, piece - slots_ + 1);", "", MESSAGES),
    ("kernels/shared_memory.cpp", "await(&Progress::written, completed_ + 1);",
     "await(&Progress::written, completed_);", MESSAGES),
    ("kernels/shared_memory.cpp", "parts[rank] = rank == rank_ ?",
     "parts[(rank - rank_ + size_) % size_] = rank == rank_ ?", SUMS),
    ("kernels/shared_memory.cpp", "at::opmath_type<Number> block[kBlock];", "Number block[kBlock];", SUMS),
    ("kernels/shared_memory.cpp", "rank * piece.stride, parts", "rank * piece.bytes, parts",
     "shared_memory -k gathered"),
    ("kernels/shared_memory.cpp", "return at::add(x, wait.call(*pending));", "return at::add(x, *pending);", RANKS),
    ("kernels/shared_memory.cpp", "&& lock.l_type == F_UNLCK;", "&& false;", "shared_memory -k when_a_rank_dies"),
    ("kernels/shared_memory.py", "world.gather(reason) if found]", "[reason] if found]", "shared_memory -k do_without"),
    ("kernels/one_hop.cpp", "nodes_ > 2 ?", "false ?",
     "one_hop -k 'rounded_once and abc'"),
    ("kernels/one_hop.cpp", "owner->completed_ < count", "owner->completed_ < 1", "one_hop -k 'any_order and ab'"),
    ("kernels/one_hop.cpp", "if (part.numel() < whole.numel())", "if (false)", "one_hop -k 'rounded_once and aabb'"),
    ("kernels/one_shot.py", "self.stream.wait_stream(", "(", ONE_SHOT),
    ("kernels/one_shot.py", "with torch.cuda.stream(self.stream):", "if True:", ONE_SHOT),
    ("kernels/group.py", ".wait_event(done)", "", ONE_SHOT),
    ("kernels/one_shot.py", "nbytes <= ONE_SHOT", "nbytes < ONE_SHOT", "one_shot -k larger_sums"),
    ("kernels/group.py", "lambda kept=tensors:", "lambda:", "one_shot -k keeps"),
    ("kernels/int8_sums.py", "/ 127).bfloat16()", "/ 128).bfloat16()", INT8_SUMS),
    ("kernels/int8_sums.py", "[:, self.rank()]", "[:, 0]", INT8_SUMS),
    ("kernels/int8_sums.py", "numel() * (SIZE + 2) // SIZE", "nbytes", "int8_sums -k fewer_bytes"),
    ("kernels/few_rows.cpp", "return x * (x < 0 ? e :", "return x * (x > 0 ? e :", FEW_INT),
    ("kernels/few_rows.cpp", "(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 16", FEW_INT),
    ("kernels/few_rows.cpp", "sums[m * W.G + k / size]", "sums[k / size]", FEW_INT),
    ("kernels/few_rows.cpp", "(position + 1, 1, T)", "(position, 1, T)", "cpu -k few_positions"),
    ("kernels/few_rows.py", "q = low | high << 4", "q = high | low << 4", "quantize -k packed_rows"),
    ("kernels/int_linear.py", "(weight & 15, weight >> 4)", "(weight >> 4, weight & 15)", "quantize -k definition"),
    ("kernels/int_linear.py", "addcmul(zeros[", "addcmul(-zeros[", "quantize -k definition"),
    ("kernels/int_linear.py", "first = start % size // smaller", "first = 0", "quantize -k straddle"),
    ("quantize.py", "((high - low) / 15)", "((high - low) / 16)", "quantize -k int4_is_within"),
    ("quantize.py", "amax(dim=1, keepdim=True) / 127", "amax() / 127", "quantize -k int8_is_within"),
    ("generate.py", "select, parts = (last - start).clamp(", "select, parts = (last - start + 1).clamp(", CHUNKS),
    ("generate.py", "done[row] = i in eos_ids or", "done[row] =", ENDS),
    ("generate.py", "                if done[row]:\n", "                if False:\n", ENDS),
    ("generate.py", "now - start - first - shown, passes)", "now - start - first, passes)", "generate -k whoever"),
    ("generate.py", "min(len(prompt) + max_new_tokens, context)", "len(prompt) + max_new_tokens",
     "speculative -k own_context"),
    ("generate.py", "if i == -1:", "if False:", "numbers -k step_and_the_row"),
    ("decoding/likely.py", "values < values[:, sample.top_k", "values <= values[:, sample.top_k", SAMPLING),
    ("decoding/likely.py", "weights.cumsum(-1) - weights >= sample", "weights.cumsum(-1) >= sample", SAMPLING),
    ("decoding/likely.py", "(values <= least)", "(values < -torch.inf)", ALIKE),
    ("decoding/likely.py", "ids, order = ids.sort()", "order = ids.argsort(descending=True)", ALIKE),
    ("decoding/sampling.py", "e[:, blocks:]", "e[:, :BLOCK]", "generate -k many_ids"),
    ("decoding/sampling.py", "+ first // BLOCK", "+ 0", ALIKE),
    ("decoding/sampling.py", "token + first), -1)", "token), -1)", ALIKE),
    ("decoding/sampling.py", "where(levels.isfinite().all(0), -1)", "where(levels[0].isfinite(), -1)", ALIKE),
    ("tp.py", "min(i * BLOCK, vocab_size)", "i * BLOCK", "tp -k shares_say"),
    ("measure/probe.py", "max(rates) > 1.25 * min(rates) and ", "", "bench -k probe_proposes"),
    ("measure/preflight.py", "[world.rank // sharers * sharers :]", "", "preflight -k unlike"),
    ("decoding/speculative.py", "logits < logits.topk(sample.top_k)", "logits <= logits.topk(sample.top_k)", ACCEPTED),
    ("decoding/speculative.py", "ordered.cumsum(-1) - ordered >= sample", "ordered.cumsum(-1) >= sample", ACCEPTED),
    ("decoding/sampling.py", "torch.Generator(device).manual_seed(seed)", "torch.Generator(device).manual_seed(0)",
     SAMPLING),
    ("decoding/sampling.py", "return top.isfinite() &", "return", MARKED),
    ("decoding/sampling.py", "level.where(good, torch.nan)", "level", MARKED),
    ("decoding/speculative.py", ".masked_fill_(~good[..., None], 0)", "", "speculative -k not_finite"),
    ("decoding/sampling.py", "[len(text) - 1 for text in texts], device=device", "[0] * len(texts)", ENDS),
    ("decoding/speculative.py", "drawn * offered <", "drawn <", "speculative -k 'accepted_or_replaced and drawn'"),
    ("decoding/speculative.py", "(rest - q[rows, first])", "rest", ACCEPTED),
    ("decoding/speculative.py", "rest.scatter(-1, proposed[rows, first][:, None], 0.0)", "rest", ACCEPTED),
    ("decoding/speculative.py", "whole | none_left, rest, left", "none_left, rest, left", ACCEPTED),
    ("decoding/speculative.py", "== proposed).long().cumprod(-1)", "== proposed).long()",
     "speculative -k 'know_of_a_draft and standard'"),
    ("decoding/sampling.py", "(positions + 1)", "positions", "cuda_dry -k ids_of_this"),
    ("decoding/sampling.py", ".clamp(max=context - 1)", "", "cuda_dry -k within"),
    ("decoding/sampling.py", "min(max(map(len, texts)) + 1, context)", "max(map(len, texts)) + 1",
     "cuda_dry -k within"),
    ("kernels/cuda_graphs.py", "key = tokens.shape, cache_length", "key = tokens.shape", "cuda_dry -k captured_step"),
    ("kernels/cuda_graphs.py", "torch._foreach_copy_(own, (tokens, positions))", "pass", "cuda_dry -k captured_step"),
    ("decoding/speculative.py", "NGRAM = 3, 2", "NGRAM = 2, 3", "speculative -k ngrams_are"),
    ("decoding/speculative.py", "self.held[row] += len(os.path.commonprefix([self.last[row], text[self.held[row] :]]))",
     "self.held[row] += len(self.last[row])", "speculative -k it_would_say"),
    ("decoding/speculative.py", "found[0][:, : count - 1]", "found[0][:, :count]", "speculative -k always_right"),
    ("decoding/speculative.py", "min([known, *self.held])", "known", "speculative -k goes_on_from"),
    ("decoding/speculative.py", "positions + i, longest + i)", "positions, longest + i)",
     "speculative -k always_right"),
    ("decoding/speculative.py", "if h and not d]", "if h]", "speculative -k it_would_say"),
    ("decoding/speculative.py", "sum(min(n + 1, count) for n in accepted)", "count * len(accepted)",
     "speculative -k what_pays"),
    ("decoding/speculative.py", "if draft.function == config.function:", "if draft == config:",
     "speculative -k cannot_be"),
    ("decoding/speculative.py", "    if missing:\n", "    if False:\n", "speculative -k cannot_be"),
    ("runtime/chat.py", "held = ids[:-1]", "held = []", "speculative -k computes_only"),
    ("runtime/cli.py", "(config.lanes or len(shares)) == 1", "len(shares) == 1", SAID),
    ("runtime/cli.py", "own.function == config.function", "own == config", SAID),
    ("runtime/launch.py", "for message in self.gather(error):", "for message in [error]:", "tp -k error_of_one_rank"),
    ("runtime/launch.py", "            if several_nodes:", "            if False:", "shared_memory -k several_nodes"),
    ("runtime/watch.py", "if computes or new.ticks != old.ticks else", "if computes else", "watch -k sign_of_life"),
    ("runtime/watch.py", "and all(place.timed for place in places)", "", "watch -k untimed_phase"),
    ("runtime/watch.py", "late = {places[rank].awaited for rank in waiting} - waiting", "late = set()",
     "watch -k 'make_no_progress'"),
    ("runtime/watch.py", "computes or (new.beats, new.busy)", "(new.beats, new.busy)", "watch -k untimed_phase"),
    ("runtime/writing.py", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "writers -k second_of_two"),
    ("runtime/writing.py", "            f.truncate(size)\n", "            pass\n", "writers -k line_that_does_not_fit"),
    ("runtime/writing.py", 'data = b"\\n" + data', "pass", "writers -k whatever_was_cut_off"),
    ("formats/checkpoint.py", "        if size > room:\n", "        if not shards:\n", "convert -k output_is_sharded"),
    ("formats/checkpoint.py", "            start += b - a\n", "            start = 0\n", "cpu -k filling"),
    ("formats/checkpoint.py", "tensor = int_linear.regroup(tensor, *ranges[0], each)", "pass",
     "quantize -k 'test_any_tp_computes_what_one_device_does and 3'"),
    ("formats/tokenizer.py", 'if new.endswith("\\ufffd"):', "if False:", "tokenizer -k 'stream and not transformers'"),
    ("formats/tokenizer.py", "first=i == 0)", "first=True)", "tokenizer -k legacy"),
    ("formats/tokenizer.py", "[i for i in ids if i not in self.hidden]", "ids", "tokenizer -k not_printed"),
    ("formats/huggingface.py", "for t in (q, k, v)], dim=1)", "for t in (q, v, k)], dim=1)", "convert -k parity"),
    ("formats/huggingface.py", "1 / (head * logits)", "1 / logits", "convert -k 'parity and granite'"),
    ("formats/huggingface.py", "tuple(range(first, n_layers))", "tuple(range(n_layers))", "convert -k windows_are"),
    ("formats/huggingface.py", "if not turned[i])", "if turned[i])", "convert -k 'parity and smollm3'"),
    ("formats/sources.py", ".transpose(1, 2).flatten(0, 2)", ".flatten(0, 2)", "convert -k llama2c_files"),
    ("formats/sources.py", "weights_only=True", "weights_only=False", "hostile -k pickle"),
    ("formats/laneformer.py", "dim=1 if ", "dim=0 if ", LANEFORMER),
    ("formats/laneformer.py", "unpaired(tensor, self.head_dim)", "tensor", LANEFORMER),
    ("formats/laneformer.py", "i >= n_layers + first", "i >= n_layers - first", "laneformer -k 'number and windows'"),
    ("formats/laneformer.py", "hf.keys() - KEYS.keys() - KNOWN", "set()", "laneformer -k one_clear_line"),
    ("formats/verify.py", "if not apart <= TOLERANCE[dtype] * largest:", "if apart > TOLERANCE[dtype] * largest:",
     "convert -k verify_sees"),
    ("formats/verify.py", "trust_remote_code=trust_remote_code", "trust_remote_code=True", "convert -k verify_runs"),
    ("formats/verify.py", "min(LENGTH, config.max_seq_len)", "LENGTH", "convert -k verify_takes"),
    ("formats/exported/modeling_ladder.py", "self.total(pending[0]),", "self.total(pending[0].detach()),",
     "export -k gradients"),
    ("formats/exported/modeling_ladder.py", "mlp(self.post_attention_layernorm(x))]", "mlp(self.input_layernorm(x))]",
     "export -k our_logits"),
    ("formats/exported/modeling_ladder.py", "None if lane else self.bias", "self.bias", "export -k our_logits"),
    ("formats/exported/modeling_ladder.py", "sharers[k])", "sharers[-1 - k])", "export -k our_logits"),
    ("formats/exported/modeling_ladder.py", "and not (self.is_last and i)", "", "export -k our_logits"),
    ("measure/link.py", "passes * (tp_size - 1) / tp_size * n_bytes * self", "passes * n_bytes * self",
     "link -k ring_traffic"),
    ("measure/link.py", "self.stream.wait_stream(torch.cuda.current_stream())", "pass", FORKS),
    ("measure/link.py", "with torch.cuda.stream(self.stream):", "if True:", FORKS),
    ("measure/link.py", "torch.cuda.current_stream().wait_event(delivered)", "None", FORKS),
    ("measure/link.py", "deadline - self.link.flight", "deadline", "link -k one_at_a_time"),
    ("measure/clock.py", "delivered - self.flight", "delivered", "link -k at_once_by_tcp"),
    ("kernels/shared_memory.cpp", "delivered - flight_", "delivered", "shared_memory -k emulated_link"),
    ("measure/link.py", "max(time.perf_counter(), self.free_at)", "time.perf_counter()", "link -k one_at_a_time"),
    ("measure/exposed.py", "before = max(before, pauses.pop(0)[1])", "pauses.pop(0)",
     "link -k between_waits_and_starts"),
    ("measure/exposed.py", '1 - exposed / (n * ms["all_reduce"])', 'exposed / (n * ms["all_reduce"])',
     "link -k the_report"),
    ("measure/clock.py", "max(self.now, self.free_at) + self", "self.now + self", "link -k clock_adds_up"),
    ("formats/config.py", "_added, hs), wiring.stale))", "_added, hs), 0))", BY_HAND),
    ("formats/config.py", "[h(x) for h in hs]", "[h(x) for h in hs[:1]]", NAIVE),
    ("model.py", "after=pending[-1] if pending else None)\n    yield x", "after=None)\n    yield x",
     "wiring -k 'few_rows_keep_it_too and delayed'"),
    ("model.py", "operator.add, self.partials)", "operator.mul, self.partials)", LANES),
    ("model.py", "cache[lane * config.n_layers + i]", "cache[i]", LANES),
    ("tp.py", "for lane in range(*share(L, rank, shares))", "for lane in range(*share(L, 0, shares))", LANES),
    ("training/lanes.py", "return torch.zeros_like(whole)", "return whole", "training -k lanes"),
    ("measure/score.py", "best(i + blocks, left - 1)", "best(i + 1, left - 1)", "eval -k least_sensitive_pairs"),
    ("measure/clock.py", "if config.sums_lanes:", "if False:", "laneformer -k head"),
    ("measure/advise.py", "max(work[place] for work in ranks)", "ranks[0][place]", SHARD),
    ("measure/report.py", 'if not n.startswith("tok_embeddings.")', "if True", "generate -k step_bytes"),
    ("measure/report.py", "read += draft.drafted / passes *", "read += 0 *", "speculative -k bytes_of_a_pass"),
    ("measure/results.py", "text = three_digits(statistics.median(values))",
     "text = three_digits(statistics.mean(values))", "bench -k cells_are_medians"),
    ("measure/score.py", "stop - (size - stride)", "stop - stride", "eval -k windows_score"),
    ("measure/score.py", "each[row, begin - 1 : end - 1]", "each[row, begin:end]", NATS),
    ("measure/score.py", "(p.exp() * (p - q))", "(q.exp() * (q - p))", NATS),
    ("measure/score.py", "    model.config = own\n", "    pass\n", "eval -k sensitivity_against"),
    ("measure/harness.py", "row[len(tokens) - len(continuation) : len(tokens)]", "row[-len(continuation) :]",
     "eval -k lm_evals"),
    ("measure/harness.py", "return all(ended)", "return any(ended)", "eval -k lm_evals"),
    ("measure/preflight.py", "(heads - queries)", "heads", "preflight -k will_hold"),
    ("eval.py", "args.checkpoint, model) * n / math.log(2)", "args.checkpoint, model) * n", "eval -k a_text_with"),
    ("adapt.py", "0.1 * nats", "nats", LOSS),
    ("adapt.py", "(loss * world.tp_size / max", "(loss / max", RANKS_TRAIN),
    ("adapt.py", "range(world.rank * rows, windows.n + world.rank * rows,", "range(0, windows.n,", RANKS_TRAIN),
    ("adapt.py", "if not math.isfinite(whole + norm):", "if False:", "adapt -k not_finite"),
    ("adapt.py", 'if line["valid"] < best["nats"]', "if True", "adapt -k lowest"),
    ("training/sharding.py", "parameter.shape[1] ** -0.5", "0.02", "training -k fresh"),
    ("training/sharding.py", '("wo.weight", "w2.weight")', '("wo.weight",)', "training -k fresh"),
    ("adapt.py", "bias[..., start:end, :end]", "bias[..., : end - start, :end]", BANDS),
    ("adapt.py", "@ k[:, :, :end].mT", "@ k[:, :, :start].mT", BANDS),
    ("adapt.py", "q * self.head_dim**-0.5", "q", BANDS),
    ("training/data.py", "(text[i : i + CUT] for text in texts for i in range(0, len(text), CUT))", "iter(texts)",
     "training -k any_length"),
    ("benchmarks/quality.py", "if run.name not in done", "", "benchmarks -k plan_of"),
    ("benchmarks/quality.py", "ended[run.origin].result()", "pass", "benchmarks -k plan_of"),
    ("training/affinity.py", "descending=True", "descending=False", "affinity"),
    ("training/affinity.py", "(x + y for y in ys)", "(settled - y for y in ys)", "affinity"),
    ("training/affinity.py", 'int(found[2] == "w2.weight")', "0", "affinity"),
    ("training/data.py", "~same[:, :-1], (1, 0)", "same[:, :-1], (1, 0)", "training -k windows_hold"),
    ("training/data.py", "self.seed * 1_000_003 + epoch", "self.seed * 1_000_003", "training -k epoch"),
    ("training/data.py", "counts += [answer] *", "counts += [True] *", "training -k answers_count"),
    ("training/sharding.py", "for rank in (world.rank, world.rank + 1)", "for rank in (0, 1)",
     "training -k 'ranks_hold and 2'"),
    ("training/sharding.py", 'dcp.load({"model": weights, "optimizer": moments}', 'dcp.load({"model": weights}', DCP),
    ("training/runs.py", 'json.loads(x)["step"] <= step', "True", DCP),
]  # fmt: skip


def killed(folder, file, old, new, tests):
    """Return whether the tests fail with the mutant in a copy of the tree."""
    path, environment = folder / file, {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    text = path.read_text()
    path.write_text(text.replace(old, new))
    if file.endswith(".cpp"):
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
    name, *flags = shlex.split(tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/test_{name}.py", *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    path.write_text(text)
    if done.returncode not in (0, 1):  # no test has that name, or the mutant cannot be imported
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode == 1


def main(words):
    chosen = [m for m in MUTANTS if not words or any(word in part for word in words for part in m[:3])]
    start, bad = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder) / "tree"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "docs"))
        for file, old, new, tests in chosen:
            once = (folder / file).read_text().count(old) == 1
            found = once and killed(folder, file, old, new, tests)
            bad += not found
            what = "killed" if found else "SURVIVED" if once else "NOT FOUND"
            print(f"{what:9} {file}: {old.strip()!r} -> {new.strip()!r}  ({tests})", flush=True)
    print(f"{len(chosen)} mutants, {bad} not killed, {time.perf_counter() - start:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
