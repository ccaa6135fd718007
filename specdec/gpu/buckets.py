"""Sizes that captured programs are padded to: few, so that few programs are captured."""


def next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def step_up(size: int, min_size: int, factor: int) -> int:
    """The first of min_size, min_size * factor, min_size * factor^2, ... that is not below `size`."""
    while min_size < size:
        min_size *= factor
    return min_size
