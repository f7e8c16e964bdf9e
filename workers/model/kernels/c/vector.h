// Vectors of float32 on any processor, by the compiler's vector extension, and conversions of small
// number formats to them.
#pragma once

#include "fp8.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // functions with vector arguments are inlined

enum { LANES = 8 };  // AVX2 has 16 registers of 8 floats
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE Floats load_floats(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE void store_floats(float *to, Floats x) { memcpy(to, &x, sizeof x); }

// sum + x * y. Written as a plain expression, -ffast-math adds two products first, which needs more
// registers than there are.
INLINE Floats add_products(Floats sum, Floats x, Floats y) {
#if defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(x, y, sum);
#else
    return sum + x * y;
#endif
}
// Keeps a value in a register. Otherwise the compiler loads it again for each sum that needs it.
INLINE Floats in_register(Floats x) {
#ifdef __AVX2__
    __asm__("" : "+x"(x));
#endif
    return x;
}
INLINE Floats add_product(Floats sum, float factor, Floats x) { return add_products(sum, factor - (Floats){0}, x); }

INLINE Floats bits_to_floats(Ints bits) {
    Floats x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE Floats pick(Ints where, Floats x, Floats y) {  // x where all bits are set, y where no bit is
    Ints a, b;
    memcpy(&a, &x, sizeof a), memcpy(&b, &y, sizeof b);
    return bits_to_floats((where & a) | (~where & b));
}
INLINE Floats larger(Floats x, Floats y) { return pick(x > y, x, y); }

INLINE Floats decay_floats(Floats x) {  // decay(x) of each lane
    Floats y;
#pragma GCC unroll 1  // GCC 12 does not vectorize a loop that it has unrolled
    for (int i = 0; i < LANES; i++) y[i] = decay(x[i]);
    return y;
}

// Converts bits 24 to 31 of each lane from E4M3; see fp8.h. With its exponent in the place of a
// float's exponent, a number is scaled by 2^-120.
INLINE Floats widen_e4m3(Ints high) {
    const Ints nan = -((high & 0x7f000000) == 0x7f000000);  // 1 where it is NaN
    return bits_to_floats((high >> 4 & (int32_t)0x87f00000) | nan << 30) * 0x1p120f;
}

// Element types of a KV cache.
typedef enum { F32, BF16, INT8, FP8, INT4 } Kind;

// Widens 8 unsigned numbers of 16 or 8 bits to 32 bits. GCC 12 does not compile the conversion to a
// single instruction.
INLINE Ints load_halves(const void *from) {
    Halves x;
    memcpy(&x, from, sizeof x);
#ifdef __AVX2__
    return (Ints)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Ints);
#endif
}

INLINE Ints load_bytes(const void *from) {
#ifdef __AVX2__
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
#else
    Bytes x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, Ints);
#endif
}

INLINE Floats load_elements(const void *from, const Kind kind) {
    if (kind == F32) return load_floats(from);
    if (kind == BF16) return bits_to_floats(load_halves(from) << 16);
    const Ints high = load_bytes(from) << 24;
    return kind == INT8 ? __builtin_convertvector(high >> 24, Floats) : widen_e4m3(high);
}
