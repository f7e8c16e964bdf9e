// The pieces of a decoder step that plain torch does in many small calls, for CPUs. Built by kernels.py.
//
// Each kernel exists for float32 and for bfloat16 (suffix _f32, _bf16) and computes in float32. The caller owns all
// memory; nothing is allocated. Threads are those of the OpenMP runtime that torch has loaded.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { MAX_GROUP = 32, KEYS = 128, SMALL = 16384 };

static inline float load_f32(float x) { return x; }
static inline float store_f32(float x) { return x; }
static inline float load_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint16_t store_bf16(float value) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Attention of single queries over a paged cache: one pass with a running softmax (arXiv 2205.14135).
//
// query, out      [rows, kv_heads * group, head_dim], rows `query_stride` and `out_stride` elements apart
// keys, values    one layer's cache: [blocks, kv_heads, block_size, head_dim]
// tables          block tables, one after the other; row r's begins at tables[offsets[r]], and its query sees the keys
//                 from first_key[r] to last_key[r]
//
// One item is one row's KV head with the `group` query heads that share it. Where head_dim and group are constants, the
// loops over them unroll, which is worth a factor of 2.5; so the usual pairs have a case each.
#define CASE(ATTEND, D, G)                                                                                             \
    case (D) * 64 + (G):                                                                                               \
        ATTEND(from, to, keys, values, table, first, last, head, kv_heads, G, D, block_size, scale);                   \
        break;
#define CASES(ATTEND)                                                                                                  \
    CASE(ATTEND, 64, 1) CASE(ATTEND, 64, 2) CASE(ATTEND, 64, 3) CASE(ATTEND, 64, 4) CASE(ATTEND, 64, 7)                \
    CASE(ATTEND, 64, 8) CASE(ATTEND, 128, 1) CASE(ATTEND, 128, 2) CASE(ATTEND, 128, 4) CASE(ATTEND, 128, 5)            \
    CASE(ATTEND, 128, 7) CASE(ATTEND, 128, 8)

#define DEFINE_ATTENTION(T, NAME)                                                                                      \
    static inline __attribute__((always_inline)) void attend_##NAME(                                                   \
        const T *query, T *out, const T *keys, const T *values, const int32_t *table, int64_t first, int64_t last,     \
        int64_t head, int64_t kv_heads, int64_t group, const int64_t D, int64_t block_size, float scale) {             \
        float q[MAX_GROUP][D], acc[MAX_GROUP][D], score[MAX_GROUP][KEYS], wide[D], top[MAX_GROUP], sum[MAX_GROUP];     \
        for (int64_t g = 0; g < group; g++) {                                                                          \
            for (int64_t d = 0; d < D; d++) q[g][d] = load_##NAME(query[g * D + d]) * scale, acc[g][d] = 0;            \
            top[g] = -1e30f, sum[g] = 0;                                                                               \
        }                                                                                                              \
        for (int64_t begin = first; begin <= last; begin += KEYS) {                                                    \
            const int64_t count = begin + KEYS <= last ? KEYS : last + 1 - begin;                                      \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                const int64_t key = begin + i;                                                                         \
                const int64_t slot = ((int64_t)table[key / block_size] * kv_heads + head) * block_size;                \
                const T *k = keys + (slot + key % block_size) * D;                                                     \
                for (int64_t d = 0; d < D; d++) wide[d] = load_##NAME(k[d]);                                           \
                for (int64_t g = 0; g < group; g++) {                                                                  \
                    float dot = 0;                                                                                     \
                    for (int64_t d = 0; d < D; d++) dot += q[g][d] * wide[d];                                          \
                    score[g][i] = dot;                                                                                 \
                }                                                                                                      \
            }                                                                                                          \
            for (int64_t g = 0; g < group; g++) {                                                                      \
                float peak = top[g], total = 0;                                                                        \
                for (int64_t i = 0; i < count; i++) peak = score[g][i] > peak ? score[g][i] : peak;                    \
                for (int64_t i = 0; i < count; i++) score[g][i] = expf(score[g][i] - peak), total += score[g][i];      \
                const float shrink = expf(top[g] - peak);                                                              \
                for (int64_t d = 0; d < D; d++) acc[g][d] *= shrink;                                                   \
                sum[g] = sum[g] * shrink + total, top[g] = peak;                                                       \
            }                                                                                                          \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                const int64_t key = begin + i;                                                                         \
                const int64_t slot = ((int64_t)table[key / block_size] * kv_heads + head) * block_size;                \
                const T *v = values + (slot + key % block_size) * D;                                                   \
                for (int64_t d = 0; d < D; d++) wide[d] = load_##NAME(v[d]);                                           \
                for (int64_t g = 0; g < group; g++)                                                                    \
                    for (int64_t d = 0; d < D; d++) acc[g][d] += score[g][i] * wide[d];                                \
            }                                                                                                          \
        }                                                                                                              \
        for (int64_t g = 0; g < group; g++)                                                                            \
            for (int64_t d = 0; d < D; d++) out[g * D + d] = store_##NAME(acc[g][d] / sum[g]);                         \
    }                                                                                                                  \
                                                                                                                       \
    void decode_attention_##NAME(const T *query, int64_t query_stride, T *out, int64_t out_stride, const T *keys,      \
                                 const T *values, const int32_t *tables, const int64_t *offsets,                       \
                                 const int64_t *first_key, const int64_t *last_key, int64_t rows, int64_t kv_heads,    \
                                 int64_t group, int64_t head_dim, int64_t block_size, float scale) {                   \
        _Pragma("omp parallel for schedule(dynamic)") for (int64_t item = 0; item < rows * kv_heads; item++) {         \
            const int64_t row = item / kv_heads, head = item % kv_heads, at = head * group * head_dim;                 \
            const T *from = query + row * query_stride + at;                                                           \
            T *to = out + row * out_stride + at;                                                                       \
            const int32_t *table = tables + offsets[row];                                                              \
            const int64_t first = first_key[row], last = last_key[row];                                                \
            switch (head_dim * 64 + group) {                                                                           \
                CASES(attend_##NAME)                                                                                   \
            default:                                                                                                   \
                attend_##NAME(from, to, keys, values, table, first, last, head, kv_heads, group, head_dim, block_size, \
                              scale);                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_ATTENTION(float, f32)
DEFINE_ATTENTION(uint16_t, bf16)

// Root mean square norm (arXiv 1910.07467) of each row: out = weight * x / rms(x). The normed row is rounded to T before
// the weight, as transformers does.
//
// x, out  [rows, dim]; weight [dim]
#define DEFINE_NORM(T, NAME)                                                                                           \
    void rms_norm_##NAME(const T *x, const T *weight, T *out, int64_t rows, int64_t dim, float epsilon) {              \
        _Pragma("omp parallel for if (rows * dim > SMALL)") for (int64_t row = 0; row < rows; row++) {                 \
            const T *from = x + row * dim;                                                                             \
            T *to = out + row * dim;                                                                                   \
            float square = 0;                                                                                          \
            for (int64_t d = 0; d < dim; d++) square += load_##NAME(from[d]) * load_##NAME(from[d]);                   \
            const float scale = 1 / sqrtf(square / dim + epsilon);                                                     \
            for (int64_t d = 0; d < dim; d++) {                                                                        \
                const T normed = store_##NAME(load_##NAME(from[d]) * scale);                                           \
                to[d] = store_##NAME(load_##NAME(weight[d]) * load_##NAME(normed));                                    \
            }                                                                                                          \
        }                                                                                                              \
    }

// silu(gate) * up, arXiv 2002.05202: x [rows, 2 * dim], gates first; out [rows, dim].
#define DEFINE_SILU(T, NAME)                                                                                           \
    void silu_mul_##NAME(const T *x, T *out, int64_t rows, int64_t dim) {                                              \
        _Pragma("omp parallel for if (rows * dim > SMALL)") for (int64_t row = 0; row < rows; row++) {                 \
            const T *gate = x + 2 * row * dim, *up = gate + dim;                                                       \
            T *to = out + row * dim;                                                                                   \
            for (int64_t d = 0; d < dim; d++) {                                                                        \
                const float g = load_##NAME(gate[d]);                                                                  \
                to[d] = store_##NAME(g / (1 + expf(-g)) * load_##NAME(up[d]));                                         \
            }                                                                                                          \
        }                                                                                                              \
    }

// Rotary embedding (arXiv 2104.09864) in place: x [rows, heads, dim], rows `stride` elements apart; cos and signed sin
// [rows, dim] as RotaryTable makes them.
#define DEFINE_ROTATE(T, NAME)                                                                                         \
    void rotate_##NAME(T *x, int64_t stride, const T *cosines, const T *sines, int64_t rows, int64_t heads,            \
                       int64_t dim) {                                                                                  \
        _Pragma("omp parallel for if (rows * heads * dim > SMALL)") for (int64_t row = 0; row < rows; row++) {         \
            const T *c = cosines + row * dim, *s = sines + row * dim;                                                  \
            const int64_t half = dim / 2;                                                                              \
            for (int64_t head = 0; head < heads; head++) {                                                             \
                T *at = x + row * stride + head * dim;                                                                 \
                for (int64_t d = 0; d < half; d++) {                                                                   \
                    const float low = load_##NAME(at[d]), high = load_##NAME(at[half + d]);                            \
                    at[d] = store_##NAME(low * load_##NAME(c[d]) + high * load_##NAME(s[d]));                          \
                    at[half + d] = store_##NAME(high * load_##NAME(c[half + d]) + low * load_##NAME(s[half + d]));     \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_NORM(float, f32)
DEFINE_NORM(uint16_t, bf16)
DEFINE_SILU(float, f32)
DEFINE_SILU(uint16_t, bf16)
DEFINE_ROTATE(float, f32)
DEFINE_ROTATE(uint16_t, bf16)

// Copies each KV head of each new token to its row of the cache: key, value [tokens, heads, row_bytes], tokens
// `key_stride` and `value_stride` bytes apart; slots [tokens * heads] rows of row_bytes in keys and values.
void store_kv(const char *key, int64_t key_stride, const char *value, int64_t value_stride, char *keys, char *values,
              const int64_t *slots, int64_t tokens, int64_t heads, int64_t row_bytes) {
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t to = slots[token * heads + head] * row_bytes, from = head * row_bytes;
            memcpy(keys + to, key + token * key_stride + from, row_bytes);
            memcpy(values + to, value + token * value_stride + from, row_bytes);
        }
}

// Attention of a chunk of one sequence over its paged cache, in tiles with a running softmax (arXiv 2205.14135), on the
// bfloat16 dot product of AVX-512.
//
// query, out  [tokens, kv_heads * group, head_dim], tokens `query_stride` and `out_stride` elements apart
// keys, values, table  as for decode_attention; token i has position start + i and sees the `window` keys up to it
//
// Only where has_chunk_attention says so.
#ifdef __AVX512BF16__
#include <immintrin.h>

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

static void load_tile(Tile *t, const uint16_t *keys, const uint16_t *values, const int32_t *table, int64_t begin,
                      int64_t count, int64_t head, int64_t kv_heads, int64_t D, int64_t block_size) {
    for (int64_t i = 0; i < TILE; i++) {
        const int64_t key = begin + (i < count ? i : count - 1);  // what is past the end is masked, but must be finite
        const int64_t slot = ((int64_t)table[key / block_size] * kv_heads + head) * block_size + key % block_size;
        const uint32_t *k = (const uint32_t *)(keys + slot * D);
        const uint16_t *v = values + slot * D;
        uint16_t *to = (uint16_t *)t->value[i / 2] + i % 2;
        for (int64_t d = 0; d < D / 2; d++) t->key[d][i] = k[d];
        for (int64_t d = 0; d < D; d++) to[2 * d] = v[d];
    }
}

// Turns row r's scores into weights: masked outside keys [first, last], softmax against the running peak.
static void weigh(Tile *t, int64_t r, int64_t first, int64_t last, int64_t D, float scale) {
    float *score = t->score[r], peak = t->top[r], total = 0;
    for (int64_t i = 0; i < TILE; i++) {
        score[i] = i >= first && i <= last ? score[i] * scale : -1e30f;
        peak = score[i] > peak ? score[i] : peak;
    }
    for (int64_t i = 0; i < TILE; i++) {
        const float weight = expf(score[i] - peak);
        score[i] = score[i] > -1e29f ? weight : 0;
        total += score[i];
    }
    for (int64_t j = 0; j < TILE; j += 32)
        _mm512_store_si512(t->weight[r] + j / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(score + j + 16),
                                                                               _mm512_load_ps(score + j)));
    if (peak > t->top[r]) {
        const float shrink = expf(t->top[r] - peak);
        for (int64_t d = 0; d < D; d++) t->acc[r][d] *= shrink;
        t->sum[r] *= shrink, t->top[r] = peak;
    }
    t->sum[r] += total;
}

int has_chunk_attention(int64_t group, int64_t head_dim) {
    return head_dim % 64 == 0 && head_dim <= MAX_DIM && group <= MAX_GROUP;
}

void chunk_attention_bf16(const uint16_t *query, int64_t query_stride, uint16_t *out, int64_t out_stride,
                          const uint16_t *keys, const uint16_t *values, const int32_t *table, int64_t start,
                          int64_t tokens, int64_t window, int64_t kv_heads, int64_t group, int64_t head_dim,
                          int64_t block_size, float scale) {
    const int64_t D = head_dim;
    const int64_t step = 256 / group < 32 ? 256 / group : 32;  // tokens of an item
    const int64_t items = (tokens + step - 1) / step;
#pragma omp parallel for schedule(dynamic)
    for (int64_t item = items * kv_heads - 1; item >= 0; item--) {  // the longest, which are the last, come first
        static __thread Tile tile;
        Tile *t = &tile;
        const int64_t head = item % kv_heads, token = item / kv_heads * step;
        const int64_t count = token + step <= tokens ? step : tokens - token, rows = count * group;
        const int64_t padded = (rows + ROWS - 1) / ROWS * ROWS, last = start + token + count - 1;
        memset(t->acc, 0, sizeof t->acc[0] * padded);
        for (int64_t r = 0; r < padded; r++) {
            const int64_t from = r < rows ? r : rows - 1;
            memcpy(t->query[r], query + (token + from / group) * query_stride + (head * group + from % group) * D, 2 * D);
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
}
#else
int has_chunk_attention(int64_t group, int64_t head_dim) { return (void)group, (void)head_dim, 0; }
#endif
