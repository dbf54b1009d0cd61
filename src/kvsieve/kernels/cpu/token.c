// Attention of one token over all entries that are stored, where they lie.
#include "common.h"

// Entries that are looked at together.
#define BLOCK 64
// Numbers of keys from which on several threads take part.
#define MANY 65536

typedef struct {
    const void *query;         // [batch, heads, groups, dim]
    const void *keys, *values; // entry t of a head: b * row + h * head + t, of dim numbers
    const void *seen;          // of a head's entry t: b * seen_row + h * seen_head + t; null: all are seen
    void *out;                 // [batch, heads, groups, dim]
    int64_t batch, heads, groups, dim, size, row, head;
    int64_t item, seen_row, seen_head; // item: bytes of a mark; one byte is true, two or four are 0 where seen
    int64_t newest, half;              // newest: the last entry is seen in any case; half: bfloat16
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

void attend(const Token *job, int64_t threads) {
    int64_t rows = job->batch * job->heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads) \
    if (threads > 1 && rows > 1 && rows * job->size * job->dim > MANY)
    for (int64_t i = 0; i < rows; i++) {
        int64_t b = i / job->heads, h = i % job->heads;
        int groups = (int)job->groups, dim = (int)job->dim;
        // Sizes that the compiler knows become straight code.
        if (job->half && dim == 64) one_head(job, b, h, groups, 64, 1);
        else if (job->half && dim == 128) one_head(job, b, h, groups, 128, 1);
        else if (job->half) one_head(job, b, h, groups, dim, 1);
        else if (dim == 64) one_head(job, b, h, groups, 64, 0);
        else one_head(job, b, h, groups, dim, 0);
    }
}
