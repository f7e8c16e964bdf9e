// Attention of a step's new tokens over the keys of their sequences in a paged cache, in tiles of keys.

#include "common.h"

// query, out    [rows, kv_heads * group, head_dim], of out value_dim; rows query_stride and out_stride elements
//               apart
// keys, values  one layer's cache: [blocks, kv_heads, block_size, head_dim], of int8 and fp8 [.., head_dim + 2], of int4
//               [.., int4_row(head_dim)];
//               blocks are block_stride elements apart. If they are the same memory, the first value_dim
//               elements of a key are its value
// tables        [2] addresses: of the concatenated block tables, and of the step's parts. The latter are the
//               number of chunks, the number of single tokens, and for each of them, chunks first: first row,
//               number of tokens, position of the first token, window of keys, start of its block table
//
// An item is some query heads of a single token's KV head, or of some tokens of a chunk; see item_of.
enum { PART = 5 };  // numbers of a part
enum { ITEM_TOKENS = 32, LEAST_ITEM_TOKENS = 4 };  // of a chunk

static Chunk chunk_of(const Arg *a, const int64_t *part, int64_t element, int64_t max_heads, int64_t max_tokens) {
    return (Chunk){
        .query = (const char *)a[0].p + part[0] * a[1].n * element,
        .out = (char *)a[2].p + part[0] * a[3].n * element,
        .keys = a[4].p,
        .values = a[5].p,
        .table = (const int32_t *)((const Arg *)a[6].p)[0].p + part[4],
        .query_stride = a[1].n,
        .out_stride = a[3].n,
        .kv_heads = a[7].n,
        .group = a[8].n,
        .head_dim = a[9].n,
        .value_dim = a[14].n,
        .block_size = a[10].n,
        .max_heads = max_heads,
        .max_tokens = max_tokens,
        .block_stride = a[16].n,
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

// Returns the number of items of the step's chunks.
static int64_t items_of_chunks(const Arg *a, const int64_t *parts, int64_t max_tokens) {
    int64_t items = 0;
    for (int64_t i = 0; i < parts[0]; i++)
        items += tile_items(parts[2 + PART * i + 1], a[7].n, a[8].n, a[9].n, a[8].n, max_tokens);
    return items;
}

// Returns the most tokens of an item. Few tokens are split until each thread has two items. More items read
// the same keys, so there is a limit.
static int64_t max_tokens_of_chunks(const Arg *a, const int64_t *parts) {
    int64_t tokens = ITEM_TOKENS;
    while (tokens > LEAST_ITEM_TOKENS && items_of_chunks(a, parts, tokens) < 2 * a[15].n) tokens /= 2;
    return tokens;
}

// `element` is the size of a number in queries and results, in bytes. The items of single tokens come first:
// threads take many of the first items at once, and an item of a chunk may take longer than all of them.
static int64_t attend_parts(const Arg *a, int64_t item, int64_t element, AttendTiles *attend) {
    const int64_t *parts = ((const Arg *)a[6].p)[1].p, kv_heads = a[7].n, group = a[8].n, head_dim = a[9].n;
    const int64_t is_decode = !parts[0] && parts[1];
    const int64_t heads = is_decode ? max_heads_of_singles(parts[1], kv_heads, group, head_dim, a[15].n) : group;
    const int64_t each = tile_items(1, kv_heads, group, head_dim, heads, 1), singles = parts[1] * each;
    const int64_t tokens = max_tokens_of_chunks(a, parts);
    if (item < 0) return singles + items_of_chunks(a, parts, tokens);
    if (item >= singles) {
        item -= singles;
        for (const int64_t *part = parts + 2;; part += PART) {
            const int64_t own = tile_items(part[1], kv_heads, group, head_dim, group, tokens);
            if (item < own) {
                const Chunk chunk = chunk_of(a, part, element, group, tokens);
                attend(&chunk, item, 0);
                return 0;
            }
            item -= own;
        }
    }
    const int64_t *part = parts + 2 + PART * (parts[0] + item / each), own = item % each;
    const Chunk single = chunk_of(a, part, element, heads, 1);
    if (item + 1 == singles) {
        attend(&single, own, 0);
        return 0;
    }
    const Chunk following = own + 1 < each ? single : chunk_of(a, part + PART, element, heads, 1);
    const NextKeys next = next_of(&following, (own + 1) % each * kv_heads / each);
    attend(&single, own, &next);
    return 0;
}

#define DEFINE_PAGED(NAME, ELEMENT, ATTEND)                                                                            \
    int64_t NAME(const Arg *a, int64_t rows, int64_t item) {                                                           \
        (void)rows;                                                                                                    \
        return attend_parts(a, item, sizeof(ELEMENT), ATTEND);                                                         \
    }
#define TILES_OR(TILES, WIDE) (has_tile_attention(a[9].n, a[14].n) ? TILES : WIDE)
DEFINE_PAGED(paged_attention_f32, float, attend_wide_f32)
DEFINE_PAGED(paged_attention_int8_f32, float, attend_wide_int8_f32)
DEFINE_PAGED(paged_attention_fp8_f32, float, attend_wide_fp8_f32)
DEFINE_PAGED(paged_attention_int4_f32, float, attend_wide_int4_f32)
DEFINE_PAGED(paged_attention_int4_bf16, uint16_t, attend_wide_int4_bf16)
DEFINE_PAGED(paged_attention_bf16, uint16_t, TILES_OR(attend_tiles, attend_wide_bf16))
DEFINE_PAGED(paged_attention_int8_bf16, uint16_t, TILES_OR(attend_tiles_int8, attend_wide_int8_bf16))
DEFINE_PAGED(paged_attention_fp8_bf16, uint16_t, TILES_OR(attend_tiles_fp8, attend_wide_fp8_bf16))
