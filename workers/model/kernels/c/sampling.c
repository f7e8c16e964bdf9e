// Samples the next token: the fused form of gumbel.py and of top-k, top-p and min-p in filters.py. Adds
// the bias of a watermark: watermark.py.

#include "common.h"

enum { BLOCK = 128 };

// -log(1 - u) for u in [2^-32, 1 - 2^-24]; uses the series for small u, where 1 - u would round.
static inline float exponential(float u) {
    const float series = u * (1 + u * (1.0f / 2 + u * (1.0f / 3 + u * (1.0f / 4 + u * (1.0f / 5)))));
    return u < 1.0f / 64 ? series : -logf(1 - u);
}

// The lower 31 bits of hash_token_ids in proto/hashing.py.
static inline int32_t hash_id(uint32_t id, uint32_t first, uint32_t second) {
    uint32_t x = id * 0x9E3779B1u + first;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x += second;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return (int32_t)(x & 0x7FFFFFFF);
}

static inline float uniform(uint32_t id, uint32_t first, uint32_t second) {
    const float u = ((float)hash_id(id, first, second) + 0.5f) * 0x1p-31f;
    return u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f;
}

// An upper bound of -log(exponential(u)), which is at most -log(u), from the exponent of u.
static inline float most_noise(float u) {
    uint32_t bits;
    memcpy(&bits, &u, sizeof bits);
    return (float)(127 - (int32_t)(bits >> 23)) * 0.69314718f + 1e-3f;
}

// The filters of a row. It keeps the top_k best tokens (0: all), of these the best up to the mass
// top_p, and no token whose score is more than -log_min_p below the best.
typedef struct {
    float top_k, top_p, log_min_p;
} Filter;

typedef struct {
    const void *logits;
    int wide;  // in float32, not bfloat16
    int64_t vocab;
    float scale, top;  // 1 / temperature, and the largest score
} Row;

// A token's place is the distance of its score from the top, in steps of 2^-16; scores with the same
// place are ties. Distances from 64 on share one place, because such tokens have no mass. Places are
// counted in two passes, first by their upper bits, then by their lower bits.
enum { BITS_OF_TURN = 11, PLACES = 1 << BITS_OF_TURN, LAST_PLACE = PLACES * PLACES - 1 };

typedef struct {
    int32_t count[PLACES];
    float mass[PLACES];
} Histogram;

static void load_scores(const Row *row, int64_t begin, int64_t count, float *score) {
    const float *wide = (const float *)row->logits + begin;
    const uint16_t *narrow = (const uint16_t *)row->logits + begin;
    if (row->wide)
        for (int64_t i = 0; i < count; i++) score[i] = wide[i] * row->scale;
    else
        for (int64_t i = 0; i < count; i++) score[i] = load_bf16(narrow[i]) * row->scale;
}

static inline int32_t place_of(const Row *row, float score) {
    float steps = (row->top - score) * 65536;
    steps = steps > 0 ? steps : 0;
    return (int32_t)(steps < LAST_PLACE ? steps : LAST_PLACE);
}

// Counts the tokens of a row by the upper bits of their places. If `upper` is not -1, counts the tokens
// with these upper bits by their lower bits.
static void count_places(const Row *row, int32_t upper, Histogram *found) {
    memset(found, 0, sizeof *found);
    for (int64_t begin = 0; begin < row->vocab; begin += BLOCK) {
        const int64_t count = least(BLOCK, row->vocab - begin);
        float score[BLOCK], mass[BLOCK];
        int32_t place[BLOCK];
        load_scores(row, begin, count, score);
        for (int64_t i = 0; i < count; i++) mass[i] = decay(score[i] - row->top);
        for (int64_t i = 0; i < count; i++) {
            const int32_t all = place_of(row, score[i]), high = all >> BITS_OF_TURN;
            place[i] = upper < 0 ? high : high == upper ? all & (PLACES - 1) : -1;
        }
        for (int64_t i = 0; i < count; i++)
            if (place[i] >= 0) {
                found->count[place[i]]++;
                found->mass[place[i]] += mass[i];
            }
    }
}

// Tokens before a place.
typedef struct {
    double count, mass;
} Before;

// Returns the first place at which the number of tokens, or their mass if `by_mass`, reaches `enough`;
// the last place if it never does.
static int32_t find_place(const Histogram *in, int by_mass, double enough, Before *before) {
    int32_t place = 0;
    for (; place < PLACES - 1; place++) {
        const double count = before->count + in->count[place], mass = before->mass + in->mass[place];
        if ((by_mass ? mass : count) >= enough) break;
        before->count = count;
        before->mass = mass;
    }
    return place;
}

// Returns the last place that is kept, and the mass up to it.
static int32_t last_place(const Row *row, const Histogram *uppers, int by_mass, double enough, double *mass) {
    Histogram lowers;
    Before before = {0, 0};
    const int32_t upper = find_place(uppers, by_mass, enough, &before);
    count_places(row, upper, &lowers);
    const int32_t lower = find_place(&lowers, by_mass, enough, &before);
    *mass = before.mass + lowers.mass[lower];
    return upper << BITS_OF_TURN | lower;
}

static int64_t sample_filtered(const Row *row, const Filter *filter, const uint32_t *key) {
    int32_t last = LAST_PLACE;
    if (filter->top_k > 0 || filter->top_p < 1) {
        Histogram uppers;
        count_places(row, -1, &uppers);
        double total = 0;
        if (filter->top_k > 0) last = last_place(row, &uppers, 0, filter->top_k, &total);
        else
            for (int32_t place = 0; place < PLACES; place++) total += uppers.mass[place];
        if (filter->top_p < 1) last = last_place(row, &uppers, 1, filter->top_p * total, &total);
    }
    float best = -3e38f;
    int64_t token = -1;
    for (int64_t begin = 0; begin < row->vocab; begin += BLOCK) {
        const int64_t count = least(BLOCK, row->vocab - begin);
        float score[BLOCK];
        int32_t place[BLOCK];
        load_scores(row, begin, count, score);
        for (int64_t i = 0; i < count; i++)
            place[i] = score[i] - row->top < filter->log_min_p ? LAST_PLACE + 1 : place_of(row, score[i]);
        for (int64_t i = 0; i < count; i++) {
            if (place[i] > last) continue;
            const float noisy = score[i] - logf(exponential(uniform((uint32_t)(begin + i), key[0], key[1])));
            if (noisy <= best) continue;
            best = noisy;
            token = begin + i;
        }
    }
    return token;
}

static inline uint16_t bits_bf16(uint16_t x) { return x; }
static inline uint32_t bits_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// logits [rows, vocab], rows `stride` elements apart; temperatures [rows], 0 is greedy; keys [rows, 2];
// tokens [rows]; filters [rows] or NULL. A row without filters has top_k 0, top_p 1, log_min_p -3e38.
//
// The first of several equal maxima wins. A token is -1 if the largest logit is not finite or a logit
// is NaN. This is detected from the largest bits of either sign, because -ffast-math assumes that there
// are no such numbers.
#define DEFINE_SAMPLE(T, NAME, BITS)                                                                                   \
    int64_t sample_##NAME(const Arg *a, int64_t rows, int64_t row) {                                                   \
        if (row < 0) return rows;                                                                                      \
        const T *from = (const T *)a[0].p + row * a[1].n;                                                              \
        const float temperature = ((const float *)a[2].p)[row], scale = temperature > 0 ? 1 / temperature : 1;         \
        const uint32_t *key = (const uint32_t *)a[3].p + 2 * row;                                                      \
        const int64_t vocab = a[5].n;                                                                                  \
        const Filter *filter = a[6].p ? (const Filter *)a[6].p + row : NULL;                                           \
        const int filtered = temperature > 0 && filter &&                                                              \
                             (filter->top_k > 0 || filter->top_p < 1 || filter->log_min_p > -3e38f);                   \
        float best = -3e38f;                                                                                           \
        int64_t token = -1;                                                                                            \
        const BITS sign = (BITS)1 << (8 * sizeof(BITS) - 1);                                                           \
        const BITS infinity = (BITS)(0xff800000u >> (32 - 8 * sizeof(BITS)));  /* the negative one */                  \
        BITS negative = 0, positive = 0;                                                                               \
        for (int64_t begin = 0; begin < vocab; begin += BLOCK) {                                                       \
            const int64_t count = least(BLOCK, vocab - begin);                                                         \
            float score[BLOCK], top = -3e38f;                                                                          \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                const BITS bits = bits_##NAME(from[begin + i]), flipped = bits ^ sign;                                 \
                negative = bits > negative ? bits : negative;                                                          \
                positive = flipped > positive ? flipped : positive;                                                    \
            }                                                                                                          \
            if (temperature > 0 && !filtered) {                                                                        \
                float u[BLOCK];                                                                                        \
                for (int64_t i = 0; i < count; i++) {                                                                  \
                    u[i] = uniform((uint32_t)(begin + i), key[0], key[1]);                                             \
                    score[i] = load_##NAME(from[begin + i]) * scale;                                                   \
                    const float most = score[i] + most_noise(u[i]);                                                    \
                    top = most > top ? most : top;                                                                     \
                }                                                                                                      \
                if (top <= best) continue;                                                                             \
                for (int64_t i = 0; i < count; i++) score[i] -= logf(exponential(u[i]));                               \
                top = -3e38f;                                                                                          \
            } else {                                                                                                   \
                for (int64_t i = 0; i < count; i++) score[i] = load_##NAME(from[begin + i]);                           \
            }                                                                                                          \
            for (int64_t i = 0; i < count; i++) top = score[i] > top ? score[i] : top;                                 \
            if (top <= best) continue;                                                                                 \
            best = top;                                                                                                \
            for (int64_t i = count - 1; i >= 0; i--)                                                                   \
                if (score[i] == top) token = begin + i;                                                                \
        }                                                                                                              \
        if (negative > infinity || positive >= infinity) token = -1;                                                   \
        if (filtered && token >= 0) {                                                                                  \
            const Row scored = {from, sizeof(T) == 4, vocab, scale, best * scale};                                     \
            token = sample_filtered(&scored, filter, key);                                                             \
        }                                                                                                              \
        ((int64_t *)a[4].p)[row] = token;                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_SAMPLE(float, f32, uint32_t)
DEFINE_SAMPLE(uint16_t, bf16, uint16_t)

static inline uint64_t rotate_bits(uint64_t x, int count) { return x << count | x >> (64 - count); }

static void sip_rounds(uint64_t *v, int count) {
    for (int i = 0; i < count; i++) {
        v[0] += v[1], v[2] += v[3];
        v[1] = rotate_bits(v[1], 13) ^ v[0], v[3] = rotate_bits(v[3], 16) ^ v[2];
        v[0] = rotate_bits(v[0], 32) + v[3], v[2] += v[1];
        v[3] = rotate_bits(v[3], 21) ^ v[0], v[1] = rotate_bits(v[1], 17) ^ v[2];
        v[2] = rotate_bits(v[2], 32);
    }
}

// SipHash-2-4 of 64-bit words; hash_context in proto/hashing.py.
static uint64_t hash_context(const uint64_t *key, const uint64_t *words, int64_t count) {
    uint64_t v[4] = {key[0] ^ 0x736F6D6570736575, key[1] ^ 0x646F72616E646F6D, key[0] ^ 0x6C7967656E657261,
                     key[1] ^ 0x7465646279746573};
    for (int64_t i = 0; i <= count; i++) {
        const uint64_t word = i < count ? words[i] : (uint64_t)(8 * count) << 56;
        v[3] ^= word;
        sip_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xFF;
    sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

// Adds delta to the scores of green tokens: scores [rows, vocab] float32, rows `stride` elements apart;
// out [rows, vocab]; contexts [rows, width] and key [2] int64. A token is green if its hash is below the
// threshold.
int64_t add_green(const Arg *a, int64_t rows, int64_t row) {
    if (row < 0) return rows;
    const int64_t vocab = a[3].n, width = a[5].n;
    const float *from = (const float *)a[0].p + row * a[1].n;
    float *restrict out = (float *)a[2].p + row * vocab;
    const uint64_t hash = hash_context((const uint64_t *)a[6].p, (const uint64_t *)a[4].p + row * width, width);
    const uint32_t first = (uint32_t)(hash >> 32), second = (uint32_t)hash;
    const int32_t threshold = (int32_t)a[7].n;
    const float delta = (float)a[8].f;
    for (int64_t i = 0; i < vocab; i++)
        out[i] = from[i] + (hash_id((uint32_t)i, first, second) < threshold ? delta : 0);
    return 0;
}
