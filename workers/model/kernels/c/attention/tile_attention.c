// Attention of new tokens of one sequence over its paged cache, in tiles of keys with a running softmax
// (arXiv 2205.14135), on the bfloat16 dot product of AVX-512.
//
// The same code computes a prompt's chunk and a decode's single token, and tiles begin at multiples of
// TILE. So a token's result does not depend, bit by bit, on the other tokens of the batch.

#include "tile.h"

#ifdef HAS_TILES

typedef struct {
    _Alignas(64) uint32_t query[MAX_ELEMENTS / 2];       // [rows, head_dim / 2] pairs along the head dimension
    _Alignas(64) uint32_t key[MAX_HEAD_DIM / 2 * TILE];  // [head_dim / 2, TILE] the same pairs, keys side by side
    _Alignas(64) uint32_t weight[MAX_ROWS * TILE / 2];   // [rows, TILE / 2] pairs of keys
    _Alignas(64) float score[MAX_ROWS * TILE], acc[MAX_ELEMENTS];  // [rows, TILE], [rows, value_dim]
    float top[MAX_ROWS], sum[MAX_ROWS];
    int64_t slots[TILE], next_slots[TILE];  // places of keys and values of this tile and of the next
} Tile;

// Writes the products of query [rows, head_dim / 2] pairs with the tile's first 16 * width keys to score
// [rows, TILE].
static inline __attribute__((always_inline)) void compare(float *score, const uint32_t *query, const Tile *t,
                                                          int64_t pairs, const int rows, const int width) {
    __m512 sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) sums[r][j] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        __m512bh side[4];
        for (int j = 0; j < width; j++) side[j] = (__m512bh)_mm512_load_si512(t->key + i * TILE + 16 * j);
        for (int r = 0; r < rows; r++) {
            const __m512bh one = (__m512bh)_mm512_set1_epi32((int)query[r * pairs + i]);
            for (int j = 0; j < width; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], one, side[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) _mm512_store_ps(score + r * TILE + 16 * j, sums[r][j]);
}

#define COMPARE(R)                                                                                                     \
    case R:                                                                                                            \
        if (count > 32) compare(score, query, t, D / 2, R, 4);                                                         \
        else compare(score, query, t, D / 2, R, 2);                                                                    \
        break;

// Writes the scores of all rows for the tile's first `count` keys.
static void compare_rows(Tile *t, int64_t count, int64_t D, int64_t rows) {
    float *score = t->score;
    const uint32_t *query = t->query;
    for (int64_t left = ceil_div(rows, ROWS); left > 0; left--) {
        const int64_t height = ceil_div(rows, left);
        switch (height) { COMPARE(1) COMPARE(2) COMPARE(3) COMPARE(4) COMPARE(5) COMPARE(6) }
        score += height * TILE, query += height * D / 2, rows -= height;
    }
}

// Loads the tile's first `count` keys, a multiple of 16; prefetches the keys of the next tile.
static void load_keys(Tile *t, const uint16_t *keys, int64_t count, int64_t D) {
    for (int64_t i = 0; i < count; i += 16) {
        for (int64_t d = 0; d < D; d += 32) {
            __m512i rows[16];
            for (int j = 0; j < 16; j++) fetch(keys + t->next_slots[i + j] + d, 64);
            for (int j = 0; j < 16; j++) rows[j] = _mm512_loadu_si512(keys + t->slots[i + j] + d);
            transpose(rows);
            for (int j = 0; j < 16; j++) _mm512_store_si512(t->key + (d / 2 + j) * TILE + i, rows[j]);
        }
    }
    for (int64_t i = count; i < TILE; i++) fetch(keys + t->next_slots[i], 2 * D);
}

// Adds the weighted values of the tile's first `count` keys to acc [rows, V], from dimension d on;
// prefetches the values of the next tile. Values of a pair of keys are combined in registers.
static inline __attribute__((always_inline)) void mix(float *acc, const uint32_t *weight, const Tile *t,
                                                      const uint16_t *values, int64_t count, int64_t V, int64_t d,
                                                      const int rows, const int width) {
    const __m512i front = _mm512_add_epi16(_mm512_set1_epi32(32 << 16), _mm512_set_epi32(
        0xF000F, 0xE000E, 0xD000D, 0xC000C, 0xB000B, 0xA000A, 0x90009, 0x80008,
        0x70007, 0x60006, 0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0));
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    __m512 sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) sums[r][j] = _mm512_load_ps(acc + r * V + d + 16 * j);
    for (int64_t i = 0; i < count; i += 2) {
        const uint16_t *one = values + t->slots[i] + d, *other = values + t->slots[i + 1] + d;
        for (int j = 0; j < 2; j++) fetch(values + t->next_slots[i + j] + d, 32 * width);
        __m512bh side[4];
        for (int j = 0; j < width; j += 2) {
            const __m512i a = _mm512_loadu_si512(one + 16 * j), b = _mm512_loadu_si512(other + 16 * j);
            side[j] = (__m512bh)_mm512_permutex2var_epi16(a, front, b);
            side[j + 1] = (__m512bh)_mm512_permutex2var_epi16(a, back, b);
        }
        for (int r = 0; r < rows; r++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int)weight[r * TILE / 2 + i / 2]);
            for (int j = 0; j < width; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], both, side[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) _mm512_store_ps(acc + r * V + d + 16 * j, sums[r][j]);
}

#define MIX(R)                                                                                                         \
    case R:                                                                                                            \
        if (d + 32 < V) mix(acc, weight, t, values, count, V, d, R, 4);                                                \
        else mix(acc, weight, t, values, count, V, d, R, 2);                                                           \
        break;

// The same for all dimensions and any number of rows.
static void mix_rows(Tile *t, const uint16_t *values, int64_t count, int64_t V, int64_t rows) {
    float *acc = t->acc;
    const uint32_t *weight = t->weight;
    for (int64_t left = ceil_div(rows, ROWS); left > 0; left--) {
        const int64_t height = ceil_div(rows, left);
        for (int64_t d = 0; d < V; d += 64)
            switch (height) { MIX(1) MIX(2) MIX(3) MIX(4) MIX(5) MIX(6) }
        acc += height * V, weight += height * TILE / 2, rows -= height;
    }
    for (int64_t i = count; i < TILE; i++) fetch(values + t->next_slots[i], 2 * V);
}

// Turns the scores of row r into weights; keys outside [first, last] are masked.
static void weigh(Tile *t, int64_t r, int64_t first, int64_t last, int64_t V, float scale, float soft_cap) {
    __m512 weight[TILE / 16];
    softmax_tile(weight, t->score + r * TILE, first, last, scale, soft_cap, t->top + r, t->sum + r, t->acc + r * V, V);
    for (int j = 0; j < TILE / 16; j += 2)
        _mm512_store_si512(t->weight + r * TILE / 2 + 8 * j, (__m512i)_mm512_cvtne2ps_pbh(weight[j + 1], weight[j]));
}

int has_tile_attention(int64_t head_dim, int64_t value_dim) { return head_dim % 32 == 0 && value_dim % 32 == 0; }

// See common.h.
void attend_tiles(const Chunk *c, int64_t item, const NextKeys *next) {
    const Item own = item_of(c, item);
    const int64_t D = c->head_dim, V = c->value_dim, token = own.token, rows = own.rows, heads = own.heads;
    const int64_t first = own.keys.first, last = own.keys.last;
    static __thread Tile tile;
    Tile *t = resolved(&tile);
    memset(t->acc, 0, sizeof *t->acc * rows * V);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (token + r / heads) * c->query_stride + (own.head + r % heads) * D;
        memcpy(t->query + r * D / 2, (const uint16_t *)c->query + at, 2 * D);
        t->top[r] = c->sinks ? c->sinks[own.head + r % heads] : -1e30f, t->sum[r] = c->sinks ? 1 : 0;
    }
    find_slots(t->next_slots, c, &own.keys, first / TILE * TILE, D, c->block_stride);
    for (int64_t begin = first / TILE * TILE; begin <= last; begin += TILE) {
        const int64_t padded = ceil_div(least(TILE, last + 1 - begin), 16) * 16;
        memcpy(t->slots, t->next_slots, sizeof t->slots);
        if (begin + TILE <= last) find_slots(t->next_slots, c, &own.keys, begin + TILE, D, c->block_stride);
        else if (next) find_slots(t->next_slots, c, next, next->first / TILE * TILE, D, c->block_stride);
        load_keys(t, c->keys, padded, D);
        compare_rows(t, padded, D, rows);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = c->start + token + r / heads - begin;
            weigh(t, r, position + 1 - c->window, position, V, c->scale, c->soft_cap);
        }
        mix_rows(t, c->values, padded, V, rows);
    }
    for (int64_t r = 0; r < rows; r++) {
        uint16_t *to = (uint16_t *)c->out + (token + r / heads) * c->out_stride + (own.head + r % heads) * V;
        const __m512 inverse = _mm512_set1_ps(1 / t->sum[r]);
        for (int64_t d = 0; d < V; d += 32) {
            const __m512 low = _mm512_mul_ps(_mm512_load_ps(t->acc + r * V + d), inverse);
            const __m512 high = _mm512_mul_ps(_mm512_load_ps(t->acc + r * V + d + 16), inverse);
            _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}
#else
int has_tile_attention(int64_t head_dim, int64_t value_dim) { return (void)head_dim, (void)value_dim, 0; }
void attend_tiles(const Chunk *c, int64_t item, const NextKeys *next) { (void)c, (void)item, (void)next; }
#endif
