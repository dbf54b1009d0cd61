// Products of a few tokens with the weight of a linear layer as it lies in memory, which is read once. Sums are of
// float32.
#include <string.h>
#include "common.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAIRS 1
#else
#define PAIRS 0
#endif

// Bytes of a vector.
#if defined(__AVX512F__)
#include <immintrin.h>
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / 4)
// Rows of a weight that are read side by side where there are several rows of x. One after another they are a single
// stream, which memory is fastest at; side by side each part of x is fetched once for all of them.
#define BESIDE (LANES == 16 ? 4 : 2)
#define TOGETHER 4 // rows of x
// Rows of a weight of a thread's turn: of one row of x, of several; and the fewest where turns are few.
#define TURN 16
#define LONG 64
#define LEAST 8
// Bytes of weights from which on several threads take part.
#define MANY 65536

typedef float Floats __attribute__((vector_size(BYTES)));
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

// Sums [outputs, rows] of products of as many rows of a weight and of x, whose last vector may be a part: `rest` bytes.
INLINE void tile(const char *w, int64_t next_w, const char *x, int64_t next_x, int64_t vectors, int64_t rest,
                 int outputs, int rows, int form, float *sums) {
    Floats a[BESIDE * TOGETHER];
    int64_t each = IS_SPLIT(form) ? 2 * BYTES : BYTES;
    for (int i = 0; i < outputs * rows; i++) a[i] = (Floats){0};
    for (int64_t v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) {
            Words y = words_at(w + o * next_w + v * BYTES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) a[o * rows + r] = added(a[o * rows + r], x + r * next_x + v * each, y, form);
        }
    if (rest)
        for (int o = 0; o < outputs; o++) {
            char last[BYTES] = {0};
            memcpy(last, w + o * next_w + vectors * BYTES, (size_t)rest);
            for (int r = 0; r < rows; r++)
                a[o * rows + r] = added(a[o * rows + r], x + r * next_x + vectors * each, words_at(last), form);
        }
    for (int i = 0; i < outputs * rows; i++) sums[i] = total(a[i]);
}

typedef struct {
    const char *x;
    int64_t next, rows, vectors, rest; // next: bytes from row to row
} Given;

INLINE void put(const Weight *weight, void *out, int64_t at, int64_t row, float sum, int form) {
    int half = form == HALVES;
    if (weight->bias) sum += half ? of_half(((const uint16_t *)weight->bias)[at]) : ((const float *)weight->bias)[at];
    if (half) ((uint16_t *)out)[row * weight->width + at] = to_half(sum);
    else ((float *)out)[row * weight->width + at] = sum;
}

// Products of `outputs` rows of a weight, `apart` from one another, with `rows` rows of x.
INLINE void some(const Weight *weight, const Given *given, int64_t next, void *out, int64_t at, int64_t apart,
                 int64_t row, int outputs, int rows, int form) {
    float sums[BESIDE * TOGETHER];
    const char *w = (const char *)weight->weight + at * next;
    const char *x = given->x + row * given->next;
    tile(w, next * apart, x, given->next, given->vectors, given->rest, outputs, rows, form, sums);
    for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++) put(weight, out, at + o * apart, row + r, sums[o * rows + r], form);
}

// The same of all rows of a weight in [from, to).
INLINE void turn_of(const Weight *weight, const Given *given, int64_t next, void *out, int64_t from, int64_t to,
                    int64_t row, int beside, int rows, int form) {
    int64_t apart = (to - from) / beside, at = from;
    for (; at < from + apart; at++) some(weight, given, next, out, at, apart, row, beside, rows, form);
    for (at = from + apart * beside; at < to; at++) some(weight, given, next, out, at, 1, row, 1, rows, form);
}

INLINE void all_rows(const Weight *weight, const Given *given, int64_t next, void *out, int64_t from, int64_t to,
                     int form) {
    int64_t row = 0;
    for (; row + TOGETHER <= given->rows; row += TOGETHER)
        turn_of(weight, given, next, out, from, to, row, BESIDE, TOGETHER, form);
    for (; row + 2 <= given->rows; row += 2) turn_of(weight, given, next, out, from, to, row, BESIDE, 2, form);
    if (row < given->rows) turn_of(weight, given, next, out, from, to, row, 1, 1, form);
}

// Rows as their vectors are read; null where there is no memory, x itself where they lie so.
INLINE char *prepared(const Weight *weight, const char *x, Given *given) {
    int64_t bytes = weight->dim * WEIGHT(weight->form), padded = (bytes + BYTES - 1) / BYTES;
    int64_t own = weight->dim * OTHER(weight->form), is_split = IS_SPLIT(weight->form);
    given->vectors = bytes / BYTES, given->rest = bytes % BYTES;
    given->x = x, given->next = own;
    if (!given->rest && !is_split) return (char *)x;
    given->next = padded * BYTES * (is_split ? 2 : 1);
    char *made = allocate_lines((size_t)(given->rows * given->next));
    if (!made) return made;
    memset(made, 0, (size_t)(given->rows * given->next));
    for (int64_t row = 0; row < given->rows; row++) {
        const char *from = x + row * own;
        char *to = made + row * given->next;
        if (!is_split) {
            memcpy(to, from, (size_t)own);
            continue;
        }
        for (int64_t v = 0; v < padded; v++) {
            int64_t left = weight->dim - v * 2 * LANES, n = left < 2 * LANES ? left : 2 * LANES;
            float *split = (float *)(to + v * 2 * BYTES);
            for (int64_t i = 0, at = v * 2 * LANES; i < n; i++, at++)
                split[(i & 1) * LANES + i / 2] =
                    weight->form == HALVES ? of_half(((const uint16_t *)from)[at]) : ((const float *)from)[at];
        }
    }
    given->x = made;
    return made;
}

// x [rows, dim]; out [rows, width]. 0 where there was no memory.
int64_t multiply(const Weight *weight, const void *x, void *out, int64_t rows, int64_t threads) {
    Given given = {.rows = rows};
    char *made = prepared(weight, x, &given);
    if (!made) return 0;
    int64_t wide = weight->width, next = weight->dim * WEIGHT(weight->form), turn = rows > 1 ? LONG : TURN;
    while (turn > LEAST && wide < 8 * threads * turn) turn /= 2;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && wide * next > MANY)
    for (int64_t from = 0; from < wide; from += turn) {
        int64_t end = from + turn < wide ? from + turn : wide;
        if (weight->form == HALVES) all_rows(weight, &given, next, out, from, end, HALVES);
        else if (weight->form == MIXED) all_rows(weight, &given, next, out, from, end, MIXED);
        else all_rows(weight, &given, next, out, from, end, FLOATS);
    }
    if (made != (char *)x) free_lines(made);
    return 1;
}
