// Single queries over a cache of fp8.

#include "fp8.h"
#include "wide_attention.h"

DEFINE_ATTEND(float, f32, uint8_t, fp8_f32, load_e4m3, scaled_row, scale_of_row)
DEFINE_ATTEND(uint16_t, bf16, uint8_t, fp8_bf16, load_e4m3, scaled_row, scale_of_row)
DEFINE_SINGLES(float, uint8_t, fp8_f32, paged_attention_fp8_f32, CASES)
DEFINE_SINGLES(uint16_t, uint8_t, fp8_bf16, attend_singles_fp8_bf16, CASES_BF16)
