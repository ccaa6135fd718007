"""The Triton kernels that read the vocabulary for `sample`, which holds the math, the references and the launches.

    scan_kernel       grid (tiles, rows)   the best logit of each group and tile of the vocabulary
    floor_kernel      grid (rows)          the row's best logit, and a floor that the tokens to choose from must reach
    collect_kernel    grid (Z, rows)       tokens of tiles z, z + Z, ... that can be chosen, appended to the row's list
    choose_kernel     grid (rows)          the exact choice from the list; once more, for the rows whose list cannot be
                                           enough, from the row itself

    greedy            nothing is listed: the first of the tile that has the row's best first
    noise, no filter  the tile's tokens within the error of `noise_bound` of its best
    top-k, top-p      the tokens that reach the floor: at most the k-th best logit, since k groups have a best that
                      reaches it. A vocabulary that fits the list is listed whole

A list cannot be enough when more tokens reach the floor than it holds, or when the nucleus goes below the floor. No
token depends on how rows are cut, or on the rows beside.
"""

from specdec.gpu.dependent_launch import trigger_next, wait_for_previous
from specdec.gpu.triton_shim import tl, triton
from specdec.sampling.noise import NOISE_ERROR, noise_bound, noise_stream
from specdec.sampling.softcap import capped

INF = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(0x7FFFFFFF)
MASS_UNIT = tl.constexpr(float(1 << 40))
LARGEST_FLOAT = tl.constexpr(3e38)


@triton.jit
def load_logits(row: tl.tuple, o_token: tl.tensor) -> tl.tensor:
    """float32, after softcap (each step rounded as the model's would be) and penalty; -inf behind the vocabulary."""
    p_logits, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len = row
    m_token = o_token < vocab_size
    b_x = tl.load(p_logits + o_token, mask=m_token, other=0.0)
    if softcap is not None:
        b_x = capped(b_x, softcap, cap_inverse)
    b_x = b_x.to(tl.float32)
    if p_seen is not None:
        penalty = tl.load(p_penalty)
        if penalty != 1.0:
            b_word = tl.load(p_seen + (o_token >> 5), mask=m_token, other=0)
            m_seen = ((b_word >> (o_token & 31)) & 1) != 0
            for i_path in range(path_len):
                m_seen = m_seen | (o_token == tl.load(p_path + i_path))
            b_x = tl.where(m_seen, tl.where(b_x > 0, tl.div_rn(b_x, penalty), b_x * penalty), b_x)
    return tl.where(m_token, b_x, -INF)


@triton.jit
def score_of(b_x: tl.tensor, row_max: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(x - max) / T <= 0, the best token at 0 however small T is; T = 1 where greedy."""
    return tl.where(b_x == row_max, 0.0, tl.div_rn(b_x - row_max, tl.where(temperature > 0, temperature, 1.0)))


@triton.jit
def min_score_of(min_p: tl.tensor) -> tl.tensor:
    """log min_p, the score of a token min_p times as likely as the best; -inf for 0."""
    return tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), -INF)


@triton.jit
def mass_of(b_s: tl.tensor) -> tl.tensor:
    return (tl.exp(b_s) * MASS_UNIT).to(tl.int64)


@triton.jit
def _floor_of(b_x: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """A number that at least `wanted` finite entries reach and, ties aside, few more; -inf if fewer are finite."""
    m_finite = b_x > -INF
    count = tl.sum(m_finite.to(tl.int32))
    lo, hi = tl.min(tl.where(m_finite, b_x, INF)), tl.max(b_x)
    enough = count >= wanted
    steps = tl.where(enough, 24, 0)
    while (steps > 0) & (count > wanted + wanted // 8):
        middle = 0.5 * lo + 0.5 * hi
        reached = tl.sum((b_x >= middle).to(tl.int32))
        fits = reached >= wanted
        lo, hi = tl.where(fits, middle, lo), tl.where(fits, hi, middle)
        count = tl.where(fits, reached, count)
        steps -= 1
    return tl.where(enough, lo, -INF)


@triton.jit
def _is_filtered(temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))


@triton.jit(do_not_specialize=["rows_per_request", "s_seen", "path_len"])
def scan_kernel(
    p_logits: tl.tensor,  # [R, V]
    p_penalty: tl.tensor,  # [B] or None
    p_seen: tl.tensor,  # [B, V / 32] or None
    p_path: tl.tensor,  # [R, D] or None
    p_group_max: tl.tensor,  # [R, tiles * TILE / GROUP]
    p_tile_max: tl.tensor,  # [R, tiles]
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    softcap: tl.tensor,  # or None
    cap_inverse: tl.tensor,
    s_row: tl.tensor,
    s_seen: tl.tensor,
    path_len: tl.tensor,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_tile, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_request = i_row // rows_per_request
    o_token = i_tile * TILE + tl.arange(0, TILE)
    wait_for_previous(PDL)
    if p_seen is not None:
        p_penalty += i_request
        p_seen += i_request * s_seen
        p_path += i_row * path_len
    p_row = p_logits + i_row * s_row
    # a softcap that rounds to 16 bits keeps the order, so of a group its best is enough: the cap takes longer than the
    # memory; in float32 the cap of a larger logit may come out a little smaller
    CAP_LAST: tl.constexpr = softcap is not None and p_seen is None and p_logits.dtype.element_ty != tl.float32
    row = (p_row, p_penalty, p_seen, p_path, vocab_size, None if CAP_LAST else softcap, cap_inverse, path_len)
    b_group = tl.max(tl.reshape(load_logits(row, o_token), [TILE // GROUP, GROUP]), axis=1)
    if CAP_LAST:
        b_group = capped(b_group.to(p_logits.dtype.element_ty), softcap, cap_inverse).to(tl.float32)
        o_first = i_tile * TILE + tl.arange(0, TILE // GROUP) * GROUP
        b_group = tl.where(o_first < vocab_size, b_group, -INF)
    best = tl.max(b_group)
    o_group = (i_row * tl.num_programs(0) + i_tile) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(p_group_max + o_group, b_group)
    tl.store(p_tile_max + i_row * tl.num_programs(0) + i_tile, best)


@triton.jit(do_not_specialize=["num_tiles", "num_groups", "vocab_size", "rows_per_request", "capacity"])
def floor_kernel(
    p_group_max: tl.tensor,  # [R, groups]
    p_tile_max: tl.tensor,  # [R, tiles]
    p_temperature: tl.tensor,  # [B]
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_row_max: tl.tensor,  # [R]
    p_floor: tl.tensor,  # [R]
    p_count: tl.tensor,  # [R]
    p_mass: tl.tensor,  # [R]
    num_tiles: tl.tensor,
    num_groups: tl.tensor,
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    capacity: tl.tensor,
    SCORES: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_request = i_row // rows_per_request
    o_tile, o_group = tl.arange(0, TILES), tl.arange(0, GROUPS)
    wait_for_previous(PDL)
    temperature, top_p = tl.load(p_temperature + i_request), tl.load(p_top_p + i_request)
    top_k = tl.load(p_top_k + i_request)
    b_tile = tl.load(p_tile_max + i_row * num_tiles + o_tile, mask=o_tile < num_tiles, other=-INF)
    tl.store(p_row_max + i_row, tl.max(b_tile))
    tl.store(p_count + i_row, 0)
    tl.store(p_mass + i_row, tl.zeros([], tl.int64))
    floor = -INF
    listed = _is_filtered(temperature, top_k, top_p, vocab_size)
    if SCORES:
        listed = listed | (temperature == 0)
    if listed & (vocab_size > capacity):
        most = num_groups - num_groups // 4
        wanted = most
        if temperature == 0:
            wanted = tl.minimum(most, K)
        elif (top_k > 0) & (top_k < most):
            wanted = top_k.to(tl.int32)
        b_group = tl.load(p_group_max + i_row * num_groups + o_group, mask=o_group < num_groups, other=-INF)
        floor = _floor_of(b_group, wanted)
    tl.store(p_floor + i_row, floor)


@triton.jit(do_not_specialize=["num_tiles", "rows_per_request", "capacity", "s_seen", "path_len"])
def collect_kernel(
    p_logits: tl.tensor,  # [R, V]
    p_positions: tl.tensor,  # [R]
    p_temperature: tl.tensor,  # [B]
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_min_p: tl.tensor,
    p_penalty: tl.tensor,
    p_seed: tl.tensor,
    p_seen: tl.tensor,  # [B, V / 32] or None
    p_path: tl.tensor,  # [R, D] or None
    p_row_max: tl.tensor,  # [R]
    p_floor: tl.tensor,  # [R]
    p_count: tl.tensor,  # [R]
    p_mass: tl.tensor,  # [R]
    p_list_id: tl.tensor,  # [R, capacity]
    p_list_x: tl.tensor,  # [R, capacity]
    p_sum_max: tl.tensor,  # [R, tiles]: largest perturbed score
    p_sum: tl.tensor,  # [R, tiles]: sum of e^(score - that)
    num_tiles: tl.tensor,
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    capacity: tl.tensor,
    softcap: tl.tensor,  # or None
    cap_inverse: tl.tensor,
    s_row: tl.tensor,
    s_seen: tl.tensor,
    path_len: tl.tensor,
    SCORES: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(1).to(tl.int64)
    i_request = i_row // rows_per_request
    wait_for_previous(PDL)
    temperature = tl.load(p_temperature + i_request)
    if SCORES or temperature > 0:
        top_k, top_p = tl.load(p_top_k + i_request), tl.load(p_top_p + i_request)
        row_max = tl.load(p_row_max + i_row)
        if p_seen is not None:
            p_penalty += i_request
            p_seen += i_request * s_seen
            p_path += i_row * path_len
        row = (p_logits + i_row * s_row, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len)
        for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            o_token = i_tile * TILE + tl.arange(0, TILE)
            b_x = load_logits(row, o_token)
            m_list = b_x > -INF
            if _is_filtered(temperature, top_k, top_p, vocab_size):
                if (top_k <= 0) | (top_k >= vocab_size):
                    b_mass = tl.where(m_list, mass_of(score_of(b_x, row_max, temperature)), 0)
                    tl.atomic_add(p_mass + i_row, tl.sum(b_mass), sem="relaxed")
                m_list = m_list & (b_x >= tl.load(p_floor + i_row))
            else:
                # near the score; the list's consumer takes the exact one
                inverse = tl.minimum(1.0 / tl.where(temperature > 0, temperature, 1.0), LARGEST_FLOAT)
                b_z = (b_x - row_max) * inverse
                if temperature > 0:
                    min_score = min_score_of(tl.load(p_min_p + i_request))
                    m_list = m_list & (b_z >= min_score - NOISE_ERROR)
                    stream = noise_stream(tl.load(p_seed + i_request), tl.load(p_positions + i_row))
                    b_z = tl.where(m_list, b_z + noise_bound(stream, o_token), -INF)
                    if K == 1:
                        floor = tl.max(b_z)
                    else:
                        floor = _floor_of(b_z, K)
                    m_list = m_list & (b_z >= floor - 2 * NOISE_ERROR)
                else:
                    m_list = m_list & (b_x >= tl.load(p_floor + i_row))
                if SCORES:
                    best = tl.max(b_z)
                    total = tl.sum(tl.where(b_z > -INF, tl.exp(b_z - tl.where(best > -INF, best, 0.0)), 0.0))
                    tl.store(p_sum_max + i_row * num_tiles + i_tile, best)
                    tl.store(p_sum + i_row * num_tiles + i_tile, total)
            count = tl.sum(m_list.to(tl.int32))
            if count > 0:
                if count <= 16:  # a scan of the tile costs more than so many requests for a place
                    o_list = tl.atomic_add(p_count + i_row + o_token * 0, 1, mask=m_list, sem="relaxed")
                else:
                    first = tl.atomic_add(p_count + i_row, count, sem="relaxed")
                    o_list = first + tl.cumsum(m_list.to(tl.int32)) - 1
                m_list = m_list & (o_list < capacity)
                tl.store(p_list_id + i_row * capacity + o_list, o_token, mask=m_list)
                tl.store(p_list_x + i_row * capacity + o_list, b_x, mask=m_list)
