// Products of a few rows of x with the rows of a weight as they lie in memory, each read once.
#pragma once
#include "tiles.h"

typedef struct {
    const char *x;
    int64_t next, rows, vectors, rest; // next: bytes from row to row
} Given;

// Products of `outputs` rows of a weight, from row `at` on, with `rows` rows of x. ahead, lines: as in `tile`.
INLINE void few_rows(const Weight *weight, const Given *given, int64_t next, void *out, int64_t at, int64_t row,
                     int outputs, int rows, int form, const char *ahead, int lines) {
    float sums[BESIDE * TOGETHER];
    const char *w = (const char *)weight->weight + at * next;
    const char *x = given->x + row * given->next;
    tile(w, next, x, given->next, given->vectors, given->rest, outputs, rows, form, ahead, lines, sums);
    put(weight, out, at, row, outputs, rows, sums, form);
}

// The same of BESIDE rows of a weight with all rows of x, in groups that differ by one row at most. The weights of the
// outputs after the next are read ahead, a part of them by each group.
INLINE void each_group(const Weight *weight, const Given *given, int64_t next, void *out, int64_t at, int form) {
    int64_t groups = (given->rows + TOGETHER - 1) / TOGETHER, row = 0;
    const char *ahead = (const char *)weight->weight + (at + 2 * BESIDE) * next;
    for (int64_t left = groups; left; left--) {
        int64_t rows = (given->rows - row + left - 1) / left;
#define FEW(ROWS, LINES) few_rows(weight, given, next, out, at, row, BESIDE, ROWS, form, ahead, LINES)
        if (groups == 1)
            switch (rows) {
            case 2: FEW(2, 4); break;
            case 3: FEW(3, 4); break;
            case 4: FEW(4, 4); break;
            case 5: FEW(5, 4); break;
            default: FEW(6, 4);
            }
        else
            switch (rows) {
            case 3: FEW(3, 2); break;
            case 4: FEW(4, 2); break;
            case 5: FEW(5, 2); break;
            default: FEW(6, 2);
            }
#undef FEW
        row += rows, ahead += 2 * given->vectors * BYTES;
    }
}

// The same of all rows of a weight in [from, to).
INLINE void all_rows(const Weight *weight, const Given *given, int64_t next, void *out, int64_t from, int64_t to,
                     int form) {
    int64_t at = from;
    for (; given->rows > 1 && at + BESIDE <= to; at += BESIDE) each_group(weight, given, next, out, at, form);
    for (; at < to; at++)
        for (int64_t row = 0; row < given->rows; row++) few_rows(weight, given, next, out, at, row, 1, 1, form, 0, 0);
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
