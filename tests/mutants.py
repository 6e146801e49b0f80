"""Do the tests see a mistake? Each mutant is one, and the named tests should fail with it.

python tests/mutants.py [WORD ...]     # without words all, else those whose file or texts hold one of them

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
# ruff: noqa: E501

ORDER, NAIVE = "test_wiring.py -k order_of_the_plain_loop", "test_wiring.py -k naive_float64"
DECODE = "test_model.py -k 'prefill_and_decode and not compiled'"
RANKS = "test_tp.py -k 'test_all_ranks_compute_what_one_device_does and 2'"
PLAN, CHUNKS = "test_tp.py -k plan_gives", "test_generate.py -k prefill_in_chunks"
ENDS, SAMPLING = "test_generate.py -k stops_at_its_own_end", "test_generate.py -k 'top_k or equal_seeds'"
LAYERS, SAID = "test_wiring.py -k layers_are", "test_wiring.py -k said_to_be"
FUNCTION = "test_wiring.py -k same_function"
SEAM = "test_wiring.py -k comes_after_the_start"
STREAM, FILES = "test_tokenizer.py -k 'stream and not transformers'", "test_generate.py -k bad_checkpoints"
QUANT, CONVERT, LINK = "test_quantize.py -k ", "test_convert.py -k ", "test_link.py -k "
EVAL, ADAPT, TRAINING = (f"test_{name}.py -k " for name in ("eval", "adapt", "training"))
EXPORT, ADVISE, WRITERS = "test_export.py -k ", "test_advise.py -k ", "test_writers.py -k "
BENCHMARKS, WATCH = "test_benchmarks.py -k ", "test_watch.py -k "
BENCH = "test_bench.py -k "
FAULTS, SOAK = "test_faults.py -k ", "test_soak.py -k "
SHARED, SUMS = "kernels/shared_memory.cpp", "test_shared_memory.py -k 'test_sums and 3'"
MESSAGES, IN_FLIGHT = "test_shared_memory.py -k 'random_messages and 400'", "test_shared_memory.py -k in_flight"
LEFT, WITHOUT = "test_shared_memory.py -k nothing_behind", "test_shared_memory.py -k do_without"
SHARED_PY = "kernels/shared_memory.py"
EXPORTED, MODELING = (f"formats/exported/{name}_ladder.py" for name in ("configuration", "modeling"))
SPECULATIVE = "test_speculative.py -k "
FIT, NUMBERS = "test_preflight.py -k ", "test_numbers.py -k "
HOSTILE = "test_hostile.py -k "
FEW_INT = "test_quantize.py -k 'exact_up_to_rounding or three_products'"

MUTANTS = [     # runtime
    ("runtime/launch.py", "start.get(name)) for start in starts}) > 1", "start.get(name)) for start in starts}) > 2", WATCH + "each_difference"),
    ("runtime/launch.py", "if value is not None and value is not False}", "if value}", WATCH + "compared_by"),
    ("runtime/launch.py", "speaks = first == rank", "speaks = True", WATCH + "one_rank_says"),
    ("runtime/launch.py", "if c.isprintable() else", "if True else", WATCH + "exit_code"),
    ("runtime/watch.py", "0 if computes or new.ticks", "0 if new.ticks", WATCH + "untimed"),
    ("runtime/watch.py", "ticks > self.timeout > 0", "ticks > self.timeout", WATCH + "sign_of_life"),
    ("runtime/watch.py", "and all(place.timed for place in places)", "", WATCH + "untimed"),
    ("runtime/watch.py", "late = late or {", "late = {", WATCH + "make_no_progress"),
    ("runtime/watch.py", "if not _held:", "if True:", WATCH + "in_words"),
    ("runtime/watch.py", "if code != 0:", "if True:", WATCH + "end_of_a_process"),
    ("runtime/watch.py", "os.register_at_fork(", "str(", WATCH + "signals_end"),
    ("runtime/writing.py", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", WRITERS + "second_of_two"),
    ("runtime/writing.py", "if os.listdir(folder) and not", "if False and not", WRITERS + "somebody_else"),
    ("runtime/writing.py", "if not os.fstat(lock.fileno()).st_nlink:", "if False:", WRITERS + "went_with_its_writer"),
    ("runtime/writing.py", "        yield unfinished\n        publish", "        yield path\n        publish", WRITERS + "any_moment"),
    ("runtime/writing.py", 'data = b"\\n" + data', "pass", WRITERS + "on_its_own"),
    ("runtime/writing.py", "            f.truncate(size)\n", "            pass\n", WRITERS + "does_not_fit_is"),
    ("benchmarks/faults.py", "traced == (kind == \"exception\")", "True", FAULTS + "what_is_wrong"),
    ("benchmarks/faults.py", "line[\"codes\"] == [2]", "True", FAULTS + "what_is_wrong"),
 # (file, old text, new text, tests)
    # model.py
    ("model.py", "if not stale:  # standard", "if False:  # standard", ORDER),
    ("model.py", "if not stale:  # standard", "if True:  # standard", ORDER),
    ("model.py", "if stale or next_stale:", "if stale:", SEAM),
    ("model.py", "(h, wiring.stale)", "(h, False)", NAIVE),
    ("model.py", "h(x + p if stale else x)", "h(x + p)", RANKS),
    ("model.py", "h(x + p if stale else x)", "h(x)", RANKS),
    ("model.py", "block.ffn_norm(x + y)", "block.ffn_norm(x)", NAIVE),
    ("model.py", "return y + block.feed_forward", "return block.feed_forward", NAIVE),
    ("model.py", "if layer in self.wired_layers else", "if True else", NAIVE),
    ("runtime/cli.py", "known.optional and wiring != config.wiring", "known.optional", LAYERS),
    ("runtime/cli.py", "if wiring != config.wiring:\n        changes", "if False:\n        changes", LAYERS),
    ("runtime/cli.py", "config.made_for_tp not in (None, tp_size)", "False", SAID),
    ("runtime/cli.py", 'own.wiring == "standard" and wiring.runs_standard', "wiring.runs_standard", SAID),
    ("runtime/cli.py", "own.function == config.function", "own == config", SAID),
    ("runtime/cli.py", "wiring.standard_alone and tp_size == 1", "wiring.runs_standard and tp_size == 1", SAID),
    ("model.py", "tuple(sorted(self.wired_layers))", "self.wired_layers", FUNCTION),
    ("model.py", 'self.wiring == "hybrid" and len(self.wired_layers)', 'False and len(self.wired_layers)', FUNCTION),
    ("model.py", "if self.desync_period == 1 else", "if False else", FUNCTION),
    ("generate.py", "warn_of_wiring(own, config, world.tp_size)", "warn_of_wiring(own, config, 1)",
     LINK + "it_stands_for"),
    ("model.py", "range(max(-1, self.n_layers - last), self.n_layers)", "range(last)", ORDER),
    ("model.py", " and i < len(sublayers):", ":", RANKS),
    ("model.py", "i % config.desync_period and", "(i + 1) % config.desync_period and", ORDER),
    ("model.py", "x / comm.tp_size + h(x)", "x + h(x)", RANKS),
    (
        "model.py",
        "        x = block.attention_norm(x)\n        return block.attention(x, metadata, cache)",
        "        y = block.attention_norm(x)\n        return block.attention(y, metadata, cache)",
        NAIVE,
    ),
    ("model.py", '(1 - keep) / s["factor"]', '(1 - keep) * s["factor"]', "test_model.py -k rope_frequencies"),
    ("model.py", "math.floor(first * H / 2), 0)", "math.ceil(first * H / 2), 0)", "test_model.py -k rope_frequencies"),
    ("model.py", "((last - first) or 0.001)", "(last - first)", "test_model.py -k rope_frequencies"),
    ("model.py", "angles.sin() * scale", "angles.sin()", "test_model.py -k some_families"),
    ("model.py", "plain if i in nope_layers else metadata", "metadata", "test_model.py -k some_families"),
    ("model.py", "slots <= positions", "slots < positions", DECODE),
    ("model.py", "cache[1][metadata.rows, :, metadata.positions]", "cache[1][:, :, metadata.positions[0]]", DECODE),
    ("model.py", "[:, None, None].expand(B, 1, G, S, T)", "[:, None, :, None].expand(B, 1, S, G, T)", CHUNKS),
    ("model.py", "self.wo(y.reshape(", "self.wo(y[:1].expand_as(y).reshape(", NAIVE),
    ("model.py", "b * cos + a * sin", "b * cos - a * sin", NAIVE),
    # tp.py
    (
        "tp.py",
        "return -(-n * rank // ranks), -(-n * (rank + 1) // ranks)",
        "return n * rank // ranks, n * (rank + 1) // ranks",
        PLAN,
    ),
    ("tp.py", "share(G, sharers.index(rank), len(sharers))", "share(G, 0, len(sharers))", PLAN),
    ("tp.py", "None if rank == 0 else []", "None", RANKS),
    ("tp.py", "return -(-vocab_size // tp_size)", "return vocab_size // tp_size", PLAN),
    ("tp.py", "parts.permute(1, 2, 0, 3)", "parts.flip(0).permute(1, 2, 0, 3)", RANKS),
    ("tp.py", "F.pad(logits, (0, part - logits.shape[-1]))", "F.pad(logits, (part - logits.shape[-1], 0))", RANKS),
    ("tp.py", '{kind}", tensor[start:stop])', '{kind}", tensor[: stop - start])', RANKS),
    (
        "formats/checkpoint.py",
        "tensor = int_linear.regroup(tensor, *ranges[0], each)",
        "pass",
        "test_quantize.py -k 'test_any_tp_computes_what_one_device_does and 3'",
    ),
    (
        "tp.py",
        "return torch.ops.ladder.settle(x, pending, after)",
        "return x if pending is None else x + self.wait(pending)",
        "test_wiring.py -k 'test_compiled_code_keeps_the_order_of_the_loop and ladder'",
    ),
    # kernels/shared_memory.cpp and .py
    (SHARED, "if (piece >= static_cast<uint64_t>(slots_)) await(&Progress::read, piece - slots_ + 1);", "", MESSAGES),
    (SHARED, "if (queue_.size() == static_cast<size_t>(slots_)) finish();", "", IN_FLIGHT),
    (SHARED, "await(&Progress::written, completed_ + 1);", "await(&Progress::written, completed_);", MESSAGES),
    (SHARED, "piece.to : slot(rank, completed_);", "piece.to : slot(rank, completed_ + 1);", SUMS),
    (SHARED, "parts[rank] = rank == rank_ ?", "parts[(rank - rank_ + size_) % size_] = rank == rank_ ?", SUMS),
    (SHARED, "at::opmath_type<Number> block[kBlock];", "Number block[kBlock];", SUMS),
    (SHARED, "from + done, length);", "from, length);", SUMS),
    (SHARED, "rank * piece.stride, parts", "rank * piece.bytes, parts", "test_shared_memory.py -k gathered"),
    (SHARED, "return at::add(x, wait.call(*pending));", "return at::add(x, *pending);", RANKS),
    (SHARED, "&& lock.l_type == F_UNLCK;", "&& false;", "test_shared_memory.py -k when_a_rank_dies"),
    (SHARED, "        if (!dead) continue;\n", "", "test_shared_memory.py -k takes_its_time"),
    (SHARED, "  groups().erase(name);\n", "", LEFT),
    (SHARED_PY, "            os.close(fd)\n    reasons", "            pass\n    reasons", WITHOUT),
    (SHARED_PY, "world.gather(reason) if found]", "[reason] if found]", WITHOUT),
    (SHARED_PY, "len(token), 0) == token.encode()", "0, 0) == b''", "test_shared_memory.py -k not_taken"),
    ("runtime/launch.py", " or shared_memory.lost_peer()", "", "test_shared_memory.py -k 'when_a_rank_dies and compiled'"),
    ("runtime/launch.py", "and not several_nodes:", ":", "test_shared_memory.py -k several_nodes"),
    # generate.py
    ("generate.py", "select = (last - start).clamp(", "select = (last - start + 1).clamp(", CHUNKS),
    ("generate.py", "torch.where((last >= start)", "torch.where((last > start)", CHUNKS),
    ("decoding/sampling.py", "logits < logits.topk(self.top_k)", "logits <= logits.topk(self.top_k)", SAMPLING),
    ("decoding/sampling.py", "ordered.cumsum(-1) - ordered >= self.top_p", "ordered.cumsum(-1) >= self.top_p", SAMPLING),
    ("decoding/sampling.py", "torch.Generator(device).manual_seed(seed)", "torch.Generator(device).manual_seed(0)", SAMPLING),
    ("generate.py", "done[row] = i in eos_ids or", "done[row] =", ENDS),
    ("generate.py", "                if not done[row]:\n", "                if True:\n", ENDS),
    ("generate.py", "[len(text) - 1 for text in texts], device=self.device", "[0] * len(texts)", ENDS),
    ("generate.py", "now - start - first - shown, passes)", "now - start - first, passes)",
     "test_generate.py -k whoever"),
    # terminal.py, launch.py
    ("runtime/terminal.py", "            ids = ids + row\n", "", "test_generate.py -k 'interactive_goes_on and 1'"),
    ("kernels/gloo.py", 'if address.startswith("127."):', "if False:", LINK + "the_interface_is"),
    ("runtime/cli.py", 'wiring = "hybrid"  # its name', "pass", LAYERS),
    ("runtime/launch.py", "for message in self.gather(error):", "for message in [error]:", "test_tp.py -k error_of_one_rank"),
    # watch.py
    ("training/runs.py", ', "timeout"]', "]", ADAPT + "flags_of_the_machine"),
    # writing.py, and who uses it
    ("training/runs.py", "NEEDED if has_ended else", "NEEDED if end.exists() else", WRITERS + "last_moment"),
    ("training/runs.py", '["*.tmp", "end"]', '["end"]', WRITERS + "last_moment"),
    ("measure/sweep.py", "        system.prctl(1, signal.SIGTERM)", "        pass", WRITERS + "sweep_s_command"),
    ("measure/exposed.py", "if not unfinished.exists():", "if False:", WRITERS + "trace"),
    # checkpoint.py
    ("formats/checkpoint.py", "(value > 0 or kind is Index and value == 0)", "True", CONVERT + "not_supported"),
    ("formats/checkpoint.py", "        if size > room:\n", "        if not shards:\n", CONVERT + "output_is_sharded"),
    ("formats/checkpoint.py", "if not re.fullmatch(", "if False and re.fullmatch(", HOSTILE + "index_names"),
    ("formats/checkpoint.py", "            start += b - a\n", "            start = 0\n", "test_cpu.py -k filling"),
    # tokenizer.py
    (
        "formats/tokenizer.py",
        "([] if self.bos_id is None else [self.bos_id]) + self",
        "[] + self",
        "test_tokenizer.py -k 'round_trip'",
    ),
    ("formats/tokenizer.py", 'if new.endswith("\\ufffd"):', "if False:", STREAM),
    ("formats/tokenizer.py", "        if new.strip():\n", "        if True:\n", "test_tokenizer.py -k several_spaces"),
    ("formats/tokenizer.py", "first=i == 0)", "first=True)", "test_tokenizer.py -k legacy"),
    ("formats/tokenizer.py", "import ImmutableSandboxedEnvironment", "import SandboxedEnvironment as ImmutableSandboxedEnvironment",
     HOSTILE + "templates_that"),
    ("runtime/terminal.py", "messages, ids = anew", "pass", "test_generate.py -k full_context"),
    ("runtime/terminal.py", "b\"\\0\", CTRL_C", "b\"\\3\", CTRL_C", "test_generate.py -k 'ctrl_c_stops and 2'"),
    ("formats/tokenizer.py", "[i for i in ids if i not in self.hidden]", "ids", "test_tokenizer.py -k not_printed"),
    ("formats/tokenizer.py", 'self.model.encode("a", add', 'self.model.encode("", add', "test_tokenizer.py -k stands_before"),
    ("formats/tokenizer.py", "i < vocab_size:", "True:", "test_tokenizer.py -k older_folders"),
    # formats/
    ("formats/huggingface.py", "for t in (q, k, v)], dim=1)", "for t in (q, v, k)], dim=1)", CONVERT + "parity"),
    ("formats/huggingface.py", "1 / (head * logits)", "1 / logits", CONVERT + "'parity and granite'"),
    ("formats/huggingface.py", "tensor.float() * factor", "tensor * factor", CONVERT + "rounded_once"),
    ("formats/huggingface.py", "if k not in foreign", "if True", CONVERT + "windows"),
    ("formats/huggingface.py", '["attention_multiplier"] * H**0.5', '["attention_multiplier"]', CONVERT + "'parity and granite'"),
    ("formats/huggingface.py", "{**known, **{k: v", "{**{k: v", CONVERT + "absent"),
    ("formats/huggingface.py", '"num_key_value_heads": 4', '"num_key_value_heads": 8', CONVERT + "absent"),
    ("formats/huggingface.py", "(below * log + 1)", "1", CONVERT + "'parity and qwen3'"),
    ("formats/huggingface.py", "if not turned[i])", "if turned[i])", CONVERT + "'parity and smollm3'"),
    ("formats/sources.py", ".transpose(1, 2).flatten(0, 2)", ".flatten(0, 2)", CONVERT + "llama2c_files"),
    ("formats/sources.py", "weights_only=True", "weights_only=False", HOSTILE + "pickle"),
    ("formats/export.py", "    if wiring.tp_bound:", "    if False:", EXPORT + "has_no_form"),
    ("formats/export.py", "    elif wiring.stream is not residual_stream:", "    elif False:", EXPORT + "has_no_form"),
    ("formats/export.py", "and not parallel and not stale", "and not parallel", EXPORT + "does_not_load"),
    ("formats/export.py", "stale in (0, config.n_layers) else", "True else", EXPORT + "comes_back"),
    ("formats/export.py", "stale in (0, config.n_layers) else", "False else", EXPORT + "all_layers_by"),
    ("formats/export.py", '"attention_bias": config.qkv_bias, ', "", EXPORT + "our_logits"),
    (EXPORTED, "range(n - layers, n)", "range(layers)", EXPORT + "our_logits"),
    (MODELING, "if self.stale:", "if False:", EXPORT + "our_logits"),
    (MODELING, "x, pending = x + pending, h(x)", "pending, x = h(x), x + pending.detach()", EXPORT + "gradients"),
    (MODELING, "self.mlp(self.post_attention_layernorm", "self.mlp(self.input_layernorm", EXPORT + "our_logits"),
    (MODELING, "return attention(x) + self.mlp(x)", "return attention(x) + self.mlp(x) / 2", EXPORT + "our_logits"),
    (MODELING, "if config.attention_bias != config.attention_out_bias:", "if False:", EXPORT + "our_logits"),
    (MODELING, "if not self.rope:", "if False:", EXPORT + "without_a_ladder"),
    (MODELING, "if not config.qk_norm:", "if True:", EXPORT + "our_logits"),
    # quantize.py, kernels/
    ("quantize.py", "((high - low) / 15)", "((high - low) / 16)", QUANT + "int4_is_within"),
    ("quantize.py", ".clamp_(0, 15)", ".clamp_(0, 14)", QUANT + "int4_is_within"),
    ("quantize.py", "amax(dim=1, keepdim=True) / 127", "amax() / 127", QUANT + "int8_is_within"),
    ("kernels/int_linear.py", "(weight & 15, weight >> 4)", "(weight >> 4, weight & 15)", QUANT + "definition"),
    ("kernels/int_linear.py", "addcmul(zeros[", "addcmul(-zeros[", QUANT + "definition"),
    ("kernels/int_linear.py", "first = start % size // smaller", "first = 0", QUANT + "straddle"),
    ("kernels/cpu.py", " or module.w1.bias is not None:", ":", QUANT + "'numbers_say and biased and False'"),
    ("kernels/cpu.py", "q = low | high << 4", "q = high | low << 4", QUANT + "packed_rows"),
    ("kernels/cpu.py", "start = -every.data_ptr() % HUGE", "start = 64", "test_cpu.py -k huge_pages"),
    (
        "kernels/cpu.py",
        "pairs = self.weight[:, :, 0].unflatten(-1, (2, 16, 2))[panel, :, :, lane]",
        "pairs = self.weight[:, :, 0].view(torch.bfloat16).unflatten(-1, (2, 16))[panel, :, :, lane][..., None]",
        "test_quantize.py -k copies_no_table",
    ),
    ("kernels/few_rows.cpp", "return x * (x < 0 ? e :", "return x * (x > 0 ? e :", FEW_INT),
    ("kernels/few_rows.cpp", "multiply(input, gate, &up)", "multiply(input, up, &gate)", FEW_INT),
    ("kernels/few_rows.cpp", "    panels(*up, begin, end, true);\n", "", FEW_INT),
    ("kernels/few_rows.cpp", "(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 16", FEW_INT),
    ("kernels/few_rows.cpp", "sums[m * W.G + k / size]", "sums[k / size]", FEW_INT),
    ("kernels/few_rows.cpp", "(position + 1, 1, T)", "(position, 1, T)", "test_cpu.py -k few_positions"),
    # measure/
    ("measure/link.py", "passes * (tp_size - 1) / tp_size * wire", "passes * wire", LINK + "ring_traffic"),
    ("measure/link.py", "max(time.perf_counter(), self.free_at)", "time.perf_counter()", LINK + "one_at_a_time"),
    (
        "measure/exposed.py",
        "before = max(before, pauses.pop(0)[1])",
        "pauses.pop(0)",
        "test_link.py -k between_waits_and_starts",
    ),
    (
        "measure/exposed.py",
        "start, wait, settle = SingleDevice.start, SingleDevice.wait, SingleDevice.settle",
        "pass",
        "test_link.py -k only_sleep",
    ),
    ("measure/exposed.py", '1 - exposed / (n * ms["all_reduce"])', 'exposed / (n * ms["all_reduce"])', "test_link.py -k the_report"),
    ("measure/clock.py", "max(self.now, self.delivered) + self", "self.now + self", LINK + "clock_adds_up"),
    (
        "measure/timing.py",
        "    for _ in range(rounds):\n        for name, way in ways.items():\n",
        "    for name, way in ways.items():\n        for _ in range(rounds):\n",
        "test_link.py -k in_turns",
    ),
    ("measure/report.py", 'if not n.startswith("tok_embeddings.")', "if True", "test_generate.py -k step_bytes"),
    ("measure/report.py", ' if result.get("step_bytes", LARGE) >= LARGE else None', "",
     LINK + "share_of_the_bandwidth"),
    ("measure/report.py", "size / statistics.median(", "size / statistics.mean(", LINK + "median_of_some"),
    (
        "measure/results.py",
        "text = three_digits(statistics.median(values))",
        "text = three_digits(statistics.mean(values))",
        "test_bench.py -k cells_are_medians",
    ),
    (
        "measure/results.py",
        'f"{statistics.median(ratios):.2f}x"',
        'f"{statistics.mean(ratios):.2f}x"',
        "test_bench.py -k cells_are_medians",
    ),
    ("measure/timing.py", "some[0] <= others[1] and ", "", "test_bench.py -k told_from"),
    # drafts in sweeps
    ("measure/sweep.py", "return tp > 1 and other", "return other", BENCH + "can_propose"),
    ("measure/sweep.py", "and other != wiring and", "and", BENCH + "can_propose"),
    ("measure/sweep.py", "norms[0] <= norms[1]", "True", BENCH + "can_propose"),
    ("measure/sweep.py", 'return wiring != "upper-bound"', "return True", BENCH + "can_propose"),
    ("measure/sweep.py", 'and run.wiring != "upper-bound" and run.draft is None', 'and run.wiring != "upper-bound"', BENCH + "can_propose"),
    ("measure/sweep.py", "if c.wiring and not any_ran:", "if False:", BENCH + "first_run_fails"),
    ("measure/sweep.py", "f\"{name}ES\", ", "", BENCH + "bad_settings"),
    ("measure/results.py", 'known = emulated["name"] != "custom"', "known = True", BENCH + "links_are_told_apart"),
    ("measure/results.py", "> 1.25 *", "> 9 *", BENCH + "writes_each_run"),
    ("measure/results.py", 'line["n_layers"] // 2', "1", BENCH + "older_lines"),
    ("measure/plot.py", "[all_reduce, link] = tuple", "[link, all_reduce] = tuple", BENCH + "first_page"),
    ("measure/results.py", 'bounded = case.wiring != "upper-bound" and not draft_of(case.wiring)',
     'bounded = case.wiring != "upper-bound"', BENCH + "have_rows"),
    ("measure/results.py", 'mean_accepted(line["accepted"]) or 0.0', 'mean_accepted(line["accepted"])',
     BENCH + "have_rows"),
    ("measure/results.py", """@{line['speculate']}\"""", '"', BENCH + "have_rows"),
    ("measure/plot.py", "max(1.3, 0.085 * max(map(len, wirings)))", "1.3", BENCH + "name_the_drafts"),
    ("measure/plot.py", "if c[0] == 1 or results.draft_of(c[2]) or", "if c[0] == 1 or", BENCH + "name_the_drafts"),
    ("measure/plot.py", 'wiring if results.draft_of(wiring) else "standard", batch', '"standard", batch',
     BENCH + "name_the_drafts"),
    # adapt.py, eval.py, measure/score.py
    ("adapt.py", "torch.lerp(before, x, alpha) if stale", "torch.lerp(before, x, 1 - alpha) if stale", ADAPT + "blend"),
    ("adapt.py", "before, x = x, x + h(", "x = x + h(", ADAPT + "blend"),
    # measure/advise.py
    ("measure/clock.py", "feed_forward=computing(feed_forward)", "feed_forward=computing(attention)",
     ADVISE + "made_by_hand"),
    ("measure/clock.py", "[(h, wiring.stale) for wiring in wirings", "[(h, False) for wiring in wirings",
     ADVISE + "made_by_hand"),
    ("measure/clock.py", "for wiring in wirings for h", "for wiring in [config.kind] * len(wirings) for h", ADVISE + "only_some"),
    ("measure/advise.py", 'shape = "output", (stop - start, *shape[1:])', 'shape = "output", shape', ADVISE + "largest_shard"),
    ("measure/advise.py", "max(work[place] for work in ranks)", "ranks[0][place]", ADVISE + "largest_shard"),
    ("measure/advise.py", "max(work.n_bytes / self.bandwidth, work.flops / self.flops)",
     "work.n_bytes / self.bandwidth", ADVISE + "over_their_rate"),
    ("measure/advise.py", "tp_size, passes=1))", "tp_size))", ADVISE + "over_their_rate"),
    ("measure/advise.py", "clock.now + times.rest + times.gather", "clock.now + times.rest", ADVISE + "made_by_hand"),
    ("measure/advise.py", 'if own.wiring == "standard" and config', "if config", ADVISE + "own_wiring"),
    ("measure/advise.py", "config.function == own.function", "config == own", ADVISE + "own_wiring"),
    ("measure/advise.py", "{config.function: config for", "{config.wiring: config for", ADVISE + "own_wiring"),
    ("measure/advise.py", "own.made_for_tp in (None, tp_size)", "True", ADVISE + "own_wiring"),
    ("measure/advise.py", "(2 if stored == torch.uint8 else 1)", "1", ADVISE + "largest_shard"),
    ("adapt.py", "0.1 * nats", "nats", ADAPT + "loss_is_the_naive"),
    ("adapt.py", "[streams[end - 1] for end", "[streams[end - 2] for end", ADAPT + "loss_is_the_naive"),
    ("adapt.py", "config.wiring_of(layer).sublayers", "2", ADAPT + "unequal_numbers"),
    ("adapt.py", "(loss * world.tp_size / max", "(loss / max", ADAPT + "'ranks_give and 2'"),
    ("adapt.py", "range(world.rank * rows, windows.n + world.rank * rows,", "range(0, windows.n,",
     ADAPT + "'ranks_give and 2'"),
    ("adapt.py", "if not math.isfinite(whole + norm):", "if False:", ADAPT + "not_finite"),
    ("adapt.py", "if nats < best", "if True or nats < best", ADAPT + "lowest"),
    ("adapt.py", "step * world.tp_size + world.rank)", "world.rank)", ADAPT + "drops_other"),
    ("adapt.py", "step * world.tp_size + world.rank)", "step * world.tp_size)", ADAPT + "'ranks_give and 2'"),
    ("training/data.py", "~same[:, :-1], (1, 0)", "same[:, :-1], (1, 0)", TRAINING + "windows_hold"),
    ("training/data.py", "[:, 1:]) & same &", "[:, 1:]) &", TRAINING + "windows_hold"),
    ("training/data.py", "self.seed * 1_000_003 + epoch", "self.seed * 1_000_003", TRAINING + "epoch"),
    ("training/data.py", "if not text.startswith(seen):", "if False:", TRAINING + "rewrites"),
    ("training/data.py", "counts += [answer] *", "counts += [True] *", TRAINING + "answers_count"),
    ("training/sharding.py", "for i in (world.rank, world.rank + 1)", "for i in (0, 1)",
     TRAINING + "'ranks_hold and 2'"),
    ("training/sharding.py", 'for old in run.glob("best-*"):', "for old in []:", TRAINING + "what_is_written"),
    ("training/sharding.py", 'dcp.load({"model": weights, "optimizer": moments}', 'dcp.load({"model": weights}',
     ADAPT + "killed_at"),
    ("training/runs.py", 'if line["step"] <= step]', "]", ADAPT + "killed_at"),
    ("training/runs.py", "if before.get(name) == now:", "if True:", ADAPT + "another_configuration"),
    ("measure/score.py", "stop - (size - stride)", "stop - stride", EVAL + "windows_score"),
    ("measure/score.py", "each[row, begin - 1 : end - 1]", "each[row, begin:end]", EVAL + "nats_and"),
    ("measure/score.py", "wanted[i : i + step]", "wanted[:step]", EVAL + "nats_and"),
    ("measure/score.py", "(p.exp() * (p - q))", "(q.exp() * (q - p))", EVAL + "nats_and"),
    ("measure/score.py", "part.argmax(-1) == other.argmax(-1)", "part.argmax(-1) == wanted", EVAL + "nats_and"),
    ("measure/score.py", "        model.config = own\n", "        pass\n", EVAL + "sensitivity_against"),
    ("measure/score.py", "ladder_layers=(layer,)", "ladder_layers=layer + 1", EVAL + "sensitivity_against"),
    ("measure/score.py", "rewired(config, wiring,", 'rewired(config, "ladder",', EVAL + "ranks_it_runs_on"),
    ("measure/score.py", "__getitem__)[:count]", "__getitem__)[-count:]", ADAPT + "auto"),
    ("eval.py", "config = own if args.sensitivity else", "config =", EVAL + "ranks_it_runs_on"),
    ("eval.py", "            n -= 1  #", "            break  #", EVAL + "bytes_are"),
    ("eval.py", "len(part.encode()) - len(tokenizer.decode(ids[:1]).encode())", "len(part.encode())",
     EVAL + "bytes_are"),
    ("eval.py", "            part = tokenizer.decode(ids)\n", "", EVAL + "bytes_are"),
    ("eval.py", "math.ceil(0.99 * n)", "math.ceil(0.9 * n)", EVAL + "two_wirings"),
    ("eval.py", "args.checkpoint, model) * n / math.log(2)", "args.checkpoint, model) * n", EVAL + "a_text_with"),
    ("eval.py", "key=layers.__getitem__)", "key=layers.index)", EVAL + "table_of_layers"),
    # what a run takes of the memory
    ("measure/preflight.py", "(heads - queries)", "heads", FIT + "will_hold"),
    ("measure/preflight.py", "if needed > free:", "if needed >= free:", FIT + "line_of_rank_0"),
    ("measure/preflight.py", "1 if world.alone or", "1 if", FIT + "line_of_rank_0"),
    ("measure/report.py", "min([available, *group_bytes()])", "available", FIT + "groups_is_free"),
    ("measure/report.py", 'path.count("/") + 2', "1", FIT + "control_group"),
    ("measure/report.py", "int(limit) - int(used) +", "int(limit) +", FIT + "control_group"),
    ("eval.py", "min(batch, len(parts)), max(parts), other)", "1, 1)", FIT + "eval_refuses"),
    # numbers that are not finite
    ("decoding/sampling.py", "return top.isfinite() &", "return", NUMBERS + "sampler_marks"),
    ("decoding/sampling.py", " & logits.amin(-1).isfinite()", "", NUMBERS + "sampler_marks"),
    ("decoding/sampling.py", ".masked_fill_(~good[..., None], 0)", "", NUMBERS + "sampler_marks"),
    ("generate.py", "if i == -1:", "if False:", NUMBERS + "step_and_the_row"),
    ("generate.py", "step = len(texts[row]) - len(prompts[row])", "step = passes", "test_speculative.py -k by_step_and_row"),
    ("eval.py", "if not math.isfinite(nats):", "if False:", NUMBERS + "eval_names"),
    ("adapt.py", "if not math.isfinite(nats):", "if False:", NUMBERS + "ends_a_training"),
    # benchmarks/
    ("benchmarks/zeroshot.py", "known.tp_bound == (tp > 1)", "True", BENCHMARKS + "each_wiring_runs"),
    ("benchmarks/zeroshot.py", "nats_per_token(m, select,", "nats_per_token(m, valid,", BENCHMARKS + "zeroshot_has"),
    ("benchmarks/zeroshot.py", "key=lambda row: row[1]", "key=lambda row: 0", BENCHMARKS + "zeroshot_has"),
    ("benchmarks/zeroshot.py", "wiring_name(wiring, half) if half else wiring", "wiring", BENCHMARKS + "zeroshot_has"),
    ("benchmarks/zeroshot.py", "first + WINDOW + 1]", "first + WINDOW]", BENCHMARKS + "zeroshot_has"),
    ("benchmarks/zeroshot.py", "line['nats'] / base[line['tp']] - 1", "base[line['tp']] / line['nats'] - 1",
     BENCHMARKS + "zeroshot_has"),
    ("benchmarks/acceptance.py", "ids[1:BEGIN] * quote", "ids[:BEGIN] * quote", BENCHMARKS + "acceptance_counts"),
    ("benchmarks/acceptance.py", "counts.update(draft.accepted)", "pass", BENCHMARKS + "acceptance_counts"),
    ("benchmarks/acceptance.py", "min(n + 1, most)", "(n + 1)", BENCHMARKS + "rows_on"),
    ("benchmarks/speculation.py", "(n * draft + verification)", "(draft + verification)",
     BENCHMARKS + "rows_on"),
    # what strangers' files may do
    ("formats/checkpoint.py", "if dtype not in DTYPES.values():", "if False:", HOSTILE + "no_floats"),
    ("generate.py", "torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit", "pass",
     SOAK + "more_shapes"),
    ("generate.py", "    if compile:  # in whole buckets", "    if False:  # in whole buckets", SOAK + "more_shapes"),
    # several tokens in a pass
    ("decoding/sampling.py", "drawn * offered < p[:, :K].gather(-1, d)[..., 0]", "drawn < 2",
     SPECULATIVE + "accepted_or_replaced"),
    ("decoding/sampling.py", "drawn * offered <", "drawn <", SPECULATIVE + "'accepted_or_replaced and drawn'"),
    ("decoding/sampling.py", "left = (rest - q[rows, first])", "left = rest", SPECULATIVE + "accepted_or_replaced"),
    ("decoding/sampling.py", "left = (rest - q[rows, first])", "left = rest", SPECULATIVE + "generated_with_a_draft"),
    ("decoding/sampling.py", "left = rest.scatter(-1, proposed[rows, first][:, None], 0.0)", "left = rest",
     SPECULATIVE + "accepted_or_replaced"),
    ("decoding/sampling.py", "all_stand | none_left", "none_left", SPECULATIVE + "accepted_or_replaced"),
    ("decoding/sampling.py", "== proposed).long().cumprod(-1)", "== proposed).long()",
     SPECULATIVE + "'know_of_a_draft and standard'"),
    ("decoding/sampling.py", "return ids.where(good, -1), stand", "return ids, stand", SPECULATIVE + "by_step_and_row"),
    ("decoding/speculative.py", "if n <= end})", "if n < end})", SPECULATIVE + "ngrams_are"),
    ("decoding/speculative.py", "NGRAM = 3, 2", "NGRAM = 2, 3", SPECULATIVE + "ngrams_are"),
    ("decoding/speculative.py", "(text[start:] * count)[:count]", "(text[start:] * count)[-count:]", SPECULATIVE + "ngrams_are"),
    ("decoding/speculative.py", "self.held[row] += len(os.path.commonprefix([self.last[row], text[self.held[row] :]]))",
     "self.held[row] += len(self.last[row])", SPECULATIVE + "it_would_say"),
    ("decoding/speculative.py", "self.held[row] += len(os.path.commonprefix([self.last[row], text[self.held[row] :]]))", "pass",
     SPECULATIVE + "catches_up"),
    ("decoding/speculative.py", "found[0][:, : count - 1]", "found[0][:, :count]", SPECULATIVE + "always_right"),
    ("decoding/speculative.py", "min([known, *self.held])", "known",
     SPECULATIVE + "goes_on_from"),
    ("decoding/speculative.py", "min([known, *self.held])", "0",
     SPECULATIVE + "'computes_only and near'"),
    ("decoding/speculative.py", "self.runner.decode(ids[-1][:, None], positions + i, longest + i)",
     "self.runner.decode(ids[-1][:, None], positions, longest + i)", SPECULATIVE + "always_right"),
    ("decoding/speculative.py", "if has and not d]", "if has]",
     SPECULATIVE + "it_would_say"),
    ("decoding/speculative.py", "= self.MEMORY * self.stood, self.MEMORY * self.tried", "= self.stood, self.tried",
     SPECULATIVE + "hopes_again"),
    ("decoding/speculative.py", "sum(min(n + 1, count) for n in stood)", "count * len(stood)", SPECULATIVE + "what_pays"),
    ("decoding/speculative.py", "checkpoint.digest(text) == checkpoint.digest(args.checkpoint)", "text == args.checkpoint",
     SPECULATIVE + "cannot_draft"),
    ("decoding/speculative.py", "if theirs.decode([i]) != tokenizer.decode([i]):", "if False:", SPECULATIVE + "cannot_draft"),
    ("decoding/speculative.py", "if draft.function == config.function:", "if draft == config:", SPECULATIVE + "same_norms"),
    ("decoding/speculative.py", "    if missing:\n", "    if False:\n", SPECULATIVE + "same_norms"),
    ("generate.py", "known = len(os.path.commonprefix([held, ids[:-1]]))", "known = min(len(held), len(ids) - 1)",
     SPECULATIVE + "'computes_only and near'"),
    ("generate.py", "held = (ids + row)[:-1]", "held = ids[:-1]", SPECULATIVE + "computes_only"),
    ("measure/report.py", "read += draft.drafted / passes *", "read += 0 *", SPECULATIVE + "bytes_of_a_pass"),
    # measure/harness.py: these take lm-eval
    ("measure/harness.py", "[-self.max_length - 1 :]", "[: self.max_length + 1]", EVAL + "likelihoods_against"),
    ("measure/harness.py", "row[len(tokens) - len(continuation) : len(tokens)]", "row[-len(continuation) :]",
     EVAL + "likelihoods_against"),
    ("measure/harness.py", "greedy &= bool", "greedy = bool", EVAL + "likelihoods_against"),
    ("measure/harness.py", "totals[i] += logp", "totals[i] = logp", EVAL + "likelihoods_against"),
    ("measure/harness.py", "ids[-(self.max_length - new) :]", "ids", EVAL + "generation_against"),
    ("measure/harness.py", "self.text.decode(row), stops, None", "self.text.decode(row), [], None",
     EVAL + "generation_against"),
    ("measure/harness.py", "return all(ended)", "return any(ended)", EVAL + "generation_against"),
    ("measure/harness.py", "ended[i] = any(stop in text for stop in stops)", "pass", EVAL + "generation_ends"),
]  # fmt: skip


def killed(folder, file, old, new, tests):
    """Whether the tests fail with the mutant in a copy of the tree; None when the old text is not there just once."""
    path = folder / file
    text = path.read_text()
    if text.count(old) != 1:
        return None
    path.write_text(text.replace(old, new))
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if file.endswith(".cpp"):
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
    name, *flags = shlex.split(tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{name}", *flags]
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
        shutil.copy(ROOT / "pyproject.toml", folder)
        for file, old, new, tests in chosen:
            found = killed(folder, file, old, new, tests)
            bad += not found
            what = {True: "killed", False: "SURVIVED", None: "NOT FOUND"}[found]
            print(f"{what:9} {file}: {old.strip()!r} -> {new.strip()!r}  ({tests})", flush=True)
    print(f"{len(chosen)} mutants, {bad} not killed, {time.perf_counter() - start:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
