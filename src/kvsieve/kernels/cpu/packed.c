// Attention of one token over encoded entries, and exact ones beside them: some entries at a time are decoded to
// scratch that stays in the nearest cache of a core.
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "common.h"
#include "float16.h"

// Entries decoded at a time; lanes of a vector. Compilers without so wide ones take several.
#define FEW 16
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
// Lanes of two vectors, those of the second counted from FEW on. GCC before 12 does not know clang's builtin.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(64)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

typedef struct {
    const uint8_t *packed;  // [P, T, bytes]
    const Float16 *scale;   // [P, 1, D] or [P, T, groups]
    const Float16 *zero;    // the same, or null
    const float *levels;    // [2 ** bits], padded to 16 at least; null: the code itself
    const uint16_t *places; // [P, apart] or null
    const Float16 *extra;   // [P, apart]
    int64_t bits, bytes, dim, group, apart; // group: 0 for a scale per channel
} Part;

#include "pairs.h"

INLINE void codes_of(const uint8_t *restrict b, int bits, int dim, float *restrict x) {
    if (bits == 8) {
        for (int j = 0; j < dim; j++) x[j] = b[j];
    } else if (bits == 4) {
        int n = dim / 2;
        for (int j = 0; j < n; j++) x[j] = b[j] & 15;
        for (int j = 0; j < n; j++) x[n + j] = b[j] >> 4;
    } else if (bits == 2) {
        int n = dim / 4;
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < n; j++) x[k * n + j] = (b[j] >> (2 * k)) & 3;
    } else if (bits == 3) {
        // A plane of two bits, then one of the lowest: number k * n + j has bit 2 * k + j / m of byte j % m.
        int n = dim / 4, m = dim / 8;
        const uint8_t *low = b + n;
#if defined(__AVX512F__)
        if (n == 16) {
            uint64_t v;
            memcpy(&v, low, 8);
            __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)b));
            __m512i lowest = _mm512_cvtepu8_epi32(_mm_set_epi64x((long long)(v >> 1), (long long)v));
            for (int k = 0; k < 4; k++) {
                __m512i two = _mm512_and_si512(_mm512_srli_epi32(high, 2 * k), _mm512_set1_epi32(3));
                __m512i one = _mm512_and_si512(_mm512_srli_epi32(lowest, 2 * k), _mm512_set1_epi32(1));
                _mm512_storeu_ps(x + k * 16, _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(two, two), one)));
            }
            return;
        }
#endif
        for (int k = 0; k < 8; k++)
            for (int j = 0; j < m; j++)
                x[k * m + j] = ((b[k % 2 * m + j] >> (k / 2 * 2)) & 3) * 2 + ((low[j] >> k) & 1);
    } else {
        // Planes, high bits first.
        for (int j = 0; j < dim; j++) x[j] = 0;
        for (int width = 4; width; width /= 2) {
            if (!(bits & width)) continue;
            int n = dim * width / 8, mask = (1 << width) - 1;
            for (int k = 0; k < 8 / width; k++)
                for (int j = 0; j < n; j++)
                    x[k * n + j] = x[k * n + j] * (mask + 1) + ((b[j] >> (width * k)) & mask);
            b += n;
        }
    }
}

INLINE void look_up(const float *restrict levels, int bits, int dim, float *restrict x) {
#if defined(__AVX512F__)
    if (bits <= 4 && dim % 16 == 0) {
        __m512 table = _mm512_loadu_ps(levels);
        for (int j = 0; j < dim; j += 16)
            _mm512_storeu_ps(x + j, _mm512_permutexvar_ps(_mm512_cvttps_epi32(_mm512_loadu_ps(x + j)), table));
        return;
    }
#endif
    for (int j = 0; j < dim; j++) x[j] = levels[(int)x[j]];
}

// Lane t of the result: the sum of all lanes of v[t].
INLINE Lanes sums_of(const Lanes *v) {
    Lanes a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               SHUFFLE(v[2 * i], v[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    for (int i = 0; i < 4; i++)
        b[i] = SHUFFLE(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    return SHUFFLE(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Products of a query [dim] with FEW rows of x.
INLINE void products(const float *restrict q, const float *restrict x, int dim, float *restrict out) {
    if (dim % FEW) {
        for (int t = 0; t < FEW; t++) {
            float s = 0;
            for (int j = 0; j < dim; j++) s += q[j] * x[t * dim + j];
            out[t] = s;
        }
        return;
    }
    Lanes v[FEW];
    for (int t = 0; t < FEW; t++) {
        Lanes s = {0};
        for (int j = 0; j < dim; j += FEW) s += *(const Lanes *)(q + j) * *(const Lanes *)(x + t * dim + j);
        v[t] = s;
    }
    *(Lanes *)out = sums_of(v);
}

// Add n rows of x, by weight, to sums of `heads` query heads, in the channels of `wide` vectors.
INLINE void add_tile(const float *restrict p, int step, const float *restrict x, int n, int dim, int heads, int wide,
                     float *restrict acc) {
    Lanes a[4][4];
    for (int g = 0; g < heads; g++)
        for (int j = 0; j < wide; j++) a[g][j] = *(Lanes *)(acc + g * dim + j * FEW);
    for (int t = 0; t < n; t++)
        for (int j = 0; j < wide; j++) {
            Lanes v = *(const Lanes *)(x + t * dim + j * FEW);
            for (int g = 0; g < heads; g++) a[g][j] += p[g * step + t] * v;
        }
    for (int g = 0; g < heads; g++)
        for (int j = 0; j < wide; j++) *(Lanes *)(acc + g * dim + j * FEW) = a[g][j];
}

INLINE void add_heads(const float *p, int step, const float *x, int n, int dim, int heads, float *acc) {
    int j = 0;
    for (; j + 4 * FEW <= dim; j += 4 * FEW) add_tile(p, step, x + j, n, dim, heads, 4, acc + j);
    for (; j + FEW <= dim; j += FEW) add_tile(p, step, x + j, n, dim, heads, 1, acc + j);
    for (; j < dim; j++)
        for (int g = 0; g < heads; g++)
            for (int t = 0; t < n; t++) acc[g * dim + j] += p[g * step + t] * x[t * dim + j];
}

// acc [groups, dim] += p [groups, step] x [n, dim].
INLINE void add_rows(const float *p, int step, const float *x, int n, int dim, int groups, float *acc) {
    int g = 0;
    for (; g + 4 <= groups; g += 4) add_heads(p + g * step, step, x, n, dim, 4, acc + g * dim);
    switch (groups - g) {
    case 3: add_heads(p + g * step, step, x, n, dim, 3, acc + g * dim); break;
    case 2: add_heads(p + g * step, step, x, n, dim, 2, acc + g * dim); break;
    case 1: add_heads(p + g * step, step, x, n, dim, 1, acc + g * dim); break;
    }
}

INLINE void levels_of(const Part *p, const uint8_t *b, int bits, int n, int dim, float *x) {
    for (int t = 0; t < n; t++) {
        codes_of(b + t * p->bytes, bits, dim, x + t * dim);
        if (p->levels) look_up(p->levels, bits, dim, x + t * dim);
    }
}

// Codes, or their levels, of n entries from the one at place `at` of a block: x [n, dim].
INLINE void unpack(const Part *p, int64_t block, int tokens, int at, int n, int dim, float *x) {
    const uint8_t *b = p->packed + (block * tokens + at) * p->bytes;
    switch (p->bits) {
    case 4: levels_of(p, b, 4, n, dim, x); break;
    case 2: levels_of(p, b, 2, n, dim, x); break;
    case 3: levels_of(p, b, 3, n, dim, x); break;
    case 8: levels_of(p, b, 8, n, dim, x); break;
    default: levels_of(p, b, (int)p->bits, n, dim, x);
    }
}

// Logits [groups, step] of FEW rows of x, from place `at` on.
INLINE void logits_of(const float *q, const float *x, int dim, int groups, int step, float *logits) {
    for (int g = 0; g < groups; g++) products(q + g * dim, x, dim, logits + g * step);
}

// Sizes that the compiler knows become straight code.
typedef struct {
    void (*unpack)(const Part *p, int64_t block, int tokens, int at, int n, int dim, float *x);
    void (*logits)(const float *q, const float *x, int dim, int groups, int step, float *logits);
    void (*add)(const float *p, int step, const float *x, int n, int dim, int groups, float *acc);
} Steps;

#define STEPS(NAME, DIM)                                                                                              \
    static void unpack_##NAME(const Part *p, int64_t block, int tokens, int at, int n, int dim, float *x) {           \
        unpack(p, block, tokens, at, n, DIM, x);                                                                      \
    }                                                                                                                 \
    static void logits_##NAME(const float *q, const float *x, int dim, int groups, int step, float *logits) {         \
        logits_of(q, x, DIM, groups, step, logits);                                                                   \
    }                                                                                                                 \
    static void add_##NAME(const float *p, int step, const float *x, int n, int dim, int groups, float *acc) {        \
        add_rows(p, step, x, n, DIM, groups, acc);                                                                    \
    }                                                                                                                 \
    static const Steps steps_##NAME = {unpack_##NAME, logits_##NAME, add_##NAME};

STEPS(64, 64)
STEPS(128, 128)
STEPS(any, dim)

static const Steps *steps_for(int dim) { return dim == 64 ? &steps_64 : dim == 128 ? &steps_128 : &steps_any; }

// Scale what `unpack` gave, by channel or by groups of channels.
static void scaled(const Part *p, int64_t block, int tokens, int at, int n, int dim, float *restrict x) {
    if (!p->group) {
        float scale[dim], zero[dim];
        halves(p->scale + block * dim, dim, scale);
        if (p->zero) halves(p->zero + block * dim, dim, zero);
        else memset(zero, 0, sizeof zero);
        for (int t = 0; t < n; t++)
            for (int j = 0; j < dim; j++) x[t * dim + j] = x[t * dim + j] * scale[j] + zero[j];
        return;
    }
    int width = (int)p->group, groups = dim / width;
    for (int t = 0; t < n; t++)
        for (int g = 0; g < groups; g++) {
            int64_t here = (block * tokens + at + t) * groups + g;
            float s = of_float16(p->scale[here]), z = p->zero ? of_float16(p->zero[here]) : 0.0f;
            float *part = x + t * dim + g * width;
            for (int j = 0; j < width; j++) part[j] = part[j] * s + z;
        }
}

static float top_of(const float *restrict x, int n) {
    float most[FEW], all = -INFINITY;
    int j = 0;
    for (int i = 0; i < FEW; i++) most[i] = -INFINITY;
    for (; j + FEW <= n; j += FEW)
        for (int i = 0; i < FEW; i++) most[i] = x[j + i] > most[i] ? x[j + i] : most[i];
    for (; j < n; j++) all = x[j] > all ? x[j] : all;
    for (int i = 0; i < FEW; i++) all = most[i] > all ? most[i] : all;
    return all;
}

typedef struct {
    const void *keys, *values; // [R, capacity, D] and [R, capacity, Dv]
    const uint8_t *real;       // [R, size], or null
    int64_t size, key_row, value_row, kind; // kind of numbers: 0 float32, 1 bfloat16, 2 float16
    int64_t fresh;                          // how many of the last are of new tokens; query g is of token g % fresh
} Exact;

static void numbers(const void *from, int64_t at, int64_t kind, int count, float *restrict x) {
    if (kind == 1) {
        const uint16_t *b = (const uint16_t *)from + at;
        for (int j = 0; j < count; j++) {
            union { uint32_t i; float f; } two = {(uint32_t)b[j] << 16};
            x[j] = two.f;
        }
    } else if (kind == 2) {
        halves((const Float16 *)from + at, count, x);
    } else {
        memcpy(x, (const float *)from + at, count * sizeof(float));
    }
}

typedef struct {
    const float *query;   // [R, G, D], scaled, and turned as the keys are
    const float *base;    // [R, G], added to every logit of encoded keys; or null
    const float *exactly; // [R, G, D], scaled
    const int64_t *table; // [R, M]
    const int64_t *fills; // [R, M]
    const float *sinks;   // [R, G] or null
    float *acc;           // [R, S, G, Dv]; of exact entries, if there are, the last of S
    float *top, *sum;     // [R, S, G]: largest logit, and the sum of exponentials beside it
    float *out;           // [R, G, Dv], of all parts; or null
    int64_t rows, per_row, groups, tokens, splits, dim, wide;
    float cap;            // 0: none
    int64_t narrow;       // queries and weights may be rounded to bfloat16
} Job;

typedef struct {
    float *x, *logits, *turned, *spare, *acc, *top, *sum;
    void *space;       // of pairs.h: decoded entries,
    uint16_t *order;   // channels in the order of keys [D],
    float *ordered;    // queries in that order [G, D],
    uint32_t *pairs;   // the same in pairs [G, D / 2],
    uint16_t *weights; // and weights [Dv / group, G, step]
    int step; // from the logits of a query head to those of the next
} Scratch;

// Turn logits [G, step] of which `fill` are there into weights; shrink what was summed before.
// base: [G], added to all, or null. Query g sees places up to its own, which is first + g % fresh, of those with a
// `real` of 0 its own only; null: all are real.
static void soften(const Job *job, const float *base, const uint8_t *real, int64_t first, int64_t fresh, int fill,
                   int wide, Scratch *my) {
    for (int g = 0; g < job->groups; g++) {
        float *restrict l = my->logits + g * my->step, add = base ? base[g] : 0.0f;
        int64_t own = first + g % fresh;
        int seen = own + 1 >= fill ? fill : own < 0 ? 0 : (int)own + 1;
        if (base)
            for (int t = 0; t < seen; t++) l[t] += add;
        if (job->cap > 0)
            for (int t = 0; t < seen; t++) l[t] = job->cap * tanhf(l[t] / job->cap);
        if (real)
            for (int t = 0; t < seen; t++) l[t] = real[t] || t == own ? l[t] : -INFINITY;
        float most = top_of(l, seen);
        float now = most > my->top[g] ? most : my->top[g], total = 0;
        if (now == -INFINITY) {
            for (int t = 0; t < fill; t++) l[t] = 0;
            continue;
        }
        float before = my->top[g] == -INFINITY ? 0.0f : exp_of(my->top[g] - now);
        for (int t = 0; t < seen; t++) l[t] = exp_of(l[t] - now);
        if (real)
            for (int t = 0; t < seen; t++) l[t] = real[t] || t == own ? l[t] : 0.0f;
        for (int t = seen; t < fill; t++) l[t] = 0;
        for (int t = 0; t < seen; t++) total += l[t];
        my->sum[g] = my->sum[g] * before + total;
        my->top[g] = now;
        if (before != 1.0f)
            for (int j = 0; j < wide; j++) my->acc[g * wide + j] *= before;
    }
}

// 1 where keys meet queries as pairs of bfloat16.
static int is_paired(const Job *job, const Part *keys, int dim) {
#if defined(WITH_PAIRS)
    return job->narrow && (!keys->group || keys->group == dim) && pairs_fit(keys, dim);
#else
    (void)job, (void)keys, (void)dim;
    return 0;
#endif
}

// Put n numbers in the given order.
static void in_order(const uint16_t *order, int n, float *restrict x) {
    float before[n + 1];
    memcpy(before, x, n * sizeof(float));
    for (int j = 0; j < n; j++) x[j] = before[order[j]];
}

#if defined(WITH_PAIRS)
// Weights times scales, in bfloat16; what the zeros add goes to the sums.
static void weigh_pairs(const Part *p, int64_t block, int tokens, int fill, int groups, int wide, Scratch *my) {
    int width = (int)p->group, parts = wide / width;
    float middle = pairs_middle(p), scales[fill * parts], zeros[fill * parts], scale[fill], zero[fill];
    halves(p->scale + block * tokens * parts, fill * parts, scales);
    if (p->zero) halves(p->zero + block * tokens * parts, fill * parts, zeros);
    for (int part = 0; part < parts; part++) {
        for (int t = 0; t < fill; t++) {
            scale[t] = scales[t * parts + part];
            zero[t] = (p->zero ? zeros[t * parts + part] : 0.0f) + middle * scale[t];
        }
        for (int g = 0; g < groups; g++) {
            const float *restrict l = my->logits + g * my->step;
            uint16_t *restrict out = my->weights + ((int64_t)part * groups + g) * my->step;
            float *restrict acc = my->acc + g * wide + part * width, sum = 0;
            float weight[my->step];
            for (int t = 0; t < fill; t++) weight[t] = l[t] * scale[t], sum += l[t] * zero[t];
            for (int t = fill; t < my->step; t++) weight[t] = 0;
            narrow_all(weight, my->step, out);
            for (int j = 0; j < width; j++) acc[j] += sum;
        }
    }
}
#endif

static void one_block(const Job *job, const Part *keys, const Part *values, int64_t row, int64_t block, int fill,
                      int dim, int wide, Scratch *my) {
    int groups = (int)job->groups, tokens = (int)job->tokens, most = tokens > dim ? tokens : dim;
    const float *query = job->query + row * groups * dim;
    const Steps *of_keys = steps_for(dim), *of_values = steps_for(wide);
    // A scale for each channel goes into the query, one for each entry into its logit, or its weight.
    int by_entry = keys->group == dim, value_by_entry = values->group == wide;
    float *sum_of = my->spare, middle = 0, scale[most], zero[most];
    int paired = is_paired(job, keys, dim);
    const float *ordered = paired ? my->ordered : query;
#if defined(WITH_PAIRS)
    if (paired) middle = pairs_middle(keys);
#endif
    if (!keys->group) {
        halves(keys->scale + block * dim, dim, scale);
        if (keys->zero) halves(keys->zero + block * dim, dim, zero);
        if (paired) in_order(my->order, dim, scale), in_order(my->order, keys->zero ? dim : 0, zero);
    } else if (by_entry) {
        halves(keys->scale + block * tokens, fill, scale);
        if (keys->zero) halves(keys->zero + block * tokens, fill, zero);
    }
    for (int g = 0; g < groups; g++) {
        float sum = 0;
        const float *restrict q = ordered + g * dim;
        float *restrict to = my->turned + g * dim;
        if (!keys->group) {
            for (int j = 0; j < dim; j++) to[j] = q[j] * scale[j];
            if (middle != 0)
                for (int j = 0; j < dim; j++) sum += middle * to[j];
            if (keys->zero)
                for (int j = 0; j < dim; j++) sum += q[j] * zero[j];
        } else {
            for (int j = 0; j < dim; j++) to[j] = q[j], sum += q[j];
        }
        sum_of[g] = sum;
    }
#if defined(WITH_PAIRS)
    if (paired) {
        narrow_all(my->turned, groups * dim, (uint16_t *)my->pairs);
        pairs_logits(keys, keys->packed + block * tokens * keys->bytes, fill, dim, my->pairs, groups, my->step,
                     my->space, my->logits);
    }
#endif
    for (int at = 0; at < fill && !paired; at += FEW) {
        int n = fill - at < FEW ? fill - at : FEW;
        of_keys->unpack(keys, block, tokens, at, n, dim, my->x);
        if (keys->group && !by_entry) scaled(keys, block, tokens, at, n, dim, my->x);
        of_keys->logits(my->turned, my->x, dim, groups, my->step, my->logits + at);
    }
    for (int g = 0; g < groups; g++) {
        float *restrict l = my->logits + g * my->step, sum = sum_of[g];
        if (!keys->group)
            for (int t = 0; t < fill; t++) l[t] += sum;
        else if (by_entry) {
            for (int t = 0; t < fill; t++) l[t] = (l[t] + middle * sum) * scale[t];
            if (keys->zero)
                for (int t = 0; t < fill; t++) l[t] += zero[t] * sum;
        }
    }
    for (int i = 0; i < keys->apart; i++) {
        int at = keys->places[block * keys->apart + i], t = at / dim;
        float extra = of_float16(keys->extra[block * keys->apart + i]);
        if (t < fill)
            for (int g = 0; g < groups; g++) my->logits[g * my->step + t] += query[g * dim + at % dim] * extra;
    }
    soften(job, job->base ? job->base + row * groups : 0, 0, fill, 1, fill, wide, my);
    for (int i = 0; i < values->apart; i++) {
        int at = values->places[block * values->apart + i], t = at / wide;
        float extra = of_float16(values->extra[block * values->apart + i]);
        if (t < fill)
            for (int g = 0; g < groups; g++) my->acc[g * wide + at % wide] += my->logits[g * my->step + t] * extra;
    }
#if defined(WITH_PAIRS)
    if (job->narrow && pairs_fit_values(values, wide)) {
        weigh_pairs(values, block, tokens, fill, groups, wide, my);
        pairs_add(values, values->packed + block * tokens * values->bytes, fill, wide, my->weights, groups, my->step,
                  my->space, my->acc);
        return;
    }
#endif
    if (value_by_entry) {
        halves(values->scale + block * tokens, fill, scale);
        if (values->zero) halves(values->zero + block * tokens, fill, zero);
        for (int g = 0; g < groups; g++) {
            float *restrict l = my->logits + g * my->step, sum = 0;
            if (values->zero) {
                for (int t = 0; t < fill; t++) sum += l[t] * zero[t];
                for (int j = 0; j < wide; j++) my->acc[g * wide + j] += sum;
            }
            for (int t = 0; t < fill; t++) l[t] *= scale[t];
        }
    }
    for (int at = 0; at < fill; at += FEW) {
        int n = fill - at < FEW ? fill - at : FEW;
        of_values->unpack(values, block, tokens, at, n, wide, my->x);
        if (!value_by_entry) scaled(values, block, tokens, at, n, wide, my->x);
        of_values->add(my->logits + at, my->step, my->x, n, wide, groups, my->acc);
    }
}

static void exact_entries(const Job *job, const Exact *exact, int64_t row, int64_t start, int fill, int dim, int wide,
                          Scratch *my) {
    int groups = (int)job->groups;
    const Steps *of_keys = steps_for(dim), *of_values = steps_for(wide);
    const float *query = job->exactly + row * groups * dim;
    const uint8_t *real = exact->real ? exact->real + row * exact->size + start : 0;
    for (int at = 0; at < fill; at += FEW) {
        int n = fill - at < FEW ? fill - at : FEW;
        numbers(exact->keys, row * exact->key_row + (start + at) * dim, exact->kind, n * dim, my->x);
        of_keys->logits(query, my->x, dim, groups, my->step, my->logits + at);
    }
    soften(job, 0, real, exact->size - exact->fresh - start, exact->fresh, fill, wide, my);
    for (int at = 0; at < fill; at += FEW) {
        int n = fill - at < FEW ? fill - at : FEW;
        numbers(exact->values, row * exact->value_row + (start + at) * wide, exact->kind, n * wide, my->x);
        for (int t = n - 1; t >= 0 && start + at + t >= exact->size - exact->fresh; t--)
            if (!is_finite(my->x + t * wide, wide))
                show(my->x + t * wide, wide, my->logits + at + t, my->step, my->acc, wide, 1, groups);
        of_values->add(my->logits + at, my->step, my->x, n, wide, groups, my->acc);
    }
}

static void one_part(const Job *job, const Part *keys, const Part *values, const Exact *exact, int64_t row,
                     int64_t split, int dim, int wide, Scratch *my) {
    int groups = (int)job->groups, tokens = (int)job->tokens;
    int64_t cell = row * job->splits + split, parts = job->splits - (exact ? 1 : 0);
    my->acc = job->acc + cell * groups * wide, my->top = job->top + cell * groups, my->sum = job->sum + cell * groups;
    for (int i = 0; i < groups * wide; i++) my->acc[i] = 0;
    for (int g = 0; g < groups; g++) my->top[g] = -INFINITY, my->sum[g] = 0;
    if (split == parts) {
        for (int64_t at = 0; at < exact->size; at += tokens) {
            int fill = exact->size - at < tokens ? (int)(exact->size - at) : tokens;
            exact_entries(job, exact, row, at, fill, dim, wide, my);
        }
        return;
    }
#if defined(WITH_PAIRS)
    if (is_paired(job, keys, dim))
        for (int g = 0; g < groups; g++)
            for (int j = 0; j < dim; j++)
                my->ordered[g * dim + j] = job->query[(row * groups + g) * dim + my->order[j]];
#endif
    int64_t first = split * job->per_row / parts, last = (split + 1) * job->per_row / parts;
    for (int64_t i = row * job->per_row + first; i < row * job->per_row + last; i++)
        if (job->fills[i]) one_block(job, keys, values, row, job->table[i], (int)job->fills[i], dim, wide, my);
}

// The output of a KV row, of all its parts and the sinks.
static void merge(const Job *job, int64_t row) {
    int64_t groups = job->groups, wide = job->wide;
    for (int64_t g = 0; g < groups; g++) {
        const float *top = job->top + row * job->splits * groups + g, *sum = job->sum + row * job->splits * groups + g;
        float *restrict out = job->out + (row * groups + g) * wide;
        float most = job->sinks ? job->sinks[row * groups + g] : -INFINITY;
        for (int64_t s = 0; s < job->splits; s++) most = top[s * groups] > most ? top[s * groups] : most;
        float total = job->sinks ? exp_of(job->sinks[row * groups + g] - most) : 0.0f;
        for (int64_t j = 0; j < wide; j++) out[j] = 0;
        for (int64_t s = 0; s < job->splits; s++) {
            if (top[s * groups] == -INFINITY) continue;
            float weight = exp_of(top[s * groups] - most);
            const float *restrict acc = job->acc + ((row * job->splits + s) * groups + g) * wide;
            for (int64_t j = 0; j < wide; j++) out[j] += weight * acc[j];
            total += weight * sum[s * groups];
        }
        for (int64_t j = 0; j < wide; j++) out[j] /= total;
    }
}

// keys, values: encoded entries, or null. exact: exact ones, or null.
int packed_attention(const Job *job, const Part *keys, const Part *values, const Exact *exact) {
    int dim = (int)job->dim, wide = (int)job->wide, most = dim > wide ? dim : wide, failed = 0;
    int step = ((int)job->tokens + FEW - 1) / FEW * FEW, groups = (int)job->groups;
    int64_t cells = job->rows * job->splits;
    size_t size = ((size_t)FEW * most + (size_t)groups * (step + dim + 1) + 64) * sizeof(float);
    size = (size + 63) / 64 * 64;
    // Decoded entries of pairs.h: keys of 16, or a chunk of all values in 2 bits; queries; weights of as many groups of
    // channels as codes in a byte.
    size_t space = 64 * (size_t)(dim / 2 + 2 * step), queries = (size_t)groups * dim * 2 / 64 * 64 + 64;
    size_t ordered = 4 * (size_t)groups * dim, order = (2 * (size_t)dim + 63) / 64 * 64;
    size_t all = job->narrow ? size + space + queries + (size_t)groups * step * 4 * 2 + ordered + order : size;
#pragma omp parallel
    {
        float *scratch = allocate_lines(all);
        Scratch my = {.x = scratch, .step = step};
        if (scratch) {
            my.logits = scratch + FEW * most;
            my.turned = my.logits + groups * step;
            my.spare = my.turned + groups * dim;
            my.space = (char *)scratch + size;
            my.pairs = (uint32_t *)((char *)my.space + space);
            my.order = (uint16_t *)((char *)my.pairs + queries);
            my.ordered = (float *)((char *)my.order + order);
            my.weights = (uint16_t *)(my.ordered + (size_t)groups * dim);
#if defined(WITH_PAIRS)
            if (keys && is_paired(job, keys, dim)) pairs_order((int)keys->bits, dim, my.order);
#endif
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t cell = 0; cell < cells; cell++) {
            int64_t row = cell / job->splits, split = cell % job->splits;
            if (!scratch) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            one_part(job, keys, values, exact, row, split, dim, wide, &my);
        }
        if (job->out) {
#pragma omp for
            for (int64_t row = 0; row < job->rows; row++) merge(job, row);
        }
        free_lines(scratch);
    }
    return failed;
}
