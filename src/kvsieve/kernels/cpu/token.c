// Attention of a token, or of the last few, over all entries that are stored, where they lie.
#include <string.h>
#include "common.h"
#include "token.h"
#include "vectors.h"

// Entries that are looked at together; queries of several tokens that are: at most, and the fewest of a thread's part.
#define BLOCK 64
#define ROWS 64
#define FEWEST 16
// Of products of several queries: entries or channels, and vectors of queries, whose sums stay in registers.
#define SIDE 4
#define DEEP 3
// Vectors do not cross lines of the processor's cache; one that is kept is not fetched again for each of its products.
#define LINED __attribute__((aligned(BYTES)))
#if defined(__AVX__)
#define KEPT(x) __asm__("" : "+v"(x))
#else
#define KEPT(x) (void)(x)
#endif
// Numbers of keys from which on several threads take part.
#define MANY 65536

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

INLINE Floats floats_at(const float *from) {
    Floats x;
    memcpy(&x, from, BYTES);
    return x;
}

// Sums of x[m, k] * y[k, r] over `count` k, for `rows` m and `vectors` vectors of r; they become `to` [m, wide], or are
// added to it. x[m, k] is at m * down + k * along; y [k, wide].
INLINE void sums_of(const float *restrict x, int64_t down, int64_t along, const float *restrict y, int64_t count,
                    float *restrict to, int64_t wide, int add, int rows, int vectors) {
    Floats a[SIDE * DEEP];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++)
            a[m * vectors + v] = add ? floats_at(to + m * wide + v * LANES) : (Floats){0};
    for (int64_t k = 0; k < count; k++) {
        Floats b[DEEP];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) {
            b[v] = floats_at(y + k * wide + v * LANES);
            KEPT(b[v]);
        }
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 16
            for (int v = 0; v < vectors; v++) a[m * vectors + v] += x[m * down + k * along] * b[v];
    }
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) memcpy(to + m * wide + v * LANES, &a[m * vectors + v], BYTES);
}

// The same for `all` m, and all r of `wide`, a multiple of LANES.
static __attribute__((noinline)) void all_sums(const float *x, int64_t down, int64_t along, int64_t all, const float *y,
                                               int64_t count, float *to, int64_t wide, int add) {
#define SUMS(M, V) sums_of(x + m * down, down, along, y + r, count, to + m * wide + r, wide, add, M, V)
    int64_t r = 0;
    for (int64_t left = (wide / LANES + DEEP - 1) / DEEP, some; left; left--, r += some * LANES) {
        int64_t m = 0;
        some = ((wide - r) / LANES + left - 1) / left;
        for (; m + SIDE <= all; m += SIDE)
            if (some == 3) SUMS(SIDE, 3);
            else if (some == 2) SUMS(SIDE, 2);
            else SUMS(SIDE, 1);
        for (; m < all; m++)
            if (some == 3) SUMS(1, 3);
            else if (some == 2) SUMS(1, 2);
            else SUMS(1, 1);
    }
#undef SUMS
}

// Entries of a head as float32, of n slots from number `start` on: in place, or copied to `room`.
INLINE const float *entries_at(const void *from, int64_t start, const int32_t *slots, int n, int64_t dim, int half,
                               float *room) {
    if (n && !half && slots[n - 1] - slots[0] == n - 1) return (const float *)from + (start + slots[0]) * dim;
    for (int i = 0; i < n; i++) loaded(from, (start + slots[i]) * dim, half, (int)dim, room + i * dim);
    return room;
}

// Logits [n, wide] become powers of their differences to each query's greatest one so far; what was summed up before
// follows it. hidden: query r does not see the slots from ends[r] on.
INLINE void weigh_all(float *restrict s, const int32_t *found, int n, const int64_t *ends, int hidden, int64_t wide,
                      float *restrict most, float *restrict sum, float *restrict acc, int64_t dim) {
    float before[wide];
    for (int64_t r = 0; r < wide; r++) before[r] = most[r];
    for (int i = 0; hidden && i < n; i++)
        for (int64_t r = 0; r < wide; r++) s[i * wide + r] = found[i] < ends[r] ? s[i * wide + r] : -3e38f;
    for (int i = 0; i < n; i++)
        for (int64_t r = 0; r < wide; r++) most[r] = s[i * wide + r] > most[r] ? s[i * wide + r] : most[r];
    for (int64_t r = 0; r < wide; r++) before[r] = exp_of(before[r] - most[r]), sum[r] *= before[r];
    for (int i = 0; i < n; i++)
        for (int64_t r = 0; r < wide; r++) s[i * wide + r] = exp_of(s[i * wide + r] - most[r]);
    for (int i = 0; hidden && i < n; i++)
        for (int64_t r = 0; r < wide; r++) s[i * wide + r] = found[i] < ends[r] ? s[i * wide + r] : 0;
    for (int i = 0; i < n; i++)
        for (int64_t r = 0; r < wide; r++) sum[r] += s[i * wide + r];
    for (int64_t j = 0; j < dim; j++)
        for (int64_t r = 0; r < wide; r++) acc[j * wide + r] *= before[r];
}

// Number of a head's query n in `query` and `out`: that of head n % groups of token n / groups.
INLINE int64_t place_of(const Token *job, int64_t b, int64_t h, int64_t n) {
    return ((b * job->fresh + n / job->groups) * job->heads + h) * job->groups + n % job->groups;
}

// `some` queries of a head's last tokens, from number `first` on, side by side in vectors.
static __attribute__((noinline)) void together(const Token *job, int64_t b, int64_t h, int64_t first, int64_t some) {
    int64_t dim = job->dim, wide = (some + LANES - 1) / LANES * LANES, start = b * job->row + h * job->head, t = 0;
    float query[dim * wide] LINED, acc[dim * wide] LINED, s[BLOCK * wide] LINED, most[wide], sum[wide];
    float x[BLOCK * dim], row[dim];
    int32_t found[BLOCK];
    int64_t ends[wide], least = job->size - (job->fresh - 1 - first / job->groups) * job->apart;
    memset(query, 0, sizeof(query)), memset(acc, 0, sizeof(acc));
    for (int64_t r = 0; r < wide; r++) most[r] = -3e38f, sum[r] = 0, ends[r] = job->size;
    for (int64_t r = 0; r < some; r++) {
        loaded(job->query, place_of(job, b, h, first + r) * dim, (int)job->half, (int)dim, row);
        for (int64_t j = 0; j < dim; j++) query[j * wide + r] = row[j] * job->scale;
        ends[r] = job->size - (job->fresh - 1 - (first + r) / job->groups) * job->apart;
    }
    while (t < job->size) {
        int n = next_seen(job, b * job->seen_row + h * job->seen_head, &t, found);
        if (!n) continue;
        const float *keys = entries_at(job->keys, start, found, n, dim, (int)job->half, x);
        all_sums(keys, dim, 1, n, query, dim, s, wide, 0);
        for (int i = 0; job->weights && i < n; i++)
            for (int64_t r = 0; r < wide; r++) s[i * wide + r] += job->weights[start + found[i]];
        weigh_all(s, found, n, ends, found[n - 1] >= least, wide, most, sum, acc, dim);
        const float *values = entries_at(job->values, start, found, n, dim, (int)job->half, x);
        for (int i = n - 1; i >= 0 && found[i] >= least; i--) {
            if (is_finite(values + i * dim, dim)) continue;
            if (values != x) values = memcpy(x, values, n * dim * sizeof(float));
            show(x + i * dim, dim, s + i * wide, 1, acc, 1, wide, wide);
        }
        all_sums(values, 1, dim, dim, s, n, acc, wide, 1);
    }
    for (int64_t r = 0; r < some; r++) {
        // Padding may see nothing.
        float share = sum[r] > 0 ? 1 / sum[r] : 0;
        int64_t to = place_of(job, b, h, first + r) * dim;
        for (int64_t j = 0; j < dim; j++) {
            float is = acc[j * wide + r] * share;
            if (job->half) ((uint16_t *)job->out)[to + j] = to_half(is);
            else ((float *)job->out)[to + j] = is;
        }
    }
}

// Sizes that the compiler knows become straight code.
static __attribute__((noinline)) void alone(const Token *job, int64_t b, int64_t h) {
    int groups = (int)job->groups;
    if (job->half && job->dim == 64) one_head(job, b, h, groups, 64, 1);
    else if (job->half && job->dim == 128) one_head(job, b, h, groups, 128, 1);
    else if (job->half) one_head(job, b, h, groups, (int)job->dim, 1);
    else if (job->dim == 64) one_head(job, b, h, groups, 64, 0);
    else one_head(job, b, h, groups, (int)job->dim, 0);
}

void attend(const Token *job, int64_t threads) {
    int64_t queries = job->groups * job->fresh, rows = job->batch * job->heads, parts = 1, most = queries;
    if (job->fresh > 1) {
        // Each thread gets some, if these are not too few to pay for reading the entries again.
        int64_t wanted = (threads + rows - 1) / rows, few = queries / FEWEST;
        parts = (queries + ROWS - 1) / ROWS, wanted = wanted < few ? wanted : few;
        parts = parts > wanted ? parts : wanted;
        most = (queries + parts - 1) / parts, parts = (queries + most - 1) / most;
    }
    int64_t tasks = rows * parts;
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

// That of prompt.c.
typedef int64_t (*Few)(const Token *job, int64_t threads);

// A decoder layer, of layers.c, and its stored entries, which those of the tokens join.
typedef struct {
    const void *layer;
    Token job;       // `size` of the entries without the tokens
    int32_t *index;  // token index of each entry, in the order of the keys
    int64_t stride;  // slots that a token takes: one for all heads, or one for each, side by side
    int64_t written; // the marks' slots that are read are multiples of it
    int64_t few;     // prompt.c attends
} Stored;

// Caches whose tokens pass together.
typedef struct {
    Stored *layers;
    int64_t index; // token index of the first token of each row
} Rows;

// Tokens of each row through several layers.
typedef struct {
    Before before;
    After after;
    Few few;
    const Rows *caches;
    const void *cosine, *sine; // [angles, dim of a head]
    void *scratch;             // for each token: four times `wide`, `dim`, and what a layer needs
    int64_t number, count;     // caches; layers
    int64_t rows, dim, wide;   // tokens of all caches; channels of hidden states; the most that queries and values have
    int64_t angles, half;
} Pass;

// Marks of new tokens: they are real, or of each head its own slots are seen, others are not, nor those behind them.
INLINE void mark(const Stored *stored) {
    const Token *job = &stored->job;
    int64_t size = job->size, used = job->fresh * stored->stride, end = size + used;
    end = (end + stored->written - 1) / stored->written * stored->written;
    for (int64_t b = 0; b < job->batch; b++)
        for (int64_t h = 0; h < job->heads; h++) {
            int64_t at = b * job->seen_row + h * job->seen_head;
            for (int64_t t = size; t < end; t++) {
                int own = t - size < used && (t - size) % stored->stride == h;
                if (job->item == 1) ((uint8_t *)job->seen)[at + t] = 1;
                else if (job->item == 2) ((uint16_t *)job->seen)[at + t] = own ? 0 : 0xff7f;
                else ((uint32_t *)job->seen)[at + t] = own ? 0 : 0xff7fffff;
            }
        }
}

// Store keys and values of tokens [batch, fresh, heads, dim]; index: of the first of them.
static void add_entries(const Stored *stored, const char *key, const char *value, int64_t index) {
    const Token *job = &stored->job;
    int64_t bytes = job->dim * (job->half ? 2 : 4), apart = stored->stride > 1;
    for (int64_t b = 0; b < job->batch; b++)
        for (int64_t n = 0; n < job->fresh; n++)
            for (int64_t h = 0; h < job->heads; h++) {
                int64_t to = b * job->row + h * (job->head + apart) + job->size + n * stored->stride;
                memcpy((char *)job->keys + to * bytes, key, (size_t)bytes);
                memcpy((char *)job->values + to * bytes, value, (size_t)bytes);
                stored->index[to] = (int32_t)(index + n);
                if (job->weights) job->weights[to] = 0;
                key += bytes, value += bytes;
            }
    if (job->seen) mark(stored);
}

// A layer's entries of all caches: the tokens' are added, and their queries attend. 0: there is no memory.
static int64_t attend_stored(const Pass *pass, int64_t layer, char *query, const char *key, const char *value,
                          char *attended, int64_t threads) {
    for (int64_t c = 0; c < pass->number; c++) {
        Stored *stored = pass->caches[c].layers + layer;
        Token *job = &stored->job;
        int64_t entries = job->batch * job->fresh * job->heads * job->dim * (job->half ? 2 : 4);
        int64_t queries = entries * job->groups;
        add_entries(stored, key, value, pass->caches[c].index);
        job->size += job->fresh * stored->stride, job->apart = stored->stride;
        job->query = query, job->out = attended;
        if (!stored->few) attend(job, threads);
        else if (!pass->few(job, threads)) return 0;
        key += entries, value += entries, query += queries, attended += queries;
    }
    return 1;
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
        if (!attend_stored(pass, i, query, key, value, attended, threads)) return 0;
        if (!pass->after(layer, attended, x, scratch, to, rows, threads)) return 0;
        x = to;
    }
    return 1;
}
