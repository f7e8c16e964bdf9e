// Scores of experts in float32: out = sigmoid(x W^T). An item is some outputs of a row.
//
// x [rows, inputs], rows `stride` elements apart; weight float32 [outputs, inputs]; out float32 [rows, outputs]

#include "../common.h"

enum { OUTPUTS = 16 };  // of an item

#define DEFINE_SIGMOID_SCORES(T, NAME)                                                                                 \
    int64_t sigmoid_scores_##NAME(const Arg *a, int64_t rows, int64_t item) {                                          \
        const T *x = a[0].p;                                                                                           \
        const float *weight = a[2].p;                                                                                  \
        float *out = a[3].p;                                                                                           \
        const int64_t stride = a[1].n, outputs = a[4].n, inputs = a[5].n, parts = ceil_div(outputs, OUTPUTS);          \
        if (item < 0) return rows * parts;                                                                             \
        const int64_t row = item / parts, first = item % parts * OUTPUTS;                                              \
        for (int64_t o = first; o < least(outputs, first + OUTPUTS); o++) {                                            \
            float sum = 0;                                                                                             \
            for (int64_t i = 0; i < inputs; i++) sum += load_##NAME(x[row * stride + i]) * weight[o * inputs + i];     \
            out[row * outputs + o] = sigmoid_mul(sum, 1);                                                              \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_SIGMOID_SCORES(float, f32)
DEFINE_SIGMOID_SCORES(uint16_t, bf16)
