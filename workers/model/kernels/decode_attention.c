// Attention of single queries over a paged cache: one pass with a running softmax (arXiv 2205.14135).

#include "common.h"

enum { KEYS = 128, AHEAD = 32 };  // keys of a tile; fetched so far ahead, about the time that memory takes

// query, out    [kv_heads * group, head_dim] of one row
// keys, values  one layer's cache: [blocks, kv_heads, block_size, head_dim]
// table         the sequence's blocks; the query sees the keys from `first` to `last`
//
// Computes one KV head with the `group` query heads that share it. Where head_dim and group are constants, the loops over
// them unroll, which is worth a factor of 2.5; so the usual pairs have a case each.
#define CASE(ATTEND, D, G)                                                                                             \
    case (D) * 64 + (G):                                                                                               \
        ATTEND(from, to, keys, values, table, first, last, head, kv_heads, G, D, block_size, scale);                   \
        break;
#define CASES(ATTEND)                                                                                                  \
    CASE(ATTEND, 64, 1) CASE(ATTEND, 64, 2) CASE(ATTEND, 64, 3) CASE(ATTEND, 64, 4) CASE(ATTEND, 64, 7)                \
    CASE(ATTEND, 64, 8) CASE(ATTEND, 128, 1) CASE(ATTEND, 128, 2) CASE(ATTEND, 128, 4) CASE(ATTEND, 128, 5)            \
    CASE(ATTEND, 128, 7) CASE(ATTEND, 128, 8)

#define DEFINE_ATTEND(T, NAME)                                                                                         \
    static inline __attribute__((always_inline)) void attend_wide_##NAME(                                              \
        const T *query, T *out, const T *keys, const T *values, const int32_t *table, int64_t first, int64_t last,     \
        int64_t head, int64_t kv_heads, int64_t group, const int64_t D, int64_t block_size, float scale) {             \
        float q[MAX_GROUP][D], acc[MAX_GROUP][D], score[MAX_GROUP][KEYS], wide[D], top[MAX_GROUP], sum[MAX_GROUP];     \
        for (int64_t g = 0; g < group; g++) {                                                                          \
            for (int64_t d = 0; d < D; d++) q[g][d] = load_##NAME(query[g * D + d]) * scale, acc[g][d] = 0;            \
            top[g] = -1e30f, sum[g] = 0;                                                                               \
        }                                                                                                              \
        for (int64_t begin = first; begin <= last; begin += KEYS) {                                                    \
            const int64_t count = begin + KEYS <= last ? KEYS : last + 1 - begin;                                      \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                const int64_t key = begin + i;                                                                         \
                const int64_t slot = ((int64_t)table[key / block_size] * kv_heads + head) * block_size;                \
                const T *k = keys + (slot + key % block_size) * D;                                                     \
                for (int64_t d = 0; d < D; d++) wide[d] = load_##NAME(k[d]);                                           \
                for (int64_t g = 0; g < group; g++) {                                                                  \
                    float dot = 0;                                                                                     \
                    for (int64_t d = 0; d < D; d++) dot += q[g][d] * wide[d];                                          \
                    score[g][i] = dot;                                                                                 \
                }                                                                                                      \
            }                                                                                                          \
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
                const T *v = values + (slot + key % block_size) * D;                                                   \
                for (int64_t d = 0; d < D; d++) wide[d] = load_##NAME(v[d]);                                           \
                for (int64_t g = 0; g < group; g++)                                                                    \
                    for (int64_t d = 0; d < D; d++) acc[g][d] += score[g][i] * wide[d];                                \
            }                                                                                                          \
        }                                                                                                              \
        for (int64_t g = 0; g < group; g++)                                                                            \
            for (int64_t d = 0; d < D; d++) out[g * D + d] = store_##NAME(acc[g][d] / sum[g]);                         \
    }

DEFINE_ATTEND(float, f32)
DEFINE_ATTEND(uint16_t, bf16)

#ifdef __AVX512BF16__

// The sum of each of 16 vectors.
static inline __attribute__((always_inline)) __m512 sum_each(const __m512 *v) {
    __m512 fours[4];  // of four vectors each; a lane of 128 bits holds a quarter of each one's sum
    for (int i = 0; i < 4; i++) {
        const __m512 *u = v + 4 * i;
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(u[0], u[1]), _mm512_unpackhi_ps(u[0], u[1]));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(u[2], u[3]), _mm512_unpackhi_ps(u[2], u[3]));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    __m512 halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x44),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

// attend_wide_bf16 on the bfloat16 dot product, for D a multiple of 32. The softmax weights are rounded to bfloat16.
static inline __attribute__((always_inline)) void attend_pairs(const uint16_t *query, uint16_t *out,
                                                               const uint16_t *keys, const uint16_t *values,
                                                               const int32_t *table, int64_t first, int64_t last,
                                                               int64_t head, int64_t kv_heads, int64_t group,
                                                               const int64_t D, int64_t block_size, float scale) {
    const int64_t C = D / 32;  // vectors of a row
    _Alignas(64) float score[group][KEYS];
    _Alignas(64) uint32_t weight[group][KEYS / 2];  // pairs of keys
    __m512bh q[group][C];
    __m512 acc[group][C][2];
    float top[group], sum[group];
    int64_t slots[KEYS + AHEAD];
    for (int64_t g = 0; g < group; g++) {
        for (int64_t c = 0; c < C; c++) {
            q[g][c] = (__m512bh)_mm512_loadu_si512(query + g * D + 32 * c);
            acc[g][c][0] = acc[g][c][1] = _mm512_setzero_ps();
        }
        top[g] = -1e30f, sum[g] = 0;
    }
    for (int64_t begin = first; begin <= last; begin += KEYS) {
        const int64_t count = begin + KEYS <= last ? KEYS : last + 1 - begin, padded = (count + 15) / 16 * 16;
        for (int64_t i = 0; i < padded + AHEAD; i++) {  // what is past the end repeats the last key and is masked
            const int64_t key = least(begin + i, last);
            slots[i] = (((int64_t)table[key / block_size] * kv_heads + head) * block_size + key % block_size) * D;
        }
        if (begin == first)
            for (int64_t i = 0; i < AHEAD; i++)
                for (int64_t c = 0; c < C; c++) _mm_prefetch((const char *)(keys + slots[i] + 32 * c), _MM_HINT_T0);
        for (int64_t i = 0; i < padded; i += 16) {
            for (int64_t j = 0; j < 16; j++)
                for (int64_t c = 0; c < C; c++) {
                    _mm_prefetch((const char *)(keys + slots[i + AHEAD + j] + 32 * c), _MM_HINT_T0);
                    _mm_prefetch((const char *)(values + slots[i + j] + 32 * c), _MM_HINT_T0);
                }
            for (int64_t g = 0; g < group; g++) {
                __m512 dots[16];
                for (int64_t j = 0; j < 16; j++) {
                    dots[j] = _mm512_setzero_ps();
                    for (int64_t c = 0; c < C; c++) {
                        const __m512bh k = (__m512bh)_mm512_loadu_si512(keys + slots[i + j] + 32 * c);
                        dots[j] = _mm512_dpbf16_ps(dots[j], q[g][c], k);
                    }
                }
                _mm512_store_ps(score[g] + i, _mm512_mul_ps(sum_each(dots), _mm512_set1_ps(scale)));
            }
        }
        for (int64_t g = 0; g < group; g++) {
            float peak = top[g], total = 0;
            for (int64_t i = count; i < padded; i++) score[g][i] = -1e30f;
            for (int64_t i = 0; i < padded; i++) peak = score[g][i] > peak ? score[g][i] : peak;
            for (int64_t i = 0; i < padded; i++) {
                const float e = decay(score[g][i] - peak);
                score[g][i] = score[g][i] > -1e29f ? e : 0;
                total += score[g][i];
            }
            for (int64_t i = 0; i < padded; i += 16)
                _mm256_store_si256((__m256i *)(weight[g] + i / 2),
                                   (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(score[g] + i)));
            const float shrink = decay(top[g] - peak);
            for (int64_t c = 0; c < C; c++)
                for (int64_t h = 0; h < 2; h++) acc[g][c][h] = _mm512_mul_ps(acc[g][c][h], _mm512_set1_ps(shrink));
            sum[g] = sum[g] * shrink + total, top[g] = peak;
        }
        for (int64_t i = 0; i < padded; i += 2)
            for (int64_t c = 0; c < C; c++) {
                const __m512i a = _mm512_loadu_si512(values + slots[i] + 32 * c);
                const __m512i b = _mm512_loadu_si512(values + slots[i + 1] + 32 * c);
                const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
                const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
                for (int64_t g = 0; g < group; g++) {
                    const __m512bh w = (__m512bh)_mm512_set1_epi32((int)weight[g][i / 2]);
                    acc[g][c][0] = _mm512_dpbf16_ps(acc[g][c][0], w, low);
                    acc[g][c][1] = _mm512_dpbf16_ps(acc[g][c][1], w, high);
                }
            }
    }
    // The unpacking left runs of four: the even ones in [0], the odd ones in [1].
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
    for (int64_t g = 0; g < group; g++)
        for (int64_t c = 0; c < C; c++) {
            const __m512 inverse = _mm512_set1_ps(1 / sum[g]);
            const __m512 x = _mm512_mul_ps(_mm512_permutex2var_ps(acc[g][c][0], front, acc[g][c][1]), inverse);
            const __m512 y = _mm512_mul_ps(_mm512_permutex2var_ps(acc[g][c][0], back, acc[g][c][1]), inverse);
            _mm512_storeu_si512(out + g * D + 32 * c, (__m512i)_mm512_cvtne2ps_pbh(y, x));
        }
}
#endif

static inline __attribute__((always_inline)) void attend_bf16(const uint16_t *query, uint16_t *out,
                                                              const uint16_t *keys, const uint16_t *values,
                                                              const int32_t *table, int64_t first, int64_t last,
                                                              int64_t head, int64_t kv_heads, int64_t group,
                                                              const int64_t D, int64_t block_size, float scale) {
#ifdef __AVX512BF16__
    if (D % 32 == 0) {
        attend_pairs(query, out, keys, values, table, first, last, head, kv_heads, group, D, block_size, scale);
        return;
    }
#endif
    attend_wide_bf16(query, out, keys, values, table, first, last, head, kv_heads, group, D, block_size, scale);
}

// Attention of a step's new tokens, of each sequence to its own keys.
//
// tables  [2] addresses: of the block tables, one after the other; and of the step's parts: the number of chunks, the
//         number of single tokens, five numbers of each chunk, four of each single token:
//         chunk         first row, tokens, position of the first, keys that a token sees at most, where its table begins
//         single token  row, first and last key, where its table begins
//
// An item is a single token's KV head with its query heads, or some tokens of a chunk.
#define DEFINE_ATTENTION(T, NAME, ATTEND, ITEMS, CHUNK)                                                                \
    int64_t paged_attention_##NAME(const Arg *a, int64_t rows, int64_t item) {                                         \
        (void)rows;                                                                                                    \
        const T *query = a[0].p, *keys = a[4].p, *values = a[5].p;                                                     \
        T *out = a[2].p;                                                                                               \
        const int32_t *tables = ((const Arg *)a[6].p)[0].p;                                                            \
        const int64_t *parts = ((const Arg *)a[6].p)[1].p, *part = parts + 2, query_stride = a[1].n;                   \
        const int64_t out_stride = a[3].n, kv_heads = a[7].n, group = a[8].n, head_dim = a[9].n, block_size = a[10].n; \
        const float scale = a[11].f;                                                                                   \
        int64_t items = parts[1] * kv_heads;                                                                           \
        for (int64_t i = 0; i < parts[0]; i++, part += 5) {                                                            \
            const int64_t own = ITEMS(part[1], kv_heads, group);                                                       \
            items += own;                                                                                              \
            if (item >= 0 && item < own) {                                                                             \
                CHUNK(query + part[0] * query_stride, query_stride, out + part[0] * out_stride, out_stride, keys,      \
                      values, tables + part[4], part[2], part[1], part[3], kv_heads, group, head_dim, block_size,      \
                      scale, item);                                                                                    \
                return 0;                                                                                              \
            }                                                                                                          \
            if (item >= 0) item -= own;                                                                                \
        }                                                                                                              \
        if (item < 0) return items;                                                                                    \
        part += item / kv_heads * 4;                                                                                   \
        const int64_t head = item % kv_heads, at = head * group * head_dim;                                            \
        const T *from = query + part[0] * query_stride + at;                                                           \
        T *to = out + part[0] * out_stride + at;                                                                       \
        const int32_t *table = tables + part[3];                                                                       \
        const int64_t first = part[1], last = part[2];                                                                 \
        switch (head_dim * 64 + group) {                                                                               \
            CASES(ATTEND)                                                                                              \
        default:                                                                                                       \
            ATTEND(from, to, keys, values, table, first, last, head, kv_heads, group, head_dim, block_size, scale);    \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

#define NO_ITEMS(...) 0
#define NO_CHUNK(...)
DEFINE_ATTENTION(float, f32, attend_wide_f32, NO_ITEMS, NO_CHUNK)
DEFINE_ATTENTION(uint16_t, bf16, attend_bf16, chunk_items, attend_chunk)
