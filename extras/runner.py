"""What extras make of a generate.Runner, without importing generate.py, which would load that script once more."""

from model import cache_slots


def like(runner, model, cache=None):
    """Return a Runner of another model, compiled alike, with this cache or one of its own of the same size."""
    cache = cache or model.new_cache(len(runner.cache[0][0]), cache_slots(runner.cache))
    return type(runner)(model, cache, runner.compiles, runner.compiles_prefill, runner.chunks)
