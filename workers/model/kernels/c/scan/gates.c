// Gates of layers that keep a state, and the norm and the product that they are applied with.

#include "scan.h"

// Gates of the gated delta rule: decay = rate * softplus(a + bias), at most 0, and beta = sigmoid(b).
//
// a, b [rows, heads], rows `a_stride` and `b_stride` elements apart; rate, bias float32 [heads]; decays float32 [rows,
// heads]; betas [rows, heads]
#define DEFINE_DELTA_GATES(T, NAME)                                                                                    \
    int64_t delta_gates_##NAME(const Arg *x, int64_t rows, int64_t item) {                                             \
        const T *a = x[0].p, *b = x[2].p;                                                                              \
        const float *rate = x[4].p, *bias = x[5].p;                                                                    \
        float *decays = x[6].p;                                                                                        \
        T *betas = x[7].p;                                                                                             \
        const int64_t a_stride = x[1].n, b_stride = x[3].n, heads = x[8].n, step = rows_of_item(heads);                \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++)                                   \
            for (int64_t h = 0; h < heads; h++) {                                                                      \
                decays[row * heads + h] = rate[h] * softplus(load_##NAME(a[row * a_stride + h]) + bias[h]);            \
                betas[row * heads + h] = store_##NAME(sigmoid_mul(load_##NAME(b[row * b_stride + h]), 1));             \
            }                                                                                                          \
        return 0;                                                                                                      \
    }

// The sum of the squares of each head of x * silu(z).
//
// x, z [rows, heads, dim], rows `x_stride` and `z_stride` elements apart; out float32 [rows, heads]
#define DEFINE_GATED_SQUARES(T, NAME)                                                                                  \
    static inline float gated_square_##NAME(const T *x, const T *z, int64_t dim) {                                     \
        float square = 0;                                                                                              \
        for (int64_t d = 0; d < dim; d++) {                                                                            \
            const float y = load_##NAME(x[d]) * silu(load_##NAME(z[d]));                                               \
            square += y * y;                                                                                           \
        }                                                                                                              \
        return square;                                                                                                 \
    }                                                                                                                  \
                                                                                                                       \
    int64_t gated_squares_##NAME(const Arg *a, int64_t rows, int64_t item) {                                           \
        const T *x = a[0].p, *z = a[2].p;                                                                              \
        float *out = a[4].p;                                                                                           \
        const int64_t x_stride = a[1].n, z_stride = a[3].n, heads = a[5].n, dim = a[6].n;                              \
        const int64_t step = rows_of_item(heads * dim);                                                                \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t i = item * step * heads; i < least(rows, (item + 1) * step) * heads; i++) {                       \
            const int64_t row = i / heads, at = i % heads * dim;                                                       \
            out[i] = gated_square_##NAME(x + row * x_stride + at, z + row * z_stride + at, dim);                       \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

// Root mean square norm of each head of each row with a gate z: weight * x / rms(x) * silu(z), or, if the gate comes
// first, weight * y / rms(y) with y = x * silu(z). Rounded once.
//
// x, z [rows, heads, dim], rows `x_stride` and `z_stride` elements apart; weight of a head [dim], heads
// `weight_stride` elements apart; out [rows, heads, dim]; squares [rows, heads], the sums of `count` squares to which a
// head's own belong, or NULL
#define DEFINE_GATED_NORM(T, NAME)                                                                                     \
    int64_t gated_norm_##NAME(const Arg *a, int64_t rows, int64_t item) {                                              \
        const T *x = a[0].p, *z = a[2].p, *weight = a[4].p;                                                            \
        T *out = a[6].p;                                                                                               \
        const int64_t x_stride = a[1].n, z_stride = a[3].n, weight_stride = a[5].n, heads = a[7].n, dim = a[8].n;      \
        const int64_t gate_first = a[10].n, count = a[12].n, step = rows_of_item(heads * dim);                         \
        const float epsilon = a[9].f, *squares = a[11].p;                                                              \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t i = item * step * heads; i < least(rows, (item + 1) * step) * heads; i++) {                       \
            const int64_t row = i / heads, head = i % heads;                                                           \
            const T *from = x + row * x_stride + head * dim, *gate = z + row * z_stride + head * dim;                  \
            const T *w = weight + head * weight_stride;                                                                \
            T *restrict to = out + i * dim;                                                                            \
            float square = 0;                                                                                          \
            if (squares)                                                                                               \
                square = squares[i];                                                                                   \
            else if (gate_first)                                                                                       \
                square = gated_square_##NAME(from, gate, dim);                                                         \
            else                                                                                                       \
                for (int64_t d = 0; d < dim; d++) square += load_##NAME(from[d]) * load_##NAME(from[d]);               \
            const float scale = 1 / sqrtf(square / count + epsilon);                                                   \
            for (int64_t d = 0; d < dim; d++) {                                                                        \
                const float y = load_##NAME(from[d]) * silu(load_##NAME(gate[d]));                                     \
                to[d] = store_##NAME(load_##NAME(w[d]) * (y * scale));                                                 \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

// x * sigmoid(gate): x [rows, dim], gate [rows, dim] or [rows, 1], rows `x_stride` and `gate_stride` elements apart;
// out [rows, dim]
#define DEFINE_SIGMOID_GATED(T, NAME)                                                                                  \
    int64_t sigmoid_gated_##NAME(const Arg *a, int64_t rows, int64_t item) {                                           \
        const T *x = a[0].p, *gate = a[2].p;                                                                           \
        T *restrict out = a[4].p;                                                                                      \
        const int64_t x_stride = a[1].n, gate_stride = a[3].n, dim = a[5].n, is_shared = a[6].n;                       \
        const int64_t step = rows_of_item(dim);                                                                        \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++)                                   \
            for (int64_t d = 0; d < dim; d++) {                                                                        \
                const float g = load_##NAME(gate[row * gate_stride + (is_shared ? 0 : d)]);                            \
                out[row * dim + d] = store_##NAME(sigmoid_mul(g, load_##NAME(x[row * x_stride + d])));                 \
            }                                                                                                          \
        return 0;                                                                                                      \
    }

DEFINE_DELTA_GATES(float, f32)
DEFINE_DELTA_GATES(uint16_t, bf16)
DEFINE_GATED_SQUARES(float, f32)
DEFINE_GATED_SQUARES(uint16_t, bf16)
DEFINE_GATED_NORM(float, f32)
DEFINE_GATED_NORM(uint16_t, bf16)
DEFINE_SIGMOID_GATED(float, f32)
DEFINE_SIGMOID_GATED(uint16_t, bf16)
