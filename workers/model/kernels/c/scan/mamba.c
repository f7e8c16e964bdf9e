// The selective scan of Mamba (arXiv 2312.00752), token by token. The rows of a head's matrix are the
// numbers of B and C, its columns are channels.

#include "scan.h"

// As in states.py. Strides are in elements between tokens.
typedef struct {
    int64_t x_stride, dt_stride, b_stride, c_stride, z_stride;
    int64_t heads, rows, columns;
    Strides strides;
} Shape;

// Loads `width` numbers of a vector with one number for each channel; 0 without a vector.
INLINE Columns of_channels(const float *vector, int64_t channel, int64_t width) {
    return vector ? load_columns(vector + channel, width) : (Columns){0};
}

#define DEFINE_MAMBA(T, NAME)                                                                                          \
    /* x, dt [tokens, channels], B, C [tokens, rows], A float32 [rows, channels], D, dt_bias float32 [channels] or     \
       NULL, z [tokens, channels] or NULL, out [tokens, channels], states, sequences, shape */                         \
    int64_t mamba_##NAME(const Arg *a, int64_t batch, int64_t item) {                                                  \
        (void)batch;                                                                                                   \
        const Steps steps = steps_at(a[10].p);                                                                         \
        const Shape *s = a[11].p;                                                                                      \
        if (item < 0) return steps.sequences * s->heads * parts_of(s->columns);                                        \
        Work work = work_of(&steps, s->columns, item);                                                                 \
        const Matrices matrices = matrices_of(a[9].p, s->strides, s->rows, s->columns, s->heads, steps.sequences);     \
        const int64_t rows = s->rows, width = work.width, channels = s->heads * s->columns;                            \
        const int64_t channel = work.head * s->columns + work.first;                                                   \
        const Columns skip = of_channels(a[5].p, channel, width), bias = of_channels(a[6].p, channel, width);          \
        Columns state[MAX_ROWS], rates[MAX_ROWS];                                                                      \
        float b[MAX_ROWS], c[MAX_ROWS];                                                                                \
        load_state(state, &matrices, &work);                                                                           \
        for (int64_t r = 0; r < rows; r++) rates[r] = of_channels(a[4].p, r * channels + channel, width);              \
        for (int64_t t = 0; t < work.sequence.tokens; t++) {                                                           \
            const int64_t token = work.sequence.row + t;                                                               \
            const Columns x = columns_##NAME((const T *)a[0].p + token * s->x_stride + channel, width);                \
            const Columns step = columns_##NAME((const T *)a[1].p + token * s->dt_stride + channel, width);            \
            const Columns dt = softplus_columns(step + bias), change = x * dt;                                         \
            load_row_##NAME(b, (const T *)a[2].p + token * s->b_stride, rows);                                         \
            load_row_##NAME(c, (const T *)a[3].p + token * s->c_stride, rows);                                         \
            Columns y = x * skip;                                                                                      \
            for (int64_t r = 0; r < rows; r++) {                                                                       \
                state[r] = state[r] * decay_columns(dt * rates[r]) + change * b[r];                                    \
                y += state[r] * c[r];                                                                                  \
            }                                                                                                          \
            if (a[7].p) y *= silu_columns(columns_##NAME((const T *)a[7].p + token * s->z_stride + channel, width));   \
            put_##NAME((T *)a[8].p + token * channels + channel, y, width);                                            \
            store_state(state, &matrices, &work, t + 1);                                                               \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_MAMBA(float, f32)
DEFINE_MAMBA(uint16_t, bf16)
