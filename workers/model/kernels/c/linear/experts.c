// Routes tokens to experts: chooses the experts of each token, groups the step's rows by expert, and adds up the
// experts' outputs. The products of the groups are in linear.c, linear_int.c and linear_wide.c.

#include "../common.h"

enum { MAX_EXPERTS = 4096 };  // as in experts.py

// Ranks of experts of other groups, and of experts that are chosen already. Both are below any score.
static const float LEFT_OUT = -1e38f, CHOSEN = -3e38f;

// How experts are chosen: the best `num_groups` of `groups` groups have the highest sums of two scores. `bias`
// [experts] is added to the scores for the choice, unless it is NULL.
typedef struct {
    const float *bias;
    int64_t experts, chosen, groups, num_groups, softmax, normalised;
    float factor;
} Routing;

static inline int is_finite(const float *x, int64_t count) { return largest_magnitude(x, count) < 0x7f800000; }

static inline void softmax(float *x, int64_t count) {
    float most = x[0], sum = 0;
    for (int64_t i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < count; i++) x[i] = decay(x[i] - most), sum += x[i];
    for (int64_t i = 0; i < count; i++) x[i] /= sum;
}

// Returns the place of the largest number, the first one of equals.
static inline int64_t largest(const float *x, int64_t count) {
    float most = x[0];
    int64_t at = 0;
    for (int64_t i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    while (at < count - 1 && x[at] != most) at++;
    return at;
}

static void leave_out_groups(float *ranked, const Routing *r) {
    float sums[MAX_EXPERTS];
    const int64_t size = r->experts / r->groups;
    for (int64_t group = 0; group < r->groups; group++) {
        float first = LEFT_OUT, second = LEFT_OUT;
        for (int64_t e = group * size; e < (group + 1) * size; e++) {
            const float x = ranked[e];
            second = x > first ? first : x > second ? x : second;
            first = x > first ? x : first;
        }
        sums[group] = first + second;
    }
    for (int64_t i = 0; i < r->num_groups; i++) sums[largest(sums, r->groups)] = CHOSEN;
    for (int64_t e = 0; e < r->experts; e++) ranked[e] = sums[e / size] == CHOSEN ? ranked[e] : LEFT_OUT;
}

// Writes the experts of a token, ascending, and their weights. Weights are NaN if a score is not finite.
static void choose(float *scores, const Routing *r, int32_t *chosen, float *weights) {
    float ranked[MAX_EXPERTS];
    if (!is_finite(scores, r->experts)) {
        const uint32_t nan = 0x7fc00000;
        for (int64_t i = 0; i < r->chosen; i++) chosen[i] = i, memcpy(weights + i, &nan, sizeof nan);
        return;
    }
    if (r->softmax) softmax(scores, r->experts);
    for (int64_t e = 0; e < r->experts; e++) ranked[e] = scores[e] + (r->bias ? r->bias[e] : 0);
    if (r->groups > 1) leave_out_groups(ranked, r);
    for (int64_t i = 0; i < r->chosen; i++) ranked[largest(ranked, r->experts)] = CHOSEN;
    float sum = 0;
    for (int64_t e = 0, i = 0; i < r->chosen; e++)
        if (ranked[e] == CHOSEN) chosen[i] = e, weights[i] = scores[e], sum += scores[e], i++;
    const float divisor = r->normalised ? sum : 1;
    for (int64_t i = 0; i < r->chosen; i++) weights[i] = weights[i] / divisor * r->factor;
}

// scores [rows, experts]: of `softmax`, or as they are; chosen int32 and weights float32 [rows, num_chosen]; the other
// arguments are in Routing.
#define DEFINE_ROUTE(T, NAME)                                                                                          \
    int64_t route_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                   \
        const T *x = a[0].p;                                                                                           \
        int32_t *chosen = a[2].p;                                                                                      \
        float *weights = a[3].p, scores[MAX_EXPERTS];                                                                  \
        const Routing r = {.bias = a[1].p,                                                                             \
                           .experts = a[4].n,                                                                          \
                           .chosen = a[5].n,                                                                           \
                           .groups = a[6].n,                                                                           \
                           .num_groups = a[7].n,                                                                       \
                           .softmax = a[8].n,                                                                          \
                           .normalised = a[9].n,                                                                       \
                           .factor = a[10].f};                                                                         \
        const int64_t step = rows_of_item(r.experts * r.chosen);                                                       \
        if (item < 0) return ceil_div(rows, step);                                                                     \
        for (int64_t row = item * step; row < least(rows, (item + 1) * step); row++) {                                 \
            for (int64_t e = 0; e < r.experts; e++) scores[e] = load_##NAME(x[row * r.experts + e]);                   \
            choose(scores, &r, chosen + row * r.chosen, weights + row * r.chosen);                                     \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_ROUTE(float, f32)
DEFINE_ROUTE(uint16_t, bf16)

// Sorts the choices of experts [rows, num_chosen] by expert, then by row. Writes the number of experts
// that are chosen, then for each of them its number and the end of its rows: groups [1 + 2 * experts]. Writes the row
// of x of each sorted row, tokens [rows * num_chosen], and the sorted row of each choice, places [rows, num_chosen].
// All are int32. There is one item.
int64_t sort_choices(const Arg *a, int64_t rows, int64_t item) {
    const int32_t *chosen = a[0].p;
    int32_t *groups = a[1].p, *tokens = a[2].p, *places = a[3].p, next[MAX_EXPERTS], count = 0, end = 0;
    const int64_t experts = a[4].n, num_chosen = a[5].n;
    if (item < 0) return 1;
    memset(next, 0, sizeof *next * experts);
    for (int64_t i = 0; i < rows * num_chosen; i++) next[chosen[i]]++;
    for (int64_t e = 0; e < experts; e++) {
        if (!next[e]) continue;
        const int32_t first = end;
        end += next[e], next[e] = first;
        groups[1 + 2 * count] = e, groups[2 + 2 * count] = end, count++;
    }
    groups[0] = count;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * num_chosen; i < (row + 1) * num_chosen; i++) {
            places[i] = next[chosen[i]]++;
            tokens[places[i]] = row;
        }
    return 0;
}

enum { RUN = 256 };  // numbers of a row that are summed together

// The sum of each row's outputs, times their weights: y [rows * num_chosen, dim]; places int32 and weights float32
// [rows, num_chosen]; out [rows, dim]. Outputs are added one by one. The sum is rounded, then the residual [rows, dim]
// is added unless it is NULL.
#define DEFINE_COMBINE(T, NAME)                                                                                        \
    int64_t combine_##NAME(const Arg *a, int64_t rows, int64_t item) {                                                 \
        const T *y = a[0].p, *residual = a[3].p;                                                                       \
        const int32_t *places = a[1].p;                                                                                \
        const float *weights = a[2].p;                                                                                 \
        T *out = a[4].p;                                                                                               \
        const int64_t num_chosen = a[5].n, dim = a[6].n, runs = ceil_div(dim, RUN);                                    \
        if (item < 0) return rows * runs;                                                                              \
        const int64_t row = item / runs, first = item % runs * RUN, count = least(RUN, dim - first);                   \
        float sums[RUN] = {0};                                                                                         \
        for (int64_t i = row * num_chosen; i < (row + 1) * num_chosen; i++) {                                          \
            const T *from = y + places[i] * dim + first;                                                               \
            for (int64_t d = 0; d < count; d++) sums[d] += weights[i] * load_##NAME(from[d]);                          \
        }                                                                                                              \
        const T *more = residual ? residual + row * dim + first : NULL;                                                \
        for (int64_t d = 0; d < count; d++) {                                                                          \
            const float sum = load_##NAME(store_##NAME(sums[d]));                                                      \
            out[row * dim + first + d] = store_##NAME(more ? sum + load_##NAME(more[d]) : sum);                        \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

DEFINE_COMBINE(float, f32)
DEFINE_COMBINE(uint16_t, bf16)
