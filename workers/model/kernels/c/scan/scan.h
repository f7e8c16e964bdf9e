// Common parts of the kernels that keep a state per sequence: matrices of the recurrent layers.
//
// A matrix is [rows, columns] float32 for each head. Its columns do not depend on each other, so an item
// is a vector of columns of a head of a sequence. It reads them once, computes the tokens of the step one
// after the other, and writes them to each target slot. The order of operations of a token does not
// depend on its place in the step, so neither do the bits.
#pragma once

#include "common.h"
#ifdef __AVX__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // functions with vector arguments are inlined

#define INLINE static inline __attribute__((always_inline))

// TILE: columns that are adjacent in memory; COLUMNS: of an item. A vector that is wider than the
// processor's registers is ten times slower. SUMS: partial sums, which hide the latency of additions.
// STREAMED: numbers of the states of a step's layer, 4 MiB, from which stores bypass the caches. They then
// do not read the memory first, which made steps of 8 sequences a third faster.
enum { TILE = 16, MAX_ROWS = 256, SUMS = 4, STREAMED = 1 << 20 };
#ifdef __AVX512F__
enum { COLUMNS = 16 };
#elif defined(__AVX__)
enum { COLUMNS = 8 };
#else
enum { COLUMNS = 4 };
#endif
typedef float Columns __attribute__((vector_size(4 * COLUMNS)));

// The sequences of a step, as steps.py writes them. The state after the first `tokens` tokens of the
// step is written to each target.
typedef struct {
    int64_t row, tokens;             // in the batch
    int64_t source;                  // slot; -1: the state is 0
    int64_t first_target, targets;   // in ascending order of tokens
} Sequence;
typedef struct {
    int64_t tokens, slot;
} Target;
typedef struct {
    int64_t sequences;
    const Sequence *sequence;
    const Target *target;
} Steps;

// `address` holds the address of the number of sequences, the sequences and the targets.
static inline Steps steps_at(const void *address) {
    const int64_t *table = *(const int64_t *const *)address;
    const Sequence *sequence = (const Sequence *)(table + 1);
    return (Steps){table[0], sequence, (const Target *)(sequence + table[0])};
}

// The work of an item. The sequence changes fastest: a long sequence among single tokens is then spread
// over all threads.
typedef struct {
    Sequence sequence;
    const Target *target;
    int64_t head, first, width;  // columns
} Work;

static inline int64_t parts_of(int64_t columns) { return ceil_div(columns, COLUMNS); }

static inline Work work_of(const Steps *steps, int64_t columns, int64_t item) {
    const Sequence *sequence = steps->sequence + item % steps->sequences;
    const int64_t place = item / steps->sequences, first = place % parts_of(columns) * COLUMNS;
    return (Work){
        .sequence = *sequence,
        .target = steps->target + sequence->first_target,
        .head = place / parts_of(columns),
        .first = first,
        .width = least(COLUMNS, columns - first),
    };
}

// Bytes between slots, and between the heads of a slot.
typedef struct {
    int64_t slot, head;
} Strides;

// Whether the next target wants the state after `tokens` tokens.
static inline int is_wanted(const Work *work, int64_t tokens) {
    return work->sequence.targets && work->target->tokens == tokens;
}
static inline void next_target(Work *work) { work->target++, work->sequence.targets--; }

// The matrices of a layer. A head's columns are stored in tiles, [tiles, rows, TILE]; the last tile has
// the columns that are left. So an item reads and writes memory almost without gaps.
typedef struct {
    char *memory;
    Strides strides;
    int64_t rows, columns;
    int streams;  // whether the step writes more than caches hold
} Matrices;

static inline Matrices matrices_of(void *memory, Strides strides, int64_t rows, int64_t columns, int64_t heads,
                                   int64_t sequences) {
    return (Matrices){memory, strides, rows, columns, sequences * heads * rows * columns >= STREAMED};
}

static inline int64_t tile_width(const Matrices *m, const Work *work) {
    return least(TILE, m->columns - work->first / TILE * TILE);
}
static inline float *columns_of(const Matrices *m, int64_t slot, const Work *work) {
    float *matrix = (float *)(m->memory + slot * m->strides.slot + work->head * m->strides.head);
    return matrix + work->first / TILE * TILE * m->rows + work->first % TILE;
}

INLINE Columns load_columns(const float *from, int64_t width) {
    Columns x = {0};
    if (width == COLUMNS)
        memcpy(&x, from, sizeof x);
    else
        memcpy(&x, from, width * sizeof *from);
    return x;
}
INLINE void store_columns(float *to, Columns x, int64_t width) {
    if (width == COLUMNS)
        memcpy(to, &x, sizeof x);
    else
        memcpy(to, &x, width * sizeof *to);
}

// Rows of a state are padded with zeros to a multiple of SUMS, vectors of one number for each row to a
// multiple of COLUMNS.
INLINE int64_t padded(int64_t rows) { return ceil_div(rows, SUMS) * SUMS; }
INLINE void clear_padding(float *x, int64_t rows) {
    if (rows % COLUMNS) memset(x + rows / COLUMNS * COLUMNS, 0, COLUMNS * sizeof *x);
}

INLINE void load_row_f32(float *to, const float *from, int64_t size) { memcpy(to, from, size * sizeof *to); }
INLINE void load_row_bf16(float *to, const uint16_t *from, int64_t size) {
    for (int64_t i = 0; i < size; i++) to[i] = load_bf16(from[i]);
}

// Loads or stores `width` numbers of a row; the other columns are 0.
INLINE Columns columns_f32(const float *from, int64_t width) { return load_columns(from, width); }
INLINE Columns columns_bf16(const uint16_t *from, int64_t width) {
    float x[COLUMNS] = {0};
    if (width == COLUMNS)
        load_row_bf16(x, from, COLUMNS);
    else
        load_row_bf16(x, from, width);
    return load_columns(x, COLUMNS);
}
INLINE void put_f32(float *to, Columns x, int64_t width) { store_columns(to, x, width); }
INLINE void put_bf16(uint16_t *to, Columns x, int64_t width) {
    uint16_t rounded[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) rounded[i] = store_bf16(x[i]);
    if (width == COLUMNS)
        memcpy(to, rounded, sizeof rounded);
    else
        memcpy(to, rounded, width * sizeof *to);
}

INLINE void load_state(Columns *state, const Matrices *m, const Work *work) {
    const int64_t slot = work->sequence.source, stride = tile_width(m, work);
    const float *from = columns_of(m, slot < 0 ? 0 : slot, work);
    for (int64_t r = 0; r < m->rows; r++)
        state[r] = slot < 0 ? (Columns){0} : load_columns(from + r * stride, work->width);
    for (int64_t r = m->rows; r < padded(m->rows); r++) state[r] = (Columns){0};
}

// Writes aligned rows past the caches.
INLINE void stream_rows(float *to, const Columns *state, int64_t rows) {
#if defined(__AVX512F__)
    for (int64_t r = 0; r < rows; r++) _mm512_stream_ps(to + r * TILE, (__m512)state[r]);
    _mm_sfence();  // other threads see the item's end only after its stores
#elif defined(__AVX__)
    for (int64_t r = 0; r < rows; r++) _mm256_stream_ps(to + r * TILE, (__m256)state[r]);
    _mm_sfence();
#else
    for (int64_t r = 0; r < rows; r++) store_columns(to + r * TILE, state[r], COLUMNS);
#endif
}

// Writes the state after `tokens` tokens to the targets that want it.
INLINE void store_state(const Columns *state, const Matrices *m, Work *work, int64_t tokens) {
    for (; is_wanted(work, tokens); next_target(work)) {
        float *to = columns_of(m, work->target->slot, work);
        const int64_t stride = tile_width(m, work);
        if (m->streams && stride == TILE && (uintptr_t)to % sizeof *state == 0)
            stream_rows(to, state, m->rows);
        else
            for (int64_t r = 0; r < m->rows; r++) store_columns(to + r * stride, state[r], work->width);
    }
}

// The sum of the rows, each times its factor.
INLINE Columns sum_rows(const Columns *state, const float *factors, int64_t rows) {
    Columns sums[SUMS] = {{0}};
    for (int64_t r = 0; r < padded(rows); r += SUMS)
        for (int i = 0; i < SUMS; i++) sums[i] += state[r + i] * factors[r + i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Lets the state decay, adds value to each row times its key, and returns the sum of the rows, each times
// its query. The decay is one for each row, or one for all.
INLINE Columns update_rows(Columns *state, const float *decays, float decay, const float *key, const float *query,
                           Columns value, int64_t rows) {
    Columns sums[SUMS] = {{0}};
    for (int64_t r = 0; r < padded(rows); r += SUMS)
        for (int i = 0; i < SUMS; i++) {
            state[r + i] = state[r + i] * (decays ? decays[r + i] : decay) + value * key[r + i];
            sums[i] += state[r + i] * query[r + i];
        }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

INLINE Columns decay_columns(Columns x) {  // decay(x) of each column; the compiler vectorizes the loop
    Columns y;
    for (int i = 0; i < COLUMNS; i++) y[i] = decay(x[i]);
    return y;
}
INLINE Columns silu_columns(Columns x) {
    Columns y;
    for (int i = 0; i < COLUMNS; i++) y[i] = silu(x[i]);
    return y;
}

// log(1 + e^x); the series of the inverse hyperbolic tangent gives log(1 + e) for e of 0 to 1.
static inline float softplus(float x) {
    const float e = decay(x > 0 ? -x : x), s = e / (2 + e), t = s * s;
    float y = 1.f / 15;
    y = y * t + 1.f / 13;
    y = y * t + 1.f / 11;
    y = y * t + 1.f / 9;
    y = y * t + 1.f / 7;
    y = y * t + 1.f / 5;
    y = y * t + 1.f / 3;
    return (x > 0 ? x : 0) + 2 * s * (y * t + 1);
}
INLINE Columns softplus_columns(Columns x) {
    Columns y;
    for (int i = 0; i < COLUMNS; i++) y[i] = softplus(x[i]);
    return y;
}
