// Codes of numbers by a codebook that is symmetric about 0: the scale that suits each vector, and the levels nearest to
// numbers.
#include <stdint.h>
#include "common.h"

typedef struct {
    const float *x;       // [vectors, size]
    const float *levels;  // the positive ones, `half` of them, ascending
    const float *starts;  // scales to start from, over a vector's root mean square
    const float *borders; // between each level and the next, of the negative ones too
    float *scale;         // [vectors]
    uint8_t *codes;       // [vectors, size]
    int64_t vectors, size, half, begins, products; // products: keep a vector's product with itself
} Job;

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

#define EACH(what)                                                                                                     \
    _Pragma("omp parallel for num_threads((int)threads) if (threads > 1)")                                             \
    for (int64_t vector = 0; vector < job->vectors; vector++) {                                                        \
        if (job->half == 8) what(job, vector, 8);                                                                      \
        else if (job->half == 4) what(job, vector, 4);                                                                 \
        else what(job, vector, 2);                                                                                     \
    }

void fit_levels(const Job *job, int64_t threads) { EACH(fit) }

void code_levels(const Job *job, int64_t threads) { EACH(code) }
