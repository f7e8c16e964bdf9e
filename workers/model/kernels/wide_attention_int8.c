// Single queries over a cache of int8.

#include "wide_attention.h"

DEFINE_ATTEND(float, f32, int8_t, int8_f32, (float), scaled_row, scale_of_row)
DEFINE_ATTEND(uint16_t, bf16, int8_t, int8_bf16, (float), scaled_row, scale_of_row)
DEFINE_SINGLES(float, int8_t, int8_f32, paged_attention_int8_f32, CASES)
DEFINE_SINGLES(uint16_t, int8_t, int8_bf16, attend_singles_int8_bf16, CASES_BF16)
