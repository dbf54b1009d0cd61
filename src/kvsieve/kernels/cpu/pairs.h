// Products of encoded entries with bfloat16 numbers, two at a time (AVX-512 BF16): codes of 2 or 4 bits become bfloat16
// by a table that lies in a register. Used where queries are bfloat16 as well: query and weights are rounded so.
//
// A byte j of an entry holds the codes of channels j + k * n, n = dim * bits / 8; two neighbouring bytes are a word. A
// table of 32 numbers repeats what the codes mean, so that bits of a word's next code do not matter. Codes without
// levels are counted from their middle, which leaves less to round; the caller adds that many scales in float32.
#pragma once
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WITH_PAIRS 1
#include <immintrin.h>

// Bytes of an entry that are looked at together; entries whose values are.
#define CHUNK 16
#define FOUR 4

static inline uint16_t narrow(float x) {
    union { float f; uint32_t i; } two = {x};
    return x != x ? 0x7fc0 : (uint16_t)((two.i + 0x7fff + ((two.i >> 16) & 1)) >> 16);
}

static __m512i pairs_table(const float *levels, int bits) {
    uint16_t table[32];
    for (int i = 0; i < 32; i++) {
        int code = i & ((1 << bits) - 1);
        table[i] = narrow(levels ? levels[code] : (float)(code - (1 << (bits - 1))));
    }
    return _mm512_loadu_si512(table);
}


// n numbers, a multiple of 16.
INLINE void narrow_all(const float *restrict x, int n, uint16_t *restrict out) {
    for (int j = 0; j < n; j += 16)
        _mm256_storeu_si256((__m256i *)(out + j), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + j)));
}

INLINE __m512bh pairs_product(const void *data) { return (__m512bh)_mm512_loadu_si512(data); }

// A chunk of each of four entries, `apart` bytes from each other.
INLINE __m512i pairs_load(const uint8_t *b, int apart) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)b));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(b + apart)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(b + 2 * apart)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(b + 3 * apart)), 3);
}

// The channels of a query as keys are read, two and two: pairs [bytes / CHUNK, 4, 16 / bits].
static void pairs_order(int bits, int dim, uint16_t *out) {
    int n = dim * bits / 8;
    for (int at = 0; at < n; at += 4)
        for (int byte = at; byte < at + 2; byte++)
            for (int low = byte; low < dim; low += n) *out++ = (uint16_t)low, *out++ = (uint16_t)(low + 2);
}

// Keys of 16 entries, a lane each, in the order of `pairs_order`; n: bytes of one.
INLINE void pairs_keys(const uint8_t *b, int n, int bits, __m512i table, __m512i *out) {
    for (int c = 0; c < n; c += CHUNK) {
        __m512i x[4], y[4], column[4];
        for (int i = 0; i < 4; i++) x[i] = pairs_load(b + i * n + c, 4 * n);
        y[0] = _mm512_unpacklo_epi32(x[0], x[1]), y[1] = _mm512_unpackhi_epi32(x[0], x[1]);
        y[2] = _mm512_unpacklo_epi32(x[2], x[3]), y[3] = _mm512_unpackhi_epi32(x[2], x[3]);
        column[0] = _mm512_unpacklo_epi64(y[0], y[2]), column[1] = _mm512_unpackhi_epi64(y[0], y[2]);
        column[2] = _mm512_unpacklo_epi64(y[1], y[3]), column[3] = _mm512_unpackhi_epi64(y[1], y[3]);
        for (int i = 0; i < 4; i++)
            for (int s = 0; s < 16; s += bits) *out++ = _mm512_permutexvar_epi16(_mm512_srli_epi16(column[i], s), table);
    }
}

INLINE void pairs_dot(const __m512i *keys, const uint32_t *q, int pairs, int heads, int step, float *logits) {
    __m512 a[4][2];
    for (int g = 0; g < heads; g++) a[g][0] = a[g][1] = _mm512_setzero_ps();
    for (int i = 0; i < pairs; i += 2)
        for (int g = 0; g < heads; g++)
            for (int k = 0; k < 2; k++)
                a[g][k] = _mm512_dpbf16_ps(a[g][k], pairs_product(keys + i + k),
                                           (__m512bh)_mm512_set1_epi32((int)q[g * pairs + i + k]));
    for (int g = 0; g < heads; g++) _mm512_storeu_ps(logits + g * step, _mm512_add_ps(a[g][0], a[g][1]));
}

// Logits [groups, step] of the entries of a block; queries: pairs [groups, dim / 2].
INLINE void pairs_logits_in(const Part *p, const uint8_t *b, int fill, int bits, int dim, const uint32_t *queries,
                            int groups, int step, __m512i *space, float *logits) {
    __m512i table = pairs_table(p->levels, bits);
    int pairs = dim / 2, n = dim * bits / 8;
    uint8_t last[16 * n];
    for (int at = 0; at < fill; at += 16) {
        const uint8_t *entries = b + at * n;
        if (at + 16 > fill) entries = memcpy(last, entries, (fill - at) * n);
        pairs_keys(entries, n, bits, table, space);
        int g = 0;
        for (; g + 4 <= groups; g += 4)
            pairs_dot(space, queries + g * pairs, pairs, 4, step, logits + g * step + at);
        switch (groups - g) {
        case 3: pairs_dot(space, queries + g * pairs, pairs, 3, step, logits + g * step + at); break;
        case 2: pairs_dot(space, queries + g * pairs, pairs, 2, step, logits + g * step + at); break;
        case 1: pairs_dot(space, queries + g * pairs, pairs, 1, step, logits + g * step + at); break;
        }
    }
}

static void pairs_logits(const Part *p, const uint8_t *b, int fill, int dim, const uint32_t *queries, int groups,
                         int step, __m512i *space, float *logits) {
    if (p->bits == 4 && dim == 64) pairs_logits_in(p, b, fill, 4, 64, queries, groups, step, space, logits);
    else if (p->bits == 4) pairs_logits_in(p, b, fill, 4, dim, queries, groups, step, space, logits);
    else pairs_logits_in(p, b, fill, 2, dim, queries, groups, step, space, logits);
}

// Values of a chunk, from `b` on, of a block's entries of n bytes each: [fill / 4, k, 2] vectors, k: shares of a byte.
// Of four entries, lane 2 * l has channel 2 * l, or 2 * l + 1 in the second vector, of the first two, and lane 2 * l + 1
// that of the others.
INLINE void pairs_values(const uint8_t *b, int n, int fill, int bits, __m512i table, __m512i *out) {
    uint8_t last[FOUR * n];
    uint16_t order[32];
    for (int l = 0; l < 8; l++)
        for (int i = 0; i < FOUR; i++) order[4 * l + i] = (uint16_t)(i * 8 + l);
    __m512i by = _mm512_loadu_si512(order);
    for (int at = 0; at < fill; at += FOUR) {
        const uint8_t *entries = b + at * n;
        // The rest of a chunk's last entry may not be there.
        if (at + FOUR > fill)
            for (int t = 0; t < fill - at; t++) memcpy(last + t * n, entries + t * n, CHUNK);
        __m512i x = _mm512_permutexvar_epi16(by, pairs_load(at + FOUR > fill ? last : entries, n));
        for (int k = 0; k < 8; k += bits) {
            *out++ = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, k), table);
            *out++ = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, k + 8), table);
        }
    }
}

// Add `shares` shares of a chunk's values by weight to acc [heads, wide]; weights: bfloat16 [heads, step].
INLINE void pairs_tile(const __m512i *values, int stride, int fours, const uint16_t *weights, int step, int heads,
                       int shares, int apart, int wide, float *acc) {
    __m512 a[4][4];
    for (int g = 0; g < heads; g++)
        for (int k = 0; k < 2 * shares; k++) a[g][k] = _mm512_setzero_ps();
    for (int i = 0; i < fours; i++)
        for (int g = 0; g < heads; g++) {
            int64_t four;
            memcpy(&four, weights + g * step + i * FOUR, 8);
            __m512bh p = (__m512bh)_mm512_set1_epi64(four);
            for (int k = 0; k < 2 * shares; k++) a[g][k] = _mm512_dpbf16_ps(a[g][k], p, pairs_product(values + i * stride + k));
        }
    for (int g = 0; g < heads; g++)
        for (int k = 0; k < shares; k++) {
            __m512 even = a[g][2 * k], odd = a[g][2 * k + 1];
            even = _mm512_add_ps(even, _mm512_shuffle_ps(even, even, 0xb1));
            odd = _mm512_add_ps(odd, _mm512_shuffle_ps(odd, odd, 0xb1));
            float *to = acc + g * wide + k * apart;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_mask_blend_ps(0xaaaa, even, odd)));
        }
}

// acc [groups, wide] += weights x values of a block. weights: bfloat16 [parts, groups, step], of each group of channels,
// 0 up to a multiple of four entries.
INLINE void pairs_add_in(const Part *p, const uint8_t *b, int fill, int bits, int wide, const uint16_t *weights,
                         int groups, int step, __m512i *space, float *acc) {
    __m512i table = pairs_table(p->levels, bits);
    int n = wide * bits / 8, all = 8 / bits, fours = (fill + FOUR - 1) / FOUR, parts = wide / (int)p->group;
    // Shares of a byte that belong to one group of channels, two at most at a time.
    int own = all / parts, shares = own > 1 ? 2 : 1;
    for (int chunk = 0; chunk < n / CHUNK; chunk++) {
        pairs_values(b + chunk * CHUNK, n, fill, bits, table, space);
        for (int k = 0; k < all; k += shares) {
            const uint16_t *w = weights + (int64_t)(k / own) * groups * step;
            const __m512i *v = space + 2 * k;
            float *to = acc + chunk * CHUNK + k * n;
            int g = 0;
#define TILE(HEADS)                                                                                                   \
    (shares == 2 ? pairs_tile(v, 2 * all, fours, w + g * step, step, HEADS, 2, n, wide, to + g * wide)                \
                 : pairs_tile(v, 2 * all, fours, w + g * step, step, HEADS, 1, n, wide, to + g * wide))
            for (; g + 4 <= groups; g += 4) TILE(4);
            switch (groups - g) {
            case 3: TILE(3); break;
            case 2: TILE(2); break;
            case 1: TILE(1); break;
            }
#undef TILE
        }
    }
}

static void pairs_add(const Part *p, const uint8_t *b, int fill, int wide, const uint16_t *weights, int groups,
                      int step, __m512i *space, float *acc) {
    if (p->bits == 4 && wide == 64) pairs_add_in(p, b, fill, 4, 64, weights, groups, step, space, acc);
    else if (p->bits == 4) pairs_add_in(p, b, fill, 4, wide, weights, groups, step, space, acc);
    else pairs_add_in(p, b, fill, 2, wide, weights, groups, step, space, acc);
}

static float pairs_middle(const Part *p) { return p->levels ? 0.0f : (float)(1 << (p->bits - 1)); }

// Keys that `pairs_logits` can read; `group` is that of their scales.
static int pairs_fit(const Part *p, int dim) {
    return (p->bits == 4 || p->bits == 2) && p->bytes % CHUNK == 0 && p->bytes == dim * p->bits / 8;
}

// Values whose shares of a byte are each of one group of channels.
static int pairs_fit_values(const Part *p, int wide) {
    return pairs_fit(p, wide) && p->group && p->group % p->bytes == 0;
}
#endif
