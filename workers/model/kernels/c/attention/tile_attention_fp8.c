// Like tile_attention.c, over a cache of fp8, whose numbers bfloat16 represents exactly.

#include "tile.h"

#ifdef HAS_TILES
static inline __m512i dot(__m512i sum, __m512i a, __m512i b) {
    return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
static inline __m512 sum_of(__m512i sum) { return (__m512)sum; }

static inline float factor_of(float peak) { return (void)peak, 1; }  // bfloat16 has the range of float
static inline float scale_of(float peak) { return (void)peak, 1; }

static inline __m512i pair_up(__m512 low, __m512 high, float factor) {
    (void)factor;
    const __m512i order = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
    return _mm512_shuffle_epi8((__m512i)_mm512_cvtne2ps_pbh(high, low), order);
}

// Converts E4M3 numbers, in the upper bytes of `upper` and the lower bytes of `lower`, to bfloat16. Moves
// sign, exponent and mantissa to their places, then adds 120 to the exponent or, for a subnormal number,
// the difference from its value.
static inline __m512i widen(__m512i upper, __m512i lower) {
    const __m512i differences = _mm512_castsi128_si512(_mm_set_epi32(0x3bf03be0, 0x3bd03bc0, 0x3b903b60, 0x3af00000));
    const __mmask32 subnormal = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(0x7800));
    const __m512i added = _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(120 << 7), subnormal, lower, differences);
    return _mm512_add_epi16(_mm512_and_si512(_mm512_srai_epi16(upper, 4), _mm512_set1_epi16((short)0x87f0)), added);
}
static inline __m512i even_bytes(__m512i x) { return widen(_mm512_slli_epi16(x, 8), x); }
static inline __m512i odd_bytes(__m512i x) { return widen(x, _mm512_srli_epi16(x, 8)); }
#endif

#define ATTEND attend_tiles_fp8
#include "tile_attention_scaled.h"
