// Pages of a paged KV cache: bounds of their keys, kept beside the cache, and the pages with the highest scores. Where
// `halves` is 1, sums of their keys in float32 take the place of bounds. A page of the cache may be `parts` pages here; it
// weighs what the best of them weighs.
#include <string.h>
#include "common.h"

typedef struct {
    const void *keys;     // [tokens, heads, dim], `apart` numbers from token to token
    const int64_t *slots; // [tokens]: page * size + place in it, of a part; negative: not stored
    void *bounds;         // [pages * parts, heads, halves, dim]: greatest, then least values
    int64_t tokens, apart, heads, dim, size, halves, half; // half: keys are bfloat16
} Update;

typedef struct {
    const void *bounds;    // as above
    const float *question; // [requests, heads, groups, halves, dim]: weights of what is known of a page
    const int32_t *table;  // [requests, width]: pages of each request
    const int32_t *sizes;  // [requests]: entries of each
    const int32_t *counts; // [requests]: pages to choose of each
    int32_t *chosen;       // [requests, heads, most]: page * heads + head, in the order of the table
    char *scratch;         // `bytes` for each thread
    int64_t requests, width, most, heads, groups, dim, page, parts, halves, half, bytes; // half: bounds are
} Choice;

INLINE void take_in(const Update *job, int64_t token, int64_t head, int half) {
    int64_t slot = job->slots[token], dim = job->dim;
    if (slot < 0) return;
    int begins = slot % job->size == 0;
    if (job->halves == 1) {
        const float *key = (const float *)job->keys + token * job->apart + head * dim;
        const uint16_t *narrow = (const uint16_t *)job->keys + token * job->apart + head * dim;
        float *restrict sums = (float *)job->bounds + (slot / job->size * job->heads + head) * dim;
        for (int64_t d = 0; d < dim; d++) sums[d] = (begins ? 0 : sums[d]) + (half ? of_half(narrow[d]) : key[d]);
        return;
    }
    int64_t from = token * job->apart + head * dim, to = (slot / job->size * job->heads + head) * 2 * dim;
    if (!half) {
        const float *restrict key = (const float *)job->keys + from;
        float *restrict bounds = (float *)job->bounds + to;
        for (int64_t d = 0; d < dim; d++) {
            bounds[d] = begins || key[d] > bounds[d] ? key[d] : bounds[d];
            bounds[dim + d] = begins || key[d] < bounds[dim + d] ? key[d] : bounds[dim + d];
        }
        return;
    }
    const uint16_t *restrict key = (const uint16_t *)job->keys + from;
    uint16_t *restrict bounds = (uint16_t *)job->bounds + to;
    for (int64_t d = 0; d < dim; d++) {
        float is = of_half(key[d]);
        bounds[d] = begins || is > of_half(bounds[d]) ? key[d] : bounds[d];
        bounds[dim + d] = begins || is < of_half(bounds[dim + d]) ? key[d] : bounds[dim + d];
    }
}

// A page's entries come in order, so that one thread has all tokens of a head.
void update_bounds(const Update *job, int64_t threads) {
    if (threads > job->heads) threads = job->heads;
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && job->tokens > 64)
    for (int64_t head = 0; head < job->heads; head++)
        for (int64_t token = 0; token < job->tokens; token++)
            if (job->half) take_in(job, token, head, 1);
            else take_in(job, token, head, 0);
}

// Pages that are fetched ahead: a head's lie apart by all heads' numbers, farther than the processor itself looks.
#define AHEAD 8

// Where what is known of the i-th page of a request begins.
INLINE int64_t place_of(const Choice *job, const int32_t *table, int64_t head, int64_t i, int64_t wide) {
    return ((table[i / job->parts] * job->parts + i % job->parts) * job->heads + head) * wide;
}

INLINE void score_wide(
    const Choice *job, int64_t request, int64_t head, int64_t pages, int half, int64_t wide, float *scores, float *x
) {
    int64_t groups = job->groups, bytes = half ? 2 : 4;
    const float *asked = job->question + (request * job->heads + head) * groups * wide;
    const int32_t *table = job->table + request * job->width;
    for (int64_t i = 0; i < pages; i++) {
        if (i + AHEAD < pages) {
            const char *next = (const char *)job->bounds + place_of(job, table, head, i + AHEAD, wide) * bytes;
            for (int64_t line = 0; line < wide * bytes; line += 64) __builtin_prefetch(next + line);
        }
        int64_t at = place_of(job, table, head, i, wide);
        const float *restrict bounds = (const float *)job->bounds + at;
        if (half) {
            const uint16_t *restrict from = (const uint16_t *)job->bounds + at;
            for (int64_t d = 0; d < wide; d++) x[d] = of_half(from[d]);
            bounds = x;
        }
        for (int64_t g = 0; g < groups; g++) {
            const float *restrict q = asked + g * wide;
            float sum = 0;
            for (int64_t d = 0; d < wide; d++) sum += q[d] * bounds[d];
            scores[g * pages + i] = sum;
        }
    }
}

// Of the usual sizes with one known to the compiler.
INLINE void score(const Choice *job, int64_t request, int64_t head, int64_t pages, int half, float *scores, float *x) {
    int64_t wide = job->halves * job->dim;
    if (wide == 64) score_wide(job, request, head, pages, half, 64, scores, x);
    else if (wide == 128) score_wide(job, request, head, pages, half, 128, scores, x);
    else if (wide == 256) score_wide(job, request, head, pages, half, 256, scores, x);
    else score_wide(job, request, head, pages, half, wide, scores, x);
}

// Weights of the pages, as core/page_weights.py has them, summed over the query heads.
static void weigh(const Choice *job, int64_t pages, float part, float *scores, float *weights) {
    memset(weights, 0, pages * sizeof(float));
    for (int64_t g = 0; g < job->groups; g++) {
        float *restrict s = scores + g * pages, most = -INFINITY, sum = 0;
        // Its keys' sum is that of a part of a page.
        if (job->halves == 1) s[pages - 1] /= part;
        s[pages - 1] += logf(part);
        for (int64_t i = 0; i < pages; i++) most = s[i] > most ? s[i] : most;
        for (int64_t i = 0; i < pages; i++) sum += s[i] = exp_of(s[i] - most);
        s[pages - 1] /= part;
        for (int64_t i = 0; i < pages; i++) weights[i] += s[i] / sum;
    }
}

static void choose(const Choice *job, int64_t request, int64_t head, char *scratch) {
    int64_t size = job->sizes[request], pages = (size + job->page - 1) / job->page, count = job->counts[request];
    const int32_t *table = job->table + request * job->width;
    int32_t *chosen = job->chosen + (request * job->heads + head) * job->most, heads = (int32_t)job->heads;
    if (pages <= count) {
        for (int64_t i = 0; i < pages; i++) chosen[i] = table[i] * heads + (int32_t)head;
        return;
    }
    int64_t wide = job->width * job->parts, small = job->page / job->parts, parts = (size + small - 1) / small;
    float *scores = (float *)scratch, *weights = scores + job->groups * wide, *x = weights + wide;
    int32_t *found = (int32_t *)(x + 2 * job->dim), *spare = found + job->width;
    if (job->half) score(job, request, head, parts, 1, scores, x);
    else score(job, request, head, parts, 0, scores, x);
    weigh(job, parts, (float)(size - (parts - 1) * small) / small, scores, weights);
    // The newest page is read in any case, and competes no more; all others have all their parts.
    for (int64_t i = 0; i < pages - 1; i++) {
        float best = weights[i * job->parts];
        for (int64_t j = 1; j < job->parts; j++) {
            float other = weights[i * job->parts + j];
            best = other > best ? other : best;
        }
        weights[i] = best;
    }
    largest(weights, pages - 1, count - 1, found, spare);
    memset(spare, 0, pages * sizeof(int32_t));
    for (int64_t i = 0; i < count - 1; i++) spare[found[i]] = 1;
    spare[pages - 1] = 1;
    for (int64_t i = 0, n = 0; i < pages; i++)
        if (spare[i]) chosen[n++] = table[i] * heads + (int32_t)head;
}

// Bytes of scratch that `choose_pages` wants for each thread.
int64_t choice_scratch(const Choice *job) {
    return (((job->groups + 1) * job->parts + 2) * job->width + 2 * job->dim) * 4 / 64 * 64 + 64;
}

void choose_pages(const Choice *job, int64_t threads) {
    int64_t tasks = job->requests * job->heads;
    if (threads > tasks) threads = tasks;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads) if (threads > 1)
    for (int64_t i = 0; i < tasks; i++) {
        int thread = 0;
#ifdef _OPENMP
        extern int omp_get_thread_num(void);
        thread = omp_get_thread_num();
#endif
        choose(job, i / job->heads, i % job->heads, job->scratch + thread * job->bytes);
    }
}
