// Codes of numbers by a codebook that is symmetric about 0: the scale that suits each vector, the levels nearest to
// numbers, and codes chosen together.
#include <float.h>
#include <stdint.h>
#include "common.h"

typedef struct {
    const float *x;       // [vectors, size]
    const float *levels;  // the positive ones, `half` of them, ascending
    const float *starts;  // scales to start from, over a vector's root mean square
    const float *borders; // between each level and the next, of the negative ones too
    const float *metric;  // [rows, size, size], symmetric
    const int64_t *rows;  // [vectors / each], which metric
    float *scale;         // [vectors]
    uint8_t *codes;       // [vectors, size]
    int64_t vectors, size, half, begins, products; // products: keep a vector's product with itself
    int64_t each, rounds; // vectors of a block; how often each code is chosen
} Job;

#define MOST 1024 // numbers of a vector whose codes are chosen together

// Of the codes by each start, the scale with the least squared error for those whose error is least: with a.n / n.n as
// the scale of levels n for numbers a, what it takes off the error is (a.n)^2 / n.n.
INLINE void fit(const Job *job, int64_t vector, int half) {
    const float *restrict x = job->x + vector * job->size;
    float squares = 0, best = -1, found = 0;
    for (int64_t i = 0; i < job->size; i++) squares += x[i] * x[i];
    // NaN and infinity are the caller's to refuse.
    if (!(squares <= 3e38f)) {
        job->scale[vector] = squares;
        return;
    }
    float root = sqrtf(squares / (float)job->size);
    for (int64_t start = 0; start < job->begins; start++) {
        float scale = root * job->starts[start], product = 0, norm = 0, border[16];
        for (int at = 1; at < half; at++) border[at] = 0.5f * (job->levels[at - 1] + job->levels[at]) * scale;
        for (int64_t i = 0; i < job->size; i++) {
            float is = fabsf(x[i]), level = job->levels[0];
            for (int at = 1; at < half; at++) level = is > border[at] ? job->levels[at] : level;
            product += is * level, norm += level * level;
        }
        float gain = product * product / norm;
        if (gain > best) best = gain, found = !job->products ? product / norm : product > 0 ? squares / product : 0;
    }
    job->scale[vector] = found;
}

INLINE void code(const Job *job, int64_t vector, int half) {
    const float *restrict x = job->x + vector * job->size;
    uint8_t *restrict codes = job->codes + vector * job->size;
    for (int64_t i = 0; i < job->size; i++) {
        int32_t above = 0;
        for (int at = 0; at < 2 * half - 1; at++) above += x[i] > job->borders[at];
        codes[i] = (uint8_t)above;
    }
}

// to += by * row
INLINE void add_row(float *restrict to, const float *restrict row, float by, int64_t size) {
    for (int64_t i = 0; i < size; i++) to[i] += by * row[i];
}

// One code after the other becomes the one by which (x - scale * levels)' M (x - scale * levels) is least; then the scale
// becomes the one by which x' M (scale * levels) is x' M x.
INLINE void shape(const Job *job, int64_t vector, int half) {
    int64_t size = job->size;
    const float *x = job->x + vector * size, *metric = job->metric + job->rows[vector / job->each] * size * size;
    uint8_t *codes = job->codes + vector * size;
    float level[16], border[16], of[MOST], wanted[MOST], got[MOST];
    for (int at = 0; at < half; at++) level[half + at] = job->levels[at], level[half - 1 - at] = -job->levels[at];
    for (int at = 0; at < 2 * half - 1; at++) border[at] = 0.5f * (level[at] + level[at + 1]);
    for (int64_t i = 0; i < size; i++) of[i] = level[codes[i]], wanted[i] = got[i] = 0;
    for (int64_t i = 0; i < size; i++) {
        add_row(wanted, metric + i * size, x[i], size);
        add_row(got, metric + i * size, of[i], size);
    }
    for (int64_t round = 0; round < job->rounds; round++) {
        float product = 0, norm = 0;
        for (int64_t i = 0; i < size; i++) product += x[i] * got[i], norm += of[i] * got[i];
        float scale = fmaxf(product / norm, FLT_MIN);
        for (int64_t i = 0; i < size; i++) {
            const float *row = metric + i * size;
            float want = of[i] + (wanted[i] / scale - got[i]) / fmaxf(row[i], FLT_MIN);
            int above = 0;
            for (int at = 0; at < 2 * half - 1; at++) above += want > border[at];
            if (above == codes[i]) continue;
            add_row(got, row, level[above] - of[i], size);
            of[i] = level[above], codes[i] = (uint8_t)above;
        }
    }
    float whole = 0, product = 0;
    for (int64_t i = 0; i < size; i++) whole += x[i] * wanted[i], product += of[i] * wanted[i];
    job->scale[vector] = product > 0 ? whole / product : 0;
}

#define EACH(what)                                                                                                     \
    _Pragma("omp parallel for num_threads((int)threads) if (threads > 1)")                                             \
    for (int64_t vector = 0; vector < job->vectors; vector++) {                                                        \
        if (job->half == 8) what(job, vector, 8);                                                                      \
        else if (job->half == 4) what(job, vector, 4);                                                                 \
        else what(job, vector, 2);                                                                                     \
    }

void fit_levels(const Job *job, int64_t threads) { EACH(fit) }

void code_levels(const Job *job, int64_t threads) { EACH(code) }

void shape_codes(const Job *job, int64_t threads) { EACH(shape) }
