"""What --compile takes besides torch.compile: a compiler, and on a GPU kernels for a decode step."""

import contextlib
import gc
import time

import torch

from ladder.decoding.batch import pad
from ladder.errors import InputError
from ladder.kernels import compilers, registry
from ladder.kernels.cpu import loading
from ladder.progress import progress
from model import dummy_slot

# A step's weights evict all else from the caches, so little should run between the products; a second thread is for
# large kernels. Of the C++, only the kernels take time to run: built apart, the rest takes g++ a third of the time.
CPU_OPTIONS = {
    "cpp_wrapper": True,
    "cpp_wrapper_build_separate": True,
    "size_asserts": False,
    "cpp.min_chunk_size": 16384,
}


def prepare(device):
    """Set up torch.compile for a device. Raises InputError if it needs a compiler and there is none."""
    compilers.prepare_compile() if device.type == "cpu" else compilers.check_triton()
    handler = torch._dynamo.callback_handler
    phase = contextlib.ExitStack()
    if not handler.start_callbacks:  # what is compiled after warm_up, as for a chat's next prompt, is no hang
        handler.register_start_callback(lambda _: phase.enter_context(progress.during("compilation")))
        handler.register_end_callback(lambda _: phase.close())


def use_decode_kernels(model):
    """Let a model use kernels for a decode step. On a CPU generate.load_model has done so already."""
    if model.device.type == "cpu":
        loading.use_on_cpu(model)
        return
    from ladder.kernels.gpu import split_attention  # late: it imports the compiler

    registry.use(split_attention.KERNELS)


def compiled(model, decode, prefill):
    """Return (the model for decode steps, the model for the prefill), each compiled if asked for.

    On a GPU the decode steps are Graphs. Raises InputError as prepare() does, and for sums that no graph can hold.
    """
    prepare(model.device)
    if "sums" in model.comm.on_host:
        raise InputError("--compile captures sums, and gloo's go through the host: run without, or by --comm one-shot")
    prefill_model = torch.compile(model, fullgraph=True) if prefill else model
    if not decode:
        return model, prefill_model
    use_decode_kernels(model)
    # One graph for any cache_length, an argument of Transformer.forward; all else is fixed. So each shape of a cache
    # has its own, and who serves many must not run out of them. Both settings are global.
    torch.compiler.config.dynamic_sources = "L['cache_length']"
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # else hooks that are added later would be ignored
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
    if model.device.type == "cuda":
        return compiled_graphs(model), prefill_model
    return torch.compile(model, fullgraph=True, dynamic=False, options=CPU_OPTIONS), prefill_model


def compiled_graphs(model):
    """Return the Graphs of a model's compiled decode step.

    Only a step of one token is tuned: there the compiler multiplies by kernels of its own. For more it calls cuBLAS,
    and tuning the rest would only take time.
    """
    from ladder.kernels.cuda_graphs import Graphs

    settings = {"fullgraph": True, "dynamic": False}
    more_rows = torch.compile(model, options={"combo_kernels": True}, **settings)
    tuned = {"combo_kernels": True, "coordinate_descent_tuning": True}  # tuning may change the last bits of results
    one_row = torch.compile(model, options=tuned, **settings)

    def step(tokens, *args, **kwargs):
        return (one_row if tokens.numel() == 1 else more_rows)(tokens, *args, **kwargs)

    return Graphs(step, _compiling)


@contextlib.contextmanager
def _compiling():
    """Say that the ranks compile, without Python's search for cycles: it would take a fifth of the compiler's time."""
    gc.disable()
    try:
        with progress.during("compilation"):
            yield
    finally:
        gc.enable()


@torch.inference_mode()
def warm_up(runner, prompts, max_new_tokens, sampler):
    """Compile, or on a GPU capture, a prefill and the passes that follow it; returns the seconds.

    On a GPU passes of all these lengths are captured, and of the cache_length after them.
    """
    start = time.perf_counter()
    first = max(map(len, prompts)) + 1
    state = sampler.generator.get_state()
    lengths = {first}
    if runner.device.type == "cuda":
        room = min(dummy_slot(runner.cache), runner.model.config.max_seq_len)
        last = min(first + max_new_tokens - 1, room)
        end = min(runner.cache_length(last) + 1, room)
        lengths = {last, *{runner.cache_length(n): n for n in range(end, first - 1, -1)}.values()}
    with _compiling():
        runner.prefill(*pad(prompts, runner.device))
        if runner.draft:
            runner.draft.begin()
        for length in sorted(lengths):
            sequences = [[0] * length for _ in prompts]
            if runner.draft:
                runner.draft.warm_up(runner, sequences)
            else:
                runner.make_step()(sequences, None, sampler)
    sampler.generator.set_state(state)
    return time.perf_counter() - start


def warm_up_aloud(runner, job):
    """Do what warm_up does for a Job, and say about how long compiling will take."""
    if runner.passes.compiles_decode:  # else a GPU captures its eager step, which takes no compiler
        layers = job.config.n_layers
        on_cpu = runner.device.type == "cpu"
        about = f", about {5 + 1.3 * layers:.0f} s of a core and less if it was compiled before" * on_cpu
        job.world.say(f"compiling {layers} layers{about} ...")
    return warm_up(runner, job.prompts, job.max_new_tokens, job.sampler)
