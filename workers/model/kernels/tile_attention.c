// Attention of new tokens of one sequence over its paged cache, in tiles of keys with a running softmax
// (arXiv 2205.14135), on the bfloat16 dot product of AVX-512.
//
// One code computes a prompt's chunk and a decode's single token, and tiles begin at multiples of TILE: so what a token
// attends to does not depend, to the last bit, on the tokens that are computed beside it.

#include "tile.h"

#ifdef HAS_TILES

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

// Loads the tile's first `count` keys, a multiple of 16; fetches the next tile's values.
static void load_keys(Tile *t, const uint16_t *keys, const uint16_t *values, int64_t count, int64_t D) {
    for (int64_t i = 0; i < count; i += 16) {
        for (int j = 0; j < 16; j++) fetch(values + t->next_slots[i + j], 2 * D);
        for (int64_t d = 0; d < D; d += 32) {
            __m512i rows[16];
            for (int j = 0; j < 16; j++) rows[j] = _mm512_loadu_si512(keys + t->slots[i + j] + d);
            transpose(rows);
            for (int j = 0; j < 16; j++) _mm512_store_si512(t->key + (d / 2 + j) * TILE + i, rows[j]);
        }
    }
    for (int64_t i = count; i < TILE; i++) fetch(values + t->next_slots[i], 2 * D);
}

// Loads the values of these keys; fetches the next tile's keys.
static void load_values(Tile *t, const uint16_t *keys, const uint16_t *values, int64_t count, int64_t D) {
    const __m512i front = _mm512_add_epi16(_mm512_set1_epi32(32 << 16), _mm512_set_epi32(
        0xF000F, 0xE000E, 0xD000D, 0xC000C, 0xB000B, 0xA000A, 0x90009, 0x80008,
        0x70007, 0x60006, 0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0));
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < count; i += 2) {
        fetch(keys + t->next_slots[i], 2 * D), fetch(keys + t->next_slots[i + 1], 2 * D);
        for (int64_t d = 0; d < D; d += 32) {
            const __m512i a = _mm512_loadu_si512(values + t->slots[i] + d);
            const __m512i b = _mm512_loadu_si512(values + t->slots[i + 1] + d);
            _mm512_store_si512(t->value + i / 2 * D + d, _mm512_permutex2var_epi16(a, front, b));
            _mm512_store_si512(t->value + i / 2 * D + d + 16, _mm512_permutex2var_epi16(a, back, b));
        }
    }
    for (int64_t i = count; i < TILE; i++) fetch(keys + t->next_slots[i], 2 * D);
}

// Turns row r's scores into weights, masked outside keys [first, last].
static void weigh(Tile *t, int64_t r, int64_t first, int64_t last, int64_t D, float scale, float soft_cap) {
    __m512 weight[TILE / 16];
    softmax_tile(weight, t->score + r * TILE, first, last, scale, soft_cap, t->top + r, t->sum + r, t->acc + r * D, D);
    for (int j = 0; j < TILE / 16; j += 2)
        _mm512_store_si512(t->weight + r * TILE / 2 + 8 * j, (__m512i)_mm512_cvtne2ps_pbh(weight[j + 1], weight[j]));
}

int has_tile_attention(int64_t head_dim) { return head_dim % 32 == 0; }

// See common.h.
void attend_tiles(const Chunk *c, int64_t item, const NextKeys *next) {
    const Item own = item_of(c, item);
    const int64_t group = c->group, D = c->head_dim, token = own.token, rows = own.rows, head = own.keys.head;
    const int64_t first = own.keys.first, last = own.keys.last;
    static __thread Tile tile;
    Tile *t = &tile;
    memset(t->acc, 0, sizeof *t->acc * rows * D);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (token + r / group) * c->query_stride + (head * group + r % group) * D;
        memcpy(t->query + r * D / 2, (const uint16_t *)c->query + at, 2 * D);
        t->top[r] = c->sinks ? c->sinks[head * group + r % group] : -1e30f, t->sum[r] = c->sinks ? 1 : 0;
    }
    find_slots(t->next_slots, c, &own.keys, first / TILE * TILE, D);
    for (int64_t begin = first / TILE * TILE; begin <= last; begin += TILE) {
        const int64_t padded = ceil_div(least(TILE, last + 1 - begin), 16) * 16;
        memcpy(t->slots, t->next_slots, sizeof t->slots);
        if (begin + TILE <= last) find_slots(t->next_slots, c, &own.keys, begin + TILE, D);
        else if (next) find_slots(t->next_slots, c, next, next->first / TILE * TILE, D);
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
        uint16_t *to = (uint16_t *)c->out + (token + r / group) * c->out_stride + (head * group + r % group) * D;
        const __m512 inverse = _mm512_set1_ps(1 / t->sum[r]);
        for (int64_t d = 0; d < D; d += 32) {
            const __m512 low = _mm512_mul_ps(_mm512_load_ps(t->acc + r * D + d), inverse);
            const __m512 high = _mm512_mul_ps(_mm512_load_ps(t->acc + r * D + d + 16), inverse);
            _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}
#else
int has_tile_attention(int64_t head_dim) { return (void)head_dim, 0; }
void attend_tiles(const Chunk *c, int64_t item, const NextKeys *next) { (void)c, (void)item, (void)next; }
#endif
