// Vectors of float32 on any processor, by the compiler's vector extension, and what numbers of few bits are in them.
#pragma once

#include "fp8.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // functions that take vectors are inlined

enum { LANES = 8 };  // AVX2 has 16 registers of so many
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

// sum + x * y. Written as such, -ffast-math adds two products first, which takes more registers than there are.
INLINE Floats add_products(Floats sum, Floats x, Floats y) {
#if defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(x, y, sum);
#else
    return sum + x * y;
#endif
}
// Else the compiler loads what several sums need for each of them.
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

INLINE Floats pick(Ints where, Floats x, Floats y) {  // x where all bits are set, y where none is
    Ints a, b;
    memcpy(&a, &x, sizeof a), memcpy(&b, &y, sizeof b);
    return bits_to_floats((where & a) | (~where & b));
}
INLINE Floats larger(Floats x, Floats y) { return pick(x > y, x, y); }

INLINE Floats decay_floats(Floats x) {  // each is decay(x); the compiler makes one vector of the loop
    Floats y;
    for (int i = 0; i < LANES; i++) y[i] = decay(x[i]);
    return y;
}

// Bits 24 to 31 of each lane as E4M3, see fp8.h. With its exponent in a float's place, a number is 2^-120 of itself.
INLINE Floats widen_e4m3(Ints high) {
    const Ints nan = -((high & 0x7f000000) == 0x7f000000);  // 1 where it is one
    return bits_to_floats((high >> 4 & (int32_t)0x87f00000) | nan << 30) * 0x1p120f;
}

// What the elements of a KV cache are.
typedef enum { F32, BF16, INT8, FP8 } Kind;

// 8 unsigned numbers of 16 and of 8 bits, as 32. GCC 12 makes more of the conversion than the one instruction.
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
