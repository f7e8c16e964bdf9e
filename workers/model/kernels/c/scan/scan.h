// Common parts of the kernels that keep a state per sequence: matrices of the recurrent layers.
//
// A matrix is [rows, columns] float32 for each head. Its columns do not depend on each other, so an item
// is some vectors of columns of a head of a sequence. It reads them once, computes the tokens of the step
// one after the other, and writes them to each target slot. The order of operations of a token does not
// depend on its place in the step, so neither do the bits.
#pragma once

#include "common.h"
#ifdef __AVX__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // functions with vector arguments are inlined

#define INLINE static inline __attribute__((always_inline))

// TILE: columns that are adjacent in memory; COLUMNS: of a vector. A vector that is wider than the
// processor's registers is ten times slower. VECTORS: of an item, which share the work on a token's query
// and key; with 128 rows they fit into the first cache. A prompt of 512 tokens took 0.6 of the time of items
// of one vector. SUMS: partial sums of each vector, which hide the latency of additions; all fit into the
// registers. STREAMED: numbers of the states of a step's layer, 4 MiB, from which stores bypass the caches.
// They then do not read the memory first, which made steps of 8 sequences a third faster.
enum { TILE = 16, MAX_ROWS = 256, STREAMED = 1 << 20 };
#ifdef __AVX512F__
enum { COLUMNS = 16, VECTORS = 4, SUMS = 4 };
#elif defined(__AVX__)
enum { COLUMNS = 8, VECTORS = 4, SUMS = 2 };
#else
enum { COLUMNS = 4, VECTORS = 4, SUMS = 2 };
#endif
enum { WIDTH = VECTORS * COLUMNS };  // columns of an item
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

static inline int64_t items_of(const Steps *steps, int64_t heads, int64_t columns) {
    return steps->sequences * heads * ceil_div(columns, WIDTH);
}

static inline Work work_of(const Steps *steps, int64_t columns, int64_t item) {
    const Sequence *sequence = steps->sequence + item % steps->sequences;
    const int64_t place = item / steps->sequences, parts = ceil_div(columns, WIDTH), first = place % parts * WIDTH;
    return (Work){
        .sequence = *sequence,
        .target = steps->target + sequence->first_target,
        .head = place / parts,
        .first = first,
        .width = least(WIDTH, columns - first),
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

// The width of a vector, if there are `width` columns from the first vector on; 0 if it has none of them.
INLINE int64_t width_of(int64_t width, int vector) {
    width -= vector * COLUMNS;
    return width > COLUMNS ? COLUMNS : width < 0 ? 0 : width;
}

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

// Where a vector of an item's columns is in the memory of a slot; `step` is the distance of two rows.
typedef struct {
    float *first;
    int64_t step, width;
} Place;

INLINE Place place_of(const Matrices *m, int64_t slot, const Work *work, int vector) {
    const int64_t column = work->first + vector * COLUMNS, tile = column / TILE * TILE;
    float *matrix = (float *)(m->memory + slot * m->strides.slot + work->head * m->strides.head);
    return (Place){
        .first = matrix + tile * m->rows + column % TILE,
        .step = least(TILE, m->columns - tile),
        .width = width_of(work->width, vector),
    };
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

// Loads or stores the vectors of `width` columns of a row.
#define DEFINE_VECTORS(T, NAME)                                                                                        \
    INLINE void load_vectors_##NAME(Columns *to, const T *from, int64_t width) {                                       \
        for (int v = 0; v < VECTORS; v++) to[v] = columns_##NAME(from + v * COLUMNS, width_of(width, v));              \
    }                                                                                                                  \
    INLINE void put_vectors_##NAME(T *to, const Columns *from, int64_t width) {                                        \
        for (int v = 0; v < VECTORS; v++) put_##NAME(to + v * COLUMNS, from[v], width_of(width, v));                   \
    }
DEFINE_VECTORS(float, f32)
DEFINE_VECTORS(uint16_t, bf16)

typedef Columns Row[VECTORS];  // an item's columns of a row of its matrix

INLINE void load_state(Row *state, const Matrices *m, const Work *work) {
    const int64_t slot = work->sequence.source;
    memset(state, 0, padded(m->rows) * sizeof *state);
    for (int v = 0; v < VECTORS && slot >= 0; v++) {
        const Place from = place_of(m, slot, work, v);
        for (int64_t r = 0; r < m->rows; r++) state[r][v] = load_columns(from.first + r * from.step, from.width);
    }
}

// Writes a vector of aligned rows past the caches.
INLINE void stream_rows(float *to, const Row *state, int vector, int64_t rows) {
#if defined(__AVX512F__)
    for (int64_t r = 0; r < rows; r++) _mm512_stream_ps(to + r * TILE, (__m512)state[r][vector]);
    _mm_sfence();  // other threads see the item's end only after its stores
#elif defined(__AVX__)
    for (int64_t r = 0; r < rows; r++) _mm256_stream_ps(to + r * TILE, (__m256)state[r][vector]);
    _mm_sfence();
#else
    for (int64_t r = 0; r < rows; r++) store_columns(to + r * TILE, state[r][vector], COLUMNS);
#endif
}

// Writes the state after `tokens` tokens to the targets that want it.
INLINE void store_state(const Row *state, const Matrices *m, Work *work, int64_t tokens) {
    for (; is_wanted(work, tokens); next_target(work))
        for (int v = 0; v < VECTORS; v++) {
            const Place to = place_of(m, work->target->slot, work, v);
            if (m->streams && to.step == TILE && to.width == COLUMNS && (uintptr_t)to.first % sizeof(Columns) == 0)
                stream_rows(to.first, state, v, m->rows);
            else
                for (int64_t r = 0; r < m->rows; r++) store_columns(to.first + r * to.step, state[r][v], to.width);
        }
}

INLINE void add_sums(Columns *y, Row *sums) {
    for (int v = 0; v < VECTORS; v++) {
        y[v] = sums[0][v] + sums[1][v];
        for (int i = 2; i < SUMS; i += 2) y[v] += sums[i][v] + sums[i + 1][v];
    }
}

// Computes the sum of the rows, each times its factor.
INLINE void sum_rows(Columns *y, const Row *state, const float *factors, int64_t rows) {
    Row sums[SUMS] = {{{0}}};
    for (int64_t r = 0; r < padded(rows); r += SUMS)
        for (int i = 0; i < SUMS; i++)
            for (int v = 0; v < VECTORS; v++) sums[i][v] += state[r + i][v] * factors[r + i];
    add_sums(y, sums);
}

// Lets the state decay, adds `value` to each row times its key, and computes the sum of the rows, each
// times its query. The decay is one for each row, or one for all.
INLINE void update_rows(Columns *y, Row *state, const float *decays, float decay, const float *key, const float *query,
                        const Columns *value, int64_t rows) {
    Row sums[SUMS] = {{{0}}};
    for (int64_t r = 0; r < padded(rows); r += SUMS)
        for (int i = 0; i < SUMS; i++)
            for (int v = 0; v < VECTORS; v++) {
                state[r + i][v] = state[r + i][v] * (decays ? decays[r + i] : decay) + value[v] * key[r + i];
                sums[i][v] += state[r + i][v] * query[r + i];
            }
    add_sums(y, sums);
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

// Defines NAME_columns, which applies the function NAME to each column. decay_floats explains the pragma.
#define EACH_COLUMN(function)                                                            \
    INLINE Columns function##_columns(Columns x) {                                       \
        Columns y;                                                                       \
        _Pragma("GCC unroll 1") for (int i = 0; i < COLUMNS; i++) y[i] = function(x[i]); \
        return y;                                                                        \
    }
EACH_COLUMN(decay)
EACH_COLUMN(silu)
EACH_COLUMN(softplus)
