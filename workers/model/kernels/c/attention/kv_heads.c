// Copies KV cache between its blocks and its canonical form, one head's vector after the other.

#include "common.h"

// Copies head_bytes for each of `halves` (a layer's keys, then its values, then the next layer's), each
// token and each slot (KV head), in the direction of COPY. The canonical form is dense: [halves, tokens,
// slots, head_bytes].
//
// cache points to the first half and slot; half_bytes and slot_bytes are its strides. places[i] is the
// offset of token i in a half, in bytes.
#define DEFINE_MOVE(NAME, SIZE, COPY)                                                                                  \
    static void NAME##_##SIZE(char *cache, char *dense, const int64_t *places, int64_t halves, int64_t half_bytes,     \
                              int64_t tokens, int64_t slots, int64_t slot_bytes, int64_t head_bytes) {                 \
        (void)head_bytes;                                                                                              \
        for (int64_t half = 0; half < halves; half++) {                                                                \
            for (int64_t token = 0; token < tokens; token++) {                                                         \
                char *head = cache + half * half_bytes + places[token];                                                \
                for (int64_t slot = 0; slot < slots; slot++, head += slot_bytes, dense += SIZE) COPY(head, dense, SIZE); \
            }                                                                                                          \
        }                                                                                                              \
    }
#define OUT(head, dense, size) memcpy(dense, head, size)
#define IN(head, dense, size) memcpy(head, dense, size)

// A copy of constant size compiles to a few instructions, any other to a call.
#define DEFINE_SIZES(NAME, COPY)                                                                                       \
    DEFINE_MOVE(NAME, 40, COPY)                                                                                        \
    DEFINE_MOVE(NAME, 66, COPY)                                                                                        \
    DEFINE_MOVE(NAME, 128, COPY)                                                                                       \
    DEFINE_MOVE(NAME, 130, COPY)                                                                                       \
    DEFINE_MOVE(NAME, 256, COPY)                                                                                       \
    DEFINE_MOVE(NAME, head_bytes, COPY)                                                                                \
    void NAME(char *cache, char *dense, const int64_t *places, int64_t halves, int64_t half_bytes, int64_t tokens,     \
              int64_t slots, int64_t slot_bytes, int64_t head_bytes) {                                                 \
        (head_bytes == 40    ? NAME##_40                                                                               \
         : head_bytes == 66  ? NAME##_66                                                                               \
         : head_bytes == 128 ? NAME##_128                                                                              \
         : head_bytes == 130 ? NAME##_130                                                                              \
         : head_bytes == 256 ? NAME##_256                                                                              \
                             : NAME##_head_bytes)(cache, dense, places, halves, half_bytes, tokens, slots, slot_bytes, \
                                                  head_bytes);                                                         \
    }

DEFINE_SIZES(read_heads, OUT)
DEFINE_SIZES(write_heads, IN)
