// The small pieces between the matrix products, which plain torch does in many calls.

#include "common.h"

enum { SMALL = 16384 };  // elements, below which threads cost more than they save

// Root mean square norm (arXiv 1910.07467) of each row: out = weight * x / rms(x). The normed row is rounded to T
// before the weight, as transformers does.
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
                to[d] = store_##NAME(silu(load_##NAME(gate[d])) * load_##NAME(up[d]));                                 \
            }                                                                                                          \
        }                                                                                                              \
    }

// Rotary embedding (arXiv 2104.09864) in place: x [rows, heads, dim], rows `stride` elements apart; cos and signed sin
// [rows, dim] of a RotaryEmbedding.
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
