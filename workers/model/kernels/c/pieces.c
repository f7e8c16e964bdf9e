// Kernels for the operations between matrix products, which need many calls in plain torch.

#include "fp8.h"

// Root mean square norm (arXiv 1910.07467) of each head of each row: out = (weight + offset) * x /
// rms(x), plus the residual unless it is NULL. The normalized head is rounded to T before the product
// with the weight, as transformers does for Llama.
//
// x  [rows, heads, dim], rows `stride` elements apart; weight [dim]; out, residual [rows, heads, dim]
#define DEFINE_NORM(T, NAME)                                                                                           \
    int64_t rms_norm_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                \
        const T *x = a[0].p, *weight = a[2].p, *residual = a[8].p;                                                     \
        T *out = a[3].p;                                                                                               \
        const int64_t stride = a[1].n, heads = a[4].n, dim = a[5].n, step = rows_of_item(heads * dim);                 \
        const float epsilon = a[6].f, offset = a[7].f;                                                                 \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t i = item * step * heads; i < least(rows, (item + 1) * step) * heads; i++) {                       \
            const T *from = x + i / heads * stride + i % heads * dim;                                                  \
            T *to = out + i * dim;                                                                                     \
            float square = 0;                                                                                          \
            for (int64_t d = 0; d < dim; d++) square += load_##NAME(from[d]) * load_##NAME(from[d]);                   \
            const float scale = 1 / sqrtf(square / dim + epsilon);                                                     \
            if (residual)                                                                                              \
                for (int64_t d = 0; d < dim; d++) {                                                                    \
                    const float normed = load_##NAME(store_##NAME(load_##NAME(from[d]) * scale));                      \
                    const float sum = (load_##NAME(weight[d]) + offset) * normed + load_##NAME(residual[i * dim + d]); \
                    to[d] = store_##NAME(sum);                                                                         \
                }                                                                                                      \
            else                                                                                                       \
                for (int64_t d = 0; d < dim; d++) {                                                                    \
                    const float normed = load_##NAME(store_##NAME(load_##NAME(from[d]) * scale));                      \
                    to[d] = store_##NAME((load_##NAME(weight[d]) + offset) * normed);                                  \
                }                                                                                                      \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

// Layer norm without bias (arXiv 1607.06450): x [rows, dim], rows `stride` elements apart; weight [dim]; out [rows,
// dim].
#define DEFINE_LAYER_NORM(T, NAME)                                                                                     \
    int64_t layer_norm_##NAME(const Arg *a, int64_t rows, int64_t item) {                                              \
        const T *x = a[0].p, *weight = a[2].p;                                                                         \
        T *out = a[3].p;                                                                                               \
        const int64_t stride = a[1].n, dim = a[4].n, step = rows_of_item(dim);                                         \
        const float epsilon = a[5].f;                                                                                  \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++) {                                 \
            const T *from = x + row * stride;                                                                          \
            float mean = 0, square = 0;                                                                                \
            for (int64_t d = 0; d < dim; d++) mean += load_##NAME(from[d]);                                            \
            mean /= dim;                                                                                               \
            for (int64_t d = 0; d < dim; d++) square += (load_##NAME(from[d]) - mean) * (load_##NAME(from[d]) - mean); \
            const float scale = 1 / sqrtf(square / dim + epsilon);                                                     \
            for (int64_t d = 0; d < dim; d++)                                                                          \
                out[row * dim + d] = store_##NAME(load_##NAME(weight[d]) * ((load_##NAME(from[d]) - mean) * scale));   \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

// factor * x + residual: all [rows, dim], contiguous; the residual may be NULL.
#define DEFINE_SCALE(T, NAME)                                                                                          \
    int64_t scale_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                   \
        const T *x = a[0].p, *residual = a[1].p;                                                                       \
        T *out = a[2].p;                                                                                               \
        const int64_t dim = a[3].n, step = rows_of_item(dim), end = least(rows, (item + 1) * step) * dim;              \
        const float factor = a[4].f;                                                                                   \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        if (residual)                                                                                                  \
            for (int64_t i = item * step * dim; i < end; i++)                                                          \
                out[i] = store_##NAME(factor * load_##NAME(x[i]) + load_##NAME(residual[i]));                          \
        else                                                                                                           \
            for (int64_t i = item * step * dim; i < end; i++) out[i] = store_##NAME(factor * load_##NAME(x[i]));       \
        return 0;                                                                                                      \
    }

// cap * tanh(x / cap): x and out [rows, dim], contiguous.
#define DEFINE_SOFT_CAP(T, NAME)                                                                                       \
    int64_t soft_cap_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                \
        const T *x = a[0].p;                                                                                           \
        T *out = a[1].p;                                                                                               \
        const int64_t dim = a[2].n, step = rows_of_item(dim), end = least(rows, (item + 1) * step) * dim;              \
        const float cap = a[3].f;                                                                                      \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t i = item * step * dim; i < end; i++) out[i] = store_##NAME(cap * tanhf(load_##NAME(x[i]) / cap)); \
        return 0;                                                                                                      \
    }

// act(gate) * up, arXiv 2002.05202: x [rows, 2 * dim], gates first; out [rows, dim].
#define DEFINE_GATED(T, NAME, ACT, KERNEL)                                                                             \
    int64_t KERNEL##_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                \
        const T *x = a[0].p;                                                                                           \
        T *out = a[1].p;                                                                                               \
        const int64_t dim = a[2].n, step = rows_of_item(dim);                                                          \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++) {                                 \
            const T *gate = x + 2 * row * dim, *up = gate + dim;                                                       \
            T *to = out + row * dim;                                                                                   \
            for (int64_t d = 0; d < dim; d++) {                                                                        \
                to[d] = store_##NAME(ACT(load_##NAME(gate[d])) * load_##NAME(up[d]));                                  \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

// relu(x)^2 (arXiv 2109.08668): x and out [rows, dim], contiguous.
#define DEFINE_RELU_SQUARED(T, NAME)                                                                                   \
    int64_t relu_squared_##NAME(const Arg *a, int64_t rows, int64_t item) {                                            \
        const T *x = a[0].p;                                                                                           \
        T *out = a[1].p;                                                                                               \
        const int64_t dim = a[2].n, step = rows_of_item(dim), end = least(rows, (item + 1) * step) * dim;              \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t i = item * step * dim; i < end; i++) {                                                            \
            const float u = load_##NAME(x[i]);                                                                         \
            out[i] = store_##NAME(pass_nan(u > 0 ? u * u : 0, u));                                                     \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

// The gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate up to `limit` and up within it: x [rows,
// dim, gate and up]; out [rows, dim].
#define DEFINE_CLAMPED_GATE(T, NAME)                                                                                   \
    int64_t clamped_gate_##NAME(const Arg *a, int64_t rows, int64_t item) {                                            \
        const T *x = a[0].p;                                                                                           \
        T *out = a[1].p;                                                                                               \
        const int64_t dim = a[2].n, step = rows_of_item(dim), end = least(rows, (item + 1) * step) * dim;              \
        const float alpha = a[3].f, limit = a[4].f;                                                                    \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t i = item * step * dim; i < end; i++) {                                                            \
            const float u = load_##NAME(x[2 * i]), v = load_##NAME(x[2 * i + 1]), most = v < limit ? v : limit;        \
            const float gate = pass_nan(u < limit ? u : limit, u), up = pass_nan(most > -limit ? most : -limit, v);    \
            out[i] = store_##NAME(sigmoid_mul(alpha * gate, gate * (up + 1)));                                         \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

// Rotary embedding (arXiv 2104.09864): x [rows, heads, dim], rows `stride` elements apart; cos and signed sin
// [rows, dim] of a RotaryEmbedding; out [rows, heads, dim].
#define DEFINE_ROTATE(T, NAME)                                                                                         \
    int64_t rotate_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                  \
        const T *x = a[0].p, *cosines = a[2].p, *sines = a[3].p;                                                       \
        T *out = a[4].p;                                                                                               \
        const int64_t stride = a[1].n, heads = a[5].n, dim = a[6].n, half = dim / 2, step = rows_of_item(heads * dim); \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++) {                                 \
            const T *c = cosines + row * dim, *s = sines + row * dim;                                                  \
            for (int64_t head = 0; head < heads; head++) {                                                             \
                const T *from = x + row * stride + head * dim, *from_high = from + half;                               \
                T *restrict to = out + (row * heads + head) * dim, *restrict to_high = to + half;                      \
                _Pragma("GCC ivdep") for (int64_t d = 0; d < half; d++) {                                              \
                    const float low = load_##NAME(from[d]), high = load_##NAME(from_high[d]);                          \
                    to[d] = store_##NAME(low * load_##NAME(c[d]) + high * load_##NAME(s[d]));                          \
                    to_high[d] = store_##NAME(high * load_##NAME(c[half + d]) + low * load_##NAME(s[half + d]));       \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_NORM(float, f32)
DEFINE_NORM(uint16_t, bf16)
DEFINE_LAYER_NORM(float, f32)
DEFINE_LAYER_NORM(uint16_t, bf16)
DEFINE_SCALE(float, f32)
DEFINE_SCALE(uint16_t, bf16)
DEFINE_SOFT_CAP(float, f32)
DEFINE_SOFT_CAP(uint16_t, bf16)
DEFINE_GATED(float, f32, silu, silu_mul)
DEFINE_GATED(uint16_t, bf16, silu, silu_mul)
DEFINE_GATED(float, f32, gelu, gelu_mul)
DEFINE_GATED(uint16_t, bf16, gelu, gelu_mul)
DEFINE_RELU_SQUARED(float, f32)
DEFINE_RELU_SQUARED(uint16_t, bf16)
DEFINE_CLAMPED_GATE(float, f32)
DEFINE_CLAMPED_GATE(uint16_t, bf16)
DEFINE_ROTATE(float, f32)
DEFINE_ROTATE(uint16_t, bf16)

// Returns the place of a KV head's row of a token in a layer's cache [blocks, heads, size, row_bytes], whose blocks
// are block_bytes apart. `slot` is the block times its size plus the offset in it.
static inline int64_t row_of_slot(int64_t slot, int64_t head, int64_t size, int64_t row_bytes, int64_t block_bytes) {
    return slot / size * block_bytes + (head * size + slot % size) * row_bytes;
}

// Copies each KV head of each new token to its row of the cache: key, value [tokens, heads, row_bytes], tokens
// `key_stride` and `value_stride` bytes apart; slots [tokens] and places in the cache as in row_of_slot. Without
// values, only keys are copied.
int64_t store_kv(const Arg *a, int64_t tokens, int64_t item) {
    const char *key = a[0].p, *value = a[2].p;
    char *keys = a[4].p, *values = a[5].p;
    const int64_t *slots = a[6].p;
    const int64_t key_stride = a[1].n, value_stride = a[3].n, heads = a[7].n, row_bytes = a[8].n;
    const int64_t size = a[9].n, block_bytes = a[10].n, step = rows_of_item(heads * row_bytes / 2);
    if (item < 0) return ceil_div(tokens, step);
    for (int64_t token = item * step; token < least(tokens, (item + 1) * step); token++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t to = row_of_slot(slots[token], head, size, row_bytes, block_bytes), from = head * row_bytes;
            memcpy(keys + to, key + token * key_stride + from, row_bytes);
            if (values) memcpy(values + to, value + token * value_stride + from, row_bytes);
        }
    return 0;
}

enum { INFINITE = 0x7f80, TINY = 0x0400 };  // as bfloat16

// Rounds x [dim] to a row of a cache of int8 or fp8. A number that is not finite makes the scale
// infinite, and so all numbers that are read with it. Bits are compared, because -ffast-math assumes
// that no number is NaN. Scales below 2^-119, whose inverse might be infinite, are set to 0.
static inline __attribute__((always_inline)) void round_row(uint8_t *to, const float *x, int64_t dim,
                                                            const int is_fp8) {
    const uint32_t largest = largest_magnitude(x, dim);
    float peak;
    memcpy(&peak, &largest, sizeof peak);
    uint16_t scale = largest >> 16 >= INFINITE ? INFINITE : store_bf16(peak * (1 / (is_fp8 ? E4M3_MAX : 127.0f)));
    if (scale < TINY) scale = 0;
    const float factor = 1 / load_bf16(scale);
    if (scale == 0 || scale == INFINITE) memset(to, 0, dim);
    else for (int64_t d = 0; d < dim; d++) to[d] = is_fp8 ? store_e4m3(x[d] * factor) : (uint8_t)lrintf(x[d] * factor);
    memcpy(to + dim, &scale, sizeof scale);
}

// Rounds x [dim] to a row of a cache of int4. A number that is not finite makes all scales infinite.
static inline __attribute__((always_inline)) void round_row_int4(uint8_t *to, const float *x, int64_t dim) {
    uint8_t *scales = to + dim / 2;
    const int is_finite = largest_magnitude(x, dim) >> 16 < INFINITE;
    for (int64_t begin = 0; begin < dim; begin += INT4_GROUP, scales += INT4_SCALES) {
        const int64_t count = least(INT4_GROUP, dim - begin), half = count / 2;
        const float *group = x + begin;
        float low = group[0], high = group[0];
        for (int64_t i = 1; i < count; i++) {
            low = group[i] < low ? group[i] : low;
            high = group[i] > high ? group[i] : high;
        }
        uint16_t kept[2] = {INFINITE, store_bf16(low)};  // scale and least value
        if ((kept[1] & 0x7fff) < TINY) kept[1] = 0;
        low = load_bf16(kept[1]);
        if (is_finite) kept[0] = store_bf16((high > low ? high - low : 0) * (1 / 15.0f));
        if (kept[0] < TINY) kept[0] = 0;
        const int is_known = kept[0] < INFINITE;
        if (!is_known) kept[0] = kept[1] = INFINITE;
        if (is_known && kept[0]) {
            const float factor = 1 / load_bf16(kept[0]);
            int32_t numbers[INT4_GROUP];
            for (int64_t i = 0; i < count; i++) {
                const int32_t number = (int32_t)lrintf((group[i] - low) * factor);
                numbers[i] = number < 0 ? 0 : number > 15 ? 15 : number;
            }
            for (int64_t i = 0; i < half; i++) to[begin / 2 + i] = (uint8_t)(numbers[i] | numbers[half + i] << 4);
        } else memset(to + begin / 2, 0, half);
        memcpy(scales, kept, sizeof kept);
    }
}

// Like store_kv, for rows of ROW_BYTES that ROUND makes: key, value [tokens, heads, head_dim], strides in elements.
#define DEFINE_STORE_SCALED(T, NAME, KERNEL, ROW_BYTES, ROUND)                                                         \
    int64_t KERNEL##_##NAME(const Arg *a, int64_t tokens, int64_t item) {                                              \
        const T *key = a[0].p, *value = a[2].p;                                                                        \
        uint8_t *keys = a[4].p, *values = a[5].p;                                                                      \
        const int64_t *slots = a[6].p;                                                                                 \
        const int64_t key_stride = a[1].n, value_stride = a[3].n, heads = a[7].n, dim = a[8].n;                        \
        const int64_t size = a[9].n, block_bytes = a[10].n, step = rows_of_item(2 * heads * dim);                      \
        if (item < 0) return ceil_div(tokens, step);                                                                   \
        for (int64_t i = item * step * heads; i < least(tokens, (item + 1) * step) * heads; i++) {                     \
            const T *from[2] = {key + i / heads * key_stride, value + i / heads * value_stride};                       \
            const int64_t at = row_of_slot(slots[i / heads], i % heads, size, ROW_BYTES(dim), block_bytes);            \
            uint8_t *to[2] = {keys + at, values + at};                                                                 \
            for (int half = 0; half < 2; half++) {                                                                     \
                float wide[MAX_HEAD_DIM];                                                                              \
                for (int64_t d = 0; d < dim; d++) wide[d] = load_##NAME(from[half][i % heads * dim + d]);              \
                ROUND(to[half], wide, dim);                                                                            \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

#define ROUND_INT8(TO, X, DIM) round_row(TO, X, DIM, 0)
#define ROUND_FP8(TO, X, DIM) round_row(TO, X, DIM, 1)
DEFINE_STORE_SCALED(float, f32, store_kv_int8, scaled_row, ROUND_INT8)
DEFINE_STORE_SCALED(uint16_t, bf16, store_kv_int8, scaled_row, ROUND_INT8)
DEFINE_STORE_SCALED(float, f32, store_kv_fp8, scaled_row, ROUND_FP8)
DEFINE_STORE_SCALED(uint16_t, bf16, store_kv_fp8, scaled_row, ROUND_FP8)
DEFINE_STORE_SCALED(float, f32, store_kv_int4, int4_row, round_row_int4)
DEFINE_STORE_SCALED(uint16_t, bf16, store_kv_int4, int4_row, round_row_int4)

// Copies rows of a table [size, row_bytes]: out [rows, row_bytes] = table[ids]. The code that creates
// the ids checks them; an id outside the table selects its last row.
int64_t gather(const Arg *a, int64_t rows, int64_t item) {
    const char *table = a[0].p;
    const int32_t *ids = a[1].p;
    const int64_t row_bytes = a[3].n, size = a[4].n, step = rows_of_item(row_bytes / 2);
    char *out = a[2].p;
    if (item < 0) return ceil_div(rows, step);
    for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++) {
        const int64_t id = ids[row] >= 0 && ids[row] < size ? ids[row] : size - 1;
        memcpy(out + row * row_bytes, table + id * row_bytes, row_bytes);
    }
    return 0;
}
