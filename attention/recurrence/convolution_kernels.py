"""Kernels of the convolutions of recurrent layers. The newest inputs of a row's path are in three places:

    position    < folded      the request's state, which has the newest inputs before that
                < start       their slots
                later         rows of this forward: ancestors, or earlier tokens of the run

A launch reads no slot that it writes. Sums are float32, tap by tap in order, and rounded once.
"""

from specdec.attention.recurrence.block_kernels import slots_at
from specdec.gpu.triton_shim import tl, triton


@triton.jit
def before_forward(
    p_inputs: tl.tensor,
    p_pool: tl.tensor,
    p_table: tl.tensor,
    begin: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    start: tl.tensor,
    o_channel: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """Inputs at positions before `start`, 0 elsewhere. `first` tokens are folded into the state."""
    recorded = (position >= first) & (position < start)
    slot = slots_at(p_table, begin, position, recorded, PAGE)
    m_recorded = o_channel < tl.where(recorded, CHANNELS, 0)
    found = tl.load(p_pool + slot * CHANNELS + o_channel, mask=m_recorded, other=0.0).to(tl.float32)
    kept = (position >= 0) & (position < first)
    p_inputs += tl.where(kept, TAPS + position - first, 0) * CHANNELS
    m_kept = o_channel < tl.where(kept, CHANNELS, 0)
    return found + tl.load(p_inputs + o_channel, mask=m_kept, other=0.0).to(tl.float32)


@triton.jit
def tree_convolution_kernel(
    p_in: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    p_inputs: tl.tensor,
    p_pool: tl.tensor,
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_table: tl.tensor,
    p_begin: tl.tensor,
    p_write: tl.tensor,
    p_positions: tl.tensor,
    p_ancestors: tl.tensor,
    stride_in: tl.tensor,
    stride_table: tl.tensor,
    stride_positions: tl.tensor,
    stride_tree: tl.tensor,
    stride_node: tl.tensor,
    stride_weight: tl.tensor,
    stride_tap: tl.tensor,
    num_nodes: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    NODES: tl.constexpr,
    PAGE: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_request, node = i_row // num_nodes, i_row % num_nodes
    o_channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_channel = o_channel < CHANNELS
    row = tl.load(p_rows + i_request).to(tl.int64)
    start = tl.load(p_start + i_request).to(tl.int64)
    first = start // FOLD * FOLD
    begin = tl.load(p_begin + i_request)
    o_node = tl.arange(0, NODES)
    m_node = o_node < num_nodes
    positions = tl.load(p_positions + i_request * stride_positions + o_node, mask=m_node, other=0)
    above = tl.load(p_ancestors + i_request * stride_tree + node * stride_node + o_node, mask=m_node, other=0) != 0
    mine = tl.sum(tl.where(o_node == node, positions, 0), axis=0)
    p_inputs += row * (TAPS * CHANNELS)
    p_rows_in = p_in + i_request * num_nodes * stride_in + o_channel
    p_weight += o_channel * stride_weight
    total = tl.zeros([BLOCK], tl.float32)
    for tap in range(TAPS + 1):
        position = mine - TAPS + tap
        x = before_forward(
            p_inputs, p_pool, p_table + i_request * stride_table, begin, position, first, start,
            o_channel, TAPS, CHANNELS, PAGE,
        )  # fmt: skip
        at = tl.sum(tl.where(above & (positions == position), o_node, 0), axis=0)
        own = o_channel < tl.where(position >= start, CHANNELS, 0)
        x += tl.load(p_rows_in + at * stride_in, mask=own, other=0.0).to(tl.float32)
        total = tl.fma(x, tl.load(p_weight + tap * stride_tap, mask=m_channel, other=0.0).to(tl.float32), total)
    if BIAS:
        total += tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * CHANNELS + o_channel, total.to(p_out.dtype.element_ty), mask=m_channel)
    slot = tl.load(p_write + i_row)
    value = tl.load(p_in + i_row * stride_in + o_channel, mask=m_channel, other=0.0)
    tl.store(p_pool + slot * CHANNELS + o_channel, value, mask=o_channel < tl.where(slot != 0, CHANNELS, 0))


@triton.jit(do_not_specialize=["num_rows"])
def run_convolution_kernel(
    p_in: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    p_inputs: tl.tensor,
    p_pool: tl.tensor,
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_length: tl.tensor,
    p_run_of: tl.tensor,
    p_cu_len: tl.tensor,
    p_table: tl.tensor,
    p_begin: tl.tensor,
    p_write: tl.tensor,
    p_positions: tl.tensor,
    stride_in: tl.tensor,
    stride_table: tl.tensor,
    stride_weight: tl.tensor,
    stride_tap: tl.tensor,
    num_rows: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    FOLD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    o_channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_channel = o_channel < CHANNELS
    runs = tl.load(p_run_of + o_row, mask=m_row, other=0).to(tl.int64)
    # the places after the last run are padding
    real = o_row < tl.load(p_cu_len + runs + 1, mask=m_row, other=0)
    start = tl.load(p_start + runs, mask=real, other=0).to(tl.int64)
    mine = tl.load(p_positions + o_row, mask=real, other=0)
    p_weight += o_channel * stride_weight
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in range(TAPS + 1):
        position = mine - TAPS + tap
        own = real & (position >= start)
        m_own = own[:, None] & m_channel[None, :]
        cells = p_in + (o_row + position - mine)[:, None] * stride_in + o_channel[None, :]
        x = tl.load(cells, mask=m_own, other=0.0).to(tl.float32)
        old = real & (position < start)
        if tl.max(old.to(tl.int32), axis=0) > 0:  # only few tiles contain the start of a run
            row = tl.load(p_rows + runs, mask=old, other=0).to(tl.int64)
            first = start // FOLD * FOLD
            begin = tl.load(p_begin + runs, mask=old, other=0)
            recorded = old & (position >= first)
            slot = tl.load(p_table + runs * stride_table + position - begin, mask=recorded, other=0)
            m_recorded = recorded[:, None] & m_channel[None, :]
            cells = p_pool + slot[:, None] * CHANNELS + o_channel[None, :]
            x += tl.load(cells, mask=m_recorded, other=0.0).to(tl.float32)
            kept = old & (position >= 0) & (position < first)
            m_kept = kept[:, None] & m_channel[None, :]
            cells = p_inputs + (row * TAPS + TAPS + position - first)[:, None] * CHANNELS + o_channel[None, :]
            x += tl.load(cells, mask=m_kept, other=0.0).to(tl.float32)
        weight = tl.load(p_weight + tap * stride_tap, mask=m_channel, other=0.0).to(tl.float32)
        total = tl.fma(x, tl.zeros_like(x) + weight[None, :], total)
    if BIAS:
        bias = tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)
        total += tl.where(real[:, None], bias[None, :], 0.0)
    cells = p_out + o_row[:, None] * CHANNELS + o_channel[None, :]
    tl.store(cells, total.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_channel[None, :])
    # store records of the tokens that stay unfolded
    end = (start + tl.load(p_length + runs, mask=real, other=0)) // FOLD * FOLD
    left = real & (mine >= end)
    if tl.max(left.to(tl.int32), axis=0) > 0:
        slot = tl.load(p_write + o_row, mask=left, other=0)
        m_left = (slot != 0)[:, None] & m_channel[None, :]
        value = tl.load(p_in + o_row[:, None] * stride_in + o_channel[None, :], mask=m_left, other=0.0)
        tl.store(p_pool + slot[:, None] * CHANNELS + o_channel[None, :], value, mask=m_left)


@triton.jit
def run_inputs_kernel(
    p_in: tl.tensor,
    p_inputs: tl.tensor,
    p_pool: tl.tensor,
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_length: tl.tensor,
    p_cu_len: tl.tensor,
    p_table: tl.tensor,
    p_begin: tl.tensor,
    stride_in: tl.tensor,
    stride_table: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the newest inputs before the last fold of each run in the run's state."""
    i_run = tl.program_id(0).to(tl.int64)
    o_channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_channel = o_channel < CHANNELS
    row = tl.load(p_rows + i_run).to(tl.int64)
    start = tl.load(p_start + i_run).to(tl.int64)
    first = start // FOLD * FOLD
    end = (start + tl.load(p_length + i_run)) // FOLD * FOLD
    if end > first:
        before = tl.load(p_cu_len + i_run).to(tl.int64) - start
        begin = tl.load(p_begin + i_run)
        for tap in range(TAPS):
            position = end - TAPS + tap
            old = position < start
            slot = slots_at(p_table + i_run * stride_table, begin, position, old, 1)
            m_old = o_channel < tl.where(old, CHANNELS, 0)
            x = tl.load(p_pool + slot * CHANNELS + o_channel, mask=m_old, other=0.0)
            at = tl.where(old, 0, before + position)
            m_new = o_channel < tl.where(old, 0, CHANNELS)
            new = tl.load(p_in + at * stride_in + o_channel, mask=m_new, other=0.0)
            p_kept = p_inputs + (row * TAPS + tap) * CHANNELS + o_channel
            tl.store(p_kept, x + new, mask=m_channel)
