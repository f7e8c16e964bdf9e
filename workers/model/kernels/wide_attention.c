// Single queries over a cache of the queries' dtype.

#include "wide_attention.h"

#define SAME(D) (D)
#define ONE(row, D) 1.0f
DEFINE_ATTEND(float, f32, float, f32, load_f32, SAME, ONE)
DEFINE_ATTEND(uint16_t, bf16, uint16_t, bf16, load_bf16, SAME, ONE)
DEFINE_SINGLES(float, float, f32, paged_attention_f32, CASES)
DEFINE_SINGLES(uint16_t, uint16_t, bf16, attend_singles_bf16, CASES_BF16)
