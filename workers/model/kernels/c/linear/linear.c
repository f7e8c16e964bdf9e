// y = x W^T on the bfloat16 dot product of AVX-512, for the few rows of a decode step and for prompt
// chunks. Weights are in bfloat16, or in FP8 with a scale for each output and group of inputs. FP8
// weights are converted to bfloat16, which represents them exactly, in registers. The scale multiplies
// a group's sums; x is not rounded.
//
// A small product is limited by the memory bandwidth for the weights. So weights are packed in the
// order in which they are read: panels of 32 outputs, and in a panel, for each pair of inputs, the 32
// pairs of weights side by side.
// A block of up to 11 rows keeps its sums in registers while it reads a panel once.

#include "fp8.h"
#include "linear.h"

// The place of an output's pair in its panel. In FP8, pairs are in order after they are widened.
#ifdef HAS_FP8
static inline int64_t place(int64_t i, int64_t bits) { return bits == 16 ? i : i % 16 / 4 * 8 + i / 16 * 4 + i % 4; }
#else
static inline int64_t place(int64_t i, int64_t bits) { return (void)bits, i; }
#endif

// Packs weight [outputs, inputs] of 16 or 8 bits to [ceil(outputs / 32), inputs / 2, 32] pairs. Outputs
// past the last are zero. An item is a panel.
int64_t pack_linear(const Arg *a, int64_t outputs, int64_t panel) {
    const uint8_t *weight = a[0].p;
    const int64_t inputs = a[2].n, bits = a[3].n, size = bits / 4, pairs = inputs / 2;  // bytes of a pair
    if (panel < 0) return ceil_div(outputs, PANEL);
    uint8_t *packed = (uint8_t *)a[1].p + panel * pairs * PANEL * size;
    for (int64_t pair = 0; pair < pairs; pair++, packed += PANEL * size)
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = panel * PANEL + i;
            uint32_t both = 0;
            if (output < outputs) memcpy(&both, weight + (output * pairs + pair) * size, size);
            memcpy(packed + place(i, bits) * size, &both, size);
        }
    return 0;
}

#ifdef __AMX_BF16__  // oneDNN's product is faster with AMX
int form_of_linear(void) { return NO_LINEAR; }
#elif defined(__AVX512BF16__)
int form_of_linear(void) { return DOT_PRODUCT; }
#else
int form_of_linear(void) { return WIDENED; }
#endif

#ifdef HAS_FP8
int form_of_linear_fp8(void) { return DOT_PRODUCT; }
#else
int form_of_linear_fp8(void) { return WIDENED; }
#endif

#ifdef __AVX512BF16__
#ifndef HAS_FP8
static inline void e4m3_widen(__m512i numbers, __m512i *low, __m512i *high) { *low = *high = numbers; }  // not called
#endif

// A group of a panel and of the rows of x. In FP8 it has scales [32]; in bfloat16 it is the whole panel.
// `ahead`, the data that is read next, is prefetched meanwhile, line by line.
struct Group {
    const uint16_t *x;
    const uint8_t *panel, *ahead;
    const float *scales;
    int64_t x_stride, pairs;
};

// Writes the products of `rows` rows with a group to the results [rows, 32], or in FP8 adds them.
static inline __attribute__((always_inline)) void multiply(const Group *g, float *results, const int rows,
                                                           const int bits) {
    const uint16_t *const x = g->x;
    const int64_t x_stride = g->x_stride, pairs = g->pairs, size = PANEL * bits / 4;
    const uint8_t *const panel = g->panel, *const ahead = g->ahead;
    __m512 sum[ROWS][2];
    EACH_ROW sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        __m512i low = _mm512_load_si512(panel + i * size), high;
        _mm_prefetch((const char *)(ahead + i * size), _MM_HINT_T1);
        if (bits == 16) {
            high = _mm512_load_si512(panel + i * size + 64);
            _mm_prefetch((const char *)(ahead + i * size + 64), _MM_HINT_T1);
        } else {
            e4m3_widen(low, &low, &high);
        }
        EACH_ROW {
            int32_t both;
            memcpy(&both, x + r * x_stride + 2 * i, sizeof both);
            const __m512bh one = (__m512bh)_mm512_set1_epi32(both);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], one, (__m512bh)low);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], one, (__m512bh)high);
        }
    }
    EACH_ROW for (int h = 0; h < 2; h++) {
        float *const result = results + r * PANEL + 16 * h;
        const __m512 scaled = bits == 16 ? sum[r][h] : _mm512_fmadd_ps(sum[r][h], _mm512_load_ps(g->scales + 16 * h),
                                                                        _mm512_load_ps(result));
        _mm512_store_ps(result, scaled);
    }
}

MULTIPLY_ROWS(16)
MULTIPLY_ROWS(8)

// x [rows, inputs], rows x_stride elements apart; weights packed as above; y [rows, outputs]. FP8
// weights have scales [.., groups, 32]; for bfloat16 the scales are NULL, and there is one group. Bias,
// residual, gate, heads and groups of rows are as in linear.h. An item is a panel, of a group if there are
// groups.
int64_t linear_bf16(const Arg *a, int64_t rows, int64_t item) {
    const int64_t x_stride = a[1].n, outputs = a[6].n, inputs = a[7].n, group = a[10].n;
    const int64_t panels = ceil_div(outputs, PANEL);
    if (item < 0) return count_parts(panels, a[13].p);
    const Part part = part_of_item(item, rows, panels, a[13].p);
    const Epilogue whole = {.bias = a[3].p, .residual = a[4].p, .y = a[5].p, .outputs = outputs, .gated = a[8].n};
    const Epilogue end = end_of_part(whole, &part);
    const uint16_t *x = (const uint16_t *)a[0].p + inputs_of_panel(part.panel, a[11].n, a[12].n);
    const float *scales = a[9].p ? (const float *)a[9].p + part.stored * (inputs / group) * PANEL : NULL;
    const int64_t pair_bytes = scales ? 2 * PANEL : 4 * PANEL, size = inputs / 2 * pair_bytes;
    const uint8_t *panel = (const uint8_t *)a[2].p + part.stored * size;
    const int64_t blocks = ceil_div(part.rows, ROWS), last = part.first + part.rows;
    for (int64_t block = 0, row = part.first; block < blocks; block++) {
        const int64_t height = (last - row + blocks - block - 1) / (blocks - block);
        // Prefetches 4 KiB ahead while a panel comes from memory, and a share of the next panel while
        // the panel is read again.
        const uint8_t *ahead = block ? panel + size + (block - 1) * size / blocks : panel + 4096;
        Multiply *const multiply_group = (scales ? multiply_rows_8 : multiply_rows_16)[height - 1];
        _Alignas(64) float results[ROWS * PANEL];
        if (scales) memset(results, 0, sizeof *results * height * PANEL);
        Group each = {.x = x + row * x_stride,
                      .panel = panel,
                      .ahead = ahead,
                      .scales = scales,
                      .x_stride = x_stride,
                      .pairs = group / 2};
        for (int64_t at = 0; at < inputs; at += group) {
            multiply_group(&each, results);
            each.x += group, each.panel += group / 2 * pair_bytes, each.ahead += group / 2 * pair_bytes;
            each.scales += scales ? PANEL : 0;
        }
        finish_rows(&end, results, row, height, part.panel * PANEL);
        row += height;
    }
    return 0;
}
#endif
