"""Write digests.json, which says of which plain functions the kernels know the source.

python -m ladder.kernels.digests        after a change of plain functions, once their kernels compute the same
"""

import json
import pkgutil

from ladder.architectures import experts
from ladder.decoding import fast_sampling
from ladder.kernels import ordered, quant_kernels, registry
from ladder.kernels.cpu import experts as cpu_experts
from ladder.kernels.cpu import heads, latents, stand_ins


def all_kernels():
    """Return the Kernels of all devices."""
    from ladder.kernels.gpu import split_attention  # late: it imports the compiler

    lists = stand_ins.KERNELS, stand_ins.WITHOUT_CPP, latents.KERNELS, heads.KERNELS, cpu_experts.KERNELS
    lists = *lists, ordered.KERNELS, split_attention.KERNELS, experts.GPU_KERNELS, *quant_kernels.KERNELS.values()
    return [kernel for kernels in lists for kernel in kernels] + [fast_sampling.KERNEL]


def digests():
    """Return {name: digest} of all plain functions that kernels stand in for."""
    calls = [call for kernel in all_kernels() for call in registry.functions_of(kernel) if call.is_ours]
    functions = {call.name: call.function for call in calls}
    functions[ordered.SETTLE_IN_ORDER] = pkgutil.resolve_name(ordered.SETTLE_IN_ORDER)
    return {name: registry.digest(functions[name]) for name in sorted(functions)}


if __name__ == "__main__":
    registry.DIGESTS.write_text(json.dumps(digests(), indent=1) + "\n")
