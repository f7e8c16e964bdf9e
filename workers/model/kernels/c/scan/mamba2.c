// The state space recurrence of Mamba 2 (arXiv 2405.21060), token by token. The rows of a head's matrix
// are the numbers of B and C, its columns those of x.

#include "scan.h"

// As in states.py. Strides are in elements between tokens.
typedef struct {
    int64_t x_stride, dt_stride, b_stride, c_stride;
    int64_t groups, heads, rows, columns;
    Strides strides;
} Shape;

#define DEFINE_MAMBA2(T, NAME)                                                                                         \
    /* x [tokens, heads, columns], dt [tokens, heads], B, C [tokens, groups, rows], A, D, dt_bias float32 [heads] (D   \
       and dt_bias or NULL), out [tokens, heads, columns], states, sequences, shape, least and greatest dt */          \
    int64_t mamba2_##NAME(const Arg *a, int64_t batch, int64_t item) {                                                 \
        (void)batch;                                                                                                   \
        const Steps steps = steps_at(a[9].p);                                                                          \
        const Shape *s = a[10].p;                                                                                      \
        if (item < 0) return items_of(&steps, s->heads, s->columns);                                                   \
        Work work = work_of(&steps, s->columns, item);                                                                 \
        const Matrices matrices = matrices_of(a[8].p, s->strides, s->rows, s->columns, s->heads, steps.sequences);     \
        const int64_t head = work.head, rows = s->rows, group = head / (s->heads / s->groups);                         \
        const float rate = ((const float *)a[4].p)[head], skip = a[5].p ? ((const float *)a[5].p)[head] : 0;           \
        const float bias = a[6].p ? ((const float *)a[6].p)[head] : 0, least_dt = a[11].f, most_dt = a[12].f;          \
        Row state[MAX_ROWS];                                                                                           \
        float b[MAX_ROWS], c[MAX_ROWS];                                                                                \
        clear_padding(b, rows), clear_padding(c, rows);                                                                \
        load_state(state, &matrices, &work);                                                                           \
        for (int64_t t = 0; t < work.sequence.tokens; t++) {                                                           \
            const int64_t token = work.sequence.row + t;                                                               \
            float dt = softplus(load_##NAME(((const T *)a[1].p)[token * s->dt_stride + head]) + bias);                 \
            dt = dt < least_dt ? least_dt : dt > most_dt ? most_dt : dt;                                               \
            load_row_##NAME(b, (const T *)a[2].p + token * s->b_stride + group * rows, rows);                          \
            load_row_##NAME(c, (const T *)a[3].p + token * s->c_stride + group * rows, rows);                          \
            const T *from = (const T *)a[0].p + token * s->x_stride + head * s->columns + work.first;                  \
            Row x, change, y;                                                                                          \
            load_vectors_##NAME(x, from, work.width);                                                                  \
            for (int v = 0; v < VECTORS; v++) change[v] = x[v] * dt;                                                   \
            update_rows(y, state, 0, decay(dt * rate), b, c, change, rows);                                            \
            for (int v = 0; v < VECTORS; v++) y[v] += x[v] * skip;                                                     \
            put_vectors_##NAME((T *)a[7].p + (token * s->heads + head) * s->columns + work.first, y, work.width);      \
            store_state(state, &matrices, &work, t + 1);                                                               \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_MAMBA2(float, f32)
DEFINE_MAMBA2(uint16_t, bf16)
