"""The Triton kernels behind `sample`, which holds the math, the reference and the launches.

    scan_kernel       grid (tiles, rows)   the best logit of each group and tile of the vocabulary
    floor_kernel      grid (rows)          the row's best logit, and a floor that the tokens to choose from must reach
    collect_kernel    grid (tiles, rows)   the tokens that can be chosen, appended to the row's list
    choose_kernel     grid (rows)          the exact choice from the list

    greedy            nothing is listed: the best of the tiles' best
    noise, no filter  the tile's tokens within the error of `noise_bound` of its best
    top-k, top-p      tokens that reach the floor. It is a lower bound on the k-th best logit by the groups' best, each
                      a token; at most the list holds every token that the filters keep, and then it is the vocabulary

When the list cannot be enough (more tokens reach the floor than it holds, or the nucleus goes below it), choose_kernel
takes the row itself instead, by the same code. A list has no order, so nothing here depends on one: counts and masses
are integers (a mass is e^score in units of 2^-40), the rest is maxima. No result depends on how rows are cut.
"""

from specdec.kvcache.triton_shim import tl, triton
from specdec.layers.launch import trigger_next, wait_for_previous
from specdec.layers.noise import NOISE_ERROR, exact_noise, noise_bound, noise_stream

INF = tl.constexpr(float("inf"))
WORST_KEY = tl.constexpr(0x7F800000)  # the bits of infinity
LARGEST = tl.constexpr(0x7FFFFFFF)
MASS_UNIT = tl.constexpr(float(1 << 40))


@triton.jit
def _tanh(b_x: tl.tensor) -> tl.tensor:
    """Within a few units of float32: the quotient cancels where the series does not."""
    b_a = tl.abs(b_x)
    b_e = tl.exp(-2.0 * b_a)
    b_sq = b_a * b_a
    b_series = b_a * (1.0 + b_sq * (-0.33333334 + b_sq * (0.13333334 - b_sq * 0.053968254)))
    b_tanh = tl.where(b_a < 0.2, b_series, tl.div_rn(1.0 - b_e, 1.0 + b_e))
    return tl.where(b_x < 0, -b_tanh, b_tanh)


@triton.jit
def _load_logits(row: tl.tuple, o_token: tl.tensor) -> tl.tensor:
    """float32, after softcap (each step rounded as the model's would be) and penalty; -inf behind the vocabulary."""
    p_logits, p_penalty, p_seen, p_path, vocab_size, softcap, path_len = row
    m_token = o_token < vocab_size
    b_x = tl.load(p_logits + o_token, mask=m_token, other=0.0)
    if softcap is not None:
        b_cap = tl.div_rn(b_x.to(tl.float32), softcap).to(b_x.dtype).to(tl.float32)
        b_x = (_tanh(b_cap).to(b_x.dtype).to(tl.float32) * softcap).to(b_x.dtype)
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
def _score(b_x: tl.tensor, row_max: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(x - max) / T <= 0, the best token at 0 however small T is; T = 1 where greedy."""
    return tl.where(b_x == row_max, 0.0, tl.div_rn(b_x - row_max, tl.where(temperature > 0, temperature, 1.0)))


@triton.jit
def _min_score(min_p: tl.tensor) -> tl.tensor:
    """log min_p, the score of a token min_p times as likely as the best; -inf for 0."""
    return tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), -INF)


@triton.jit
def _mass(b_s: tl.tensor) -> tl.tensor:
    return (tl.exp(b_s) * MASS_UNIT).to(tl.int64)


@triton.jit
def _floor_of(b_x: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """A number that at least `wanted` of the finite entries reach and, ties aside, few more; -inf if fewer are finite."""
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


@triton.jit(do_not_specialize=["vocab_size", "rows_per_request", "s_row", "s_seen", "path_len"])
def scan_kernel(
    p_logits: tl.tensor,  # [R, V]
    p_penalty: tl.tensor,  # [B] or None
    p_seen: tl.tensor,  # [B, V / 32] or None
    p_path: tl.tensor,  # [R, D] or None
    p_group_max: tl.tensor,  # [R, tiles * TILE / GROUP]
    p_tile_max: tl.tensor,  # [R, tiles]
    p_tile_best: tl.tensor,  # [R, tiles]
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    softcap: tl.tensor,
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
    row = (p_logits + i_row * s_row, p_penalty, p_seen, p_path, vocab_size, softcap, path_len)
    b_x = _load_logits(row, o_token)
    b_group = tl.max(tl.reshape(b_x, [TILE // GROUP, GROUP]), axis=1)
    best = tl.max(b_group)
    o_group = (i_row * tl.num_programs(0) + i_tile) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(p_group_max + o_group, b_group)
    tl.store(p_tile_max + i_row * tl.num_programs(0) + i_tile, best)
    tl.store(p_tile_best + i_row * tl.num_programs(0) + i_tile, tl.min(tl.where(b_x == best, o_token, LARGEST)))


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


@triton.jit(do_not_specialize=["vocab_size", "rows_per_request", "capacity", "s_row", "s_seen", "path_len"])
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
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    capacity: tl.tensor,
    softcap: tl.tensor,
    s_row: tl.tensor,
    s_seen: tl.tensor,
    path_len: tl.tensor,
    SCORES: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_tile, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_request = i_row // rows_per_request
    o_token = i_tile * TILE + tl.arange(0, TILE)
    wait_for_previous(PDL)
    temperature = tl.load(p_temperature + i_request)
    if SCORES or temperature > 0:
        top_k, top_p = tl.load(p_top_k + i_request), tl.load(p_top_p + i_request)
        row_max = tl.load(p_row_max + i_row)
        if p_seen is not None:
            p_penalty += i_request
            p_seen += i_request * s_seen
            p_path += i_row * path_len
        row = (p_logits + i_row * s_row, p_penalty, p_seen, p_path, vocab_size, softcap, path_len)
        b_x = _load_logits(row, o_token)
        b_s = _score(b_x, row_max, temperature)
        m_list = b_x > -INF
        if _is_filtered(temperature, top_k, top_p, vocab_size):
            if top_p < 1.0:
                b_mass = tl.where(m_list, _mass(b_s), 0)
                tl.atomic_add(p_mass + i_row, tl.sum(b_mass), sem="relaxed")
            m_list = m_list & (b_x >= tl.load(p_floor + i_row))
        else:
            b_z = b_s
            if temperature > 0:
                min_p = tl.load(p_min_p + i_request)
                m_list = m_list & (b_s >= _min_score(min_p))
                stream = noise_stream(tl.load(p_seed + i_request), tl.load(p_positions + i_row))
                b_z = tl.where(m_list, b_s + noise_bound(stream, o_token), -INF)
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
                tl.store(p_sum_max + i_row * tl.num_programs(0) + i_tile, best)
                tl.store(p_sum + i_row * tl.num_programs(0) + i_tile, total)
        count = tl.sum(m_list.to(tl.int32))
        if count > 0:
            first = tl.atomic_add(p_count + i_row, count, sem="relaxed")
            o_list = first + tl.cumsum(m_list.to(tl.int32)) - 1
            m_list = m_list & (o_list < capacity)
            tl.store(p_list_id + i_row * capacity + o_list, o_token, mask=m_list)
            tl.store(p_list_x + i_row * capacity + o_list, b_x, mask=m_list)


@triton.jit
def _entries(source: tl.tuple, i_tile: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Tokens, scores and keys of one tile of the list or the row: a smaller key is a better score."""
    listed, num_entries, p_list_id, p_list_x, row, row_max, temperature = source
    o_entry = i_tile * TILE + tl.arange(0, TILE)
    m_entry = o_entry < num_entries
    if listed:
        b_id = tl.load(p_list_id + o_entry, mask=m_entry, other=LARGEST)
        b_x = tl.load(p_list_x + o_entry, mask=m_entry, other=-INF)
    else:
        b_id = o_entry
        b_x = _load_logits(row, o_entry)
    m_entry = m_entry & (b_x > -INF)
    b_s = tl.where(m_entry, _score(b_x, row_max, temperature), -INF)
    b_key = tl.where(m_entry, tl.abs(b_s).to(tl.int32, bitcast=True), LARGEST)
    return tl.where(m_entry, b_id, LARGEST), b_s, b_key


@triton.jit
def _mass_better(source: tl.tuple, key: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The mass of all entries with smaller keys, the largest of these keys, and the smallest other key."""
    b_mass = tl.zeros([TILE], tl.int64)
    b_below, b_above = tl.full([TILE], -1, tl.int32), tl.full([TILE], LARGEST, tl.int32)
    for i_tile in range(tl.cdiv(source[1], TILE)):
        _id, b_s, b_key = _entries(source, i_tile, TILE)
        m_better = b_key < key
        b_mass += tl.where(m_better, _mass(b_s), 0)
        b_below = tl.maximum(b_below, tl.where(m_better, b_key, -1))
        b_above = tl.minimum(b_above, tl.where(m_better, LARGEST, b_key))
    return tl.sum(b_mass), tl.max(b_below), tl.min(b_above)


@triton.jit
def _kth_key(source: tl.tuple, k: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The key of the k-th best entry, WORST_KEY if there are fewer."""
    lo, hi = -1, WORST_KEY  # fewer than k entries have keys up to lo
    while hi - lo > 1:
        key = lo + (hi - lo) // 2
        b_count = tl.zeros([TILE], tl.int32)
        b_below, b_above = tl.full([TILE], -1, tl.int32), tl.full([TILE], WORST_KEY, tl.int32)
        for i_tile in range(tl.cdiv(source[1], TILE)):
            _id, _s, b_key = _entries(source, i_tile, TILE)
            m_up_to = b_key <= key
            b_count += m_up_to.to(tl.int32)
            b_below = tl.maximum(b_below, tl.where(m_up_to, b_key, -1))
            b_above = tl.minimum(b_above, tl.where(m_up_to, WORST_KEY, b_key))
        if tl.sum(b_count) >= k:
            hi = tl.max(b_below)
        else:
            lo = tl.min(b_above) - 1
    return hi


@triton.jit
def _share(mass: tl.tensor, whole: tl.tensor) -> tl.tensor:
    return tl.div_rn(mass.to(tl.float32), whole.to(tl.float32))


@triton.jit
def _nucleus(
    source: tl.tuple, top_p: tl.tensor, last_key: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(key, id): the nucleus of the entries up to last_key has all better keys, and of this key the ids up to id."""
    whole, _below, _above = _mass_better(source, last_key + 1, TILE)
    lo, hi = 0, last_key + 1  # better entries than lo weigh less than top_p; better than hi, not so
    while hi - lo > 1:
        key = lo + (hi - lo) // 2
        mass, below, above = _mass_better(source, key, TILE)
        if _share(mass, whole) < top_p:
            lo = tl.minimum(above, hi - 1)
        else:
            hi = below + 1
    _mass_all, border, _above = _mass_better(source, lo + 1, TILE)
    before, _below, _above = _mass_better(source, border, TILE)
    b_ties, b_mass = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
    for i_tile in range(tl.cdiv(source[1], TILE)):
        _id, b_s, b_key = _entries(source, i_tile, TILE)
        b_ties += (b_key == border).to(tl.int32)
        b_mass = tl.maximum(b_mass, tl.where(b_key == border, _mass(b_s), 0))
    ties, mass = tl.sum(b_ties), tl.max(b_mass)
    few, many = 1, ties + 1  # of the equal ones so many stay, at least one; so many do not
    while many - few > 1:
        middle = few + (many - few) // 2
        if _share(before + (middle - 1) * mass, whole) < top_p:
            few = middle
        else:
            many = middle
    last_id = LARGEST
    if few < ties:
        first, last_id = -1, LARGEST - 1  # up to first are fewer than `few`
        while last_id - first > 1:
            token = first + (last_id - first) // 2
            b_ties = tl.zeros([TILE], tl.int32)
            for i_tile in range(tl.cdiv(source[1], TILE)):
                b_id, _s, b_key = _entries(source, i_tile, TILE)
                b_ties += ((b_key == border) & (b_id <= token)).to(tl.int32)
            if tl.sum(b_ties) >= few:
                last_id = token
            else:
                first = token
    return border, last_id


@triton.jit
def _keep_best(
    b_value: tl.tensor,
    b_s: tl.tensor,
    b_id: tl.tensor,
    b_best: tl.tensor,
    b_best_id: tl.tensor,
    stream: tl.tensor,
    sampled: tl.tensor,
    SLOTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The best of (b_best, what b_value offers), the lower id among equals: exact, though b_value is only near."""
    o_slot = tl.arange(0, SLOTS)
    slack = tl.where(sampled, NOISE_ERROR, 0.0)
    bound, worst = tl.max(b_value), tl.min(b_best)
    open_end = (bound > -INF) & (bound >= worst - slack)
    while open_end:
        token = tl.min(tl.where(b_value == bound, b_id, LARGEST))
        value = tl.max(tl.where(b_id == token, b_s, -INF))
        if sampled:
            value += exact_noise(stream, token)
        worst_id = tl.max(tl.where(b_best == worst, b_best_id, -1))
        m_worst = (b_best == worst) & (b_best_id == worst_id)
        better = (value > worst) | ((value == worst) & (token < worst_id))
        m_slot = o_slot == tl.where(better, tl.min(tl.where(m_worst, o_slot, SLOTS)), SLOTS)
        b_best, b_best_id = tl.where(m_slot, value, b_best), tl.where(m_slot, token, b_best_id)
        b_value = tl.where(b_id == token, -INF, b_value)
        bound, worst = tl.max(b_value), tl.min(b_best)
        # without noise the next of equal values cannot be better either
        open_end = (bound > -INF) & (bound >= worst - slack) & (sampled | better)
    return b_best, b_best_id


@triton.jit(
    do_not_specialize=[
        *("num_tiles", "vocab_size", "rows_per_request", "capacity", "list_len", "s_row", "s_seen", "path_len")
    ]
)
def choose_kernel(
    p_logits: tl.tensor,  # [R, V], or None: all tokens are listed
    p_positions: tl.tensor,  # [R]
    p_temperature: tl.tensor,  # [B]
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_min_p: tl.tensor,
    p_penalty: tl.tensor,
    p_seed: tl.tensor,
    p_seen: tl.tensor,  # [B, V / 32] or None
    p_path: tl.tensor,  # [R, D] or None
    p_tile_max: tl.tensor,  # [R, tiles]
    p_tile_best: tl.tensor,  # [R, tiles]
    p_row_max: tl.tensor,  # [R]
    p_floor: tl.tensor,  # [R]
    p_count: tl.tensor,  # [R]
    p_mass: tl.tensor,  # [R]
    p_list_id: tl.tensor,  # [R, capacity]
    p_list_x: tl.tensor,  # [R, capacity]
    p_sum_max: tl.tensor,  # [R, tiles]
    p_sum: tl.tensor,  # [R, tiles]
    p_chosen: tl.tensor,  # [R] or None: tokens whose log-probabilities are wanted
    p_token: tl.tensor,  # [R, K]
    p_score: tl.tensor,  # [R, K] or None
    p_chosen_score: tl.tensor,  # [R] or None
    num_tiles: tl.tensor,
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    capacity: tl.tensor,
    list_len: tl.tensor,
    softcap: tl.tensor,
    s_row: tl.tensor,
    s_seen: tl.tensor,
    path_len: tl.tensor,
    SCORES: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_request = i_row // rows_per_request
    o_tile, o_slot = tl.arange(0, TILES), tl.arange(0, SLOTS)
    GIVEN: tl.constexpr = p_logits is None
    wait_for_previous(PDL)
    temperature = tl.load(p_temperature + i_request)
    sampled = temperature > 0
    p_list_id += i_row * capacity
    p_list_x += i_row * capacity
    if GIVEN:
        row = (p_list_x, p_penalty, p_seen, p_path, vocab_size, softcap, path_len)  # never read
        b_max = tl.full([TILE], -INF, tl.float32)
        for i_tile in range(tl.cdiv(list_len, TILE)):
            o_entry = i_tile * TILE + tl.arange(0, TILE)
            b_max = tl.maximum(b_max, tl.load(p_list_x + o_entry, mask=o_entry < list_len, other=-INF))
        row_max = tl.max(b_max)
        in_tiles = sampled & (temperature < 0)  # never
    else:
        if p_seen is not None:
            p_penalty += i_request
            p_seen += i_request * s_seen
            p_path += i_row * path_len
        row = (p_logits + i_row * s_row, p_penalty, p_seen, p_path, vocab_size, softcap, path_len)
        row_max = tl.load(p_row_max + i_row)
        m_tile = o_tile < num_tiles
        o_tile = i_row * num_tiles + o_tile
        in_tiles = temperature == 0
        if SCORES:
            in_tiles = in_tiles & sampled  # never
    if in_tiles:
        if not GIVEN:
            b_tile = tl.load(p_tile_max + o_tile, mask=m_tile, other=-INF)
            b_token = tl.load(p_tile_best + o_tile, mask=m_tile, other=LARGEST)
            token = tl.min(tl.where(b_tile == row_max, b_token, LARGEST))
            tl.store(p_token + i_row, tl.where(token < vocab_size, token, 0).to(tl.int64))
    else:
        top_k, top_p = tl.load(p_top_k + i_request), tl.load(p_top_p + i_request)
        stream = noise_stream(tl.load(p_seed + i_request), tl.load(p_positions + i_row))
        uses_k = sampled & (top_k > 0) & (top_k < vocab_size)
        uses_p = sampled & (top_p < 1.0)

        # is the list enough?
        if GIVEN:
            listed = temperature >= 0
            source = (listed, list_len, p_list_id, p_list_x, row, row_max, temperature)
        else:
            num_listed, floor = tl.load(p_count + i_row), tl.load(p_floor + i_row)
            listed = num_listed <= capacity
            if floor > -INF:
                if uses_k:
                    listed = listed & (top_k <= num_listed)
                elif uses_p & listed:
                    whole_list = (listed, num_listed, p_list_id, p_list_x, row, row_max, temperature)
                    mass, _below, _above = _mass_better(whole_list, WORST_KEY, TILE)
                    listed = _share(mass, tl.load(p_mass + i_row)) >= top_p
            num_entries = tl.where(listed, num_listed, vocab_size)
            source = (listed, num_entries, p_list_id, p_list_x, row, row_max, temperature)

        # what the filters keep
        last_key, last_id = WORST_KEY, LARGEST
        if uses_k:
            last_key = _kth_key(source, top_k, TILE)
        border = last_key
        if uses_p:
            border, last_id = _nucleus(source, top_p, last_key, TILE)
        min_score = -INF
        if sampled:
            min_score = _min_score(tl.load(p_min_p + i_request))

        # the best K of it
        b_best = tl.where(o_slot < K, -INF, INF)
        b_best_id = tl.full([SLOTS], LARGEST, tl.int32)
        for i_tile in range(tl.cdiv(source[1], TILE)):
            b_id, b_s, b_key = _entries(source, i_tile, TILE)
            m_kept = ((b_key < border) | ((b_key == border) & (b_id <= last_id))) & (b_s >= min_score)
            b_value = b_s
            if sampled:
                b_value += noise_bound(stream, b_id)
            b_value = tl.where(m_kept, b_value, -INF)
            b_best, b_best_id = _keep_best(b_value, b_s, b_id, b_best, b_best_id, stream, sampled, SLOTS)
        b_best = tl.where(o_slot < K, b_best, -INF)

        if SCORES:  # the logarithm of the sum over all that is kept
            best = tl.max(b_best)
            in_tiles = ~(uses_k | uses_p)
            if GIVEN:
                in_tiles = sampled & (temperature < 0)  # never
            if in_tiles:
                log_sum = best
                if not GIVEN:
                    b_tile = tl.load(p_sum_max + o_tile, mask=m_tile, other=-INF)
                    b_tile_sum = tl.load(p_sum + o_tile, mask=m_tile, other=0.0)
                    best = tl.max(b_tile)
                    log_sum = best + tl.log(tl.sum(b_tile_sum * tl.exp(b_tile - best)))
            else:
                b_sum = tl.zeros([TILE], tl.int64)
                for i_tile in range(tl.cdiv(source[1], TILE)):
                    b_id, b_s, b_key = _entries(source, i_tile, TILE)
                    m_kept = ((b_key < border) | ((b_key == border) & (b_id <= last_id))) & (b_s >= min_score)
                    b_value = b_s
                    if sampled:
                        b_value += noise_bound(stream, b_id)
                    b_sum += tl.where(m_kept, _mass(b_value - best), 0)
                log_sum = best + tl.log(tl.sum(b_sum).to(tl.float32) / MASS_UNIT)
            if p_chosen is not None:
                chosen = tl.load(p_chosen + i_row).to(tl.int32)
                tl.store(p_chosen_score + i_row, _load_logits(row, chosen) - row_max - log_sum)

        for i_best in range(K):
            value = tl.max(b_best)
            token = tl.min(tl.where(b_best == value, b_best_id, LARGEST))
            tl.store(p_token + i_row * K + i_best, tl.where(token < vocab_size, token, 0).to(tl.int64))
            if SCORES:
                tl.store(p_score + i_row * K + i_best, value - log_sum)
            b_best = tl.where(b_best_id == token, -INF, b_best)
