// Attention of new tokens of one sequence over its paged cache, in tiles of keys with a running softmax
// (arXiv 2205.14135), on the bfloat16 dot product of AVX-512.
//
// One code computes a prompt's chunk and a decode's single token, and tiles begin at multiples of TILE: so what a token
// attends to does not depend, to the last bit, on the tokens that are computed beside it.

#include "common.h"

#ifdef __AVX512BF16__

enum { TILE = 64, ROWS = 6, MAX_ROWS = 256, MAX_DIM = 256 };  // keys of a tile; rows of a register block and of an item

typedef struct {
    _Alignas(64) uint32_t query[MAX_ROWS * MAX_DIM / 2];  // [rows, head_dim / 2] pairs along the head dimension
    _Alignas(64) uint32_t key[MAX_DIM / 2 * TILE];        // [head_dim / 2, TILE] the same pairs, keys side by side
    _Alignas(64) uint32_t value[TILE / 2 * MAX_DIM];      // [TILE / 2, head_dim] pairs of keys
    _Alignas(64) uint32_t weight[MAX_ROWS * TILE / 2];    // [rows, TILE / 2] pairs of keys
    _Alignas(64) float score[MAX_ROWS * TILE], acc[MAX_ROWS * MAX_DIM];  // [rows, TILE], [rows, head_dim]
    float top[MAX_ROWS], sum[MAX_ROWS];
    int64_t slots[TILE], next_slots[TILE];  // where the tile's keys and values are, and those of the tile after it
} Tile;

// c[r][0..16 * width) (+)= sum over i of pairs a[r][i] . b[i][0..16 * width).
static inline __attribute__((always_inline)) void multiply(float *c, int64_t c_stride, const uint32_t *a,
                                                           int64_t a_stride, const uint32_t *b, int64_t b_stride,
                                                           int64_t pairs, int add, const int rows, const int width) {
    __m512 sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++)
            sums[r][j] = add ? _mm512_load_ps(c + r * c_stride + 16 * j) : _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        __m512bh side[4];
        for (int j = 0; j < width; j++) side[j] = (__m512bh)_mm512_load_si512(b + i * b_stride + 16 * j);
        for (int r = 0; r < rows; r++) {
            const __m512bh one = (__m512bh)_mm512_set1_epi32((int)a[r * a_stride + i]);
            for (int j = 0; j < width; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], one, side[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) _mm512_store_ps(c + r * c_stride + 16 * j, sums[r][j]);
}

#define CASE(R)                                                                                                        \
    case R:                                                                                                            \
        if (width == 4) multiply(c, c_stride, a, a_stride, b, b_stride, pairs, add, R, 4);                             \
        else multiply(c, c_stride, a, a_stride, b, b_stride, pairs, add, R, 2);                                        \
        break;

// The same for any number of rows.
static void multiply_rows(float *c, int64_t c_stride, const uint32_t *a, int64_t a_stride, const uint32_t *b,
                          int64_t b_stride, int64_t pairs, int add, int64_t rows, int width) {
    for (int64_t left = ceil_div(rows, ROWS); left > 0; left--) {
        const int64_t height = ceil_div(rows, left);
        switch (height) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
        c += height * c_stride, a += height * a_stride, rows -= height;
    }
}

// 16 rows of 16 words become 16 columns.
static inline __attribute__((always_inline)) void transpose(__m512i *v) {
    __m512i u[16];
    for (int i = 0; i < 16; i += 2) {
        u[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        u[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(u[i + j], u[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(u[i + j], u[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {  // v[i], v[i + 4], ...: lane l of each holds column 4 l + i of four rows
        const __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xDD);
        const __m512i c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xDD);
        u[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        u[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
        u[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        u[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
    memcpy(v, u, sizeof u);
}

static inline void fetch(const uint16_t *head, int64_t D) {
    for (int64_t d = 0; d < D; d += 32) _mm_prefetch((const char *)(head + d), _MM_HINT_T0);
}

// Finds a tile's keys, from `begin` on. Those before the first or after the last that any token sees are masked, but
// must be finite: these two are taken in their place.
static void find_slots(int64_t *slots, const Chunk *c, const NextKeys *of, int64_t begin) {
    const int64_t size = c->block_size, D = c->head_dim;
    const __m512i step = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(D));
    for (int64_t i = 0; i < TILE; i += 8) {
        const int64_t start = begin + i, is_run = size % 8 == 0 && start >= of->first && start + 7 <= of->last;
        for (int64_t j = 0; j < (is_run ? 1 : 8); j++) {  // few divisions: one for each key took half of all the time
            const int64_t key = start + j < of->first ? of->first : least(start + j, of->last);
            slots[i + j] = (((int64_t)of->table[key / size] * c->kv_heads + of->head) * size + key % size) * D;
        }
        if (is_run) _mm512_storeu_si512(slots + i, _mm512_add_epi64(_mm512_set1_epi64(slots[i]), step));
    }
}

// Loads the tile's first `count` keys, a multiple of 16; fetches the next tile's values.
static void load_keys(Tile *t, const uint16_t *keys, const uint16_t *values, int64_t count, int64_t D) {
    for (int64_t i = 0; i < count; i += 16) {
        for (int j = 0; j < 16; j++) fetch(values + t->next_slots[i + j], D);
        for (int64_t d = 0; d < D; d += 32) {
            __m512i rows[16];
            for (int j = 0; j < 16; j++) rows[j] = _mm512_loadu_si512(keys + t->slots[i + j] + d);
            transpose(rows);
            for (int j = 0; j < 16; j++) _mm512_store_si512(t->key + (d / 2 + j) * TILE + i, rows[j]);
        }
    }
    for (int64_t i = count; i < TILE; i++) fetch(values + t->next_slots[i], D);
}

// Loads the values of these keys; fetches the next tile's keys.
static void load_values(Tile *t, const uint16_t *keys, const uint16_t *values, int64_t count, int64_t D) {
    const __m512i front = _mm512_add_epi16(_mm512_set1_epi32(32 << 16), _mm512_set_epi32(
        0xF000F, 0xE000E, 0xD000D, 0xC000C, 0xB000B, 0xA000A, 0x90009, 0x80008,
        0x70007, 0x60006, 0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0));
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < count; i += 2) {
        fetch(keys + t->next_slots[i], D), fetch(keys + t->next_slots[i + 1], D);
        for (int64_t d = 0; d < D; d += 32) {
            const __m512i a = _mm512_loadu_si512(values + t->slots[i] + d);
            const __m512i b = _mm512_loadu_si512(values + t->slots[i + 1] + d);
            _mm512_store_si512(t->value + i / 2 * D + d, _mm512_permutex2var_epi16(a, front, b));
            _mm512_store_si512(t->value + i / 2 * D + d + 16, _mm512_permutex2var_epi16(a, back, b));
        }
    }
    for (int64_t i = count; i < TILE; i++) fetch(keys + t->next_slots[i], D);
}

// e^x for x <= 0, at least e^-80; the polynomial is that of the Cephes library.
static inline __m512 decay_each(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-80));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    const float terms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (int i = 0; i < 5; i++) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(terms[i]));
    y = _mm512_fmadd_ps(_mm512_mul_ps(y, r), r, _mm512_add_ps(r, _mm512_set1_ps(1)));
    return _mm512_scalef_ps(y, n);
}

// cap * tanh(x / cap).
static inline __m512 cap_each(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1);
    const __m512 e = decay_each(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2 / cap)));
    const __m512 size = _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e)));
    return _mm512_mask_sub_ps(size, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), size);
}

// Turns row r's scores into weights: masked outside keys [first, last], softmax against the running peak.
static void weigh(Tile *t, int64_t r, int64_t first, int64_t last, int64_t D, float scale, float soft_cap) {
    const __m512i from = _mm512_set1_epi32(first > 0 ? (int32_t)first : 0);
    const __m512i to = _mm512_set1_epi32((int32_t)least(last, TILE - 1));
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 score[TILE / 16], peaks = _mm512_set1_ps(t->top[r]), total = _mm512_setzero_ps();
    __mmask16 seen[TILE / 16];
    for (int j = 0; j < TILE / 16; j++, lane = _mm512_add_epi32(lane, _mm512_set1_epi32(16))) {
        seen[j] = _mm512_mask_cmple_epi32_mask(_mm512_cmpge_epi32_mask(lane, from), lane, to);
        const __m512 each = _mm512_load_ps(t->score + r * TILE + 16 * j);
        score[j] = _mm512_mul_ps(each, _mm512_set1_ps(scale));
        if (soft_cap) score[j] = cap_each(score[j], soft_cap);
        peaks = _mm512_mask_max_ps(peaks, seen[j], peaks, score[j]);
    }
    const float peak = _mm512_reduce_max_ps(peaks);
    for (int j = 0; j < TILE / 16; j++) {
        score[j] = _mm512_maskz_mov_ps(seen[j], decay_each(_mm512_sub_ps(score[j], _mm512_set1_ps(peak))));
        total = _mm512_add_ps(total, score[j]);
    }
    for (int j = 0; j < TILE / 16; j += 2)
        _mm512_store_si512(t->weight + r * TILE / 2 + 8 * j, (__m512i)_mm512_cvtne2ps_pbh(score[j + 1], score[j]));
    if (peak > t->top[r]) {
        const __m512 shrink = decay_each(_mm512_set1_ps(t->top[r] - peak));
        for (float *acc = t->acc + r * D; acc < t->acc + (r + 1) * D; acc += 16)
            _mm512_store_ps(acc, _mm512_mul_ps(_mm512_load_ps(acc), shrink));
        t->sum[r] *= _mm512_cvtss_f32(shrink), t->top[r] = peak;
    }
    t->sum[r] += _mm512_reduce_add_ps(total);
}

int has_tile_attention(int64_t group, int64_t head_dim) {
    return head_dim % 32 == 0 && head_dim <= MAX_DIM && group <= MAX_GROUP;
}

static inline int64_t tokens_of_item(int64_t group) { return least(MAX_ROWS / group, 32); }

int64_t tile_items(int64_t tokens, int64_t kv_heads, int64_t group) {
    return ceil_div(tokens, tokens_of_item(group)) * kv_heads;
}

// Computes some tokens of a KV head with the query heads that share it. `next` may be NULL.
void attend_tiles(const Chunk *c, int64_t item, const NextKeys *next) {
    const int64_t group = c->group, D = c->head_dim, step = tokens_of_item(group);
    static __thread Tile tile;
    Tile *t = &tile;
    const int64_t head = item % c->kv_heads;
    const int64_t token = (ceil_div(c->tokens, step) - 1 - item / c->kv_heads) * step;  // the last, the longest, first
    const int64_t count = least(step, c->tokens - token), rows = count * group, last = c->start + token + count - 1;
    const int64_t first = last + 2 - count > c->window ? last + 2 - count - c->window : 0;
    const NextKeys own = {c->table, head, first, last};
    memset(t->acc, 0, sizeof *t->acc * rows * D);
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *row = c->query + (token + r / group) * c->query_stride + (head * group + r % group) * D;
        memcpy(t->query + r * D / 2, row, 2 * D);
        t->top[r] = c->sinks ? c->sinks[head * group + r % group] : -1e30f, t->sum[r] = c->sinks ? 1 : 0;
    }
    find_slots(t->next_slots, c, &own, first / TILE * TILE);
    for (int64_t begin = first / TILE * TILE; begin <= last; begin += TILE) {
        const int64_t padded = ceil_div(least(TILE, last + 1 - begin), 16) * 16;
        memcpy(t->slots, t->next_slots, sizeof t->slots);
        if (begin + TILE <= last) find_slots(t->next_slots, c, &own, begin + TILE);
        else if (next) find_slots(t->next_slots, c, next, next->first / TILE * TILE);
        load_keys(t, c->keys, c->values, padded, D);
        multiply_rows(t->score, TILE, t->query, D / 2, t->key, TILE, D / 2, 0, rows, padded > 32 ? 4 : 2);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = c->start + token + r / group - begin;
            weigh(t, r, position + 1 - c->window, position, D, c->scale, c->soft_cap);
        }
        load_values(t, c->keys, c->values, padded, D);
        for (int64_t d = 0; d < D; d += 64)
            multiply_rows(t->acc + d, D, t->weight, TILE / 2, t->value + d, D, padded / 2, 1, rows, d + 32 < D ? 4 : 2);
    }
    for (int64_t r = 0; r < rows; r++) {
        uint16_t *to = c->out + (token + r / group) * c->out_stride + (head * group + r % group) * D;
        const __m512 inverse = _mm512_set1_ps(1 / t->sum[r]);
        for (int64_t d = 0; d < D; d += 32) {
            const __m512 low = _mm512_mul_ps(_mm512_load_ps(t->acc + r * D + d), inverse);
            const __m512 high = _mm512_mul_ps(_mm512_load_ps(t->acc + r * D + d + 16), inverse);
            _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}
#else
int has_tile_attention(int64_t group, int64_t head_dim) { return (void)group, (void)head_dim, 0; }
int64_t tile_items(int64_t tokens, int64_t kv_heads, int64_t group) {
    return (void)tokens, (void)kv_heads, (void)group, 0;
}
void attend_tiles(const Chunk *c, int64_t item, const NextKeys *next) { (void)c, (void)item, (void)next; }
#endif
