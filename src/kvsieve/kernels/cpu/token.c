// Attention of a token, or of the last few, over all entries that are stored, where they lie.
#include <string.h>
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
    float *weights;            // logarithms of the entries' weights, where the keys are; null: all weigh 1
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
        if (job->weights)
            for (int i = 0; i < n; i++)
                for (int g = 0; g < groups; g++) logits[g * BLOCK + i] += job->weights[first + found[i]];
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
            if (job->weights)
                for (int i = 0; i < seen; i++) s[i] += job->weights[start + found[i]];
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

// Functions of layers.c.
typedef int64_t (*Before)(const void *layer, const void *x, const void *cosine, const void *sine, void *scratch,
                          void *query, void *key, void *value, int64_t rows, int64_t angles, int64_t threads);
typedef int64_t (*After)(const void *layer, const void *attended, const void *x, void *scratch, void *out, int64_t rows,
                         int64_t threads);

// A decoder layer, of layers.c, and its stored entries, which a token's join.
typedef struct {
    const void *layer;
    Token job;       // `size` of the entries without the token
    int32_t *index;  // token index of each entry, in the order of the keys
    int64_t stride;  // slots that a token takes: one for all heads, or one for each, side by side
    int64_t written; // the marks' slots that are read are multiples of it
} Stored;

// Caches whose tokens pass together.
typedef struct {
    Stored *layers;
    int64_t index; // token index of the token of each row
} Rows;

// A token of each row through several layers.
typedef struct {
    Before before;
    After after;
    const Rows *caches;
    const void *cosine, *sine; // [angles, dim of a head]
    void *scratch;             // for each row: four times `wide`, `dim`, and what a layer needs
    int64_t number, count;     // caches; layers
    int64_t rows, dim, wide;   // rows of all caches; channels of hidden states; the most that queries and values have
    int64_t angles, half;
} Pass;

// Marks of a new token: it is real, or of each head its own slot is seen, others are not, nor those behind them.
INLINE void mark(const Stored *stored) {
    const Token *job = &stored->job;
    int64_t size = job->size, end = size + stored->stride;
    end = (end + stored->written - 1) / stored->written * stored->written;
    for (int64_t b = 0; b < job->batch; b++)
        for (int64_t h = 0; h < job->heads; h++) {
            int64_t at = b * job->seen_row + h * job->seen_head;
            for (int64_t t = size; t < end; t++)
                if (job->item == 1) ((uint8_t *)job->seen)[at + t] = 1;
                else if (job->item == 2) ((uint16_t *)job->seen)[at + t] = t - size == h ? 0 : 0xff7f;
                else ((uint32_t *)job->seen)[at + t] = t - size == h ? 0 : 0xff7fffff;
        }
}

// Store a token's key and value [batch, heads, dim].
static void add_entry(const Stored *stored, const char *key, const char *value, int64_t index) {
    const Token *job = &stored->job;
    int64_t bytes = job->dim * (job->half ? 2 : 4), apart = stored->stride > 1;
    for (int64_t b = 0; b < job->batch; b++)
        for (int64_t h = 0; h < job->heads; h++) {
            int64_t from = (b * job->heads + h) * bytes, to = b * job->row + h * (job->head + apart) + job->size;
            memcpy((char *)job->keys + to * bytes, key + from, (size_t)bytes);
            memcpy((char *)job->values + to * bytes, value + from, (size_t)bytes);
            stored->index[to] = (int32_t)index;
            if (job->weights) job->weights[to] = 0;
        }
    if (job->seen) mark(stored);
}

// A layer's entries of all caches: the tokens' are added, and their queries attend.
static void attend_stored(const Pass *pass, int64_t layer, char *query, const char *key, const char *value,
                          char *attended, int64_t threads) {
    for (int64_t c = 0; c < pass->number; c++) {
        Stored *stored = pass->caches[c].layers + layer;
        Token *job = &stored->job;
        int64_t entries = job->batch * job->heads * job->dim * (job->half ? 2 : 4), queries = entries * job->groups;
        add_entry(stored, key, value, pass->caches[c].index);
        job->size += stored->stride;
        job->query = query, job->out = attended;
        attend(job, threads);
        key += entries, value += entries, query += queries, attended += queries;
    }
}

// x [rows, dim] becomes the output of the last layer, in `out`; 0: there is no memory.
int64_t through_layers(const Pass *pass, const void *x, void *out, int64_t threads) {
    int64_t rows = pass->rows, bytes = pass->half ? 2 : 4, wide = rows * pass->wide * bytes;
    char *query = pass->scratch, *key = query + wide, *value = key + wide, *attended = value + wide;
    char *other = attended + wide, *scratch = other + rows * pass->dim * bytes;
    for (int64_t i = 0; i < pass->count; i++) {
        const void *layer = pass->caches->layers[i].layer;
        void *to = (pass->count - i) % 2 ? out : other;
        if (!pass->before(layer, x, pass->cosine, pass->sine, scratch, query, key, value, rows, pass->angles, threads))
            return 0;
        attend_stored(pass, i, query, key, value, attended, threads);
        if (!pass->after(layer, attended, x, scratch, to, rows, threads)) return 0;
        x = to;
    }
    return 1;
}
