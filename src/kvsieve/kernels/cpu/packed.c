// Attention of one token over encoded entries: blocks are decoded to scratch that stays in the cache of a core.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef struct {
    const uint8_t *packed;  // [P, T, bytes]
    const _Float16 *scale;  // [P, 1, D] or [P, T, groups]
    const _Float16 *zero;   // the same, or null
    const float *levels;    // [2 ** bits], padded to 16 at least; null: the code itself
    const uint16_t *places; // [P, apart] or null
    const _Float16 *extra;  // [P, apart]
    int64_t bits, bytes, dim, group, apart; // group: 0 for a scale per channel
} Part;

static inline void codes_of(const uint8_t *restrict b, int bits, int dim, float *restrict x) {
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
        // A plane of two bits, then one of the lowest.
        int n = dim / 4, m = dim / 8;
        const uint8_t *low = b + n;
        for (int k = 0; k < 8; k++)
            for (int j = 0; j < m; j++) x[k * m + j] = (low[j] >> k) & 1;
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < n; j++) x[k * n + j] += ((b[j] >> (2 * k)) & 3) * 2;
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

static inline void look_up(const float *restrict levels, int bits, int dim, float *restrict x) {
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

static inline __attribute__((always_inline)) void decode_block(const Part *p, int64_t block, int tokens, int fill,
                                                               int dim, float *restrict x, float *restrict tmp) {
    const uint8_t *b = p->packed + block * tokens * p->bytes;
    float *scale = tmp, *zero = tmp + dim;
    if (!p->group)
        for (int j = 0; j < dim; j++) {
            scale[j] = (float)p->scale[block * dim + j];
            zero[j] = p->zero ? (float)p->zero[block * dim + j] : 0.0f;
        }
    int groups = p->group ? dim / (int)p->group : 0;
    for (int t = 0; t < fill; t++) {
        float *row = x + (int64_t)t * dim;
        codes_of(b + t * p->bytes, (int)p->bits, dim, row);
        if (p->levels) look_up(p->levels, (int)p->bits, dim, row);
        if (!p->group) {
            for (int j = 0; j < dim; j++) row[j] = row[j] * scale[j] + zero[j];
        } else {
            for (int g = 0; g < groups; g++) {
                int64_t at = (block * tokens + t) * groups + g;
                float s = (float)p->scale[at], z = p->zero ? (float)p->zero[at] : 0.0f;
                float *part = row + g * p->group;
                for (int j = 0; j < p->group; j++) part[j] = part[j] * s + z;
            }
        }
    }
    for (int i = 0; i < p->apart; i++) {
        int at = p->places[block * p->apart + i];
        if (at < fill * dim) x[at] += (float)p->extra[block * p->apart + i];
    }
}

// exp of x <= 0, to a few units in the last place.
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    union { int32_t i; float f; } two = {((int32_t)n + 127) << 23};
    return y * two.f;
}

typedef struct {
    const float *query;   // [R, G, D], scaled, and turned as the keys are
    const float *base;    // [R, G], added to every logit; or null
    const int64_t *table; // [R, M]
    const int64_t *fills; // [R, M]
    float *acc;           // [R, S, G, Dv]
    float *top, *sum;     // [R, S, G]: largest logit, and the sum of exponentials beside it
    int64_t rows, per_row, groups, tokens, splits;
    float cap;            // 0: none
} Job;

static inline __attribute__((always_inline)) void one_part(const Job *job, const Part *keys, const Part *values,
                                                           int64_t row, int64_t split, int dim, int wide,
                                                           float *scratch) {
    int groups = (int)job->groups, tokens = (int)job->tokens;
    int most = dim > wide ? dim : wide;
    float *x = scratch, *logits = x + (int64_t)tokens * most, *tmp = logits + (int64_t)groups * tokens;
    int64_t cell = row * job->splits + split;
    float *acc = job->acc + cell * groups * wide, *top = job->top + cell * groups, *sum = job->sum + cell * groups;
    for (int i = 0; i < groups * wide; i++) acc[i] = 0;
    for (int g = 0; g < groups; g++) top[g] = -INFINITY, sum[g] = 0;
    int64_t first = split * job->per_row / job->splits, last = (split + 1) * job->per_row / job->splits;
    const float *query = job->query + row * groups * dim;
    for (int64_t i = first; i < last; i++) {
        int fill = (int)job->fills[row * job->per_row + i];
        if (!fill) continue;
        int64_t block = job->table[row * job->per_row + i];
        decode_block(keys, block, tokens, fill, dim, x, tmp);
        for (int t = 0; t < fill; t++) {
            const float *restrict k = x + (int64_t)t * dim;
            for (int g = 0; g < groups; g++) {
                const float *restrict q = query + g * dim;
                float s = 0;
                for (int j = 0; j < dim; j++) s += q[j] * k[j];
                logits[g * tokens + t] = s;
            }
        }
        for (int g = 0; g < groups; g++) {
            float *restrict l = logits + g * tokens, most_here = -INFINITY;
            float base = job->base ? job->base[row * groups + g] : 0.0f;
            for (int t = 0; t < fill; t++) l[t] += base;
            if (job->cap > 0)
                for (int t = 0; t < fill; t++) l[t] = job->cap * tanhf(l[t] / job->cap);
            for (int t = 0; t < fill; t++) most_here = l[t] > most_here ? l[t] : most_here;
            float now = most_here > top[g] ? most_here : top[g];
            float before = top[g] == -INFINITY ? 0.0f : exp_of(top[g] - now), total = 0;
            for (int t = 0; t < fill; t++) {
                l[t] = exp_of(l[t] - now);
                total += l[t];
            }
            sum[g] = sum[g] * before + total;
            top[g] = now;
            float *restrict a = acc + g * wide;
            for (int j = 0; j < wide; j++) a[j] *= before;
        }
        decode_block(values, block, tokens, fill, wide, x, tmp);
        for (int t = 0; t < fill; t++) {
            const float *restrict v = x + (int64_t)t * wide;
            for (int g = 0; g < groups; g++) {
                float p = logits[g * tokens + t];
                float *restrict a = acc + g * wide;
                for (int j = 0; j < wide; j++) a[j] += p * v[j];
            }
        }
    }
}

int packed_attention(const Job *job, const Part *keys, const Part *values) {
    int dim = (int)keys->dim, wide = (int)values->dim, most = dim > wide ? dim : wide, failed = 0;
    int64_t cells = job->rows * job->splits;
    size_t size = ((size_t)job->tokens * most + job->groups * job->tokens + 2 * most + 64) * sizeof(float);
#pragma omp parallel
    {
        float *scratch = aligned_alloc(64, (size + 63) / 64 * 64);
#pragma omp for schedule(dynamic, 1)
        for (int64_t cell = 0; cell < cells; cell++) {
            int64_t row = cell / job->splits, split = cell % job->splits;
            if (!scratch) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            // Sizes that the compiler knows become straight code.
            if (dim == 64 && wide == 64)
                one_part(job, keys, values, row, split, 64, 64, scratch);
            else if (dim == 128 && wide == 128)
                one_part(job, keys, values, row, split, 128, 128, scratch);
            else
                one_part(job, keys, values, row, split, dim, wide, scratch);
        }
        free(scratch);
    }
    return failed;
}
