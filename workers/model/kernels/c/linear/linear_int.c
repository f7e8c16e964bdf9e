// y = x W^T with weights of 8 or 4 bits and a scale for each output and group of inputs (the groups of
// compressed-tensors), on the dot product of bytes of AVX-512 VNNI. x is rounded to 8 bits before, group
// by group (ZeroQuant, arXiv 2206.01861), so that products and sums within a group are exact integers.
// Or x is rounded to 16 bits, as two numbers of 8 bits (`parts` is 2): the second is the remainder of
// the first, in units of 1/254 of its step, and has its own products.
//
// The dot product requires one unsigned operand: the weights. Their zero is in the middle of the range
// or, for each output and group, at its own place, in units of 1/256 of the range. The group's sum of x,
// times that zero, is subtracted. Weights are packed in panels of 32 outputs as in linear.c, in quads of
// inputs. 4-bit weights of two quads share bytes; those of the first quad are in the low halves.

#include "linear.h"

enum { QUAD = 4, FINER = 254 };  // inputs of a dot product; steps of a second part
enum { INFINITE = 0x7f80, TINY = 0x0400 };  // bfloat16 as bits: below 2^-119, 127 / x might be infinite

// Packs weight [outputs, inputs] of numbers 0..255 or 0..15 and scales [outputs, groups] to
// [ceil(outputs / 32), inputs / 4, 32] quads (half as many for 4 bits) and packed_scales [.., groups,
// 32]. An item is a panel. Outputs past the last have scale 0.
int64_t pack_linear_int(const Arg *a, int64_t outputs, int64_t panel) {
    const uint8_t *weight = a[0].p;
    const uint16_t *scales = a[1].p;
    const int64_t inputs = a[4].n, groups = a[5].n, bits = a[6].n, per_byte = 8 / bits, quads = inputs / QUAD;
    if (panel < 0) return ceil_div(outputs, PANEL);
    uint8_t *packed = (uint8_t *)a[2].p + panel * quads * PANEL * QUAD / per_byte;
    uint16_t *packed_scales = (uint16_t *)a[3].p + panel * groups * PANEL;
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t output = panel * PANEL + i;
        for (int64_t group = 0; group < groups; group++)
            packed_scales[group * PANEL + i] = output < outputs ? scales[output * groups + group] : 0;
        for (int64_t at = 0; at < inputs / per_byte; at++) {
            const int64_t quad = at / QUAD, lane = at % QUAD;
            const uint8_t *from = weight + output * inputs + quad * per_byte * QUAD + lane;
            const uint8_t low = output < outputs ? from[0] : 0;
            const uint8_t high = output < outputs && per_byte == 2 ? from[QUAD] : 0;
            packed[(quad * PANEL + i) * QUAD + lane] = low | high << 4;
        }
    }
    return 0;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

int form_of_linear_int(void) { return DOT_PRODUCT; }

// Rounds x [rows, inputs], rows x_stride elements apart, to q [rows, parts, inputs] of -127..127. Writes
// for each row, part and group the scale and the sum of q: terms [rows, parts, groups, 2], float and
// int32. If an x is NaN or infinite, the scale is NaN, and so is the product. Bits are compared and
// stored, because -ffast-math assumes that no number is NaN. An item is a row.
int64_t quantize_bf16(const Arg *a, int64_t rows, int64_t row) {
    if (row < 0) return rows;
    const int64_t inputs = a[4].n, group = a[5].n, parts = a[6].n, groups = inputs / group;
    const uint16_t *x = (const uint16_t *)a[0].p + row * a[1].n;
    int8_t *q = (int8_t *)a[2].p + row * parts * inputs;
    float *terms = (float *)a[3].p + row * parts * groups * 2;
    for (int64_t g = 0; g < groups; g++, x += group, q += group) {
        uint16_t largest = 0;
        for (int64_t i = 0; i < group; i++) {
            const uint16_t size = x[i] & 0x7fff;
            largest = size > largest ? size : largest;
        }
        const int is_finite = largest < INFINITE;
        const float inverse = is_finite && largest >= TINY ? 127 / load_bf16(largest) : 0;
        int32_t sums[2] = {0, 0};
        for (int64_t i = 0; i < group; i++) {
            const float steps = is_finite ? load_bf16(x[i]) * inverse : 0, rounded = rintf(steps);
            q[i] = (int8_t)rounded;
            sums[0] += (int32_t)rounded;
            if (parts == 1) continue;
            const float rest = rintf((steps - rounded) * FINER);
            q[inputs + i] = (int8_t)rest;
            sums[1] += (int32_t)rest;
        }
        const uint32_t nan = 0x7fc00000;
        for (int64_t part = 0; part < parts; part++) {
            float *const term = terms + (part * groups + g) * 2;
            const float scale = load_bf16(largest) / (part ? 127 * FINER : 127);
            memcpy(term, is_finite ? (const void *)&scale : &nan, sizeof nan);
            memcpy(term + 1, sums + part, sizeof sums[part]);
        }
    }
    return 0;
}

static inline __m512 load_scales(const uint16_t *scales) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)scales)), 16));
}

// Replaces _mm512_dpbusd_epi32, whose operands GCC 12 copies in each iteration, and spills.
#define ADD_BYTES(SUM, UNSIGNED, SIGNED) __asm__("vpdpbusd %2, %1, %0" : "+v"(SUM) : "v"(UNSIGNED), "v"(SIGNED))

// Adds to the integers sum [rows, 2 of 16] the product of a quad of q with 32 outputs.
#define ADD_QUAD(LOW, HIGH, QUAD_AT)                                                                                   \
    EACH_ROW {                                                                                                         \
        int32_t four;                                                                                                  \
        memcpy(&four, q + r * q_stride + (QUAD_AT) * QUAD, sizeof four);                                               \
        const __m512i one = _mm512_set1_epi32(four);                                                                   \
        ADD_BYTES(sum[r][0], LOW, one);                                                                                \
        ADD_BYTES(sum[r][1], HIGH, one);                                                                               \
    }

static inline __m512i load_zeros(const uint8_t *zeros) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)zeros));
}

// A group of a panel and of the rows of q: its numbers, scales [32], and zeros [32], or NULL if all zeros
// are 128. `terms` are from quantize_bf16. `ahead` is prefetched meanwhile, line by line.
struct Group {
    const int8_t *q;
    const float *terms;
    const uint8_t *panel, *ahead, *zeros;
    const uint16_t *scales;
    int64_t q_stride, terms_stride, steps;
};

// Adds the products of `rows` rows with a group to the results [rows, 32]: exact sums of bytes, scaled.
static inline __attribute__((always_inline)) void multiply(const Group *g, float *results, const int rows,
                                                           const int bits) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    const int8_t *const q = g->q;
    const int64_t q_stride = g->q_stride;
    __m512i sum[ROWS][2];
    EACH_ROW sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (int64_t i = 0; i < g->steps; i++) {
        const __m512i low = _mm512_load_si512(g->panel + i * 128), high = _mm512_load_si512(g->panel + i * 128 + 64);
        _mm_prefetch((const char *)(g->ahead + i * 128), _MM_HINT_T1);
        _mm_prefetch((const char *)(g->ahead + i * 128 + 64), _MM_HINT_T1);
        if (bits == 8) {
            ADD_QUAD(low, high, i)
        } else {
            const __m512i low_0 = _mm512_and_si512(low, mask), high_0 = _mm512_and_si512(high, mask);
            const __m512i low_1 = _mm512_and_si512(_mm512_srli_epi16(low, 4), mask);
            const __m512i high_1 = _mm512_and_si512(_mm512_srli_epi16(high, 4), mask);
            ADD_QUAD(low_0, high_0, 2 * i)
            ADD_QUAD(low_1, high_1, 2 * i + 1)
        }
    }
    const __m512 scales[2] = {load_scales(g->scales), load_scales(g->scales + 16)};
    const __m512i middle = _mm512_set1_epi32(128);
    const __m512i zeros[2] = {g->zeros ? load_zeros(g->zeros) : middle, g->zeros ? load_zeros(g->zeros + 16) : middle};
    EACH_ROW {
        int32_t row_sum;
        memcpy(&row_sum, g->terms + r * g->terms_stride + 1, sizeof row_sum);
        const __m512 scale = _mm512_set1_ps(g->terms[r * g->terms_stride] / (1 << (8 - bits)));
        for (int h = 0; h < 2; h++) {
            float *const result = results + r * PANEL + 16 * h;
            const __m512i shift = _mm512_mullo_epi32(zeros[h], _mm512_set1_epi32(row_sum));
            const __m512i exact = _mm512_sub_epi32(_mm512_slli_epi32(sum[r][h], 8 - bits), shift);
            const __m512 scaled = _mm512_mul_ps(scale, scales[h]);
            _mm512_store_ps(result, _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scaled, _mm512_load_ps(result)));
        }
    }
}

MULTIPLY_ROWS(8)
MULTIPLY_ROWS(4)

// q and terms are from quantize_bf16; packed and packed_scales are as above; zeros are [.., groups, 32]
// or NULL. The other arguments and the items are as in linear_bf16.
int64_t linear_int_bf16(const Arg *a, int64_t rows, int64_t item) {
    const int8_t *q = a[0].p;
    const float *terms = a[1].p;
    const int64_t outputs = a[7].n, inputs = a[8].n, group = a[9].n, bits = a[10].n, parts = a[13].n;
    const int64_t panels = ceil_div(outputs, PANEL), groups = inputs / group;
    if (item < 0) return count_parts(panels, a[14].p);
    const Part part = part_of_item(item, rows, panels, a[14].p);
    const Epilogue whole = {.bias = a[4].p, .residual = a[5].p, .y = a[6].p, .outputs = outputs, .gated = a[11].n};
    const Epilogue end = end_of_part(whole, &part);
    const int64_t size = inputs * bits / 8 * PANEL, group_bytes = group * bits / 8 * PANEL;
    const int64_t blocks = ceil_div(part.rows, ROWS), last = part.first + part.rows, steps = group_bytes / 128;
    const uint8_t *panel = (const uint8_t *)a[2].p + part.stored * size;
    const uint16_t *scales = (const uint16_t *)a[3].p + part.stored * groups * PANEL;
    const uint8_t *zeros = a[12].p ? (const uint8_t *)a[12].p + part.stored * groups * PANEL : NULL;
    for (int64_t block = 0, row = part.first; block < blocks; block++) {
        const int64_t height = (last - row + blocks - block - 1) / (blocks - block);
        // As in linear_bf16.
        const uint8_t *ahead = block ? panel + size + (block - 1) * size / blocks : panel + 4096;
        Multiply *const multiply_group = (bits == 8 ? multiply_rows_8 : multiply_rows_4)[height - 1];
        _Alignas(64) float results[ROWS * PANEL] = {0};
        Group each = {.q = q + row * parts * inputs,
                      .q_stride = parts * inputs,
                      .terms = terms + row * parts * groups * 2,
                      .terms_stride = parts * groups * 2,
                      .panel = panel,
                      .ahead = ahead,
                      .scales = scales,
                      .zeros = zeros,
                      .steps = steps};
        for (int64_t g = 0; g < groups; g++) {
            multiply_group(&each, results);
            if (parts == 2) {  // while the group's weights are in the cache
                Group second = each;
                second.q += inputs, second.terms += groups * 2;
                multiply_group(&second, results);
            }
            each.q += group, each.terms += 2, each.panel += group_bytes, each.ahead += group_bytes;
            each.scales += PANEL, each.zeros += zeros ? PANEL : 0;
        }
        finish_rows(&end, results, row, height, part.panel * PANEL);
        row += height;
    }
    return 0;
}

#else
int form_of_linear_int(void) { return WIDENED; }
#endif
