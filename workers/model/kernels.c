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
