// Numbers of FP8 (E4M3, arXiv 2209.05433): a sign, 4 bits of exponent, 3 of mantissa; 0x7f and 0xff are NaN.
#pragma once

#include "common.h"

#define E4M3_MAX 448.0f

// Of subnormal numbers the mantissa counts steps of 2^-9.
static inline float load_e4m3(uint8_t x) {
    const uint32_t size = x & 0x7f, bits = (size << 20) + (120u << 23);
    float value;
    memcpy(&value, &bits, sizeof value);
    value = size < 8 ? (float)size * 0x1p-9f : value;
    return x & 0x80 ? -value : value;
}

// To nearest, ties to even. What would be rounded to more than E4M3_MAX is not for it.
static inline uint8_t store_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t steps = (uint32_t)lrintf(fabsf(x) * 0x1p9f);  // 8 is the smallest normal number
    return (uint8_t)(sign | (size < 121u << 23 ? steps : normal));
}
