"""At which columns ranks may cut groups of int4. int_linear.py has the modules."""

import math


def column_unit(config, width, least_ranks):
    """Return how many of the `width` columns of a w2 must stay on one rank: 1, or more in a mixture or with int4.

    In a mixture these are 8 columns: torch._grouped_mm on a GPU takes rows of a multiple of 16 bytes. With int4 they
    are a group, or 128 columns, which PyTorch's int4 kernel on a GPU wants, if no share then exceeds its due by more
    than an eighth. least_ranks: how many ranks there would be if each had the smallest share.
    Where groups are too few they are halved, down to 8 columns, the least that few_rows.cpp takes. Lanes are cut at
    multiples of 8: at the neurons where they are cut without int4.
    """
    if config.group_size is None or "w2" in config.kept:
        return 8 if config.n_experts and width % 8 == 0 else 1
    unit = config.group_size
    if config.lanes:
        return 8
    if width % 128 == 0 and width >= 8 * 128 * least_ranks and not config.named_wiring.depends_on_lanes:
        unit = 128
    while unit > 8 and width // unit < least_ranks:
        unit //= 2
    return unit


def stored_columns(ranges, columns):
    """Return how many stored numbers cover ranges of a matrix's columns, if each covers `columns`; see regroup."""
    return sum((stop - start) // math.gcd(columns, start, stop) for start, stop in ranges)


def regroup(numbers, start, stop, size):
    """Return int4 scales or zeros for columns start to stop, given those (..., G) of all groups that contain them.

    size: columns of such a group. If start or stop lies inside a group, all groups become smaller: the largest size
    that divides both. Example: groups of 64 cut at column 96 become groups of 32.
    """
    if start % size == stop % size == 0:
        return numbers
    smaller = math.gcd(size, start, stop)
    first = start % size // smaller
    numbers = numbers.repeat_interleave(size // smaller, dim=-1)
    return numbers[..., first : first + (stop - start) // smaller].contiguous()
