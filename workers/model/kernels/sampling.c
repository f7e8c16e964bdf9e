// Samples the next token without a filter: the fused form of gumbel.py.

#include "common.h"

enum { BLOCK = 1024 };

// -log(1 - u) for u in [2^-32, 1 - 2^-24]: the series where 1 - u would round.
static inline float exponential(float u) {
    const float series = u * (1 + u * (1.0f / 2 + u * (1.0f / 3 + u * (1.0f / 4 + u * (1.0f / 5)))));
    return u < 1.0f / 64 ? series : -logf(1 - u);
}

static inline float uniform(uint32_t id, uint32_t first, uint32_t second) {
    uint32_t x = id * 0x9E3779B1u + first;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x += second;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    const float u = ((float)(int32_t)(x & 0x7FFFFFFF) + 0.5f) * 0x1p-31f;
    return u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f;
}

static inline uint16_t bits_bf16(uint16_t x) { return x; }
static inline uint32_t bits_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// logits [rows, vocab], rows `stride` elements apart; temperatures [rows], 0 is greedy; keys [rows, 2]; tokens [rows].
// The first of several equal maxima wins; -1 if the largest is not finite or a logit is NaN. The bits say so, the
// largest of either sign's: -ffast-math takes it that there is no such number.
#define DEFINE_SAMPLE(T, NAME, BITS)                                                                                   \
    int64_t sample_##NAME(const Arg *a, int64_t rows, int64_t row) {                                                   \
        if (row < 0) return rows;                                                                                      \
        const T *from = (const T *)a[0].p + row * a[1].n;                                                              \
        const float temperature = ((const float *)a[2].p)[row];                                                        \
        const uint32_t *key = (const uint32_t *)a[3].p + 2 * row;                                                      \
        const int64_t vocab = a[5].n;                                                                                  \
        float best = -3e38f;                                                                                           \
        int64_t token = -1;                                                                                            \
        const BITS sign = (BITS)1 << (8 * sizeof(BITS) - 1);                                                           \
        const BITS infinity = (BITS)(0xff800000u >> (32 - 8 * sizeof(BITS)));  /* the negative one */                  \
        BITS negative = 0, positive = 0;                                                                               \
        for (int64_t begin = 0; begin < vocab; begin += BLOCK) {                                                       \
            const int64_t count = least(BLOCK, vocab - begin);                                                         \
            float score[BLOCK], top = -3e38f;                                                                          \
            if (temperature > 0)                                                                                       \
                for (int64_t i = 0; i < count; i++)                                                                    \
                    score[i] = load_##NAME(from[begin + i]) / temperature -                                            \
                               logf(exponential(uniform((uint32_t)(begin + i), key[0], key[1])));                      \
            else                                                                                                       \
                for (int64_t i = 0; i < count; i++) score[i] = load_##NAME(from[begin + i]);                           \
            for (int64_t i = 0; i < count; i++) top = score[i] > top ? score[i] : top;                                 \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                const BITS bits = bits_##NAME(from[begin + i]), flipped = bits ^ sign;                                 \
                negative = bits > negative ? bits : negative;                                                          \
                positive = flipped > positive ? flipped : positive;                                                    \
            }                                                                                                          \
            if (top <= best) continue;                                                                                 \
            best = top;                                                                                                \
            for (int64_t i = count - 1; i >= 0; i--)                                                                   \
                if (score[i] == top) token = begin + i;                                                                \
        }                                                                                                              \
        ((int64_t *)a[4].p)[row] = negative > infinity || positive >= infinity ? -1 : token;                           \
        return 0;                                                                                                      \
    }

DEFINE_SAMPLE(float, f32, uint32_t)
DEFINE_SAMPLE(uint16_t, bf16, uint16_t)
