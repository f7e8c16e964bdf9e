// Attention over a paged cache: of single queries in one pass with a running softmax (arXiv 2205.14135); what suits
// tile_attention.c goes there.

#include "common.h"

enum { KEYS = 128 };  // of a tile

// query, out    [kv_heads * group, head_dim] of one row
// keys, values  one layer's cache: [blocks, kv_heads, block_size, head_dim], of int8 [.., head_dim + 2]
// table         the sequence's blocks; the query sees the keys from `first` to `last`
// soft_cap      0 or the bound of the scores, see Chunk
// sinks         NULL or [group], see Chunk
//
// Computes one KV head with the `group` query heads that share it. Where head_dim and group are constants, the loops over
// them unroll, which is worth a factor of 2.5; so the usual pairs have a case each.
#define CASE(ATTEND, D, G)                                                                                             \
    case (D) * 64 + (G):                                                                                               \
        ATTEND(from, to, keys, values, table, first, last, head, kv_heads, G, D, block_size, scale,                    \
               soft_cap, sinks);                                                                                       \
        break;
#define CASES(ATTEND)                                                                                                  \
    CASE(ATTEND, 64, 1) CASE(ATTEND, 64, 2) CASE(ATTEND, 64, 3) CASE(ATTEND, 64, 4) CASE(ATTEND, 64, 7)                \
    CASE(ATTEND, 64, 8) CASE(ATTEND, 128, 1) CASE(ATTEND, 128, 2) CASE(ATTEND, 128, 4) CASE(ATTEND, 128, 5)            \
    CASE(ATTEND, 128, 7) CASE(ATTEND, 128, 8)

// K is what the cache has, ROW(D) how much of that a row is, SCALE(row, D) what its numbers are to be multiplied with.
#define DEFINE_ATTEND(T, IN, K, NAME, LOAD, ROW, SCALE)                                                                \
    static inline __attribute__((always_inline)) void attend_wide_##NAME(                                              \
        const T *query, T *out, const K *keys, const K *values, const int32_t *table, int64_t first, int64_t last,     \
        int64_t head, int64_t kv_heads, int64_t group, const int64_t D, int64_t block_size, float scale,               \
        float soft_cap, const float *sinks) {                                                                          \
        float q[MAX_GROUP][D], acc[MAX_GROUP][D], score[MAX_GROUP][KEYS], wide[D], top[MAX_GROUP], sum[MAX_GROUP];     \
        for (int64_t g = 0; g < group; g++) {                                                                          \
            for (int64_t d = 0; d < D; d++) q[g][d] = load_##IN(query[g * D + d]) * scale, acc[g][d] = 0;              \
            top[g] = sinks ? sinks[g] : -1e30f, sum[g] = sinks ? 1 : 0;                                                \
        }                                                                                                              \
        for (int64_t begin = first; begin <= last; begin += KEYS) {                                                    \
            const int64_t count = begin + KEYS <= last ? KEYS : last + 1 - begin;                                      \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                const int64_t key = begin + i;                                                                         \
                const int64_t slot = ((int64_t)table[key / block_size] * kv_heads + head) * block_size;                \
                const K *k = keys + (slot + key % block_size) * ROW(D);                                                \
                for (int64_t d = 0; d < D; d++) wide[d] = LOAD(k[d]) * SCALE(k, D);                                    \
                for (int64_t g = 0; g < group; g++) {                                                                  \
                    float dot = 0;                                                                                     \
                    for (int64_t d = 0; d < D; d++) dot += q[g][d] * wide[d];                                          \
                    score[g][i] = dot;                                                                                 \
                }                                                                                                      \
            }                                                                                                          \
            if (soft_cap)                                                                                              \
                for (int64_t g = 0; g < group; g++)                                                                    \
                    for (int64_t i = 0; i < count; i++) score[g][i] = soft_cap * tanhf(score[g][i] / soft_cap);        \
            for (int64_t g = 0; g < group; g++) {                                                                      \
                float peak = top[g], total = 0;                                                                        \
                for (int64_t i = 0; i < count; i++) peak = score[g][i] > peak ? score[g][i] : peak;                    \
                for (int64_t i = 0; i < count; i++) score[g][i] = decay(score[g][i] - peak), total += score[g][i];     \
                const float shrink = decay(top[g] - peak);                                                             \
                for (int64_t d = 0; d < D; d++) acc[g][d] *= shrink;                                                   \
                sum[g] = sum[g] * shrink + total, top[g] = peak;                                                       \
            }                                                                                                          \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                const int64_t key = begin + i;                                                                         \
                const int64_t slot = ((int64_t)table[key / block_size] * kv_heads + head) * block_size;                \
                const K *v = values + (slot + key % block_size) * ROW(D);                                              \
                for (int64_t d = 0; d < D; d++) wide[d] = LOAD(v[d]) * SCALE(v, D);                                    \
                for (int64_t g = 0; g < group; g++)                                                                    \
                    for (int64_t d = 0; d < D; d++) acc[g][d] += score[g][i] * wide[d];                                \
            }                                                                                                          \
        }                                                                                                              \
        for (int64_t g = 0; g < group; g++)                                                                            \
            for (int64_t d = 0; d < D; d++) out[g * D + d] = store_##IN(acc[g][d] / sum[g]);                           \
    }

#define SAME(D) (D)
#define ONE(row, D) 1.0f
DEFINE_ATTEND(float, f32, float, f32, load_f32, SAME, ONE)
DEFINE_ATTEND(uint16_t, bf16, uint16_t, bf16, load_bf16, SAME, ONE)
DEFINE_ATTEND(float, f32, int8_t, int8_f32, (float), int8_row, scale_int8)
DEFINE_ATTEND(uint16_t, bf16, int8_t, int8_bf16, (float), int8_row, scale_int8)

// Attention of a step's new tokens, of each sequence to its own keys.
//
// tables  [2] addresses: of the block tables, one after the other; and of the step's parts: the number of chunks, the
//         number of single tokens, and of each, chunks first: its first row, tokens, position of the first, keys that a
//         token sees at most, where its table begins
//
// An item is a single token's KV head with its query heads, or some tokens of a chunk.
enum { PART = 5 };  // numbers

#define DEFINE_SINGLES(T, K, NAME)                                                                                     \
    static int64_t attend_singles_##NAME(const Arg *a, int64_t item) {                                                 \
        const T *query = a[0].p;                                                                                       \
        const K *keys = a[4].p, *values = a[5].p;                                                                      \
        T *out = a[2].p;                                                                                               \
        const int64_t *parts = ((const Arg *)a[6].p)[1].p, query_stride = a[1].n, out_stride = a[3].n;                 \
        const int64_t kv_heads = a[7].n, group = a[8].n, head_dim = a[9].n, block_size = a[10].n;                      \
        const float scale = a[11].f, soft_cap = a[12].f;                                                               \
        if (item < 0) return parts[1] * kv_heads;                                                                      \
        const int64_t *part = parts + 2 + PART * (parts[0] + item / kv_heads);                                         \
        const int64_t head = item % kv_heads, at = head * group * head_dim, last = part[2];                            \
        const int64_t first = last + 1 > part[3] ? last + 1 - part[3] : 0;                                             \
        const T *from = query + part[0] * query_stride + at;                                                           \
        T *to = out + part[0] * out_stride + at;                                                                       \
        const int32_t *table = (const int32_t *)((const Arg *)a[6].p)[0].p + part[4];                                  \
        const float *sinks = a[13].p ? (const float *)a[13].p + head * group : 0;                                      \
        switch (head_dim * 64 + group) {                                                                               \
            CASES(attend_wide_##NAME)                                                                                  \
        default:                                                                                                       \
            attend_wide_##NAME(from, to, keys, values, table, first, last, head, kv_heads, group, head_dim,            \
                               block_size, scale, soft_cap, sinks);                                                    \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_SINGLES(float, float, f32)
DEFINE_SINGLES(uint16_t, uint16_t, bf16)
DEFINE_SINGLES(float, int8_t, int8_f32)
DEFINE_SINGLES(uint16_t, int8_t, int8_bf16)

// For single tokens alone.
int64_t paged_attention_f32(const Arg *a, int64_t rows, int64_t item) {
    (void)rows;
    return attend_singles_f32(a, item);
}
int64_t paged_attention_int8_f32(const Arg *a, int64_t rows, int64_t item) {
    (void)rows;
    return attend_singles_int8_f32(a, item);
}

static Chunk chunk_of(const Arg *a, const int64_t *part) {
    return (Chunk){
        .query = (const uint16_t *)a[0].p + part[0] * a[1].n,
        .out = (uint16_t *)a[2].p + part[0] * a[3].n,
        .keys = a[4].p,
        .values = a[5].p,
        .table = (const int32_t *)((const Arg *)a[6].p)[0].p + part[4],
        .query_stride = a[1].n,
        .out_stride = a[3].n,
        .kv_heads = a[7].n,
        .group = a[8].n,
        .head_dim = a[9].n,
        .block_size = a[10].n,
        .start = part[2],
        .tokens = part[1],
        .window = part[3],
        .scale = a[11].f,
        .soft_cap = a[12].f,
        .sinks = a[13].p,
    };
}

static NextKeys next_of(const Chunk *single, int64_t head) {
    const int64_t first = single->start + 1 > single->window ? single->start + 1 - single->window : 0;
    return (NextKeys){single->table, head, first, single->start};
}

static int64_t attend_parts(const Arg *a, int64_t item, AttendTiles *attend) {
    const int64_t *parts = ((const Arg *)a[6].p)[1].p, kv_heads = a[7].n, group = a[8].n, singles = parts[1] * kv_heads;
    int64_t items = singles;
    for (int64_t i = 0; i < parts[0]; i++) {
        const int64_t *part = parts + 2 + PART * i, own = tile_items(part[1], kv_heads, group);
        items += own;
        if (item >= 0 && item < own) {
            const Chunk chunk = chunk_of(a, part);
            attend(&chunk, item, 0);
            return 0;
        }
        if (item >= 0) item -= own;
    }
    if (item < 0) return items;
    const int64_t *part = parts + 2 + PART * (parts[0] + item / kv_heads), head = item % kv_heads;
    const Chunk single = chunk_of(a, part);
    if (item + 1 == singles) {
        attend(&single, head, 0);
        return 0;
    }
    const Chunk following = head + 1 < kv_heads ? single : chunk_of(a, part + PART);
    const NextKeys next = next_of(&following, (head + 1) % kv_heads);
    attend(&single, head, &next);
    return 0;
}

int64_t paged_attention_bf16(const Arg *a, int64_t rows, int64_t item) {
    (void)rows;
    return has_tile_attention(a[8].n, a[9].n) ? attend_parts(a, item, attend_tiles) : attend_singles_bf16(a, item);
}
int64_t paged_attention_int8_bf16(const Arg *a, int64_t rows, int64_t item) {
    (void)rows;
    const int has_tiles = has_tile_attention(a[8].n, a[9].n);
    return has_tiles ? attend_parts(a, item, attend_tiles_int8) : attend_singles_int8_bf16(a, item);
}
