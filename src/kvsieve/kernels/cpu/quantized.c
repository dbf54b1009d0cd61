// Weights in GGUF's blocks: their rows as numbers, and products of a few tokens with them. Sums are of float32.
#include "products.h"
#include "blocks.h"
#include "integers.h"

// Numbers of a row that become float32 at a time, which stay in the nearest cache: whole blocks of every type.
#define SOME 1024
// Rows of x, at most, for which a row of the weight is unpacked once.
#define MOST 32

INLINE const uint8_t *numbers_at(const Matrix *matrix, const uint8_t *row, int64_t from) {
    return row + from / SIZE(matrix->kind) * block_bytes(matrix->kind);
}

// Round to nearest. are_small: some may be subnormal, which the processor's own instruction takes for 0.
INLINE void to_halves(const float *restrict from, int64_t n, int are_small, uint16_t *restrict to) {
    int64_t j = 0;
#if PAIRS
    for (; !are_small && j + 16 <= n; j += 16)
        _mm256_storeu_si256((__m256i *)(to + j), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + j)));
#endif
    for (; j < n; j++) to[j] = to_half(from[j]);
}

// Rows `index` [count] of a weight, null: all of them; out [count, inner], bfloat16 or float32. An index that is none is
// left out, and the last such one's place, from 1 on, is returned; 0: there is none.
int64_t dequantize(const Matrix *matrix, const int64_t *index, int64_t count, void *out, int64_t half, int64_t threads) {
    int64_t inner = matrix->inner, kind = matrix->kind, size = SIZE(kind), wrong = 0;
    int are_small = kind == F32 || kind == BF16;
#pragma omp parallel for schedule(static) num_threads((int)threads) reduction(max : wrong) \
    if (threads > 1 && count * matrix->bytes > MANY)
    for (int64_t i = 0; i < count; i++) {
        int64_t at = index ? index[i] : i;
        if (at < 0 || at >= matrix->width) {
            wrong = i + 1;
            continue;
        }
        const uint8_t *row = row_at(matrix, at);
        if (!half) {
            unpack(kind, row, inner / size, (float *)out + i * inner);
            continue;
        }
        for (int64_t from = 0; from < inner; from += SOME) {
            float numbers[SOME];
            int64_t n = inner - from < SOME ? inner - from : SOME;
            unpack(kind, numbers_at(matrix, row, from), n / size, numbers);
            to_halves(numbers, n, are_small, (uint16_t *)out + i * inner + from);
        }
    }
    return wrong;
}

typedef struct {
    const float *x; // [rows, next], beyond their numbers 0
    int64_t next, rows;
} Tokens;

// Sums [rows, outputs] of `vectors` vectors of as many rows of numbers, SOME from one another, and of x.
INLINE void sums_of(const float *w, const float *x, int64_t next, int64_t vectors, int outputs, int rows, float *sums) {
#define TILE(ROWS) \
    tile((const char *)w, SOME * 4, (const char *)x, next * 4, vectors, 0, outputs, ROWS, FLOATS, 0, 0, sums)
    switch (rows) {
    case 1: TILE(1); break;
    case 2: TILE(2); break;
    case 3: TILE(3); break;
    case 4: TILE(4); break;
    case 5: TILE(5); break;
    default: TILE(6);
    }
#undef TILE
}

// Products of `outputs` rows of a weight, from row `at` on: BESIDE of them, or 1; with `rows` rows of x, from `first` on.
INLINE void some(const Matrix *matrix, const Weight *target, const Tokens *tokens, void *out, int64_t at, int outputs,
                 int64_t first, int64_t rows) {
    float numbers[BESIDE * SOME], sums[BESIDE * MOST] = {0}, more[BESIDE * TOGETHER];
    for (int64_t from = 0; from < matrix->inner; from += SOME) {
        int64_t n = matrix->inner - from < SOME ? matrix->inner - from : SOME, vectors = (n + LANES - 1) / LANES;
        for (int o = 0; o < outputs; o++) {
            float *to = numbers + o * SOME;
            unpack(matrix->kind, numbers_at(matrix, row_at(matrix, at + o), from), n / SIZE(matrix->kind), to);
            for (int64_t j = n; j < vectors * LANES; j++) to[j] = 0;
        }
        for (int64_t row = 0; row < rows; row += TOGETHER) {
            int few = rows - row < TOGETHER ? (int)(rows - row) : TOGETHER;
            sums_of(numbers, tokens->x + (first + row) * tokens->next + from, tokens->next, vectors, outputs, few, more);
            for (int i = 0; i < few * outputs; i++) sums[row * outputs + i] += more[i];
        }
    }
    for (int64_t row = 0; row < rows; row += TOGETHER) {
        int few = rows - row < TOGETHER ? (int)(rows - row) : TOGETHER;
        put(target, out, at, first + row, outputs, few, sums + row * outputs, (int)target->form);
    }
}

static void rows_of(const Matrix *matrix, const Weight *target, const Tokens *tokens, void *out, int64_t from,
                    int64_t to) {
#if WITH_SUMS
    // One row of x meets numbers as they are unpacked.
    for (; from < to && tokens->rows == 1 && SIZE(matrix->kind) > 1; from++) {
        float sum = sum_of(matrix->kind, row_at(matrix, from), matrix->inner / SIZE(matrix->kind), tokens->x);
        put(target, out, from, 0, 1, 1, &sum, (int)target->form);
    }
#endif
    for (int64_t first = 0; first < tokens->rows; first += MOST) {
        int64_t rows = tokens->rows - first < MOST ? tokens->rows - first : MOST, at = from;
        for (; at + BESIDE <= to; at += BESIDE) some(matrix, target, tokens, out, at, BESIDE, first, rows);
        for (; at < to; at++) some(matrix, target, tokens, out, at, 1, first, rows);
    }
}

// Rows of x as float32; null where there is no memory.
static float *tokens_of(const void *x, int64_t inner, int64_t half, Tokens *tokens) {
    tokens->next = (inner + LANES - 1) / LANES * LANES;
    float *made = allocate_lines((size_t)(tokens->rows * tokens->next) * sizeof *made);
    for (int64_t row = 0; made && row < tokens->rows; row++) {
        float *to = made + row * tokens->next;
        for (int64_t j = inner; j < tokens->next; j++) to[j] = 0;
        if (half)
            for (int64_t j = 0; j < inner; j++) to[j] = of_half(((const uint16_t *)x)[row * inner + j]);
        else memcpy(to, (const float *)x + row * inner, (size_t)inner * sizeof *to);
    }
    tokens->x = made;
    return made;
}

// Products of float32 rows with a weight of plain bfloat16 numbers, which is read in place.
static int64_t multiply_in_place(const Matrix *matrix, const void *bias, const void *x, void *out, int64_t rows,
                                 int64_t threads) {
    Weight weight = {matrix->data, bias, matrix->width, matrix->inner, MIXED};
    Given given = {.rows = rows};
    char *made = prepared(&weight, x, &given);
    if (!made) return 0;
    int64_t wide = matrix->width, next = matrix->bytes, turn = turn_of(wide, rows, threads);
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && wide * next > MANY)
    for (int64_t from = 0; from < wide; from += turn) {
        int64_t to = from + turn < wide ? from + turn : wide;
        all_rows(&weight, &given, next, out, from, to, MIXED);
    }
    free_lines(made);
    return 1;
}

// bias [width] or null, x [rows, inner], out [rows, width]: bfloat16 or float32. 0 where there was no memory.
int64_t multiply(const Matrix *matrix, const void *bias, const void *x, void *out, int64_t rows, int64_t half,
                 int64_t threads) {
    if (matrix->kind == BF16 && !matrix->order && !half) return multiply_in_place(matrix, bias, x, out, rows, threads);
    Weight target = {.bias = bias, .width = matrix->width, .dim = matrix->inner, .form = half ? HALVES : FLOATS};
    Tokens tokens = {.rows = rows};
    void *made = 0;
#if WITH_INTEGERS
    Pairs pairs;
    int is_integers = half && in_integers(matrix->kind);
    if (is_integers) made = pairs_of(matrix, x, rows, &pairs);
    else
#endif
        made = tokens_of(x, matrix->inner, half, &tokens);
    if (!made) return 0;
    int64_t wide = matrix->width, turn = turn_of(wide, rows, threads);
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && wide * matrix->bytes > MANY)
    for (int64_t from = 0; from < wide; from += turn) {
        int64_t to = from + turn < wide ? from + turn : wide;
#if WITH_INTEGERS
        if (is_integers) integer_rows(matrix, &target, &pairs, out, from, to);
        else
#endif
            rows_of(matrix, &target, &tokens, out, from, to);
    }
    free_lines(made);
    return 1;
}
