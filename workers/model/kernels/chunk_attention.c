// Attention of several new tokens of one sequence over its paged cache, in tiles with a running softmax
// (arXiv 2205.14135), on the bfloat16 dot product of AVX-512.

#include "common.h"

// query, out  [tokens, kv_heads * group, head_dim], tokens `query_stride` and `out_stride` elements apart
// keys, values, table  as in decode_attention.c; token i has position start + i and sees the `window` keys up to it
//
// Only where has_chunk_attention says so. An item is some tokens of a KV head.
#ifdef __AVX512BF16__

enum { TILE = 64, ROWS = 6, MAX_ROWS = 258, MAX_DIM = 128 };  // keys of a tile; rows of a register block and of an item

typedef struct {
    _Alignas(64) uint32_t query[MAX_ROWS][MAX_DIM / 2];  // pairs along the head dimension
    _Alignas(64) uint32_t key[MAX_DIM / 2][TILE];        // the same pairs of 64 keys side by side
    _Alignas(64) uint32_t value[TILE / 2][MAX_DIM];      // pairs of keys
    _Alignas(64) uint32_t weight[MAX_ROWS][TILE / 2];    // pairs of keys
    _Alignas(64) float score[MAX_ROWS][TILE], acc[MAX_ROWS][MAX_DIM];
    float top[MAX_ROWS], sum[MAX_ROWS];
} Tile;

// c[r][0..63] (+)= sum over i of pairs a[r][i] . b[i][0..63], for ROWS rows.
static inline void multiply(float *c, int64_t c_stride, const uint32_t *a, int64_t a_stride, const uint32_t *b,
                            int64_t b_stride, int64_t pairs, int add) {
    __m512 sums[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 4; j++) sums[r][j] = add ? _mm512_load_ps(c + r * c_stride + 16 * j) : _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        __m512bh side[4];
        for (int j = 0; j < 4; j++) side[j] = (__m512bh)_mm512_load_si512(b + i * b_stride + 16 * j);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh one = (__m512bh)_mm512_set1_epi32((int)a[r * a_stride + i]);
            for (int j = 0; j < 4; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], one, side[j]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 4; j++) _mm512_store_ps(c + r * c_stride + 16 * j, sums[r][j]);
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

static void load_tile(Tile *t, const uint16_t *keys, const uint16_t *values, const int32_t *table, int64_t begin,
                      int64_t count, int64_t head, int64_t kv_heads, int64_t D, int64_t block_size) {
    int64_t slots[TILE];
    for (int64_t i = 0; i < TILE; i++) {
        const int64_t key = begin + (i < count ? i : count - 1);  // what is past the end is masked, but must be finite
        slots[i] = (((int64_t)table[key / block_size] * kv_heads + head) * block_size + key % block_size) * D;
    }
    for (int64_t i = 0; i < TILE; i += 16)
        for (int64_t d = 0; d < D; d += 32) {
            __m512i rows[16];
            for (int j = 0; j < 16; j++) rows[j] = _mm512_loadu_si512(keys + slots[i + j] + d);
            transpose(rows);
            for (int j = 0; j < 16; j++) _mm512_store_si512(t->key[d / 2 + j] + i, rows[j]);
        }
    const __m512i front = _mm512_add_epi16(_mm512_set1_epi32(32 << 16), _mm512_set_epi32(
        0xF000F, 0xE000E, 0xD000D, 0xC000C, 0xB000B, 0xA000A, 0x90009, 0x80008,
        0x70007, 0x60006, 0x50005, 0x40004, 0x30003, 0x20002, 0x10001, 0));
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < TILE; i += 2)
        for (int64_t d = 0; d < D; d += 32) {
            const __m512i a = _mm512_loadu_si512(values + slots[i] + d);
            const __m512i b = _mm512_loadu_si512(values + slots[i + 1] + d);
            _mm512_store_si512(t->value[i / 2] + d, _mm512_permutex2var_epi16(a, front, b));
            _mm512_store_si512(t->value[i / 2] + d + 16, _mm512_permutex2var_epi16(a, back, b));
        }
}

// Turns row r's scores into weights: masked outside keys [first, last], softmax against the running peak.
static void weigh(Tile *t, int64_t r, int64_t first, int64_t last, int64_t D, float scale) {
    const int32_t from = first > 0 ? (int32_t)first : 0, to = last < TILE ? (int32_t)last : TILE;
    float *score = t->score[r], peak = t->top[r], total = 0;
    for (int32_t i = 0; i < TILE; i++) {
        score[i] = i >= from && i <= to ? score[i] * scale : -1e30f;
        peak = score[i] > peak ? score[i] : peak;
    }
    for (int64_t i = 0; i < TILE; i++) {
        const float weight = decay(score[i] - peak);
        score[i] = score[i] > -1e29f ? weight : 0;
        total += score[i];
    }
    for (int64_t j = 0; j < TILE; j += 32)
        _mm512_store_si512(t->weight[r] + j / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(score + j + 16),
                                                                               _mm512_load_ps(score + j)));
    if (peak > t->top[r]) {
        const float shrink = decay(t->top[r] - peak);
        for (int64_t d = 0; d < D; d++) t->acc[r][d] *= shrink;
        t->sum[r] *= shrink, t->top[r] = peak;
    }
    t->sum[r] += total;
}

int has_chunk_attention(int64_t group, int64_t head_dim) {
    return head_dim % 64 == 0 && head_dim <= MAX_DIM && group <= MAX_GROUP;
}

static inline int64_t tokens_of_item(int64_t group) { return least(256 / group, 32); }

int64_t chunk_items(int64_t tokens, int64_t kv_heads, int64_t group) {
    return ceil_div(tokens, tokens_of_item(group)) * kv_heads;
}

void attend_chunk(const uint16_t *query, int64_t query_stride, uint16_t *out, int64_t out_stride, const uint16_t *keys,
                  const uint16_t *values, const int32_t *table, int64_t start, int64_t tokens, int64_t window,
                  int64_t kv_heads, int64_t group, int64_t D, int64_t block_size, float scale, int64_t item) {
    const int64_t step = tokens_of_item(group), items = chunk_items(tokens, kv_heads, group);
    item = items - 1 - item;  // the longest, which are the last, come first
    static __thread Tile tile;
    Tile *t = &tile;
    const int64_t head = item % kv_heads, token = item / kv_heads * step;
    const int64_t count = least(step, tokens - token), rows = count * group;
    const int64_t padded = ceil_div(rows, ROWS) * ROWS, last = start + token + count - 1;
    memset(t->acc, 0, sizeof t->acc[0] * padded);
    for (int64_t r = 0; r < padded; r++) {
        const int64_t from = r < rows ? r : rows - 1;
        const uint16_t *row = query + (token + from / group) * query_stride + (head * group + from % group) * D;
        memcpy(t->query[r], row, 2 * D);
        t->top[r] = -1e30f, t->sum[r] = 0;
    }
    int64_t begin = start + token + 1 - window;
    for (begin = begin > 0 ? begin : 0; begin <= last; begin += TILE) {
        load_tile(t, keys, values, table, begin, last + 1 - begin, head, kv_heads, D, block_size);
        for (int64_t r = 0; r < padded; r += ROWS)
            multiply(t->score[r], TILE, t->query[r], MAX_DIM / 2, t->key[0], TILE, D / 2, 0);
        for (int64_t r = 0; r < padded; r++) {
            const int64_t position = start + token + (r < rows ? r : rows - 1) / group;
            weigh(t, r, position + 1 - window - begin, position - begin, D, scale);
        }
        for (int64_t r = 0; r < padded; r += ROWS)
            for (int64_t d = 0; d < D; d += 64)
                multiply(t->acc[r] + d, MAX_DIM, t->weight[r], TILE / 2, t->value[0] + d, MAX_DIM, TILE / 2, 1);
    }
    for (int64_t r = 0; r < rows; r++) {
        uint16_t *to = out + (token + r / group) * out_stride + (head * group + r % group) * D;
        for (int64_t d = 0; d < D; d++) to[d] = store_bf16(t->acc[r][d] / t->sum[r]);
    }
}
#else
int has_chunk_attention(int64_t group, int64_t head_dim) { return (void)group, (void)head_dim, 0; }
int64_t chunk_items(int64_t tokens, int64_t kv_heads, int64_t group) { return (void)tokens, (void)kv_heads, (void)group, 0; }
void attend_chunk(const uint16_t *query, int64_t query_stride, uint16_t *out, int64_t out_stride, const uint16_t *keys,
                  const uint16_t *values, const int32_t *table, int64_t start, int64_t tokens, int64_t window,
                  int64_t kv_heads, int64_t group, int64_t D, int64_t block_size, float scale, int64_t item) {
    (void)query, (void)query_stride, (void)out, (void)out_stride, (void)keys, (void)values, (void)table, (void)start;
    (void)tokens, (void)window, (void)kv_heads, (void)group, (void)D, (void)block_size, (void)scale, (void)item;
}
#endif
