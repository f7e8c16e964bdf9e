// Causal depthwise convolution over the tokens of each sequence. Its state is the last inputs: [heads,
// width - 1, columns] in the dtype of the inputs, the oldest first; head and column make up the channel.

#include "scan.h"

enum { MAX_WIDTH = 16 };

// As in states.py. Strides are in elements between tokens.
typedef struct {
    int64_t x_stride, out_stride;
    int64_t heads, columns, channels, width;  // the weights have all channels of the model's convolution
    int64_t gated;                            // whether silu follows
    Strides strides;
} Shape;

// The taps are added from the oldest to the newest. `width` is a constant where registers hold them.
#define DEFINE_CONV(T, NAME)                                                                                           \
    INLINE void conv_columns_##NAME(const Arg *a, const Shape *s, Work work, int vector, const int64_t width) {        \
        const int64_t first = work.first + vector * COLUMNS, columns = width_of(work.width, vector);                   \
        const int64_t channel = work.head * s->columns + first;                                                        \
        const int64_t place = work.head * s->strides.head + first * (int64_t)sizeof(T);                                \
        Columns taps[MAX_WIDTH], past[MAX_WIDTH], bias = {0};                                                          \
        for (int64_t k = 0; k < width; k++)                                                                            \
            taps[k] = columns_##NAME((const T *)a[1].p + k * s->channels + channel, columns);                          \
        if (a[2].p) bias = columns_##NAME((const T *)a[2].p + channel, columns);                                       \
        const T *source = (const T *)((const char *)a[4].p + work.sequence.source * s->strides.slot + place);          \
        for (int64_t k = 0; k < width - 1; k++)                                                                        \
            past[k] = work.sequence.source < 0 ? (Columns){0} : columns_##NAME(source + k * s->columns, columns);      \
        for (int64_t t = 0; t < work.sequence.tokens; t++) {                                                           \
            const int64_t token = work.sequence.row + t;                                                               \
            past[width - 1] = columns_##NAME((const T *)a[0].p + token * s->x_stride + channel, columns);              \
            Columns y = bias;                                                                                          \
            for (int64_t k = 0; k < width; k++) y += taps[k] * past[k];                                                \
            if (s->gated) y = silu_columns(y);                                                                         \
            put_##NAME((T *)a[3].p + token * s->out_stride + channel, y, columns);                                     \
            for (int64_t k = 0; k < width - 1; k++) past[k] = past[k + 1];                                             \
            for (; is_wanted(&work, t + 1); next_target(&work)) {                                                      \
                T *to = (T *)((char *)a[4].p + work.target->slot * s->strides.slot + place);                           \
                for (int64_t k = 0; k < width - 1; k++) put_##NAME(to + k * s->columns, past[k], columns);             \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* x [tokens, heads * columns], weight [width, channels], bias [channels] or NULL, out as x, states, sequences,    \
       shape; x, weight, bias and out begin at the first channel */                                                    \
    int64_t conv_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                    \
        (void)rows;                                                                                                    \
        const Steps steps = steps_at(a[5].p);                                                                          \
        const Shape *s = a[6].p;                                                                                       \
        if (item < 0) return items_of(&steps, s->heads, s->columns);                                                   \
        const Work work = work_of(&steps, s->columns, item);                                                           \
        for (int v = 0; v < VECTORS; v++)                                                                              \
            if (s->width == 4)                                                                                         \
                conv_columns_##NAME(a, s, work, v, 4);                                                                 \
            else if (s->width == 3)                                                                                    \
                conv_columns_##NAME(a, s, work, v, 3);                                                                 \
            else                                                                                                       \
                conv_columns_##NAME(a, s, work, v, s->width);                                                          \
        return 0;                                                                                                      \
    }

DEFINE_CONV(float, f32)
DEFINE_CONV(uint16_t, bf16)
