// The gated delta rule (arXiv 2412.06464), token by token, with a gate for each head or for each row of
// its state (Kimi Linear, arXiv 2510.26692).

#include "scan.h"

// As in states.py. Strides are in elements between tokens.
typedef struct {
    int64_t query_stride, key_stride, value_stride, gate_stride, beta_stride;
    int64_t key_heads, heads, rows, columns;
    int64_t gates;       // of a head: 1, or rows
    int64_t normalizes;  // whether query and key are divided by their length
    Strides strides;
} Shape;

// Divides a padded row by its length and multiplies it by `scale`.
INLINE void normalize(float *x, int64_t size, float scale) {
    Columns sums = {0};
    for (int64_t i = 0; i < size; i += COLUMNS) {
        const Columns part = load_columns(x + i, COLUMNS);
        sums += part * part;
    }
    float sum = 1e-6f;
    for (int i = 0; i < COLUMNS; i++) sum += sums[i];
    const float factor = scale / sqrtf(sum);
    for (int64_t i = 0; i < size; i++) x[i] *= factor;
}

#define DEFINE_DELTA(T, NAME)                                                                                          \
    INLINE void delta_tile_##NAME(const Arg *a, const Shape *s, Work *work, int64_t sequences, const int gated_rows) { \
        const Matrices matrices = matrices_of(a[6].p, s->strides, s->rows, s->columns, s->heads, sequences);           \
        const int64_t key_head = work->head / (s->heads / s->key_heads), rows = s->rows;                               \
        const float scale = (float)a[9].f;                                                                             \
        Row state[MAX_ROWS];                                                                                           \
        float query[MAX_ROWS], key[MAX_ROWS], decays[MAX_ROWS];                                                        \
        clear_padding(query, rows), clear_padding(key, rows), clear_padding(decays, rows);                             \
        load_state(state, &matrices, work);                                                                            \
        for (int64_t t = 0; t < work->sequence.tokens; t++) {                                                          \
            const int64_t token = work->sequence.row + t;                                                              \
            const T *value = (const T *)a[2].p + token * s->value_stride + work->head * s->columns + work->first;      \
            const float *gate = (const float *)a[3].p + token * s->gate_stride + work->head * s->gates;                \
            const float beta = load_##NAME(((const T *)a[4].p)[token * s->beta_stride + work->head]);                  \
            load_row_##NAME(query, (const T *)a[0].p + token * s->query_stride + key_head * rows, rows);               \
            load_row_##NAME(key, (const T *)a[1].p + token * s->key_stride + key_head * rows, rows);                   \
            if (s->normalizes) {                                                                                       \
                normalize(query, rows, scale);                                                                         \
                normalize(key, rows, 1);                                                                               \
            } else                                                                                                     \
                for (int64_t r = 0; r < rows; r++) query[r] *= scale;                                                  \
            const float one = decay(gate[0]);                                                                          \
            Row known, change, y;                                                                                      \
            load_vectors_##NAME(change, value, work->width);                                                           \
            if (gated_rows) {                                                                                          \
                float decayed[MAX_ROWS];                                                                               \
                for (int64_t r = 0; r < rows; r++) decays[r] = decay(gate[r]);                                         \
                for (int64_t r = 0; r < padded(rows); r++) decayed[r] = decays[r] * key[r];                            \
                sum_rows(known, state, decayed, rows);                                                                 \
                for (int v = 0; v < VECTORS; v++) change[v] = (change[v] - known[v]) * beta;                           \
            } else {                                                                                                   \
                sum_rows(known, state, key, rows);                                                                     \
                for (int v = 0; v < VECTORS; v++) change[v] = (change[v] - known[v] * one) * beta;                     \
            }                                                                                                          \
            update_rows(y, state, gated_rows ? decays : 0, one, key, query, change, rows);                             \
            T *out = (T *)a[5].p + (token * s->heads + work->head) * s->columns + work->first;                         \
            put_vectors_##NAME(out, y, work->width);                                                                   \
            store_state(state, &matrices, work, t + 1);                                                                \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* query, key [tokens, key_heads, rows], value [tokens, heads, columns], gate float32 [tokens, heads, gates],      \
       beta [tokens, heads], out [tokens, heads, columns], states, sequences, shape, scale of the query */             \
    int64_t delta_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                   \
        (void)rows;                                                                                                    \
        const Steps steps = steps_at(a[7].p);                                                                          \
        const Shape *s = a[8].p;                                                                                       \
        if (item < 0) return items_of(&steps, s->heads, s->columns);                                                   \
        Work work = work_of(&steps, s->columns, item);                                                                 \
        if (s->gates > 1)                                                                                              \
            delta_tile_##NAME(a, s, &work, steps.sequences, 1);                                                        \
        else                                                                                                           \
            delta_tile_##NAME(a, s, &work, steps.sequences, 0);                                                        \
        return 0;                                                                                                      \
    }

DEFINE_DELTA(float, f32)
DEFINE_DELTA(uint16_t, bf16)
