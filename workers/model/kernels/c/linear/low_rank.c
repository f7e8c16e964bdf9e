// Low-rank terms of a layer: y = residual + (x A^T) B^T, with a pair A, B for each row (arXiv 2106.09685).
// The pairs of a step are in a table at a fixed address, so that a recorded call serves any mixture of
// pairs. x A^T is rounded to bfloat16. A row's result does not depend on the other rows: each output of
// a row is summed in one order.
//
// Table: the number of segments, then for each segment its first row, its number of rows, and the address
// of the pairs of all layers, or 0 for rows without. A segment has few rows, so threads share a step's
// rows.

#include "linear.h"

enum { PANELS = 8 };  // of an item of the second product; a panel of few inputs is a small item

// A [rank, inputs] and B [outputs, rank] as `pack_linear` packs them; rank 0: no pair for the layer.
typedef struct {
    const uint16_t *down, *up;
    int64_t rank;
} Pair;

typedef struct {
    int64_t first, rows;
    const Pair *pairs;
} Segment;

static inline int64_t num_segments(const Arg *address) { return **(const int64_t **)address->p; }

static inline Segment segment_of(const Arg *address, int64_t i) {
    return ((const Segment *)(*(const int64_t **)address->p + 1))[i];
}

#ifdef __AVX512BF16__

struct Group {
    const uint16_t *x, *panel;
    int64_t x_stride, pairs;
};

static inline __attribute__((always_inline)) void multiply(const Group *g, float *results, const int rows,
                                                           const int bits) {
    const uint16_t *const x = g->x, *const panel = g->panel;
    const int64_t x_stride = g->x_stride, pairs = g->pairs;
    (void)bits;
    __m512 sum[ROWS][2];
    EACH_ROW sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++) {
        const __m512bh low = (__m512bh)_mm512_load_si512(panel + 2 * PANEL * i);
        const __m512bh high = (__m512bh)_mm512_load_si512(panel + 2 * PANEL * i + PANEL);
        EACH_ROW {
            int32_t both;
            memcpy(&both, x + r * x_stride + 2 * i, sizeof both);
            const __m512bh one = (__m512bh)_mm512_set1_epi32(both);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], one, low);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], one, high);
        }
    }
    EACH_ROW for (int h = 0; h < 2; h++) _mm512_store_ps(results + r * PANEL + 16 * h, sum[r][h]);
}

MULTIPLY_ROWS(16)

// Writes the products of up to ROWS rows of x, x_stride elements apart, with a panel to the results
// [rows, 32].
static void multiply_panel(const uint16_t *x, int64_t x_stride, int64_t rows, const uint16_t *panel, int64_t inputs,
                           float *results) {
    const Group group = {.x = x, .panel = panel, .x_stride = x_stride, .pairs = inputs / 2};
    multiply_rows_16[rows - 1](&group, results);
}

#else

static void multiply_panel(const uint16_t *x, int64_t x_stride, int64_t rows, const uint16_t *panel, int64_t inputs,
                           float *results) {
    for (int64_t r = 0; r < rows; r++) {
        float sums[PANEL] = {0};
        for (int64_t i = 0; i < inputs / 2; i++) {
            const float first = load_bf16(x[r * x_stride + 2 * i]), second = load_bf16(x[r * x_stride + 2 * i + 1]);
            const uint16_t *pairs = panel + 2 * PANEL * i;
            for (int p = 0; p < PANEL; p++)
                sums[p] += first * load_bf16(pairs[2 * p]) + second * load_bf16(pairs[2 * p + 1]);
        }
        memcpy(results + r * PANEL, sums, sizeof sums);
    }
}

#endif

// Computes one panel of outputs of a segment's rows.
static void multiply_segment(const Segment *segment, const uint16_t *x, int64_t x_stride, const uint16_t *panel,
                             int64_t inputs, const Epilogue *end, int64_t first) {
    for (int64_t row = segment->first, last = row + segment->rows; row < last;) {
        _Alignas(64) float results[ROWS * PANEL];
        const int64_t height = least(ROWS, last - row);
        multiply_panel(x + row * x_stride, x_stride, height, panel, inputs, results);
        finish_rows(end, results, row, height, first);
        row += height;
    }
}

// t = x A^T: x [rows, inputs], rows x_stride elements apart; t [rows, width], of which the pair's rank is
// written, in panels of 32. An item is a segment and a panel.
int64_t low_rank_down_bf16(const Arg *a, int64_t rows, int64_t item) {
    const int64_t x_stride = a[1].n, width = a[3].n, layer = a[5].n, inputs = a[6].n, panels = width / PANEL;
    if (item < 0) return rows ? num_segments(a + 4) * panels : 0;
    const Segment segment = segment_of(a + 4, item / panels);
    const int64_t first = item % panels * PANEL;
    if (!segment.pairs || segment.pairs[layer].rank <= first) return 0;
    const Epilogue end = {.y = a[2].p, .outputs = width};
    multiply_segment(&segment, a[0].p, x_stride, segment.pairs[layer].down + first * inputs, inputs, &end, first);
    return 0;
}

// y = residual + t B^T: t [rows, width]; residual and y [rows, outputs]. Rows without a pair get the
// residual. Without residuals these are -0, which changes no number that is added to it. An item is a
// segment and some panels.
int64_t low_rank_up_bf16(const Arg *a, int64_t rows, int64_t item) {
    const uint16_t *t = a[0].p, *residual = a[2].p;
    uint16_t *y = a[3].p;
    const int64_t width = a[1].n, layer = a[5].n, outputs = a[6].n, parts = ceil_div(outputs, PANELS * PANEL);
    if (item < 0) return rows ? num_segments(a + 4) * parts : 0;
    const Segment segment = segment_of(a + 4, item / parts);
    const int64_t begin = item % parts * PANELS * PANEL, last = least(outputs, begin + PANELS * PANEL);
    if (!segment.pairs || !segment.pairs[layer].rank) {
        for (int64_t row = segment.first; row < segment.first + segment.rows; row++) {
            const int64_t at = row * outputs;
            if (residual) memcpy(y + at + begin, residual + at + begin, (last - begin) * sizeof *y);
            else
                for (int64_t i = begin; i < last; i++) y[at + i] = 0x8000;
        }
        return 0;
    }
    const Pair pair = segment.pairs[layer];
    const Epilogue end = {.residual = residual, .y = y, .outputs = outputs};
    for (int64_t first = begin; first < last; first += PANEL)
        multiply_segment(&segment, t, width, pair.up + first * pair.rank, pair.rank, &end, first);
    return 0;
}
