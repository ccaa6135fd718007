"""Sizes that captured programs are padded to. They are few, so few programs are captured."""


def next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def step_up(size: int, min_size: int, factor: int) -> int:
    """The first of least, least * factor, least * factor^2, ... that is not below `size`."""
    while min_size < size:
        min_size *= factor
    return min_size
