// Like tile_attention.c, over a cache of int8, on the dot product of 16-bit integers of AVX-512 VNNI.
//
// Queries and, in each tile, weights times the values' scales are rounded to integers of -32767..32767,
// relative to the largest of each row. This is 256 times finer than the rounding of the cache. Sums
// within a tile are exact.

#include "tile.h"

#ifdef HAS_TILES
static inline __m512i dot(__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }
static inline __m512 sum_of(__m512i sum) { return _mm512_cvtepi32_ps(sum); }

static inline float factor_of(float peak) { return peak > 0 ? 32767 / peak : 0; }
static inline float scale_of(float peak) { return peak / 32767; }

static inline __m512i pair_up(__m512 low, __m512 high, float factor) {
    const __m512i order = _mm512_set_epi32(29, 28, 25, 24, 21, 20, 17, 16, 13, 12, 9, 8, 5, 4, 1, 0);
    const __m512i mask = _mm512_set1_epi32(0xFFFF);
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(factor)));
    const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(factor)));
    const __m512i a2 = _mm512_slli_epi32(_mm512_shuffle_epi32(a, 0xEE), 16);
    const __m512i b2 = _mm512_slli_epi32(_mm512_shuffle_epi32(b, 0xEE), 16);
    return _mm512_permutex2var_epi32(_mm512_or_si512(_mm512_and_si512(a, mask), a2), order,
                                     _mm512_or_si512(_mm512_and_si512(b, mask), b2));
}

static inline __m512i even_bytes(__m512i x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
static inline __m512i odd_bytes(__m512i x) { return _mm512_srai_epi16(x, 8); }
#endif

#define ATTEND attend_tiles_int8
#include "tile_attention_scaled.h"
