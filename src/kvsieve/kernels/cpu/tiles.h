// Sums of products of a few rows of a weight with a few rows of x, which stay in registers.
#pragma once
#include <string.h>
#include "common.h"
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAIRS 1
#else
#define PAIRS 0
#endif

// Neighbouring rows of a weight that are read side by side where there are several rows of x, so that each part of x is
// fetched once for all of them. Memory does not bring such rows by itself in time: they are read ahead.
#define BESIDE (LANES == 16 ? 4 : 2)
#define TOGETHER 6 // rows of x, at most
// Rows of a weight of a thread's turn: of one row of x, of several; and the fewest where turns are few.
#define TURN 16
#define LONG 64
#define LEAST 8
// Bytes of weights from which on several threads take part.
#define MANY 65536

typedef uint32_t Words __attribute__((vector_size(BYTES)));

// What is bfloat16: nothing, all, or the weights alone.
enum { FLOATS, HALVES, MIXED };

typedef struct {
    const void *weight, *bias; // [width, dim], [width]; null: no bias
    int64_t width, dim, form;
} Weight;

// Bytes of a number of a weight, and of x, biases and sums.
#define WEIGHT(form) ((form) == FLOATS ? 4 : 2)
#define OTHER(form) ((form) == HALVES ? 2 : 4)
// What the numbers of a row become before they meet weights: float32 of the even ones and of the odd ones, where there
// are no instructions for pairs of bfloat16, or x is none.
#define IS_SPLIT(form) ((form) == MIXED || ((form) == HALVES && !PAIRS))

// Rows of a weight of `width` rows that a thread takes at a time, for products with `rows` rows of x.
INLINE int64_t turn_of(int64_t width, int64_t rows, int64_t threads) {
    int64_t turn = rows > 1 ? LONG : TURN;
    while (turn > LEAST && width < 8 * threads * turn) turn /= 2;
    return turn;
}

INLINE Words words_at(const char *from) {
    Words x;
    memcpy(&x, from, BYTES);
    return x;
}

INLINE Floats floats_of(Words x) {
    Floats y;
    memcpy(&y, &x, BYTES);
    return y;
}

INLINE Floats added(Floats sum, const char *x, Words w, int form) {
    if (form == FLOATS) return sum + floats_of(words_at(x)) * floats_of(w);
#if PAIRS
    if (form == HALVES) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words_at(x), (__m512bh)w);
#endif
    sum += floats_of(words_at(x)) * floats_of(w << 16);
    return sum + floats_of(words_at(x + BYTES)) * floats_of(w & 0xffff0000u);
}

INLINE float total(Floats x) {
#if BYTES == 64
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

#if BYTES == 64
// Lane i of the result: the sum of all lanes of a[i], added in the order of `total`.
INLINE __m512 totals(const Floats *a) {
    __m512 half[8], quarter[4], eighth[2];
#define ADDED(SHUFFLE, X, Y, LOW, HIGH) _mm512_add_ps(SHUFFLE(X, Y, LOW), SHUFFLE(X, Y, HIGH))
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        half[2 * i] = ADDED(_mm512_shuffle_f32x4, (__m512)a[i], (__m512)a[4 + i], 0x44, 0xee);
        half[2 * i + 1] = ADDED(_mm512_shuffle_f32x4, (__m512)a[8 + i], (__m512)a[12 + i], 0x44, 0xee);
        quarter[i] = ADDED(_mm512_shuffle_f32x4, half[2 * i], half[2 * i + 1], 0x88, 0xdd);
    }
    for (int i = 0; i < 2; i++) eighth[i] = ADDED(_mm512_shuffle_ps, quarter[2 * i], quarter[2 * i + 1], 0x44, 0xee);
    return ADDED(_mm512_shuffle_ps, eighth[0], eighth[1], 0x88, 0xdd);
#undef ADDED
}
#endif

// The sums of all lanes of each of `count` vectors.
INLINE void all_totals(const Floats *a, int count, float *sums) {
    int i = 0;
#if BYTES == 64
#pragma GCC unroll 2
    while (count - i >= 8) {
        int n = count - i < 16 ? count - i : 16;
        Floats some[16];
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) some[k] = k < n ? a[i + k] : (Floats){0};
        _mm512_mask_storeu_ps(sums + i, (__mmask16)((1 << n) - 1), totals(some));
        i += n;
    }
#endif
#pragma GCC unroll 32
    for (; i < count; i++) sums[i] = total(a[i]);
}

// Sums [outputs, rows] of products of as many rows of a weight and of x, whose last vector may be a part: `rest` bytes.
// Meanwhile `lines` vectors for each of their own are read ahead, from `ahead` on.
INLINE void tile(const char *w, int64_t next_w, const char *x, int64_t next_x, int64_t vectors, int64_t rest,
                 int outputs, int rows, int form, const char *ahead, int lines, float *sums) {
    Floats a[BESIDE * TOGETHER];
    int64_t each = IS_SPLIT(form) ? 2 * BYTES : BYTES;
#pragma GCC unroll 32
    for (int i = 0; i < outputs * rows; i++) a[i] = (Floats){0};
    for (int64_t v = 0; v < vectors; v++) {
#pragma GCC unroll 4
        for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + (v * lines + i) * BYTES, 0, 2);
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) {
            Words y = words_at(w + o * next_w + v * BYTES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) a[r * outputs + o] = added(a[r * outputs + o], x + r * next_x + v * each, y, form);
        }
    }
    if (rest)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) {
            char last[BYTES] = {0};
            memcpy(last, w + o * next_w + vectors * BYTES, (size_t)rest);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                a[r * outputs + o] = added(a[r * outputs + o], x + r * next_x + vectors * each, words_at(last), form);
        }
    all_totals(a, outputs * rows, sums);
}

// Sums [outputs, rows] become numbers of `out`, from output `at` and row `row` on.
INLINE void put(const Weight *weight, void *out, int64_t at, int64_t row, int outputs, int rows, float *sums, int form) {
    int half = form == HALVES;
    char *to = (char *)out + (row * weight->width + at) * OTHER(form);
    if (weight->bias)
        for (int o = 0; o < outputs; o++) {
            int64_t i = at + o;
            float more = half ? of_half(((const uint16_t *)weight->bias)[i]) : ((const float *)weight->bias)[i];
            for (int r = 0; r < rows; r++) sums[r * outputs + o] += more;
        }
    uint16_t halves[BESIDE * TOGETHER];
    if (half)
        for (int i = 0; i < outputs * rows; i++) halves[i] = to_half(sums[i]);
    for (int r = 0; r < rows; r++)
        memcpy(to + r * weight->width * OTHER(form), half ? (void *)(halves + r * outputs) : (void *)(sums + r * outputs),
               (size_t)(outputs * OTHER(form)));
}
