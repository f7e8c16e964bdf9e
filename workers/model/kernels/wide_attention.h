// Attention of single queries over a paged cache in one pass with a running softmax (arXiv 2205.14135): for float32, and
// for what tile_attention.c does not suit. Compiling takes long, so each kind of cache has a source of its own.
#pragma once

#include "common.h"

enum { KEYS = 128 };  // of a tile

// query, out    [kv_heads * group, head_dim] of one row
// keys, values  one layer's cache: [blocks, kv_heads, block_size, head_dim], of int8 and fp8 [.., head_dim + 2]
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

// Of bfloat16 where attention in tiles computes all of these pairs: left out, which halves the time to compile.
#ifdef HAS_TILES
#define CASES_BF16(ATTEND)
#else
#define CASES_BF16 CASES
#endif

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

// Attention of a step's new tokens, of each sequence to its own keys.
//
// tables  [2] addresses: of the block tables, one after the other; and of the step's parts: the number of chunks, the
//         number of single tokens, and of each, chunks first: its first row, tokens, position of the first, keys that a
//         token sees at most, where its table begins
//
// An item is a single token's KV head with its query heads, or some tokens of a chunk.
enum { PART = 5 };  // numbers

#define DEFINE_SINGLES(T, K, NAME, KERNEL, CASES)                                                                      \
    int64_t KERNEL(const Arg *a, int64_t rows, int64_t item) {                                                         \
        (void)rows;                                                                                                    \
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

Kernel attend_singles_bf16, attend_singles_int8_bf16, attend_singles_fp8_bf16;
