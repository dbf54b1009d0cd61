// Attention that queries give to entries, added up or its largest over the queries, in bfloat16 (AVX-512 BF16). Logits
// are computed twice and never stored: once for each query's total over all it sees, once for what each entry gets of it.
#include "half.h"

// Entries of a product; queries of a task of the first pass, tiles of one of the second.
#define TILE 64
#define PART 64
#define TILES 4

typedef struct {
    const uint16_t *query, *keys;                    // of [B, Hq, T, D], [B, H, N, D], by strides
    const uint8_t *visible;                          // of [B, H, T, N], by strides
    const float *weights, *sinks;                    // of [B, H, T], by strides; [Hq]; or null
    float *out, *norms;                              // [B, Hq, entries], [B, Hq, T]
    uint32_t *pairs;                                 // [B * H, tiles, TILE * D / 2]
    int64_t query_row, query_head, query_slot, key_row, key_head, key_slot;
    int64_t visible_row, visible_head, visible_slot, weight_row, weight_head, weight_slot;
    int64_t batch, query_heads, heads, count, length, entries, dim, most;
    float scale, cap;
} Job;

#ifdef WITH_HALF
// One head's queries and what they meet.
typedef struct {
    const uint16_t *query;
    const uint32_t *keys;
    const uint8_t *visible;
    const float *weights;
    float *norms;
    float sink;
} Head;

static Head head_of(const Job *job, int64_t item) {
    int64_t b = item / job->query_heads, head = item % job->query_heads, h = head / (job->query_heads / job->heads);
    int64_t tiles = (job->length + TILE - 1) / TILE;
    return (Head){
        job->query + b * job->query_row + head * job->query_head,
        job->pairs + (b * job->heads + h) * tiles * TILE * job->dim / 2,
        job->visible + b * job->visible_row + h * job->visible_head,
        job->weights ? job->weights + b * job->weight_row + h * job->weight_head : 0,
        job->norms + item * job->count,
        job->sinks ? 1.44269504f * job->sinks[head] : -INFINITY,
    };
}

// What FEW queries from `row` on see of a tile, a bit for each entry; queries behind the last one see nothing.
INLINE uint64_t seen_by(const Job *job, const Head *my, int64_t row, int64_t tile, uint64_t *seen) {
    int64_t left = job->length - tile * TILE;
    __mmask64 there = left < TILE ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
    uint64_t any = 0;
    for (int r = 0; r < FEW; r++) {
        seen[r] = 0;
        if (row + r < job->count) {
            __m512i x = _mm512_maskz_loadu_epi8(there, my->visible + (row + r) * job->visible_slot + tile * TILE);
            seen[r] = _mm512_test_epi8_mask(x, x);
        }
        any |= seen[r];
    }
    return any;
}

// Logits of FEW queries, in units of log 2.
INLINE void logits_of(const Job *job, const Head *my, int64_t row, int64_t tile, int64_t half, const uint32_t *last,
                      __m512 a[FEW][FEW]) {
    const uint32_t *keys = my->keys + tile * TILE * half;
    const uint32_t *query = (const uint32_t *)(my->query + row * job->query_slot);
    if (row + FEW <= job->count) dots(query, job->query_slot / 2, keys, half, a, FEW, 0, 0);
    else dots(last, half, keys, half, a, FEW, 0, 0);
    __m512 factor = _mm512_set1_ps(1.44269504f * (job->cap > 0 ? 1.0f : job->scale));
    for (int r = 0; r < FEW; r++)
        for (int t = 0; t < FEW; t++)
            a[r][t] = _mm512_mul_ps(job->cap > 0 ? capped(a[r][t], job->scale, job->cap) : a[r][t], factor);
}

// The last queries of a head, where they are fewer than FEW: a copy, with zeros behind them.
INLINE void copy_last(const Job *job, const Head *my, int64_t half, uint32_t *last) {
    int64_t row = job->count / FEW * FEW;
    memset(last, 0, FEW * half * 4);
    for (int64_t r = 0; row + r < job->count; r++) memcpy(last + r * half, my->query + (row + r) * job->query_slot, half * 4);
}

// What is not a number stays so.
INLINE __m512 power_or_none(__m512 x, uint64_t seen, int t) {
    __mmask16 shown = (__mmask16)(seen >> (t * LANES));
    return _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(shown, x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ), power(x));
}

// The logarithm of each query's total, for queries [first, first + PART).
INLINE void add_up(const Job *job, const Head *my, int64_t first, int64_t half, const uint32_t *last) {
    int64_t tiles = (job->length + TILE - 1) / TILE, end = first + PART < job->count ? first + PART : job->count;
    for (int64_t row = first; row < end; row += FEW) {
        __m512 most[FEW], total[FEW], a[FEW][FEW];
        // So little that nothing is less, and no infinity, of which there are no differences.
        for (int r = 0; r < FEW; r++) most[r] = _mm512_set1_ps(-1e30f), total[r] = _mm512_setzero_ps();
        for (int64_t tile = 0; tile < tiles; tile++) {
            uint64_t seen[FEW];
            if (!seen_by(job, my, row, tile, seen)) continue;
            logits_of(job, my, row, tile, half, last, a);
            for (int r = 0; r < FEW; r++) {
                __m512 top = most[r];
                for (int t = 0; t < FEW; t++) top = _mm512_mask_max_ps(top, (__mmask16)(seen[r] >> (t * LANES)), a[r][t], top);
                total[r] = _mm512_mul_ps(total[r], power_or_none(_mm512_sub_ps(most[r], top), ~0ull, 0));
                for (int t = 0; t < FEW; t++)
                    total[r] = _mm512_add_ps(total[r], power_or_none(_mm512_sub_ps(a[r][t], top), seen[r], t));
                most[r] = top;
            }
        }
        for (int r = 0; r < FEW && row + r < end; r++) {
            float top = _mm512_reduce_max_ps(most[r]);
            top = my->sink > top ? my->sink : top;
            __m512 part = _mm512_mul_ps(total[r], power_or_none(_mm512_sub_ps(most[r], _mm512_set1_ps(top)), ~0ull, 0));
            my->norms[row + r] = top + log2f(_mm512_reduce_add_ps(part) + exp2f(my->sink - top));
        }
    }
}

// What the entries of a tile get.
INLINE void give(const Job *job, const Head *my, int64_t tile, int64_t half, const uint32_t *last, float *out) {
    __m512 sum[FEW], a[FEW][FEW];
    for (int t = 0; t < FEW; t++) sum[t] = _mm512_setzero_ps();
    uint64_t spoilt = 0;
    for (int64_t row = 0; row < job->count; row += FEW) {
        uint64_t seen[FEW];
        if (!seen_by(job, my, row, tile, seen)) continue;
        logits_of(job, my, row, tile, half, last, a);
        for (int r = 0; r < FEW && row + r < job->count; r++) {
            __m512 norm = _mm512_set1_ps(my->norms[row + r]);
            if (isnan(my->norms[row + r])) spoilt |= seen[r];
            __m512 weight = _mm512_set1_ps(my->weights ? my->weights[(row + r) * job->weight_slot] : 1.0f);
            for (int t = 0; t < FEW; t++) {
                __m512 mass = _mm512_mul_ps(power_or_none(_mm512_sub_ps(a[r][t], norm), seen[r], t), weight);
                sum[t] = job->most ? _mm512_max_ps(sum[t], mass) : _mm512_add_ps(sum[t], mass);
            }
        }
    }
    int64_t left = job->entries - tile * TILE;
    for (int t = 0; t < FEW; t++) {
        int64_t here = left - t * LANES;
        // The largest of some numbers may hide that one of them is none.
        sum[t] = _mm512_mask_mov_ps(sum[t], (__mmask16)(spoilt >> (t * LANES)), _mm512_set1_ps(NAN));
        if (here > 0) _mm512_mask_storeu_ps(out + tile * TILE + t * LANES, here < LANES ? (1u << here) - 1 : 0xffff, sum[t]);
    }
}

static void first_pass(const Job *job, int64_t item, int64_t part) {
    uint32_t last[FEW * job->dim / 2];
    Head my = head_of(job, item);
    copy_last(job, &my, job->dim / 2, last);
    if (job->dim == 64) add_up(job, &my, part * PART, 32, last);
    else if (job->dim == 128) add_up(job, &my, part * PART, 64, last);
    else add_up(job, &my, part * PART, job->dim / 2, last);
}

static void second_pass(const Job *job, int64_t item, int64_t part, int64_t tiles) {
    uint32_t last[FEW * job->dim / 2];
    Head my = head_of(job, item);
    copy_last(job, &my, job->dim / 2, last);
    float *out = job->out + item * job->entries;
    for (int64_t tile = part * TILES; tile < (part + 1) * TILES && tile < tiles; tile++)
        if (job->dim == 64) give(job, &my, tile, 32, last, out);
        else if (job->dim == 128) give(job, &my, tile, 64, last, out);
        else give(job, &my, tile, job->dim / 2, last, out);
}

int64_t has_half(void) { return 1; }

void query_mass(const Job *job, int64_t threads) {
    int64_t rows = job->batch * job->heads, items = job->batch * job->query_heads, half = job->dim / 2;
    int64_t tiles = (job->length + TILE - 1) / TILE, wanted = (job->entries + TILE - 1) / TILE;
    int64_t parts = (job->count + PART - 1) / PART, groups = (wanted + TILES - 1) / TILES;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * tiles; i++) {
            const uint16_t *keys = job->keys + i / tiles / job->heads * job->key_row + i / tiles % job->heads * job->key_head;
            lay_out_keys(keys, job->key_slot, i % tiles * TILE, TILE, job->length, half, job->pairs + i * TILE * half);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items * parts; i++) first_pass(job, i / parts, i % parts);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items * groups; i++) second_pass(job, i / groups, i % groups, wanted);
    }
}
#else
int64_t has_half(void) { return 0; }

void query_mass(const Job *job, int64_t threads) { (void)job, (void)threads; }
#endif
