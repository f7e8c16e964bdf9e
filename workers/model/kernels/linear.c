// y = x W^T for the few rows of a decode step and for prompt chunks alike, on the bfloat16 dot product of AVX-512.
//
// A small product is bound by how fast the weights come from memory, so these are packed in the very order in which
// they are read: panels of 32 outputs, and in a panel, for each pair of inputs, the 32 pairs of weights side by side.
// A block of up to 12 rows keeps its sums in registers while it reads a panel once.

#include "common.h"

enum { PANEL = 32, ROWS = 12 };  // 24 registers of sums, 2 of weights, and the broadcast input

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

static inline void add(float *sums, const uint16_t *terms, __mmask32 some) {
    const __m512i both = _mm512_maskz_loadu_epi16(some, terms);
    for (int h = 0; h < 2; h++) {
        const __m256i half = h ? _mm512_extracti64x4_epi64(both, 1) : _mm512_castsi512_si256(both);
        const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        _mm512_store_ps(sums + 16 * h, _mm512_add_ps(_mm512_load_ps(sums + 16 * h), wide));
    }
}

static inline void gate(const float *sums, uint16_t *y, int64_t by) {
    if (by == SILU)
        for (int i = 0; i < PANEL / 2; i++) y[i] = store_bf16(silu(sums[i]) * sums[i + PANEL / 2]);
    else
        for (int i = 0; i < PANEL / 2; i++) y[i] = store_bf16(gelu(sums[i]) * sums[i + PANEL / 2]);
}

// x [rows, inputs], rows x_stride elements apart; packed as above; y [rows, outputs]. An item is a panel.
//
// `bias` [outputs] and `residual` [rows, outputs] are added where they are not NULL. If `gated` is not 0, the weights of
// gates and of what they gate alternate in runs of 16, and y [rows, outputs / 2] = act(gate) * gated, SILU or GELU (arXiv
// 2002.05202).
int64_t linear_bf16(const Arg *a, int64_t rows, int64_t item) {
    const uint16_t *x = a[0].p, *bias = a[3].p, *residual = a[4].p;
    const uint32_t *packed = a[2].p;
    uint16_t *y = a[5].p;
    const int64_t x_stride = a[1].n, outputs = a[6].n, inputs = a[7].n, gated = a[8].n;
    if (item < 0) return ceil_div(outputs, PANEL);
    const int64_t pairs = inputs / 2, blocks = ceil_div(rows, ROWS), first = item * PANEL;
    const uint32_t *panel = packed + item * pairs * PANEL;
    const __mmask32 some = outputs - first < PANEL ? (1u << (outputs - first)) - 1 : ~0u;  // outputs of this panel
    for (int64_t block = 0, row = 0; block < blocks; block++) {
        const int64_t height = (rows - row + blocks - block - 1) / (blocks - block);
        // While a panel comes from memory, the line 4 KiB on; while it is read again, a share of the next panel.
        const uint32_t *ahead = block ? panel + pairs * PANEL + (block - 1) * pairs * PANEL / blocks : panel + 1024;
        _Alignas(64) float sums[ROWS][PANEL];
        multiply_rows(x + row * x_stride, x_stride, panel, ahead, sums[0], pairs, height);
        for (int64_t r = 0; r < height; r++) {
            if (bias) add(sums[r], bias + first, some);
            if (gated) {
                gate(sums[r], y + (row + r) * (outputs / 2) + first / 2, gated);
                continue;
            }
            const int64_t at = (row + r) * outputs + first;
            if (residual) add(sums[r], residual + at, some);
            const __m512 low = _mm512_load_ps(sums[r]), high = _mm512_load_ps(sums[r] + 16);
            _mm512_mask_storeu_epi16(y + at, some, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
        row += height;
    }
    return 0;
}

#else
int has_linear(int64_t inputs) { return (void)inputs, 0; }
#endif
