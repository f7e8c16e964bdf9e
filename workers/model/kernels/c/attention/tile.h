// The common code of attention in tiles of keys, for all cache dtypes and processors: items and places
// of keys.
#pragma once

#include "common.h"

enum { TILE = 64 };  // keys of a tile
// Rows of an item: so many that its rows and a tile of keys fit into the L2 cache.
enum { MAX_ROWS = 256, ROW_DIM = 256, MAX_WIDE_ROWS = 64 };  // the last for heads of more than ROW_DIM elements
enum { MAX_ELEMENTS = MAX_ROWS * ROW_DIM };                  // of the rows of an item
_Static_assert(MAX_WIDE_ROWS * MAX_HEAD_DIM <= MAX_ELEMENTS, "wide rows have the same memory");

// Finds a tile's keys from `begin` on; `row` is the size of a key, and `block` the distance of two blocks.
// Keys before the first or after the last key that any token sees are masked, but must be finite: the first
// or the last key replaces them.
static inline void find_slots(int64_t *slots, const Chunk *c, const NextKeys *of, int64_t begin, int64_t row,
                              int64_t block) {
    const int64_t size = c->block_size;
    for (int64_t i = 0; i < TILE; i += 8) {
        const int64_t start = begin + i, is_run = size % 8 == 0 && start >= of->first && start + 7 <= of->last;
        if (is_run) {  // avoids divisions: one per key took half of the total time
            const int64_t at = of->table[start / size] * block + (of->head * size + start % size) * row;
            for (int64_t j = 0; j < 8; j++) slots[i + j] = at + j * row;
            continue;
        }
        for (int64_t j = 0; j < 8; j++) {
            const int64_t key = start + j < of->first ? of->first : least(start + j, of->last);
            slots[i + j] = of->table[key / size] * block + (of->head * size + key % size) * row;
        }
    }
}

// Prefetches a row of keys or values into the L2 cache. The L1 cache can load only a few lines from memory
// at a time, and then waits (Zen 4).
static inline void fetch(const void *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i, 0, 2);
}

// Returns the address of thread-local memory as a plain pointer. Otherwise the compiler calls the dynamic
// linker for it at each use, even within loops.
static inline void *resolved(void *memory) {
    __asm__("" : "+r"(memory));
    return memory;
}

// How the pairs of a token and a query head of one KV head are split into items.
typedef struct {
    int64_t tokens, heads;  // of an item
    int64_t splits;         // items that share the query heads of a KV head
} Split;

static inline Split split_of(int64_t group, int64_t head_dim, int64_t max_heads, int64_t max_tokens) {
    const int64_t most = head_dim > ROW_DIM ? MAX_WIDE_ROWS : MAX_ROWS;
    const int64_t heads = ceil_div(group, ceil_div(group, least(most, max_heads)));
    return (Split){least(most / heads, max_tokens), heads, ceil_div(group, heads)};
}

// Some tokens of a KV head with query heads that share it; each pair of them is a row.
typedef struct {
    int64_t token, rows;  // the first token, and the number of rows
    int64_t head, heads;  // the first query head, and the number of query heads
    NextKeys keys;        // the keys that the rows see
} Item;

static inline Item item_of(const Chunk *c, int64_t item) {
    const Split split = split_of(c->group, c->head_dim, c->max_heads, c->max_tokens);
    const int64_t kv_head = item / split.splits % c->kv_heads, skipped = item % split.splits * split.heads;
    // The last tokens come first, because they see the most keys.
    const int64_t row = item / split.splits / c->kv_heads;
    const int64_t token = (ceil_div(c->tokens, split.tokens) - 1 - row) * split.tokens;
    const int64_t count = least(split.tokens, c->tokens - token), last = c->start + token + count - 1;
    const int64_t first = last + 2 - count > c->window ? last + 2 - count - c->window : 0;
    const int64_t heads = least(split.heads, c->group - skipped);
    return (Item){
        token, count * heads, kv_head * c->group + skipped, heads, {c->table, kv_head, first, last},
    };
}

enum { ROWS = 6 };  // rows of a register block

#ifdef HAS_TILES

// Transposes 16 rows of 16 words.
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

// e^x for x <= 0, at least e^-80; the polynomial is from the Cephes library.
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

// Turns a row's scores into weights of the keys [first, last], and zero for other keys: a softmax
// relative to the running peak `top`. If the peak rises, scales down the sum of the weights and the
// weighted values so far, acc [D].
static inline __attribute__((always_inline)) void softmax_tile(__m512 *weight, const float *scores, int64_t first,
                                                               int64_t last, float scale, float soft_cap, float *top,
                                                               float *sum, float *acc, int64_t D) {
    const __m512i from = _mm512_set1_epi32(first > 0 ? (int32_t)first : 0);
    const __m512i to = _mm512_set1_epi32((int32_t)least(last, TILE - 1));
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 peaks = _mm512_set1_ps(*top), total = _mm512_setzero_ps();
    __mmask16 seen[TILE / 16];
    for (int j = 0; j < TILE / 16; j++, lane = _mm512_add_epi32(lane, _mm512_set1_epi32(16))) {
        seen[j] = _mm512_mask_cmple_epi32_mask(_mm512_cmpge_epi32_mask(lane, from), lane, to);
        weight[j] = _mm512_mul_ps(_mm512_load_ps(scores + 16 * j), _mm512_set1_ps(scale));
        if (soft_cap) weight[j] = cap_each(weight[j], soft_cap);
        peaks = _mm512_mask_max_ps(peaks, seen[j], peaks, weight[j]);
    }
    const float peak = _mm512_reduce_max_ps(peaks);
    for (int j = 0; j < TILE / 16; j++) {
        weight[j] = _mm512_maskz_mov_ps(seen[j], decay_each(_mm512_sub_ps(weight[j], _mm512_set1_ps(peak))));
        total = _mm512_add_ps(total, weight[j]);
    }
    if (peak > *top) {
        const __m512 shrink = decay_each(_mm512_set1_ps(*top - peak));
        for (float *each = acc; each < acc + D; each += 16)
            _mm512_store_ps(each, _mm512_mul_ps(_mm512_load_ps(each), shrink));
        *sum *= _mm512_cvtss_f32(shrink), *top = peak;
    }
    *sum += _mm512_reduce_add_ps(total);
}

#endif
