// Products of vectors of bfloat16, of which a processor multiplies two at a time (AVX-512 BF16), and powers of their
// results. WITH_HALF is defined where the compiler makes them.
#pragma once
#include <string.h>
#include "common.h"
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WITH_HALF 1
#include <immintrin.h>

// Lanes of a vector; rows, and vectors of entries or channels, of a product that stays in registers.
#define LANES 16
#define FEW 4
// Entries after those that are laid out, of which keys are read ahead.
#define AHEAD 128
#define LINE 64 // bytes that memory brings at a time

INLINE uint32_t pair(const uint16_t *at) {
    uint32_t two;
    memcpy(&two, at, sizeof two);
    return two;
}

INLINE __m512bh two_of(const uint32_t *at) { return (__m512bh)_mm512_loadu_si512(at); }

// Products of up to FEW rows, each `apart` pairs from the next, with FEW * LANES entries: pairs of channels, LANES entries
// side by side. Meanwhile `lines` cache lines for each pair of channels are read ahead, from `ahead` on.
INLINE void dots(const uint32_t *q, int64_t apart, const uint32_t *k, int64_t half, __m512 a[FEW][FEW],
                 int rows, const char *ahead, int lines) {
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < FEW; t++) a[r][t] = _mm512_setzero_ps();
    for (int64_t c = 0; c < half; c++) {
        for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + (c * lines + i) * LINE, 0, 2);
        __m512bh x[FEW];
        for (int t = 0; t < FEW; t++) x[t] = two_of(k + (t * half + c) * LANES);
        for (int r = 0; r < rows; r++) {
            __m512bh y = (__m512bh)_mm512_set1_epi32((int)q[r * apart + c]);
            for (int t = 0; t < FEW; t++) a[r][t] = _mm512_dpbf16_ps(a[r][t], y, x[t]);
        }
    }
}

// 2 to the power of x.
INLINE __m512 power(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.33335581e-3f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.61812911e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.55041087e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.40226507e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93147181e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

// cap * tanh(scale / cap * x).
INLINE __m512 capped(__m512 x, float scale, float cap) {
    __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    __m512 e = power(_mm512_mul_ps(x, _mm512_set1_ps(2.88539008f * scale / cap)));
    return _mm512_mul_ps(_mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one))), _mm512_set1_ps(cap));
}

// LANES pairs of each of LANES rows, `slot` numbers from one another, become LANES rows of a pair of each.
INLINE void turn(const uint16_t *rows, int64_t slot, uint32_t *to) {
    __m512i x[LANES], y[LANES];
    for (int i = 0; i < LANES; i++) x[i] = _mm512_loadu_si512(rows + i * slot);
    // Keys of the next tile, which memory does not bring in time by itself.
    for (int i = 0; i < LANES; i++) __builtin_prefetch(rows + (i + AHEAD) * slot, 0, 2);
    for (int i = 0; i < LANES; i += 2)
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 2; k++) {
            x[i + 2 * k] = _mm512_unpacklo_epi64(y[i + k], y[i + k + 2]);
            x[i + 2 * k + 1] = _mm512_unpackhi_epi64(y[i + k], y[i + k + 2]);
        }
    // x[4 * r + c] has, in its parts p, pairs 4 * p + c of rows 4 * r to 4 * r + 3.
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88), b = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        __m512i d = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88), e = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * LANES, _mm512_shuffle_i32x4(a, d, 0x88));
        _mm512_storeu_si512(to + (8 + c) * LANES, _mm512_shuffle_i32x4(a, d, 0xdd));
        _mm512_storeu_si512(to + (4 + c) * LANES, _mm512_shuffle_i32x4(b, e, 0x88));
        _mm512_storeu_si512(to + (12 + c) * LANES, _mm512_shuffle_i32x4(b, e, 0xdd));
    }
}

// Keys of `count` entries, a multiple of LANES, from entry `first` on, as `dots` takes them; 0 for entries that are not
// among [0, length).
INLINE void lay_out_keys(const uint16_t *keys, int64_t slot, int64_t first, int64_t count, int64_t length, int64_t half,
                         uint32_t *to) {
    static const uint16_t none[2] = {0, 0};
    int64_t whole = 0;
    // Of LANES entries that are all there, LANES pairs of channels at a time.
    for (; half % LANES == 0 && whole < count && first + whole >= 0 && first + whole + LANES <= length; whole += LANES)
        for (int64_t c = 0; c < half; c += LANES)
            turn(keys + (first + whole) * slot + 2 * c, slot, to + whole * half + c * LANES);
    for (int64_t p = whole; p < count; p++) {
        int64_t entry = first + p;
        int there = entry >= 0 && entry < length;
        uint32_t *at = to + p / LANES * half * LANES + p % LANES;
        const uint16_t *key = keys + entry * slot;
        for (int64_t c = 0; c < half; c++) at[c * LANES] = there ? pair(key + 2 * c) : pair(none);
    }
}
#endif
