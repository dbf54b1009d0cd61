// Attention of a token, or of the last few, over all entries that are stored, where they lie.
#include "common.h"

// Entries that are looked at together; query heads of several tokens that are.
#define BLOCK 64
#define ROWS 64
// Numbers of keys from which on several threads take part.
#define MANY 65536

typedef struct {
    const void *query;         // [batch, heads, groups, fresh, dim]
    const void *keys, *values; // entry t of a head: b * row + h * head + t, of dim numbers
    const void *seen;          // of a head's entry t: b * seen_row + h * seen_head + t; null: all are seen
    void *out;                 // [batch, heads, groups, fresh, dim]
    int64_t batch, heads, groups, dim, size, row, head;
    int64_t item, seen_row, seen_head; // item: bytes of a mark; one byte is true, two or four are 0 where seen
    int64_t newest, half;              // newest: the last entry is seen in any case; half: bfloat16
    int64_t fresh, apart;              // tokens; each sees `apart` entries more than the one before it, the last all
    float scale;
} Token;

INLINE void loaded(const void *from, int64_t at, int half, int n, float *restrict x) {
    if (half) {
        const uint16_t *restrict b = (const uint16_t *)from + at;
        for (int i = 0; i < n; i++) x[i] = of_half(b[i]);
    } else {
        const float *restrict f = (const float *)from + at;
        for (int i = 0; i < n; i++) x[i] = f[i];
    }
}

// Numbers of the next entries that are seen, from *from on: how many.
INLINE int next_seen(const Token *job, int64_t marks, int64_t *from, int32_t *found) {
    int n = 0;
    int64_t t = *from;
    for (; t < job->size && n < BLOCK; t++) {
        int is = 1;
        if (job->seen && job->item == 1) is = ((const uint8_t *)job->seen)[marks + t] != 0;
        else if (job->seen && job->item == 2) is = ((const uint16_t *)job->seen)[marks + t] == 0;
        else if (job->seen) is = ((const uint32_t *)job->seen)[marks + t] == 0;
        found[n] = (int32_t)t;
        n += is || (job->newest && t + 1 == job->size);
    }
    *from = t;
    return n;
}

// Logits become powers of their difference to the greatest one so far; what was summed up before follows it.
INLINE void weigh(float *restrict s, int n, float *most, float *sum, float *restrict acc, int dim) {
    float top = *most, all = 0;
    for (int i = 0; i < n; i++) top = s[i] > top ? s[i] : top;
    float before = exp_of(*most - top);
    for (int i = 0; i < n; i++) s[i] = exp_of(s[i] - top);
    for (int i = 0; i < n; i++) all += s[i];
    *sum = *sum * before + all, *most = top;
    if (before != 1.0f)
        for (int j = 0; j < dim; j++) acc[j] *= before;
}

INLINE void one_head(const Token *job, int64_t b, int64_t h, int groups, int dim, int half) {
    float query[groups * dim], acc[groups * dim], logits[groups * BLOCK], most[groups], sum[groups];
    float x[dim];
    int32_t found[BLOCK];
    int64_t number = (b * job->heads + h) * groups, first = b * job->row + h * job->head, t = 0;
    loaded(job->query, number * dim, half, groups * dim, query);
    for (int j = 0; j < groups * dim; j++) query[j] *= job->scale;
    for (int j = 0; j < groups * dim; j++) acc[j] = 0;
    for (int g = 0; g < groups; g++) most[g] = -3e38f, sum[g] = 0;
    while (t < job->size) {
        int n = next_seen(job, b * job->seen_row + h * job->seen_head, &t, found);
        for (int i = 0; i < n; i++) {
            loaded(job->keys, (first + found[i]) * dim, half, dim, x);
            for (int g = 0; g < groups; g++) {
                const float *restrict q = query + g * dim;
                float product = 0;
                for (int j = 0; j < dim; j++) product += q[j] * x[j];
                logits[g * BLOCK + i] = product;
            }
        }
        for (int g = 0; g < groups; g++) weigh(logits + g * BLOCK, n, most + g, sum + g, acc + g * dim, dim);
        for (int i = 0; i < n; i++) {
            loaded(job->values, (first + found[i]) * dim, half, dim, x);
            for (int g = 0; g < groups; g++) {
                float *restrict to = acc + g * dim, weight = logits[g * BLOCK + i];
                for (int j = 0; j < dim; j++) to[j] += weight * x[j];
            }
        }
    }
    for (int g = 0; g < groups; g++)
        for (int j = 0; j < dim; j++) {
            float is = acc[g * dim + j] / sum[g];
            if (half) ((uint16_t *)job->out)[(number + g) * dim + j] = to_half(is);
            else ((float *)job->out)[(number + g) * dim + j] = is;
        }
}

// `some` queries of a head's last tokens, from number `first` on: query n is that of token n % fresh.
INLINE void some_of_head(const Token *job, int64_t b, int64_t h, int first, int some, int dim, int half) {
    float query[some * dim], acc[some * dim], logits[some * BLOCK], most[some], sum[some], x[BLOCK * dim];
    int32_t found[BLOCK], sees[some];
    int64_t number = (b * job->heads + h) * job->groups * job->fresh + first;
    int64_t start = b * job->row + h * job->head, t = 0;
    loaded(job->query, number * dim, half, some * dim, query);
    for (int j = 0; j < some * dim; j++) query[j] *= job->scale, acc[j] = 0;
    for (int r = 0; r < some; r++) most[r] = -3e38f, sum[r] = 0;
    while (t < job->size) {
        int n = next_seen(job, b * job->seen_row + h * job->seen_head, &t, found);
        for (int i = 0; i < n; i++) loaded(job->keys, (start + found[i]) * dim, half, dim, x + i * dim);
        for (int r = 0; r < some; r++) {
            int64_t end = job->size - (job->fresh - 1 - (first + r) % job->fresh) * job->apart;
            float *restrict s = logits + r * BLOCK;
            int seen = n;
            while (seen && found[seen - 1] >= end) seen--;
            sees[r] = seen;
            for (int i = 0; i < seen; i++) {
                const float *restrict q = query + r * dim, *restrict key = x + i * dim;
                float product = 0;
                for (int j = 0; j < dim; j++) product += q[j] * key[j];
                s[i] = product;
            }
            if (seen) weigh(s, seen, most + r, sum + r, acc + r * dim, dim);
        }
        for (int i = 0; i < n; i++) loaded(job->values, (start + found[i]) * dim, half, dim, x + i * dim);
        for (int r = 0; r < some; r++)
            for (int i = 0; i < sees[r]; i++) {
                float *restrict to = acc + r * dim, weight = logits[r * BLOCK + i];
                const float *restrict value = x + i * dim;
                for (int j = 0; j < dim; j++) to[j] += weight * value[j];
            }
    }
    for (int r = 0; r < some; r++) {
        // Padding may see nothing.
        float share = sum[r] > 0 ? 1 / sum[r] : 0;
        for (int j = 0; j < dim; j++) {
            float is = acc[r * dim + j] * share;
            if (half) ((uint16_t *)job->out)[(number + r) * dim + j] = to_half(is);
            else ((float *)job->out)[(number + r) * dim + j] = is;
        }
    }
}

// Sizes that the compiler knows become straight code.
#define SIZED(WHAT, ...)                                                                                              \
    do {                                                                                                              \
        if (job->half && job->dim == 64) WHAT(job, b, h, __VA_ARGS__, 64, 1);                                         \
        else if (job->half && job->dim == 128) WHAT(job, b, h, __VA_ARGS__, 128, 1);                                  \
        else if (job->half) WHAT(job, b, h, __VA_ARGS__, (int)job->dim, 1);                                           \
        else if (job->dim == 64) WHAT(job, b, h, __VA_ARGS__, 64, 0);                                                 \
        else WHAT(job, b, h, __VA_ARGS__, (int)job->dim, 0);                                                          \
    } while (0)

// Apart from each other, so that each becomes the code that it is alone.
static __attribute__((noinline)) void alone(const Token *job, int64_t b, int64_t h) {
    SIZED(one_head, (int)job->groups);
}

static __attribute__((noinline)) void together(const Token *job, int64_t b, int64_t h, int64_t first, int64_t some) {
    SIZED(some_of_head, (int)first, (int)some);
}

void attend(const Token *job, int64_t threads) {
    int64_t queries = job->groups * job->fresh, parts = job->fresh > 1 ? (queries + ROWS - 1) / ROWS : 1;
    int64_t most = (queries + parts - 1) / parts, tasks = job->batch * job->heads * parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads) \
    if (threads > 1 && tasks > 1 && tasks * job->size * job->dim > MANY)
    for (int64_t i = 0; i < tasks; i++) {
        int64_t b = i / parts / job->heads, h = i / parts % job->heads, first = i % parts * most;
        int64_t some = queries - first < most ? queries - first : most;
        if (job->fresh > 1) together(job, b, h, first, some);
        else alone(job, b, h);
    }
}
