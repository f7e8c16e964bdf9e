// y = x W^T for the few rows of a decode step and for prompt chunks alike, on the bfloat16 dot product of AVX-512.
//
// A small product is bound by how fast the weights come from memory, so these are packed in the very order in which
// they are read: panels of 32 outputs, and in a panel, for each pair of inputs, the 32 pairs of weights side by side.
// A block of up to 12 rows keeps its sums in registers while it reads a panel once.

#include "linear.h"

enum { ROWS = 12 };  // 24 registers of sums, 2 of weights, and the broadcast input

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)  // with AMX, oneDNN's own product is faster

int has_linear(int64_t inputs) { return inputs % 2 == 0; }

// weight [outputs, inputs] to packed [ceil(outputs / 32), inputs / 2, 32] pairs; outputs past the last are zero.
int64_t pack_linear(const Arg *a, int64_t outputs, int64_t panel) {
    const uint16_t *weight = a[0].p;
    uint32_t *packed = a[1].p;
    const int64_t inputs = a[2].n, pairs = inputs / 2;
    if (panel < 0) return ceil_div(outputs, PANEL);
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t output = panel * PANEL + i;
            uint32_t both = 0;
            if (output < outputs) memcpy(&both, weight + output * inputs + 2 * pair, sizeof both);
            packed[(panel * pairs + pair) * PANEL + i] = both;
        }
    return 0;
}

// sums [rows, 32] of `rows` rows of x with one panel. `ahead` is fetched meanwhile, line by line: what is read next.
static inline __attribute__((always_inline)) void multiply(const uint16_t *x, int64_t x_stride, const uint32_t *panel,
                                                           const uint32_t *ahead, float *sums, int64_t pairs,
                                                           const int rows) {
    __m512 sum[ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        const __m512bh low = (__m512bh)_mm512_load_si512(panel + i * PANEL);
        const __m512bh high = (__m512bh)_mm512_load_si512(panel + i * PANEL + 16);
        _mm_prefetch((const char *)(ahead + i * PANEL), _MM_HINT_T1);
        _mm_prefetch((const char *)(ahead + i * PANEL + 16), _MM_HINT_T1);
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, x + r * x_stride + 2 * i, sizeof both);
            const __m512bh one = (__m512bh)_mm512_set1_epi32(both);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], one, low);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], one, high);
        }
    }
    for (int r = 0; r < rows; r++) {
        _mm512_store_ps(sums + r * PANEL, sum[r][0]);
        _mm512_store_ps(sums + r * PANEL + 16, sum[r][1]);
    }
}

#define CASE(R)                                                                                                        \
    case R:                                                                                                            \
        multiply(x, x_stride, panel, ahead, sums, pairs, R);                                                           \
        break;

static void multiply_rows(const uint16_t *x, int64_t x_stride, const uint32_t *panel, const uint32_t *ahead,
                          float *sums, int64_t pairs, int64_t rows) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

// x [rows, inputs], rows x_stride elements apart; packed as above; y [rows, outputs]. An item is a panel.
//
// Bias, residual and gate as in linear.h.
int64_t linear_bf16(const Arg *a, int64_t rows, int64_t item) {
    const uint16_t *x = a[0].p;
    const uint32_t *packed = a[2].p;
    const Epilogue end = {.bias = a[3].p, .residual = a[4].p, .y = a[5].p, .outputs = a[6].n, .gated = a[8].n};
    const int64_t x_stride = a[1].n, inputs = a[7].n;
    if (item < 0) return ceil_div(end.outputs, PANEL);
    const int64_t pairs = inputs / 2, blocks = ceil_div(rows, ROWS), first = item * PANEL;
    const uint32_t *panel = packed + item * pairs * PANEL;
    for (int64_t block = 0, row = 0; block < blocks; block++) {
        const int64_t height = (rows - row + blocks - block - 1) / (blocks - block);
        // While a panel comes from memory, the line 4 KiB on; while it is read again, a share of the next panel.
        const uint32_t *ahead = block ? panel + pairs * PANEL + (block - 1) * pairs * PANEL / blocks : panel + 1024;
        _Alignas(64) float sums[ROWS][PANEL];
        multiply_rows(x + row * x_stride, x_stride, panel, ahead, sums[0], pairs, height);
        finish_rows(&end, sums[0], row, height, first);
        row += height;
    }
    return 0;
}

#else
int has_linear(int64_t inputs) { return (void)inputs, 0; }
#endif
