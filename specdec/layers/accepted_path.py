r"""Gathers the rows of a tree's accepted path, and keeps the last row of the path.

    path_rows    rows[b, d]       = x[b, path[b, d]]
                 following[b, d]  = tokens[b, path[b, d + 1]]    d + 1 < length_b: the token after each
                                  = next_token[b]                later
    keep_last    kept[row_b]      = rows[b, length_b - 1]        if several row_b are equal, one is kept
                                  = x[b, path[b, length_b - 1]]  the same, if the rows were not gathered

Each is one launch. The first `length` entries of a path [B, D] count (a length of 0 counts as 1); the rest are
arbitrary nodes.
"""

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import pdl_options, tl, trigger_next, triton, wait_for_previous

BLOCK = 2048


def reference_path_rows(
    x: torch.Tensor, tokens: torch.Tensor, path: torch.Tensor, length: torch.Tensor, next_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.gather(1, path[:, :, None].expand(-1, -1, x.shape[-1]))
    following = tokens.gather(1, path).roll(-1, dims=1)
    steps = torch.arange(1, path.shape[1] + 1, device=path.device)
    return rows, torch.where(steps < length[:, None], following, next_token[:, None])


def reference_keep_last(
    kept: torch.Tensor, row: torch.Tensor, rows: torch.Tensor, length: torch.Tensor, path: torch.Tensor | None = None
) -> None:
    last = (length - 1).clamp(min=0)[:, None]
    if path is not None:
        last = path.gather(1, last)
    kept[row] = rows.gather(1, last[:, :, None].expand(-1, -1, rows.shape[-1]))[:, 0]


@triton.jit(do_not_specialize=["num_steps"])
def _path_rows_kernel(
    p_x: tl.tensor,  # [B, N, F]
    p_tokens: tl.tensor,  # [B, N]
    p_path: tl.tensor,  # [B, D]
    p_length: tl.tensor,  # [B]
    p_next: tl.tensor,  # [B]
    p_rows: tl.tensor,  # [B, D, F]
    p_following: tl.tensor,  # [B, D]
    num_steps: tl.tensor,
    width: tl.tensor,
    s_x_b: tl.tensor,
    s_x_n: tl.tensor,
    s_tokens: tl.tensor,
    s_path: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_step = i_row // num_steps, i_row % num_steps
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    p_path += i_b * s_path + i_step
    node = tl.load(p_path).to(tl.int64)
    b_x = tl.load(p_x + i_b * s_x_b + node * s_x_n + o, mask=o < width, other=0.0)
    tl.store(p_rows + i_row * width + o, b_x, mask=o < width)
    if tl.program_id(1) == 0:
        token = tl.load(p_next + i_b).to(tl.int64)
        if i_step + 1 < tl.load(p_length + i_b):
            token = tl.load(p_tokens + i_b * s_tokens + tl.load(p_path + 1)).to(tl.int64)
        tl.store(p_following + i_row, token)


@triton.jit(do_not_specialize=["s_path"])
def _keep_last_kernel(
    p_kept: tl.tensor,  # [R, H]
    p_row: tl.tensor,  # [B]
    p_rows: tl.tensor,  # [B, D, H]
    p_length: tl.tensor,  # [B]
    p_path: tl.tensor,  # [B, D], or None
    width: tl.tensor,
    s_b: tl.tensor,
    s_d: tl.tensor,
    s_path: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_b = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    last = tl.maximum(tl.load(p_length + i_b).to(tl.int64), 1) - 1
    if p_path is not None:
        last = tl.load(p_path + i_b * s_path + last).to(tl.int64)
    b_x = tl.load(p_rows + i_b * s_b + last * s_d + o, mask=o < width, other=0.0)
    tl.store(p_kept + tl.load(p_row + i_b).to(tl.int64) * width + o, b_x, mask=o < width)


@op(reference=reference_path_rows)
def path_rows(
    x: torch.Tensor, tokens: torch.Tensor, path: torch.Tensor, length: torch.Tensor, next_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather: x [B, N, F], tokens [B, N], path [B, D], length and next_token [B] -> rows [B, D, F], following [B,
    D]."""
    (batch, num_nodes, width), num_steps = x.shape, path.shape[1]
    assert tokens.shape == (batch, num_nodes) and path.shape == (batch, num_steps), f"{tokens.shape=} {path.shape=}"
    assert length.shape == next_token.shape == (batch,), f"{length.shape=} {next_token.shape=}"
    assert length.is_contiguous() and next_token.is_contiguous(), f"{length.stride()=} {next_token.stride()=}"
    assert x.stride(2) == tokens.stride(1) == 1 and (num_steps == 1 or path.stride(1) == 1), f"{x.stride()=}"
    rows = x.new_empty((batch, num_steps, width))
    following = tokens.new_empty((batch, num_steps))
    if rows.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _path_rows_kernel[(batch * num_steps, triton.cdiv(width, block))](
            *(x, tokens, path, length, next_token, rows, following, num_steps, width),
            *(x.stride(0), x.stride(1), tokens.stride(0), path.stride(0)),
            BLOCK=block,
            num_warps=4,
            **pdl_options(x.device),
        )
    return rows, following


@op(reference=reference_keep_last)
def keep_last(
    kept: torch.Tensor, row: torch.Tensor, rows: torch.Tensor, length: torch.Tensor, path: torch.Tensor | None = None
) -> None:
    """Write the last row of each path of `length` [B] nodes to kept [R, H], at row [B]. rows: those of the path [B, D,
    H], or those of all nodes [B, N, H], with path [B, D]."""
    batch, _, width = rows.shape
    assert kept.is_contiguous() and kept.shape[1] == width and kept.dtype == rows.dtype, f"{kept.shape=} {rows.shape=}"
    assert row.shape == length.shape == (batch,), f"{row.shape=} {length.shape=}"
    assert row.is_contiguous() and length.is_contiguous() and rows.stride(2) == 1, f"{rows.stride()=}"
    if path is not None:
        assert len(path) == batch and (path.shape[1] == 1 or path.stride(1) == 1), f"{path.shape=} {path.stride()=}"
    if rows.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _keep_last_kernel[(batch, triton.cdiv(width, block))](
            *(kept, row, rows, length, path, width, rows.stride(0), rows.stride(1)),
            0 if path is None else path.stride(0),
            BLOCK=block,
            num_warps=4,
            **pdl_options(rows.device),
        )
