// Products of a few tokens with the weight of a linear layer as it lies in memory, which is read once. Sums are of
// float32.
#include "products.h"

// x [rows, dim]; out [rows, width]. 0 where there was no memory.
int64_t multiply(const Weight *weight, const void *x, void *out, int64_t rows, int64_t threads) {
    Given given = {.rows = rows};
    char *made = prepared(weight, x, &given);
    if (!made) return 0;
    int64_t wide = weight->width, next = weight->dim * WEIGHT(weight->form), turn = turn_of(wide, rows, threads);
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
