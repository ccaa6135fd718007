"""Chooses the exact tokens from a row's candidates, or from the row itself, in one program.

    key      the bits of |score|: scores are at most 0, so a smaller key is a better score, and equal keys equal scores
    top-k    the k-th smallest key: the range of keys is bisected, and after each probe both ends move to existing keys
    top-p    the largest key whose better entries weigh less than p of the whole, found in the same way; if entries
             tie at this key, the number of them that stay, and the last id that stays
    best     the best kept entry, by `noise_bound` first; float64 noise is computed only if it can change the result

A list has no order, so no result depends on one: counts and masses are integers (a mass is e^score in units of 2^-40),
and all other reductions are maxima and minima.
"""

from specdec.gpu.triton_shim import tl, trigger_next, triton, wait_for_previous
from specdec.sampling.collect_candidates import N_SIGMA, sigma_bound
from specdec.sampling.noise import NOISE_ERROR, exact_noise, noise_bound, noise_stream
from specdec.sampling.row_scores import (
    INF,
    LARGEST,
    MASS_UNIT,
    MIN_P,
    PENALTY,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_logits,
    mass_of,
    min_score_of,
    score_of,
)

WORST_KEY = tl.constexpr(0x7F800000)  # the bits of infinity
SETTLED = tl.constexpr(-1)  # the count of a row whose token is chosen


@triton.jit
def _entries(source: tl.tuple, i_tile: tl.tensor, LISTED: tl.constexpr, TILE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Tokens, scores and keys of one tile of the list or the row: a smaller key is a better score."""
    num_entries, p_list_id, p_list_s, row, row_max, temperature, min_logit = source
    o_entry = i_tile * TILE + tl.arange(0, TILE)
    m_entry = o_entry < num_entries
    if LISTED:
        b_id = tl.load(p_list_id + o_entry, mask=m_entry, other=LARGEST)
        b_s = tl.load(p_list_s + o_entry, mask=m_entry, other=-INF)
        m_entry = m_entry & (b_id != LARGEST)
    else:
        b_id = o_entry
        b_x = load_logits(row, o_entry)
        m_entry = m_entry & (b_x > -INF) & (b_x >= min_logit)
        b_s = tl.where(m_entry, score_of(b_x, row_max, temperature), -INF)
    b_key = tl.where(m_entry, tl.abs(b_s).to(tl.int32, bitcast=True), LARGEST)
    return tl.where(m_entry, b_id, LARGEST), b_s, b_key


@triton.jit
def _score_list(
    num_entries: tl.tensor,
    p_list_id: tl.tensor,
    p_list_x: tl.tensor,
    row_max: tl.tensor,
    temperature: tl.tensor,
    min_logit: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Replace the list's logits by scores; a token that cannot be drawn loses its id."""
    for i_tile in range(tl.cdiv(num_entries, TILE)):
        o_entry = i_tile * TILE + tl.arange(0, TILE)
        m_entry = o_entry < num_entries
        b_x = tl.load(p_list_x + o_entry, mask=m_entry, other=-INF)
        b_x = tl.where(b_x >= min_logit, b_x, -INF)
        b_s = tl.where(b_x > -INF, score_of(b_x, row_max, temperature), -INF)
        tl.store(p_list_x + o_entry, b_s, mask=m_entry)
        tl.store(p_list_id + o_entry, LARGEST, mask=m_entry & (b_x == -INF))
    tl.debug_barrier()


@triton.jit
def _mass_better(
    source: tl.tuple, key: tl.tensor, LISTED: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The mass of all entries with keys below `key`. And for each column of the tiles: the largest key below it, and
    the smallest that is not."""
    b_mass = tl.zeros([TILE], tl.int64)
    b_below, b_above = tl.full([TILE], -1, tl.int32), tl.full([TILE], LARGEST, tl.int32)
    for i_tile in range(tl.cdiv(source[0], TILE)):
        _id, b_s, b_key = _entries(source, i_tile, LISTED, TILE)
        m_better = b_key < key
        b_mass += tl.where(m_better, mass_of(b_s), 0)
        b_below = tl.maximum(b_below, tl.where(m_better, b_key, -1))
        b_above = tl.minimum(b_above, tl.where(m_better, LARGEST, b_key))
    return tl.sum(b_mass), b_below, b_above


@triton.jit
def _kth_key(source: tl.tuple, k: tl.tensor, LISTED: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The key of the k-th best entry, WORST_KEY if there are fewer."""
    lo, hi = -1, WORST_KEY  # fewer than k entries have keys up to lo
    while hi - lo > 1:
        key = lo + (hi - lo) // 2
        b_count = tl.zeros([TILE], tl.int32)
        b_below, b_above = tl.full([TILE], -1, tl.int32), tl.full([TILE], WORST_KEY, tl.int32)
        for i_tile in range(tl.cdiv(source[0], TILE)):
            _id, _s, b_key = _entries(source, i_tile, LISTED, TILE)
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
    source: tl.tuple,
    top_p: tl.tensor,
    whole: tl.tensor,
    last_key: tl.tensor,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Border (key, id) of the top-p nucleus: it keeps all smaller keys and, at this key, the ids up to `id`. whole:
    mass of the entries with keys up to last_key."""
    lo, hi = 0, last_key + 1  # entries better than lo weigh less than top_p; those better than hi weigh more
    while hi - lo > 1:
        key = lo + (hi - lo) // 2
        mass, b_below, b_above = _mass_better(source, key, LISTED, TILE)
        if _share(mass, whole) < top_p:
            lo = tl.minimum(tl.min(b_above), hi - 1)
        else:
            hi = tl.max(b_below) + 1
    up_to, b_below, _above = _mass_better(source, lo + 1, LISTED, TILE)
    border = tl.max(b_below)
    b_ties, b_mass = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
    for i_tile in range(tl.cdiv(source[0], TILE)):
        _id, b_s, b_key = _entries(source, i_tile, LISTED, TILE)
        b_ties += (b_key == border).to(tl.int32)
        b_mass = tl.maximum(b_mass, tl.where(b_key == border, mass_of(b_s), 0))
    ties, mass = tl.sum(b_ties), tl.max(b_mass)
    before = up_to - ties * mass
    few, many = 1, ties + 1  # of the tied entries `few` may stay, at least one; `many` may not
    while many - few > 1:
        middle = few + (many - few) // 2
        if _share(before + (middle - 1) * mass, whole) < top_p:
            few = middle
        else:
            many = middle
    last_id = LARGEST
    if few < ties:
        first, last_id = -1, LARGEST - 1  # fewer than `few` have ids up to first
        while last_id - first > 1:
            token = first + (last_id - first) // 2
            b_ties = tl.zeros([TILE], tl.int32)
            for i_tile in range(tl.cdiv(source[0], TILE)):
                b_id, _s, b_key = _entries(source, i_tile, LISTED, TILE)
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
    """The best of b_best and the entries of b_value, the lower id among equals. Exact, although b_value is
    approximate."""
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
        # without noise, a later entry of equal value cannot win either
        open_end = (bound > -INF) & (bound >= worst - slack) & (sampled | better)
    return b_best, b_best_id


@triton.jit(
    do_not_specialize=["num_tiles", "rows_per_request", "num_requests", "capacity", "list_len", "s_seen", "path_len"]
)
def choose_kernel(
    p_logits: tl.tensor,  # [R, V], or None: all tokens are listed
    p_positions: tl.tensor,  # [R]
    p_whole: tl.tensor,  # [INT_COLUMNS, B]
    p_real: tl.tensor,  # [FLOAT_COLUMNS, B]
    p_seen: tl.tensor,  # [B, V / 32] or None
    p_path: tl.tensor,  # [R, D] or None
    p_tile_max: tl.tensor,  # [R, tiles]
    p_row_max: tl.tensor,  # [R]
    p_floor: tl.tensor,  # [R]
    p_min_logit: tl.tensor,  # [R]
    p_count: tl.tensor,  # [R]
    p_mass: tl.tensor,  # [R]
    p_list_id: tl.tensor,  # [R, capacity]
    p_list_x: tl.tensor,  # [R, capacity]
    p_sum_max: tl.tensor,  # [R, tiles]
    p_sum: tl.tensor,  # [R, tiles]
    p_token: tl.tensor,  # [R, K]
    p_score: tl.tensor,  # [R, K] or None
    num_tiles: tl.tensor,
    vocab_size: tl.tensor,
    rows_per_request: tl.tensor,
    num_requests: tl.tensor,  # B
    capacity: tl.tensor,
    list_len: tl.tensor,
    softcap: tl.tensor,  # or None
    cap_inverse: tl.tensor,
    s_row: tl.tensor,
    s_seen: tl.tensor,
    path_len: tl.tensor,
    LISTED: tl.constexpr,
    SCORES: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    SCAN_TILE: tl.constexpr,  # of p_tile_max
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_request = i_row // rows_per_request
    o_tile, o_slot = tl.arange(0, TILES), tl.arange(0, SLOTS)
    GIVEN: tl.constexpr = p_logits is None
    wait_for_previous(PDL)
    temperature = tl.load(p_real + TEMPERATURE * num_requests + i_request)
    top_k = tl.load(p_whole + TOP_K * num_requests + i_request)
    top_p = tl.load(p_real + TOP_P * num_requests + i_request)
    p_penalty = p_real + PENALTY * num_requests + i_request
    sampled = temperature > 0
    uses_k = sampled & (top_k > 0) & (top_k < vocab_size)
    uses_p = sampled & (top_p < 1.0)
    p_list_id += i_row * capacity
    p_list_x += i_row * capacity

    # find out whether this program has work, with which entries, and their mass
    whole = tl.zeros([], tl.int64)  # unknown
    if GIVEN:
        row = (p_list_x, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len)  # never read
        b_max, b_token = tl.full([TILE], -INF, tl.float32), tl.full([TILE], LARGEST, tl.int32)
        for i_tile in range(tl.cdiv(list_len, TILE)):
            o_entry = i_tile * TILE + tl.arange(0, TILE)
            b_x = tl.load(p_list_x + o_entry, mask=o_entry < list_len, other=-INF)
            b_id = tl.load(p_list_id + o_entry, mask=o_entry < list_len, other=LARGEST)
            b_token = tl.where(b_x > b_max, b_id, tl.where(b_x == b_max, tl.minimum(b_id, b_token), b_token))
            b_max = tl.maximum(b_max, b_x)
        row_max = tl.max(b_max)
        min_logit, n_sigma = -INF, tl.load(p_real + N_SIGMA * num_requests + i_request)
        if sampled & (n_sigma > 0):
            b_zero = tl.zeros([TILE], tl.float64)
            b_count, b_total, b_squares = b_zero, b_zero, b_zero
            for i_tile in range(tl.cdiv(list_len, TILE)):
                o_entry = i_tile * TILE + tl.arange(0, TILE)
                b_x = tl.load(p_list_x + o_entry, mask=o_entry < list_len, other=-INF)
                b_wide = tl.where(b_x > -INF, b_x, 0.0).to(tl.float64)
                b_count += (b_x > -INF).to(tl.float64)
                b_total += b_wide
                b_squares += b_wide * b_wide
            min_logit = sigma_bound(row_max, n_sigma, tl.sum(b_count), tl.sum(b_total), tl.sum(b_squares))
        source = (list_len, p_list_id, p_list_x, row, row_max, temperature, min_logit)
        open_row = (temperature > 0) | SCORES
        if open_row:
            _score_list(list_len, p_list_id, p_list_x, row_max, temperature, min_logit, TILE)
        else:
            token = tl.min(tl.where(b_max == row_max, b_token, LARGEST))
            tl.store(p_token + i_row, tl.where(token < vocab_size, token, 0).to(tl.int64))
    else:
        if p_seen is not None:
            p_seen += i_request * s_seen
            p_path += i_row * path_len
        row = (p_logits + i_row * s_row, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len)
        row_max, min_logit = tl.load(p_row_max + i_row), tl.load(p_min_logit + i_row)
        m_tile = o_tile < num_tiles
        o_tile = i_row * num_tiles + o_tile
        num_listed = tl.load(p_count + i_row)
        if LISTED:
            source = (num_listed, p_list_id, p_list_x, row, row_max, temperature, min_logit)
            open_row = num_listed <= capacity
            if open_row:
                _score_list(num_listed, p_list_id, p_list_x, row_max, temperature, min_logit, TILE)
            if tl.load(p_floor + i_row) > -INF:
                if uses_k:
                    open_row = open_row & (top_k <= num_listed)
                elif uses_p & open_row:
                    whole = tl.load(p_mass + i_row)
                    mass, _below, _above = _mass_better(source, WORST_KEY, LISTED, TILE)
                    open_row = _share(mass, whole) >= top_p
            if not SCORES:  # noqa: SIM102 - this is decided when the kernel is compiled
                if temperature == 0:
                    b_tile = tl.load(p_tile_max + o_tile, mask=m_tile, other=-INF)
                    first = tl.min(tl.where(b_tile == row_max, tl.arange(0, TILES), TILES))
                    o_token = first * SCAN_TILE + tl.arange(0, SCAN_TILE)
                    token = tl.min(tl.where(load_logits(row, o_token) == row_max, o_token, LARGEST))
                    tl.store(p_token + i_row, tl.where(token < vocab_size, token, 0).to(tl.int64))
                    tl.store(p_count + i_row, SETTLED)
                    open_row = temperature > 0
        else:
            source = (vocab_size, p_list_id, p_list_x, row, row_max, temperature, min_logit)
            open_row = num_listed != SETTLED
    if open_row:
        if LISTED and not GIVEN:
            tl.store(p_count + i_row, SETTLED)

        # the entries that the filters keep
        last_key, last_id = WORST_KEY, LARGEST
        if uses_k:
            last_key = _kth_key(source, top_k, LISTED, TILE)
        border = last_key
        if uses_p:
            if whole == 0:
                whole, _below, _above = _mass_better(source, last_key + 1, LISTED, TILE)
            border, last_id = _nucleus(source, top_p, whole, last_key, LISTED, TILE)
        min_score = -INF
        if sampled:
            min_score = min_score_of(tl.load(p_real + MIN_P * num_requests + i_request))

        # the best K of them
        stream = noise_stream(tl.load(p_whole + SEED * num_requests + i_request), tl.load(p_positions + i_row))
        b_best = tl.where(o_slot < K, -INF, INF)
        b_best_id = tl.full([SLOTS], LARGEST, tl.int32)
        for i_tile in range(tl.cdiv(source[0], TILE)):
            b_id, b_s, b_key = _entries(source, i_tile, LISTED, TILE)
            m_kept = ((b_key < border) | ((b_key == border) & (b_id <= last_id))) & (b_s >= min_score)
            b_value = b_s
            if sampled:
                b_value += noise_bound(stream, b_id)
            b_value = tl.where(m_kept, b_value, -INF)
            b_best, b_best_id = _keep_best(b_value, b_s, b_id, b_best, b_best_id, stream, sampled, SLOTS)
        b_best = tl.where(o_slot < K, b_best, -INF)

        if SCORES:  # the logarithm of the sum over all kept entries
            best = tl.max(b_best)
            log_sum = best
            summed = uses_k | uses_p
            if GIVEN:
                summed = temperature >= 0
            if summed:
                b_sum = tl.zeros([TILE], tl.int64)
                for i_tile in range(tl.cdiv(source[0], TILE)):
                    b_id, b_s, b_key = _entries(source, i_tile, LISTED, TILE)
                    m_kept = ((b_key < border) | ((b_key == border) & (b_id <= last_id))) & (b_s >= min_score)
                    b_value = b_s
                    if sampled:
                        b_value += noise_bound(stream, b_id)
                    b_sum += tl.where(m_kept, mass_of(b_value - best), 0)
                log_sum += tl.log(tl.sum(b_sum).to(tl.float32) / MASS_UNIT)
            elif not GIVEN:  # the tiles have summed it
                b_tile = tl.load(p_sum_max + o_tile, mask=m_tile, other=-INF)
                b_tile_sum = tl.load(p_sum + o_tile, mask=m_tile, other=0.0)
                log_sum += tl.log(tl.sum(b_tile_sum * tl.exp(b_tile - best)))

        # if fewer than K can be drawn, the lowest other ids fill the rest, so that all K are distinct
        m_missing = (b_best_id == LARGEST) & (o_slot < K)
        missing, token = tl.sum(m_missing.to(tl.int32)), 0
        while missing > 0:
            if tl.sum((b_best_id == token).to(tl.int32)) == 0:
                slot = tl.min(tl.where((b_best_id == LARGEST) & (o_slot < K), o_slot, SLOTS))
                b_best_id = tl.where(o_slot == slot, token, b_best_id)
                missing -= 1
            token += 1
        for i_best in range(K):
            value = tl.max(b_best)
            token = tl.min(tl.where(b_best == value, b_best_id, LARGEST))
            tl.store(p_token + i_row * K + i_best, token.to(tl.int64))
            if SCORES:
                tl.store(p_score + i_row * K + i_best, value - log_sum)
            m_given = b_best_id == token
            b_best, b_best_id = tl.where(m_given, -INF, b_best), tl.where(m_given, LARGEST, b_best_id)
