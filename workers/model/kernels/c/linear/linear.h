// The common code of products with differently packed weights: panels of 32 outputs, and the
// operations after a panel's sums.
#pragma once

#include "common.h"

// How a processor multiplies weights of a kind: without our kernels, by its dot product, or as float32.
enum { NO_LINEAR, DOT_PRODUCT, WIDENED };

// Registers of a block: 22 for sums, 2 for weights, 1 for the broadcast input. With a twelfth row, an
// address would be in memory.
enum { PANEL = 32, ROWS = 11 };

// Returns the place in a row of x of a panel's inputs. They are the same for all panels if head_outputs is
// 0. Else each head_outputs outputs, a multiple of PANEL, have inputs of their own, `head_stride`
// elements after the last head's.
static inline int64_t inputs_of_panel(int64_t panel, int64_t head_outputs, int64_t head_stride) {
    return head_outputs ? panel * PANEL / head_outputs * head_stride : 0;
}

// What an item computes: a panel of the outputs for `rows` rows from `first` on. `stored` is the place of
// its weights among the packed panels.
typedef struct {
    int64_t panel, stored, first, rows, expert;
} Part;

// The number of items of a product with `panels` panels of outputs, for all rows or for groups of rows.
static inline int64_t count_parts(int64_t panels, const int32_t *groups) {
    return groups ? *groups * panels : panels;
}

// Without groups, all rows are multiplied by the same weight. Otherwise each group of rows has an expert,
// whose panels follow the panels of the expert before it; see sort_choices in experts.c.
static inline Part part_of_item(int64_t item, int64_t rows, int64_t panels, const int32_t *groups) {
    if (!groups) return (Part){.panel = item, .stored = item, .rows = rows};
    const int64_t panel = item % panels, group = item / panels;
    const int64_t first = group ? groups[2 * group] : 0, expert = groups[1 + 2 * group];
    return (Part){.panel = panel,
                  .stored = expert * panels + panel,
                  .first = first,
                  .rows = groups[2 + 2 * group] - first,
                  .expert = expert};
}

// `bias` [outputs] and `residual` [rows, outputs] are added unless they are NULL; y [rows, outputs]. If
// `gated` is not 0, the weights of gate and up alternate in runs of 16, and y [rows, outputs / 2] =
// act(gate) * up, with SILU or GELU (arXiv 2002.05202).
typedef struct {
    const uint16_t *bias, *residual;
    uint16_t *y;
    int64_t outputs, gated;
} Epilogue;

// Returns the epilogue of a part; experts have a bias each, [experts, outputs].
static inline Epilogue end_of_part(Epilogue end, const Part *part) {
    end.bias += end.bias ? part->expert * end.outputs : 0;
    return end;
}

static inline void gate(const float *sums, uint16_t *y, int64_t by) {
    _Alignas(64) float gated[PANEL / 2];
    if (by == SILU)
        for (int i = 0; i < PANEL / 2; i++) gated[i] = silu(sums[i]) * sums[i + PANEL / 2];
    else
        for (int i = 0; i < PANEL / 2; i++) gated[i] = gelu(sums[i]) * sums[i + PANEL / 2];
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)y, (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(gated)));
#else
    for (int i = 0; i < PANEL / 2; i++) y[i] = store_bf16(gated[i]);
#endif
}

#ifdef __AVX512BF16__

// Unrolls the loop; otherwise the compiler keeps the sums in memory.
#define EACH_ROW _Pragma("GCC unroll 11") for (int r = 0; r < rows; r++)

typedef struct Group Group;  // operands of a product of some rows with a panel; each file has its own
typedef void Multiply(const Group *group, float *results);

// multiply_rows_BITS has one function per number of rows. If they were inlined into the loop over the
// groups, the compiler would spill the sums.
#define EACH_HEIGHT(F, BITS)                                                                                           \
    F(1, BITS) F(2, BITS) F(3, BITS) F(4, BITS) F(5, BITS) F(6, BITS) F(7, BITS) F(8, BITS) F(9, BITS) F(10, BITS)     \
    F(11, BITS)
#define MULTIPLY(R, BITS)                                                                                              \
    static __attribute__((noinline)) void multiply_##R##_##BITS(const Group *group, float *results) {                  \
        multiply(group, results, R, BITS);                                                                             \
    }
#define NAME(R, BITS) multiply_##R##_##BITS,
#define MULTIPLY_ROWS(BITS)                                                                                            \
    EACH_HEIGHT(MULTIPLY, BITS)                                                                                        \
    static Multiply *const multiply_rows_##BITS[ROWS] = {EACH_HEIGHT(NAME, BITS)};

static inline void add(float *sums, const uint16_t *terms, __mmask32 some) {
    const __m512i both = _mm512_maskz_loadu_epi16(some, terms);
    for (int h = 0; h < 2; h++) {
        const __m256i half = h ? _mm512_extracti64x4_epi64(both, 1) : _mm512_castsi512_si256(both);
        const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        _mm512_store_ps(sums + 16 * h, _mm512_add_ps(_mm512_load_ps(sums + 16 * h), wide));
    }
}

// Writes y for `rows` rows from `row` on and for the outputs from `first` on, from their sums [rows,
// 32].
static inline void finish_rows(const Epilogue *end, float *sums, int64_t row, int64_t rows, int64_t first) {
    const __mmask32 some = end->outputs - first < PANEL ? (1u << (end->outputs - first)) - 1 : ~0u;
    for (int64_t r = 0; r < rows; r++, sums += PANEL) {
        const int64_t at = (row + r) * end->outputs + first;
        if (end->bias) add(sums, end->bias + first, some);
        if (end->residual) add(sums, end->residual + at, some);
        if (end->gated) {
            gate(sums, end->y + (row + r) * (end->outputs / 2) + first / 2, end->gated);
            continue;
        }
        const __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
        _mm512_mask_storeu_epi16(end->y + at, some, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

#else

static inline void add(float *sums, const uint16_t *terms, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] += load_bf16(terms[i]);
}

// The same without AVX-512.
static inline void finish_rows(const Epilogue *end, float *sums, int64_t row, int64_t rows, int64_t first) {
    const int64_t some = least(PANEL, end->outputs - first);
    for (int64_t r = 0; r < rows; r++, sums += PANEL) {
        const int64_t at = (row + r) * end->outputs + first;
        if (end->bias) add(sums, end->bias + first, some);
        if (end->residual) add(sums, end->residual + at, some);
        if (end->gated) gate(sums, end->y + (row + r) * (end->outputs / 2) + first / 2, end->gated);
        else
            for (int64_t i = 0; i < some; i++) end->y[at + i] = store_bf16(sums[i]);
    }
}

#endif
