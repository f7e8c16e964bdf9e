// The common definitions of all kernels. Kernels exist for float32 and bfloat16 (suffix _f32, _bf16)
// and compute in float32. The caller owns all memory; kernels allocate nothing.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#ifdef __AVX512VNNI__
#define HAS_TILES  // of attention, see tile.h
#endif
#endif

// One argument of a kernel.
typedef union {
    void *p;
    int64_t n;
    double f;
} Arg;

// Computes item `item` of the outputs for `rows` rows; returns the number of items if `item` is -1.
// Threads take items in any order, and an item may be computed twice at the same time (see team.c).
// So an item must not read memory that an item of the same call writes, and must always write the
// same bytes.
typedef int64_t Kernel(const Arg *a, int64_t rows, int64_t item);

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

enum { SMALL = 4096 };  // elements of an item in elementwise kernels
static inline int64_t rows_of_item(int64_t elements) { return elements < SMALL ? SMALL / elements : 1; }

enum { MAX_HEAD_DIM = 576 };  // of attention: a latent of 512 elements and 64 with positions

// In a KV cache of int8 or fp8, a head's vector consists of head_dim numbers (-127..127, or as in
// fp8.h) and their scale in bfloat16.
static inline int64_t scaled_row(int64_t head_dim) { return head_dim + 2; }

// In a KV cache of int4, a head's vector consists of groups of INT4_GROUP numbers, of which the last may have fewer.
// A byte has two numbers (0..15) of a group, whose distance is half of the group: the earlier one in its low bits.
// Behind all numbers, each group has its scale and its least value in bfloat16. head_dim is even.
enum { INT4_GROUP = 32, INT4_SCALES = 4 };
static inline int64_t int4_row(int64_t head_dim) {
    return head_dim / 2 + (head_dim + INT4_GROUP - 1) / INT4_GROUP * INT4_SCALES;
}

static inline float load_f32(float x) { return x; }
static inline float store_f32(float x) { return x; }
static inline float load_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline float scale_of_row(const void *row, int64_t head_dim) {
    uint16_t bits;
    memcpy(&bits, (const char *)row + head_dim, sizeof bits);
    return load_bf16(bits);
}
static inline uint16_t store_bf16(float value) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for x <= 0, at least e^-80; the polynomial is from the Cephes library. The compiler vectorizes
// loops over it, while expf would be one call per number.
static inline float decay(float x) {
    x = x > -80 ? x : -80;
    // Rounds to nearest, since the argument is negative.
    const int32_t n = (int32_t)(x * 1.44269504f - 0.5f), bits = (n + 127) << 23;
    const float r = x - (float)n * 0.693359375f + (float)n * 2.12194440e-4f;
    float y = 1.9875691500e-4f, power;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    memcpy(&power, &bits, sizeof power);
    return (y * r * r + r + 1) * power;
}

static inline float sigmoid_mul(float x, float y) {  // y / (1 + e^-x)
    const float e = decay(x > 0 ? -x : x);
    return y * (x > 0 ? 1 : e) / (1 + e);
}

static inline float silu(float x) { return sigmoid_mul(x, x); }

// The tanh form (arXiv 1606.08415). The factor is 2 * sqrt(2 / pi), since tanh is a sigmoid of twice
// its argument.
static inline float gelu(float x) { return sigmoid_mul(1.5957691216f * (x + 0.044715f * x * x * x), x); }

// The bits of the largest absolute value of x [count]; those of a number that is not finite are at
// least 0x7f800000. Bits are compared, because -ffast-math assumes that no number is NaN.
static inline __attribute__((always_inline)) uint32_t largest_magnitude(const float *x, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// y, or x if that is NaN. Bits are compared, because -ffast-math assumes that no number is NaN.
static inline float pass_nan(float y, float x) {
    uint32_t bits, of_x;
    memcpy(&bits, &y, sizeof bits), memcpy(&of_x, &x, sizeof of_x);
    bits = (of_x & 0x7fffffff) > 0x7f800000 ? of_x : bits;
    memcpy(&y, &bits, sizeof y);
    return y;
}

enum { SILU = 1, GELU = 2 };  // activations of gates

// New tokens of one sequence and its KV cache; see paged_attention.c. A group is the query heads that
// share a KV head.
typedef struct {
    const void *query;  // [tokens, kv_heads * group, head_dim], tokens query_stride elements apart
    void *out;          // [tokens, kv_heads * group, value_dim], tokens out_stride elements apart
    const void *keys, *values;  // the same address if the first value_dim elements of a key are its value
    const int32_t *table;
    int64_t query_stride, out_stride, kv_heads, group, head_dim, value_dim, block_size;
    int64_t max_heads;  // query heads of an item
    int64_t max_tokens;  // of an item
    int64_t block_stride;  // from one block of keys or values to the next: elements, of int8, fp8 and int4 bytes
    int64_t start, tokens, window;  // token i has position start + i and sees the `window` keys up to it
    float scale, soft_cap;  // scores become soft_cap * tanh(score / soft_cap), unless it is 0
    const float *sinks;     // [kv_heads * group] or NULL: scores of a key without value that every token sees
} Chunk;

// The keys of a KV head, from `first` to `last`, that a thread will probably read next.
typedef struct {
    const int32_t *table;
    int64_t head, first, last;
} NextKeys;

// Computes an item of a chunk: some tokens of a KV head with query heads that share it. `next` may be
// NULL. See tile_attention.c and tile_attention_scaled.h; tile_attention_wide.c computes the
// cases that these do not support.
typedef void AttendTiles(const Chunk *chunk, int64_t item, const NextKeys *next);
AttendTiles attend_tiles, attend_tiles_int8, attend_tiles_fp8;
AttendTiles attend_wide_f32, attend_wide_int8_f32, attend_wide_fp8_f32, attend_wide_int4_f32;
AttendTiles attend_wide_bf16, attend_wide_int8_bf16, attend_wide_fp8_bf16, attend_wide_int4_bf16;
int has_tile_attention(int64_t head_dim, int64_t value_dim);
int64_t tile_items(int64_t tokens, int64_t kv_heads, int64_t group, int64_t head_dim, int64_t max_heads,
                   int64_t max_tokens);
int64_t max_heads_of_singles(int64_t singles, int64_t kv_heads, int64_t group, int64_t head_dim, int64_t threads);
