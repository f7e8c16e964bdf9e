// FP8 numbers (E4M3, arXiv 2209.05433): sign, 4 bits of exponent, 3 of mantissa; 0x7f and 0xff are
// NaN. bfloat16 represents each of them exactly.
#pragma once

#include "common.h"

#define E4M3_MAX 448.0f

// The mantissa of a subnormal number counts steps of 2^-9.
static inline float load_e4m3(uint8_t x) {
    const uint32_t size = x & 0x7f, bits = (size << 20) + (120u << 23);
    float value;
    memcpy(&value, &bits, sizeof value);
    value = size < 8 ? (float)size * 0x1p-9f : value;
    return x & 0x80 ? -value : value;
}

// Rounds to nearest, ties to even. Numbers that would round above E4M3_MAX are not allowed.
static inline uint8_t store_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t steps = (uint32_t)lrintf(fabsf(x) * 0x1p9f);  // 8 is the smallest normal number
    return (uint8_t)(sign | (size < 121u << 23 ? steps : normal));
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_FP8

// The lower and the upper byte in bfloat16 of each number without its sign. 0 to 7 are subnormal, 127
// is NaN.
#define LOWER_HALF 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70
#define UPPER_HALF_BUT_LAST 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0
#define ROW LOWER_HALF, UPPER_HALF_BUT_LAST, 0xf0
#define TIMES_8(X) X, X, X, X, X, X, X, X
#define TIMES_16(X) TIMES_8(X), TIMES_8(X)
static const uint8_t e4m3_lower[128] __attribute__((aligned(64))) = {
    0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, UPPER_HALF_BUT_LAST, 0xf0, ROW, ROW, ROW, ROW, ROW, ROW,
    LOWER_HALF, UPPER_HALF_BUT_LAST, 0xc0};
static const uint8_t e4m3_upper[128] __attribute__((aligned(64))) = {
    0,  59, 59, 59, 60, 60, 60, 60, TIMES_8(60), TIMES_16(61), TIMES_16(62), TIMES_16(63), TIMES_16(64), TIMES_16(65),
    TIMES_16(66), TIMES_8(67), 67, 67, 67, 67, 67, 67, 67, 127};

static inline __m512i e4m3_look_up(const uint8_t *table, __m512i numbers) {  // the result has no sign
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), numbers, _mm512_load_si512(table + 64));
}

// Widens 64 numbers: of each 16, the first 8 to `low` and the others to `high`.
static inline void e4m3_widen(__m512i numbers, __m512i *low, __m512i *high) {
    const __m512i lower = e4m3_look_up(e4m3_lower, numbers), upper = e4m3_look_up(e4m3_upper, numbers);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i with_sign = _mm512_ternarylogic_epi64(upper, numbers, sign, 0xf8);  // upper | numbers & sign
    *low = _mm512_unpacklo_epi8(lower, with_sign);
    *high = _mm512_unpackhi_epi8(lower, with_sign);
}

#endif
