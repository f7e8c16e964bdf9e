// Like tile_attention.c, for any processor and dtype: a tile converts queries and cache to float32.

#include "tile.h"
#include "vector.h"

enum { BLOCK = 3, WIDTH = 4 };  // rows, and keys or vectors, of a register block
enum { FEW_ROWS = 2 * BLOCK };  // up to this number, rows read the cache directly; else a tile is widened first

typedef struct {
    _Alignas(64) float query[MAX_ELEMENTS];           // [rows, D], where D is head_dim rounded up to LANES
    _Alignas(64) float wide[2][TILE * MAX_HEAD_DIM];  // keys and values [TILE, D], for many rows or an odd head_dim
    _Alignas(64) float weight[MAX_ROWS * TILE];       // [rows, TILE], scores before
    _Alignas(64) float acc[MAX_ELEMENTS];             // [rows, V], where V is value_dim rounded up to LANES
    float key_scale[TILE], value_scale[TILE], top[MAX_ROWS], sum[MAX_ROWS];
    const char *key[TILE], *value[TILE];    // address of each row of the tile, in the cache or in `wide`
    int64_t slots[TILE], next_slots[TILE];  // offsets in bytes of keys and values of this tile and of the next
} Tile;

INLINE int64_t bytes_of_element(const Kind kind) { return kind == F32 ? 4 : kind == BF16 ? 2 : 1; }
INLINE int is_scaled(const Kind kind) { return kind == INT8 || kind == FP8; }
INLINE int64_t bytes_of_row(int64_t head_dim, const Kind kind) {
    if (kind == INT4) return int4_row(head_dim);
    return is_scaled(kind) ? scaled_row(head_dim) : head_dim * bytes_of_element(kind);
}

// Converts a head's vector of int4 to float32; writes zeros past its end. A number times a scale of bfloat16 is exact.
INLINE void widen_int4(float *wide, const char *row, int64_t head_dim) {
    const char *scales = row + head_dim / 2;
    int64_t begin = 0;
    for (; begin < head_dim; begin += INT4_GROUP, scales += INT4_SCALES) {
        const int64_t count = least(INT4_GROUP, head_dim - begin), half = count / 2;
        const uint8_t *from = (const uint8_t *)row + begin / 2;
        uint16_t kept[2];
        memcpy(kept, scales, sizeof kept);
        const float scale = load_bf16(kept[0]), low = load_bf16(kept[1]);
        float *to = wide + begin;
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            const Ints pairs = load_bytes(from + i);
            const Floats early = __builtin_convertvector(pairs & 15, Floats);
            const Floats late = __builtin_convertvector(pairs >> 4, Floats);
            store_floats(to + i, add_product((Floats){0} + low, scale, early));
            store_floats(to + half + i, add_product((Floats){0} + low, scale, late));
        }
        for (; i < half; i++) to[i] = low + scale * (from[i] & 15), to[half + i] = low + scale * (from[i] >> 4);
    }
    for (int64_t d = head_dim; d % LANES; d++) wide[d] = 0;
}

// Converts a head's vector to float32; writes zeros past its end.
INLINE void widen_row(float *wide, const char *row, int64_t head_dim, const Kind kind) {
    if (kind == INT4) {
        widen_int4(wide, row, head_dim);
        return;
    }
    const int64_t size = bytes_of_element(kind);
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) store_floats(wide + d, load_elements(row + d * size, kind));
    if (d == head_dim) return;
    char rest[LANES * sizeof(float)] = {0};
    memcpy(rest, row + d * size, (head_dim - d) * size);
    store_floats(wide + d, load_elements(rest, kind));
}

#ifdef __clang__
#define SHUFFLE(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define SHUFFLE(A, B, ...) __builtin_shuffle(A, B, (Ints){__VA_ARGS__})
#endif

// Writes the sum of each of four vectors.
INLINE void add_lanes(float *to, Floats a, Floats b, Floats c, Floats d) {
    const Floats ab = SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const Floats cd = SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    Floats all = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    all += SHUFFLE(all, all, 4, 5, 6, 7, 0, 1, 2, 3);
    memcpy(to, &all, 4 * sizeof *to);
}

// Computes the scores of `rows` rows for the WIDTH keys from `first` on.
INLINE void score_block(Tile *t, int64_t row, int64_t first, int64_t D, const int rows, const Kind kind) {
    const float *query = t->query + row * D;
    Floats sum[BLOCK][WIDTH];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < WIDTH; k++) sum[r][k] = (Floats){0};
    for (int64_t d = 0; d < D; d += LANES) {
        Floats part[BLOCK];
        for (int r = 0; r < rows; r++) part[r] = in_register(load_floats(query + r * D + d));
        for (int k = 0; k < WIDTH; k++) {
            const Floats key = in_register(load_elements(t->key[first + k] + d * bytes_of_element(kind), kind));
            for (int r = 0; r < rows; r++) sum[r][k] = add_products(sum[r][k], part[r], key);
        }
    }
    for (int r = 0; r < rows; r++)
        add_lanes(t->weight + (row + r) * TILE + first, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

// Adds the weighted values of `count` keys to `rows` rows, in `width` vectors of elements from d on.
INLINE void mix_block(Tile *t, int64_t row, int64_t d, int64_t count, int64_t V, const int rows, const int width,
                      const Kind kind) {
    const float *weight = t->weight + row * TILE;
    float *acc = t->acc + row * V + d;
    Floats sum[BLOCK][WIDTH];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) sum[r][v] = load_floats(acc + r * V + v * LANES);
    for (int64_t i = 0; i < count; i++)
        for (int v = 0; v < width; v++) {
            const char *from = t->value[i] + (d + v * LANES) * bytes_of_element(kind);
            const Floats value = in_register(load_elements(from, kind));
            for (int r = 0; r < rows; r++) sum[r][v] = add_product(sum[r][v], weight[r * TILE + i], value);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) store_floats(acc + r * V + v * LANES, sum[r][v]);
}

INLINE void score_rows(Tile *t, int64_t row, int64_t count, int64_t D, const int rows, const Kind kind) {
    for (int64_t first = 0; first < count; first += WIDTH) score_block(t, row, first, D, rows, kind);
}

INLINE void mix_rows(Tile *t, int64_t row, int64_t count, int64_t V, const int rows, const Kind kind) {
    int64_t d = 0;
    for (; d + WIDTH * LANES <= V; d += WIDTH * LANES) mix_block(t, row, d, count, V, rows, WIDTH, kind);
    for (; d < V; d += LANES) mix_block(t, row, d, count, V, rows, 1, kind);
}

// The same for any number of rows; each row's result is the same as alone.
INLINE void score(Tile *t, int64_t rows, int64_t count, int64_t D, const Kind kind) {
    int64_t row = 0;
    for (; row + BLOCK <= rows; row += BLOCK) score_rows(t, row, count, D, BLOCK, kind);
    for (; row < rows; row++) score_rows(t, row, count, D, 1, kind);
}

INLINE void mix(Tile *t, int64_t rows, int64_t count, int64_t V, const Kind kind) {
    int64_t row = 0;
    for (; row + BLOCK <= rows; row += BLOCK) mix_rows(t, row, count, V, BLOCK, kind);
    for (; row < rows; row++) mix_rows(t, row, count, V, 1, kind);
}

static __attribute__((noinline)) void score_wide(Tile *t, int64_t rows, int64_t count, int64_t D) {
    score(t, rows, count, D, F32);
}
static __attribute__((noinline)) void mix_wide(Tile *t, int64_t rows, int64_t count, int64_t V) {
    mix(t, rows, count, V, F32);
}

// Turns the scores of row r into weights of the keys [first, last], and zero for other keys: a softmax
// relative to the running peak. If the peak rises, scales down the sum of the weights and the weighted
// values so far. In a quantized cache, scores and weights include the scales.
static __attribute__((noinline)) void weigh(Tile *t, int64_t r, int64_t first, int64_t last, int64_t V, const Chunk *c,
                                            int scaled) {
    float *weights = t->weight + r * TILE, *acc = t->acc + r * V;
    if (c->soft_cap) {
        const float *scales = scaled ? t->key_scale : NULL;
        for (int i = 0; i < TILE; i++) weights[i] *= c->scale * (scales ? scales[i] : 1) / c->soft_cap;
        for (int i = 0; i < TILE; i++) weights[i] = c->soft_cap * tanhf(weights[i]);
    }
    Floats weight[TILE / LANES], peaks = (Floats){0} + t->top[r], total = {0};
    Ints lane = {0, 1, 2, 3, 4, 5, 6, 7}, seen[TILE / LANES];
    for (int j = 0; j < TILE / LANES; j++, lane += LANES) {
        seen[j] = (lane >= (int32_t)(first > 0 ? first : 0)) & (lane <= (int32_t)least(last, TILE - 1));
        weight[j] = load_floats(weights + j * LANES);
        if (!c->soft_cap) weight[j] *= c->scale;
        if (!c->soft_cap && scaled) weight[j] *= load_floats(t->key_scale + j * LANES);
        peaks = pick(seen[j], larger(weight[j], peaks), peaks);
    }
    float peak = peaks[0];
    for (int i = 1; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
    for (int j = 0; j < TILE / LANES; j++) {
        weight[j] = pick(seen[j], decay_floats(weight[j] - peak), (Floats){0});
        total += weight[j];
        if (scaled) weight[j] = pick(seen[j], weight[j] * load_floats(t->value_scale + j * LANES), (Floats){0});
        store_floats(weights + j * LANES, weight[j]);
    }
    if (peak > t->top[r]) {
        const float shrink = decay_floats((Floats){0} + (t->top[r] - peak))[0];
        for (int64_t d = 0; d < V; d++) acc[d] *= shrink;
        t->sum[r] *= shrink, t->top[r] = peak;
    }
    for (int i = 0; i < LANES; i++) t->sum[r] += total[i];
}

int64_t tile_items(int64_t tokens, int64_t kv_heads, int64_t group, int64_t head_dim, int64_t max_heads,
                   int64_t max_tokens) {
    const Split split = split_of(group, head_dim, max_heads, max_tokens);
    return ceil_div(tokens, split.tokens) * kv_heads * split.splits;
}

// Returns the query heads of an item, if only single tokens are computed. With few tokens, wide heads are
// split until there is an item for each thread; more items read the same keys, so each has at least
// ROWS rows.
int64_t max_heads_of_singles(int64_t singles, int64_t kv_heads, int64_t group, int64_t head_dim, int64_t threads) {
    const int64_t heads = ceil_div(group, ceil_div(threads, singles * kv_heads));
    return head_dim <= ROW_DIM ? group : heads < ROWS ? ROWS : heads;
}

// Finds the rows of the tile's first `count` keys or values, and converts them to float32 if `widened`;
// prefetches those of the next tile.
INLINE void find_rows(Tile *t, const char **found, float *wide, float *scales, const char *cache, int64_t count,
                      int64_t head_dim, int64_t D, const int widened, const Kind kind) {
    for (int64_t i = 0; i < TILE; i++) fetch(cache + t->next_slots[i], bytes_of_row(head_dim, kind));
    for (int64_t i = 0; i < count; i++) {
        const char *row = cache + t->slots[i];
        if (is_scaled(kind)) scales[i] = scale_of_row(row, head_dim);
        if (widened) widen_row(wide + i * D, row, head_dim, kind);
        found[i] = widened ? (const char *)(wide + i * D) : row;
    }
}

// Computes some tokens of a KV head with query heads that share it; `inputs` is the type of queries and
// results.
INLINE void attend(const Chunk *c, int64_t item, const NextKeys *next, const Kind inputs, const Kind kind) {
    const Item own = item_of(c, item);
    const int64_t head_dim = c->head_dim, value_dim = c->value_dim, token = own.token, rows = own.rows;
    const int64_t D = ceil_div(head_dim, LANES) * LANES, V = ceil_div(value_dim, LANES) * LANES, heads = own.heads;
    const int64_t first = own.keys.first, last = own.keys.last, size = bytes_of_row(head_dim, kind);
    const int64_t element = bytes_of_element(inputs);
    const int64_t block = c->block_stride * (is_scaled(kind) ? 1 : bytes_of_element(kind));
    const int widened = kind == INT4 || rows > FEW_ROWS || D != head_dim, is_shared = c->keys == c->values;
    static __thread Tile tile;
    Tile *t = resolved(&tile);
    memset(t->acc, 0, sizeof *t->acc * rows * V);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (token + r / heads) * c->query_stride + (own.head + r % heads) * head_dim;
        widen_row(t->query + r * D, (const char *)c->query + at * element, head_dim, inputs);
        t->top[r] = c->sinks ? c->sinks[own.head + r % heads] : -1e30f, t->sum[r] = c->sinks ? 1 : 0;
    }
    find_slots(t->next_slots, c, &own.keys, first / TILE * TILE, size, block);
    for (int64_t begin = first / TILE * TILE; begin <= last; begin += TILE) {
        const int64_t padded = ceil_div(least(TILE, last + 1 - begin), WIDTH) * WIDTH;
        memcpy(t->slots, t->next_slots, sizeof t->slots);
        if (begin + TILE <= last) find_slots(t->next_slots, c, &own.keys, begin + TILE, size, block);
        else if (next) find_slots(t->next_slots, c, next, next->first / TILE * TILE, size, block);
        find_rows(t, t->key, t->wide[0], t->key_scale, c->keys, padded, head_dim, D, widened, kind);
        if (widened) score_wide(t, rows, padded, D);
        else score(t, rows, padded, D, kind);
        if (is_shared) memcpy(t->value, t->key, sizeof t->value);
        else find_rows(t, t->value, t->wide[1], t->value_scale, c->values, padded, head_dim, D, widened, kind);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = c->start + token + r / heads - begin;
            weigh(t, r, position + 1 - c->window, position, V, c, is_scaled(kind));
        }
        if (widened) mix_wide(t, rows, padded, V);
        else mix(t, rows, padded, V, kind);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = (token + r / heads) * c->out_stride + (own.head + r % heads) * value_dim;
        const float *acc = t->acc + r * V, inverse = 1 / t->sum[r];
        if (inputs == F32)
            for (int64_t d = 0; d < value_dim; d++) ((float *)c->out)[at + d] = acc[d] * inverse;
        else
            for (int64_t d = 0; d < value_dim; d++) ((uint16_t *)c->out)[at + d] = store_bf16(acc[d] * inverse);
    }
}

#define DEFINE_ATTEND(NAME, INPUTS, KIND)                                                                              \
    void NAME(const Chunk *c, int64_t item, const NextKeys *next) { attend(c, item, next, INPUTS, KIND); }
DEFINE_ATTEND(attend_wide_f32, F32, F32)
DEFINE_ATTEND(attend_wide_bf16, BF16, BF16)
DEFINE_ATTEND(attend_wide_int8_f32, F32, INT8)
DEFINE_ATTEND(attend_wide_int8_bf16, BF16, INT8)
DEFINE_ATTEND(attend_wide_fp8_f32, F32, FP8)
DEFINE_ATTEND(attend_wide_fp8_bf16, BF16, FP8)
DEFINE_ATTEND(attend_wide_int4_f32, F32, INT4)
DEFINE_ATTEND(attend_wide_int4_bf16, BF16, INT4)
