// Attention over a paged cache: in tiles of keys, else of single queries.

#include "wide_attention.h"

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

#define DEFINE_PAGED(NAME, TILES, SINGLES)                                                                             \
    int64_t NAME(const Arg *a, int64_t rows, int64_t item) {                                                           \
        return has_tile_attention(a[8].n, a[9].n) ? attend_parts(a, item, TILES) : SINGLES(a, rows, item);             \
    }
DEFINE_PAGED(paged_attention_bf16, attend_tiles, attend_singles_bf16)
DEFINE_PAGED(paged_attention_int8_bf16, attend_tiles_int8, attend_singles_int8_bf16)
DEFINE_PAGED(paged_attention_fp8_bf16, attend_tiles_fp8, attend_singles_fp8_bf16)
