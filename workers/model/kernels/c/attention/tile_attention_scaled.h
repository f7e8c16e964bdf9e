// Like tile_attention.c, over a cache of 8-bit numbers with scales, where values are as long as keys. A file that includes this header
// defines for its number format:
//
// dot(sum, a, b)               adds the products of 16 pairs of 16 bits each to 16 sums
// sum_of(sum)                  converts such sums to float
// factor_of(peak)              the factor of a row with this largest number, before it becomes pairs
// scale_of(peak)               the inverse of that factor
// pair_up(low, high, factor)   converts 32 numbers times the factor to pairs
// even_bytes(x), odd_bytes(x)  of each four bytes the first and third, or the second and fourth, as a pair
// ATTEND                       the name of the kernel
//
// A pair consists of elements 0 and 2, or 1 and 3, of four neighbours, because shifts extract these from
// four bytes.

#include "tile.h"

#ifdef HAS_TILES

// D is head_dim rounded up to PART.
enum { PART = 64 };

typedef struct {
    _Alignas(64) uint32_t query[MAX_ELEMENTS / 2];       // [rows, D / 2] pairs along the head dimension
    _Alignas(64) uint32_t key[MAX_HEAD_DIM / 2 * TILE];  // [D / 2, TILE] the same pairs, keys side by side
    _Alignas(64) uint32_t value[TILE / 2 * MAX_HEAD_DIM];  // [TILE / 2, D] pairs of keys, as of load_values
    _Alignas(64) uint32_t weight[MAX_ROWS * TILE / 2];     // [rows, TILE / 2] pairs of keys
    _Alignas(64) float score[MAX_ROWS * TILE], acc[MAX_ELEMENTS];  // [rows, TILE], [rows, D] as the values
    _Alignas(64) float key_scale[TILE], value_scale[TILE];
    float query_scale[MAX_ROWS], weight_scale[MAX_ROWS], top[MAX_ROWS], sum[MAX_ROWS];
    int64_t slots[TILE], next_slots[TILE];  // places of keys and values of this tile and of the next
} Tile;

// s[r][0..16 * width) = sum over i of pairs a[r][i] . b[i][0..16 * width). With column scales, c = s *
// column; without them, c[r] += s[r] * row[r].
static inline __attribute__((always_inline)) void multiply(float *c, int64_t c_stride, const uint32_t *a,
                                                           int64_t a_stride, const uint32_t *b, int64_t b_stride,
                                                           int64_t pairs, const float *row, const float *column,
                                                           const int rows, const int width) {
    __m512i sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) sums[r][j] = _mm512_setzero_si512();
    for (int64_t i = 0; i < pairs; i++) {
        __m512i side[4];
        for (int j = 0; j < width; j++) side[j] = _mm512_load_si512(b + i * b_stride + 16 * j);
        for (int r = 0; r < rows; r++) {
            const __m512i one = _mm512_set1_epi32((int)a[r * a_stride + i]);
            for (int j = 0; j < width; j++) sums[r][j] = dot(sums[r][j], one, side[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) {
            __asm__("" : "+v"(sums[r][j]));  // otherwise GCC 12 keeps copies of the sums in memory
            const __m512 sum = sum_of(sums[r][j]);
            float *to = c + r * c_stride + 16 * j;
            _mm512_store_ps(to, column ? _mm512_mul_ps(sum, _mm512_load_ps(column + 16 * j))
                                       : _mm512_fmadd_ps(sum, _mm512_set1_ps(row[r]), _mm512_load_ps(to)));
        }
}

#define CASE(R)                                                                                                        \
    case R:                                                                                                            \
        if (column && width == 2) multiply(c, c_stride, a, a_stride, b, b_stride, pairs, 0, column, R, 2);             \
        else if (column) multiply(c, c_stride, a, a_stride, b, b_stride, pairs, 0, column, R, 4);                      \
        else multiply(c, c_stride, a, a_stride, b, b_stride, pairs, row, 0, R, 4);                                     \
        break;

// The same for any number of rows.
static void multiply_rows(float *c, int64_t c_stride, const uint32_t *a, int64_t a_stride, const uint32_t *b,
                          int64_t b_stride, int64_t pairs, const float *row, const float *column, int64_t rows,
                          int width) {
    for (int64_t left = ceil_div(rows, ROWS); left > 0; left--) {
        const int64_t height = ceil_div(rows, left);
        switch (height) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
        c += height * c_stride, a += height * a_stride, rows -= height, row += height;
    }
}

// A part of a row, zeros past its end.
static inline __m512i load_part(const int8_t *row, int64_t d, int64_t head_dim) {
    if (head_dim - d >= PART) return _mm512_loadu_si512(row + d);
    return _mm512_maskz_loadu_epi8(~0ull >> (PART - (head_dim - d)), row + d);
}

static void load_query(Tile *t, int64_t r, const uint16_t *query, int64_t head_dim, int64_t D, float scale) {
    _Alignas(64) float wide[MAX_HEAD_DIM] = {0};
    float peak = 0;
    for (int64_t d = 0; d < head_dim; d++) {
        wide[d] = load_bf16(query[d]);
        peak = fabsf(wide[d]) > peak ? fabsf(wide[d]) : peak;
    }
    const float factor = factor_of(peak);
    for (int64_t d = 0; d < D; d += 32) {
        const __m512i pairs = pair_up(_mm512_load_ps(wide + d), _mm512_load_ps(wide + d + 16), factor);
        _mm512_store_si512(t->query + r * D / 2 + d / 2, pairs);
    }
    t->query_scale[r] = scale_of(peak) * scale;
}

// Loads the tile's first `count` keys, a multiple of 16; prefetches the next tile's values.
static void load_keys(Tile *t, const int8_t *keys, const int8_t *values, int64_t count, int64_t head_dim, int64_t D) {
    const int64_t row = scaled_row(head_dim);
    for (int64_t i = 0; i < count; i += 16) {
        for (int j = 0; j < 16; j++) {
            fetch(values + t->next_slots[i + j], row);
            t->key_scale[i + j] = scale_of_row(keys + t->slots[i + j], head_dim);
        }
        for (int64_t d = 0; d < D; d += PART) {
            __m512i rows[16];
            for (int j = 0; j < 16; j++) rows[j] = load_part(keys + t->slots[i + j], d, head_dim);
            transpose(rows);
            for (int j = 0; j < 16; j++) {
                _mm512_store_si512(t->key + (d / 2 + 2 * j) * TILE + i, even_bytes(rows[j]));
                _mm512_store_si512(t->key + (d / 2 + 2 * j + 1) * TILE + i, odd_bytes(rows[j]));
            }
        }
    }
    for (int64_t i = count; i < TILE; i++) fetch(values + t->next_slots[i], row);
}

// Loads the values of these keys; prefetches the next tile's keys. Values are interleaved within lanes of
// 16 bytes: element 16 l + 4 j + e of a part moves to 16 j + 4 l + e.
static void load_values(Tile *t, const int8_t *keys, const int8_t *values, int64_t count, int64_t head_dim, int64_t D) {
    for (int64_t i = 0; i < count; i += 4) {
        for (int j = 0; j < 4; j++) fetch(keys + t->next_slots[i + j], scaled_row(head_dim));
        for (int64_t d = 0; d < D; d += PART) {
            __m512i rows[4], four[4];
            for (int j = 0; j < 4; j++) rows[j] = load_part(values + t->slots[i + j], d, head_dim);
            const __m512i low = _mm512_unpacklo_epi8(rows[0], rows[1]), low2 = _mm512_unpacklo_epi8(rows[2], rows[3]);
            const __m512i high = _mm512_unpackhi_epi8(rows[0], rows[1]), high2 = _mm512_unpackhi_epi8(rows[2], rows[3]);
            four[0] = _mm512_unpacklo_epi16(low, low2), four[1] = _mm512_unpackhi_epi16(low, low2);
            four[2] = _mm512_unpacklo_epi16(high, high2), four[3] = _mm512_unpackhi_epi16(high, high2);
            for (int j = 0; j < 4; j++) {
                _mm512_store_si512(t->value + i / 2 * D + d + 16 * j, even_bytes(four[j]));
                _mm512_store_si512(t->value + (i / 2 + 1) * D + d + 16 * j, odd_bytes(four[j]));
            }
        }
    }
    for (int64_t i = count; i < TILE; i++) fetch(keys + t->next_slots[i], scaled_row(head_dim));
}

// Turns the scores of row r into weights times the scales of the values; keys outside [first, last] are
// masked.
static void weigh(Tile *t, int64_t r, int64_t first, int64_t last, int64_t D, float soft_cap) {
    __m512 weight[TILE / 16], peaks = _mm512_setzero_ps();
    softmax_tile(weight, t->score + r * TILE, first, last, t->query_scale[r], soft_cap, t->top + r, t->sum + r,
                 t->acc + r * D, D);
    for (int j = 0; j < TILE / 16; j++) {
        const __mmask16 seen = _mm512_cmp_ps_mask(weight[j], _mm512_setzero_ps(), _CMP_NEQ_OQ);
        weight[j] = _mm512_maskz_mul_ps(seen, weight[j], _mm512_load_ps(t->value_scale + 16 * j));
        peaks = _mm512_max_ps(peaks, weight[j]);
    }
    const float peak = _mm512_reduce_max_ps(peaks), factor = factor_of(peak);
    for (int j = 0; j < TILE / 16; j += 2)
        _mm512_store_si512(t->weight + r * TILE / 2 + 8 * j, pair_up(weight[j], weight[j + 1], factor));
    t->weight_scale[r] = scale_of(peak);
}

static void store_row(const Tile *t, int64_t r, uint16_t *to, int64_t head_dim, int64_t D) {
    const __m512 inverse = _mm512_set1_ps(1 / t->sum[r]);
    for (int64_t d = 0; d < head_dim; d += 32) {
        __m512 half[2];
        for (int h = 0; h < 2; h++) {  // undoes the order of load_values
            const float *from = t->acc + r * D + d / PART * PART + (d % PART / 16 + h) * 4;
            __m512 x = _mm512_castps128_ps512(_mm_load_ps(from));
            x = _mm512_insertf32x4(x, _mm_load_ps(from + 16), 1);
            x = _mm512_insertf32x4(x, _mm_load_ps(from + 32), 2);
            half[h] = _mm512_mul_ps(_mm512_insertf32x4(x, _mm_load_ps(from + 48), 3), inverse);
        }
        _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(half[1], half[0]));
    }
}

// See attend_tiles.
void ATTEND(const Chunk *c, int64_t item, const NextKeys *next) {
    const Item own = item_of(c, item);
    const int64_t head_dim = c->head_dim, size = scaled_row(head_dim);
    const int64_t D = ceil_div(head_dim, PART) * PART, token = own.token, rows = own.rows, heads = own.heads;
    const int64_t first = own.keys.first, last = own.keys.last;
    static __thread Tile tile;
    Tile *t = resolved(&tile);
    memset(t->acc, 0, sizeof *t->acc * rows * D);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (token + r / heads) * c->query_stride + (own.head + r % heads) * head_dim;
        load_query(t, r, (const uint16_t *)c->query + at, head_dim, D, c->scale);
        t->top[r] = c->sinks ? c->sinks[own.head + r % heads] : -1e30f, t->sum[r] = c->sinks ? 1 : 0;
    }
    find_slots(t->next_slots, c, &own.keys, first / TILE * TILE, size, c->block_stride);
    for (int64_t begin = first / TILE * TILE; begin <= last; begin += TILE) {
        const int64_t padded = ceil_div(least(TILE, last + 1 - begin), 16) * 16;
        memcpy(t->slots, t->next_slots, sizeof t->slots);
        if (begin + TILE <= last) find_slots(t->next_slots, c, &own.keys, begin + TILE, size, c->block_stride);
        else if (next) find_slots(t->next_slots, c, next, next->first / TILE * TILE, size, c->block_stride);
        load_keys(t, c->keys, c->values, padded, head_dim, D);
        multiply_rows(t->score, TILE, t->query, D / 2, t->key, TILE, D / 2, t->query_scale, t->key_scale, rows,
                      padded > 32 ? 4 : 2);
        for (int64_t i = 0; i < padded; i++)
            t->value_scale[i] = scale_of_row((const int8_t *)c->values + t->slots[i], head_dim);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = c->start + token + r / heads - begin;
            weigh(t, r, position + 1 - c->window, position, D, c->soft_cap);
        }
        load_values(t, c->keys, c->values, padded, head_dim, D);
        for (int64_t d = 0; d < D; d += PART)
            multiply_rows(t->acc + d, D, t->weight, TILE / 2, t->value + d, D, padded / 2, t->weight_scale, 0, rows, 4);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (token + r / heads) * c->out_stride + (own.head + r % heads) * head_dim;
        store_row(t, r, (uint16_t *)c->out + at, head_dim, D);
    }
}
#else
void ATTEND(const Chunk *c, int64_t item, const NextKeys *next) { (void)c, (void)item, (void)next; }
#endif
