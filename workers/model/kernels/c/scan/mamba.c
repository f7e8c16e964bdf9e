// The selective scan of Mamba (arXiv 2312.00752), token by token. The rows of a head's matrix are the
// numbers of B and C, its columns are channels.

#include "scan.h"

// As in states.py. Strides are in elements between tokens.
typedef struct {
    int64_t x_stride, dt_stride, b_stride, c_stride, z_stride;
    int64_t heads, rows, columns;
    Strides strides;
} Shape;

// Loads the numbers of an item's channels; 0 without a vector.
INLINE void of_channels(Columns *to, const float *vector, int64_t channel, int64_t width) {
    if (vector)
        load_vectors_f32(to, vector + channel, width);
    else
        memset(to, 0, sizeof(Row));
}

#define DEFINE_MAMBA(T, NAME)                                                                                          \
    /* x, dt [tokens, channels], B, C [tokens, rows], A float32 [rows, channels], D, dt_bias float32 [channels] or     \
       NULL, z [tokens, channels] or NULL, out [tokens, channels], states, sequences, shape */                         \
    int64_t mamba_##NAME(const Arg *a, int64_t batch, int64_t item) {                                                  \
        (void)batch;                                                                                                   \
        const Steps steps = steps_at(a[10].p);                                                                         \
        const Shape *s = a[11].p;                                                                                      \
        if (item < 0) return items_of(&steps, s->heads, s->columns);                                                   \
        Work work = work_of(&steps, s->columns, item);                                                                 \
        const Matrices matrices = matrices_of(a[9].p, s->strides, s->rows, s->columns, s->heads, steps.sequences);     \
        const int64_t rows = s->rows, width = work.width, channels = s->heads * s->columns;                            \
        const int64_t channel = work.head * s->columns + work.first;                                                   \
        Row skip, bias, state[MAX_ROWS], rates[MAX_ROWS];                                                              \
        of_channels(skip, a[5].p, channel, width), of_channels(bias, a[6].p, channel, width);                          \
        float b[MAX_ROWS], c[MAX_ROWS];                                                                                \
        load_state(state, &matrices, &work);                                                                           \
        for (int64_t r = 0; r < rows; r++) of_channels(rates[r], a[4].p, r * channels + channel, width);               \
        for (int64_t t = 0; t < work.sequence.tokens; t++) {                                                           \
            const int64_t token = work.sequence.row + t;                                                               \
            Row x, dt, z, y;                                                                                           \
            load_vectors_##NAME(x, (const T *)a[0].p + token * s->x_stride + channel, width);                          \
            load_vectors_##NAME(dt, (const T *)a[1].p + token * s->dt_stride + channel, width);                        \
            load_row_##NAME(b, (const T *)a[2].p + token * s->b_stride, rows);                                         \
            load_row_##NAME(c, (const T *)a[3].p + token * s->c_stride, rows);                                         \
            if (a[7].p) load_vectors_##NAME(z, (const T *)a[7].p + token * s->z_stride + channel, width);              \
            for (int v = 0; v < VECTORS; v++) {                                                                        \
                dt[v] = softplus_columns(dt[v] + bias[v]);                                                             \
                y[v] = x[v] * skip[v];                                                                                 \
                for (int64_t r = 0; r < rows; r++) {                                                                   \
                    state[r][v] = state[r][v] * decay_columns(dt[v] * rates[r][v]) + x[v] * dt[v] * b[r];              \
                    y[v] += state[r][v] * c[r];                                                                        \
                }                                                                                                      \
                if (a[7].p) y[v] *= silu_columns(z[v]);                                                                \
            }                                                                                                          \
            put_vectors_##NAME((T *)a[8].p + token * channels + channel, y, width);                                    \
            store_state(state, &matrices, &work, t + 1);                                                               \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_MAMBA(float, f32)
DEFINE_MAMBA(uint16_t, bf16)
