// Elementwise operators of torch, for models whose own code calls torch.

#include "common.h"

enum { OF_COPY, OF_ADD, OF_SUB, OF_MUL, OF_NEG, OF_SILU, OF_GELU, OF_GELU_TANH, OF_TANH, OF_RELU };  // as in elementwise.py

static inline float erf_gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678118654752f)); }

// One step of a row: `x` and `to` are contiguous elements of T; so is `y`, or it is one element for
// all if its stride is 0.
#define EACH(NAME, RESULT)                                                                                             \
    if (y_stride)                                                                                                      \
        for (int64_t d = 0; d < dim; d++) {                                                                            \
            const float u = load_##NAME(from[d]), v = load_##NAME(other[d]);                                           \
            (void)u, (void)v;                                                                                          \
            to[d] = store_##NAME(RESULT);                                                                              \
        }                                                                                                              \
    else                                                                                                               \
        for (int64_t d = 0; d < dim; d++) {                                                                            \
            const float u = load_##NAME(from[d]), v = constant;                                                        \
            (void)u, (void)v;                                                                                          \
            to[d] = store_##NAME(RESULT);                                                                              \
        }                                                                                                              \
    break;

// x, y and out [rows, heads, dim]. Strides of rows and heads are in elements; the stride of y's last
// dimension is 1 or 0. If y is NULL, a number is used instead.
#define DEFINE_ELEMENTWISE(T, NAME)                                                                                    \
    int64_t elementwise_##NAME(const Arg *a, int64_t rows, int64_t item) {                                             \
        const T *x = a[0].p, *y = a[3].p;                                                                              \
        T *out = a[7].p;                                                                                               \
        const int64_t x_row = a[1].n, x_head = a[2].n, y_row = a[4].n, y_head = a[5].n, y_stride = a[6].n;             \
        const int64_t out_row = a[8].n, out_head = a[9].n, heads = a[10].n, dim = a[11].n, operation = a[12].n;        \
        const int64_t step = rows_of_item(heads * dim);                                                                \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t i = item * step * heads; i < least(rows, (item + 1) * step) * heads; i++) {                       \
            const int64_t row = i / heads, head = i % heads;                                                           \
            const T *from = x + row * x_row + head * x_head, *other = y ? y + row * y_row + head * y_head : NULL;      \
            T *restrict to = out + row * out_row + head * out_head;                                                    \
            const float constant = y ? load_##NAME(*other) : (float)a[13].f;                                           \
            switch (operation) {                                                                                       \
                case OF_COPY: EACH(NAME, u)                                                                            \
                case OF_ADD: EACH(NAME, u + v)                                                                         \
                case OF_SUB: EACH(NAME, u - v)                                                                         \
                case OF_MUL: EACH(NAME, u * v)                                                                         \
                case OF_NEG: EACH(NAME, -u)                                                                            \
                case OF_SILU: EACH(NAME, silu(u))                                                                      \
                case OF_GELU: EACH(NAME, erf_gelu(u))                                                                  \
                case OF_GELU_TANH: EACH(NAME, gelu(u))                                                                 \
                case OF_TANH: EACH(NAME, tanhf(u))                                                                     \
                case OF_RELU: EACH(NAME, pass_nan(u > 0 ? u : 0, u))                                                   \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_ELEMENTWISE(float, f32)
DEFINE_ELEMENTWISE(uint16_t, bf16)
