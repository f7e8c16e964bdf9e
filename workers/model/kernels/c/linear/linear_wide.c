// y = x W^T for weights as in linear.c and linear_int.c on processors without a dot product for them.
// Weights are converted to float32 in registers, or for many rows in the first cache, and x is float32.
// Numbers are summed one by one in the same order for any number of rows.

#include "linear.h"
#include "vector.h"

enum { BLOCK = 6, VECTORS = PANEL / LANES };  // rows that read a panel at once; with half of its outputs, 12 registers

// For more than FEW rows a group of at most LONGEST inputs is converted once for MANY rows; their sums fit into
// the first cache as well.
enum { FEW = 8, MANY = 16 * BLOCK, LONGEST = 256 };

typedef enum { WIDE_BF16, WIDE_FP8, WIDE_INT8, WIDE_INT4, WIDE_F32 } Weights;  // F32: converted

INLINE int has_zeros(const Weights kind) { return kind == WIDE_INT8 || kind == WIDE_INT4; }

// A word is a lane of a load, and contains one or more weights. Weights of the same input in all lanes
// are widened together (`widen`).
INLINE int inputs_of_word(const Weights kind) {
    return kind == WIDE_INT4 ? 8 : kind == WIDE_INT8 ? 4 : kind == WIDE_F32 ? 1 : 2;
}
INLINE int64_t bytes_of_word(const Weights kind) { return kind == WIDE_FP8 ? 2 : 4; }

INLINE Ints load_words(const uint8_t *from, const Weights kind) {
    if (kind == WIDE_FP8) return load_halves(from);
    Ints words;
    memcpy(&words, from, sizeof words);
    return words;
}

INLINE Floats widen(Ints words, const int input, const Weights kind) {
    if (kind == WIDE_F32) return bits_to_floats(words);
    if (kind == WIDE_BF16) return bits_to_floats(input ? words & (int32_t)0xffff0000 : words << 16);
    if (kind == WIDE_FP8) return widen_e4m3(words << (input ? 16 : 24) & (int32_t)0xff000000);
    if (kind == WIDE_INT8) return __builtin_convertvector(words >> 8 * input & 0xff, Floats);
    return __builtin_convertvector(words >> (8 * (input % 4) + 4 * (input / 4)) & 0x0f, Floats);
}

// A group of a panel and of the rows of x. Scales [32] are float32 for FP8 and bfloat16 for integers.
// Zeros [32] may be NULL, if all are 128. In bfloat16 the group is the whole panel, without scales.
typedef struct {
    const float *x;
    const uint8_t *panel, *zeros;
    const char *scales;
    int64_t x_stride, words;
    int is_fp8;  // what converted weights were
    const uint8_t *ahead;  // prefetched meanwhile, `pace` bytes further per word, `half` for the second half
    int64_t pace, half;
} WideGroup;

INLINE int64_t bytes_of_scale(const Weights kind) { return kind == WIDE_FP8 ? sizeof(float) : sizeof(uint16_t); }

INLINE Floats load_scales(const WideGroup *g, int64_t at, const Weights kind) {
    const char *from = g->scales;
    return kind == WIDE_FP8 || (kind == WIDE_F32 && g->is_fp8) ? load_elements(from + at * sizeof(float), F32)
                                                               : load_elements(from + at * sizeof(uint16_t), BF16);
}

// Zeros are in units of 1/256 of the range of numbers.
INLINE Floats load_zeros(const uint8_t *zeros, int64_t at, const Weights kind) {
    const Ints some = zeros ? load_bytes(zeros + at) : (Ints){0} + 128;
    return __builtin_convertvector(some, Floats) * (kind == WIDE_INT4 ? 1.0f / 16 : 1);
}

// Writes the products of `rows` rows with a group to the results [rows, 32], or with scales adds them,
// for `width` vectors of outputs from `at` on.
INLINE void multiply_part(const WideGroup *g, float *results, const int at, const int rows, const int width,
                          const Weights kind) {
    const int per_word = inputs_of_word(kind);
    const int64_t size = bytes_of_word(kind), stride = g->x_stride;
    const uint8_t *panel = g->panel + at * LANES * size, *ahead = g->ahead + (at ? g->half : 0);
    const float *x = g->x;
    Floats sum[BLOCK][VECTORS], zero[VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) sum[r][v] = (Floats){0};
    if (has_zeros(kind))
        for (int v = 0; v < width; v++) zero[v] = load_zeros(g->zeros, (at + v) * LANES, kind);
    for (int64_t word = 0; word < g->words; word++, panel += PANEL * size, x += per_word, ahead += g->pace) {
        if (kind != WIDE_F32) __builtin_prefetch(ahead, 0, 2);
        if (kind != WIDE_F32 && width == VECTORS && size == 4) __builtin_prefetch(ahead + 64, 0, 2);
        _Pragma("GCC unroll 8") for (int i = 0; i < per_word; i++) {
            Floats weight[VECTORS];
            for (int v = 0; v < width; v++) {
                weight[v] = widen(load_words(panel + v * LANES * size, kind), i, kind);
                if (has_zeros(kind)) weight[v] -= zero[v];
            }
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < width; v++) sum[r][v] = add_product(sum[r][v], x[r * stride + i], weight[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) {
            const int64_t first = (at + v) * LANES;
            float *result = results + r * PANEL + first;
            if (kind != WIDE_BF16) sum[r][v] = load_floats(result) + sum[r][v] * load_scales(g, first, kind);
            store_floats(result, sum[r][v]);
        }
}

// With few rows, the panel is read in one pass, in the order of its memory.
INLINE void multiply_wide(const WideGroup *g, float *results, const int rows, const Weights kind) {
    if (rows <= 2) {
        multiply_part(g, results, 0, rows, VECTORS, kind);
        return;
    }
    multiply_part(g, results, 0, rows, VECTORS / 2, kind);
    multiply_part(g, results, VECTORS / 2, rows, VECTORS / 2, kind);
}

typedef void MultiplyWide(const WideGroup *group, float *results);

#define MULTIPLY_WIDE(R, KIND)                                                                                         \
    static __attribute__((noinline)) void multiply_##R##_##KIND(const WideGroup *group, float *results) {              \
        multiply_wide(group, results, R, KIND);                                                                        \
    }
#define WIDE_HEIGHTS(F, KIND) F(1, KIND) F(2, KIND) F(3, KIND) F(4, KIND) F(5, KIND) F(6, KIND)
#define WIDE_NAME(R, KIND) multiply_##R##_##KIND,
WIDE_HEIGHTS(MULTIPLY_WIDE, WIDE_BF16)
WIDE_HEIGHTS(MULTIPLY_WIDE, WIDE_FP8)
WIDE_HEIGHTS(MULTIPLY_WIDE, WIDE_INT8)
WIDE_HEIGHTS(MULTIPLY_WIDE, WIDE_INT4)
WIDE_HEIGHTS(MULTIPLY_WIDE, WIDE_F32)
static MultiplyWide *const multiply_wide_rows[][BLOCK] = {
    {WIDE_HEIGHTS(WIDE_NAME, WIDE_BF16)},
    {WIDE_HEIGHTS(WIDE_NAME, WIDE_FP8)},
    {WIDE_HEIGHTS(WIDE_NAME, WIDE_INT8)},
    {WIDE_HEIGHTS(WIDE_NAME, WIDE_INT4)},
    {WIDE_HEIGHTS(WIDE_NAME, WIDE_F32)},
};

// Writes the weights of a group, without its scales, to `wide` [inputs, 32].
INLINE void widen_group(const WideGroup *g, float *wide, const Weights kind) {
    const uint8_t *panel = g->panel;
    Floats zero[VECTORS];
    for (int v = 0; v < VECTORS; v++) zero[v] = has_zeros(kind) ? load_zeros(g->zeros, v * LANES, kind) : (Floats){0};
    for (int64_t word = 0; word < g->words; word++, panel += PANEL * bytes_of_word(kind)) {
        __builtin_prefetch(panel + 4096, 0, 2);
        if (bytes_of_word(kind) == 4) __builtin_prefetch(panel + 4096 + 64, 0, 2);
        _Pragma("GCC unroll 8") for (int i = 0; i < inputs_of_word(kind); i++, wide += PANEL)
            for (int v = 0; v < VECTORS; v++) {
                Floats weight = widen(load_words(panel + v * LANES * bytes_of_word(kind), kind), i, kind);
                if (has_zeros(kind)) weight -= zero[v];
                store_floats(wide + v * LANES, weight);
            }
    }
}

// The place of block `block` of `blocks` that share `rows` rows.
INLINE int64_t row_of_block(int64_t rows, int64_t block, int64_t blocks) { return rows * block / blocks; }

// Writes the products of at most MANY rows with all groups to the results [rows, 32]. `next` has the first
// group, which is converted once for all rows.
INLINE void multiply_many(WideGroup next, float *results, int64_t rows, int64_t groups, const Weights kind) {
    const int64_t inputs = next.words * inputs_of_word(kind), blocks = ceil_div(rows, BLOCK);
    _Alignas(64) float wide[LONGEST * PANEL];
    memset(results, 0, rows * PANEL * sizeof *results);
    for (int64_t group = 0; group < groups; group++) {
        widen_group(&next, wide, kind);
        WideGroup each = next;
        each.panel = (const uint8_t *)wide, each.words = inputs, each.is_fp8 = kind == WIDE_FP8;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t at = row_of_block(rows, block, blocks), height = row_of_block(rows, block + 1, blocks) - at;
            each.x = next.x + at * next.x_stride;
            multiply_wide_rows[WIDE_F32][height - 1](&each, results + at * PANEL);
        }
        next.x += inputs, next.panel += next.words * PANEL * bytes_of_word(kind);
        next.scales += PANEL * bytes_of_scale(kind), next.zeros += next.zeros ? PANEL : 0;
    }
}

// Converts x [rows, inputs], rows x_stride elements apart, to float32 [rows, inputs].
int64_t widen_rows_bf16(const Arg *a, int64_t rows, int64_t item) {
    const uint16_t *x = a[0].p;
    float *wide = a[2].p;
    const int64_t x_stride = a[1].n, inputs = a[3].n, step = rows_of_item(inputs);
    if (item < 0) return ceil_div(rows, step);
    for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++)
        for (int64_t i = 0; i < inputs; i++) wide[row * inputs + i] = load_bf16(x[row * x_stride + i]);
    return 0;
}

// Computes a part. x is from widen_rows, rows x_stride elements apart; packed weights, scales and zeros are as in
// linear.c and linear_int.c.
INLINE int64_t multiply_panel(const Arg *a, const Part *part, const float *x, int64_t x_stride, const char *scales,
                              const uint8_t *zeros, int64_t inputs, int64_t group, const Weights kind,
                              const Epilogue *end) {
    const int64_t rows = part->rows, words = group / inputs_of_word(kind);
    const int64_t group_bytes = words * PANEL * bytes_of_word(kind);
    const int64_t groups = inputs / group, scale_bytes = PANEL * bytes_of_scale(kind), blocks = ceil_div(rows, BLOCK);
    const uint8_t *panel = (const uint8_t *)a[2].p + part->stored * groups * group_bytes;
    const WideGroup first = {.panel = panel,
                             .scales = kind == WIDE_BF16 ? NULL : scales + part->stored * groups * scale_bytes,
                             .zeros = zeros ? zeros + part->stored * groups * PANEL : NULL,
                             .x_stride = x_stride,
                             .words = words,
                             .ahead = panel + 4096,
                             .pace = PANEL * bytes_of_word(kind),
                             .half = PANEL / 2 * bytes_of_word(kind)};
    if (kind != WIDE_BF16 && rows > FEW && group <= LONGEST) {
        _Alignas(64) float results[MANY * PANEL];
        for (int64_t at = 0; at < rows; at += MANY) {
            const int64_t some = least(MANY, rows - at), row = part->first + at;
            WideGroup begin = first;
            begin.x = x + row * x_stride;
            multiply_many(begin, results, some, groups, kind);
            finish_rows(end, results, row, some, part->panel * PANEL);
        }
        return 0;
    }
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t at = row_of_block(rows, block, blocks), height = row_of_block(rows, block + 1, blocks) - at;
        const int64_t row = part->first + at;
        _Alignas(64) float results[BLOCK * PANEL] = {0};
        WideGroup each = first;
        each.x = x + row * x_stride;
        // Prefetches 4 KiB ahead while a panel comes from memory, and a share of the next panel while
        // the panel is read again.
        const int64_t again = blocks - 1, ahead_step = block ? group_bytes / again : group_bytes;
        if (block) {
            each.ahead = panel + groups * (group_bytes + ahead_step * (block - 1));
            each.pace = each.half / again, each.half = words * each.pace;
        }
        for (int64_t g = 0; g < groups; g++) {
            multiply_wide_rows[kind][height - 1](&each, results);
            each.x += group, each.panel += group_bytes, each.ahead += ahead_step;
            each.scales += each.scales ? scale_bytes : 0, each.zeros += zeros ? PANEL : 0;
        }
        finish_rows(end, results, row, height, part->panel * PANEL);
    }
    return 0;
}

// Like linear_bf16, except for x.
int64_t linear_wide_bf16(const Arg *a, int64_t rows, int64_t item) {
    const Epilogue whole = {.bias = a[3].p, .residual = a[4].p, .y = a[5].p, .outputs = a[6].n, .gated = a[8].n};
    const int64_t panels = ceil_div(whole.outputs, PANEL);
    if (item < 0) return count_parts(panels, a[13].p);
    const Part part = part_of_item(item, rows, panels, a[13].p);
    const Epilogue end = end_of_part(whole, &part);
    const float *x = (const float *)a[0].p + inputs_of_panel(part.panel, a[11].n, a[12].n);
    return a[9].p ? multiply_panel(a, &part, x, a[1].n, a[9].p, NULL, a[7].n, a[10].n, WIDE_FP8, &end)
                  : multiply_panel(a, &part, x, a[1].n, NULL, NULL, a[7].n, a[7].n, WIDE_BF16, &end);
}

// Like linear_int_bf16, except that x is in the place of q.
int64_t linear_int_wide_bf16(const Arg *a, int64_t rows, int64_t item) {
    const Epilogue whole = {.bias = a[4].p, .residual = a[5].p, .y = a[6].p, .outputs = a[7].n, .gated = a[11].n};
    const int64_t panels = ceil_div(whole.outputs, PANEL);
    if (item < 0) return count_parts(panels, a[14].p);
    const Part part = part_of_item(item, rows, panels, a[14].p);
    const Epilogue end = end_of_part(whole, &part);
    const int64_t inputs = a[8].n;
    return a[10].n == 8 ? multiply_panel(a, &part, a[0].p, inputs, a[3].p, a[12].p, inputs, a[9].n, WIDE_INT8, &end)
                        : multiply_panel(a, &part, a[0].p, inputs, a[3].p, a[12].p, inputs, a[9].n, WIDE_INT4, &end);
}
