// Attention of the last token, or few, over entries where they lie.
#pragma once
#include <stdint.h>

typedef struct {
    const void *query;         // [batch, fresh, heads, groups, dim]
    const void *keys, *values; // entry t of a head: b * row + h * head + t, of dim numbers
    const void *seen;          // of a head's entry t: b * seen_row + h * seen_head + t; null: all are seen
    float *weights;            // logarithms of the entries' weights, where the keys are; null: all weigh 1
    void *out;                 // [batch, fresh, heads, groups, dim]
    int64_t batch, heads, groups, dim, size, row, head;
    int64_t item, seen_row, seen_head; // item: bytes of a mark; one byte is true, two or four are 0 where seen
    int64_t newest, half;              // newest: the last entry is seen in any case; half: bfloat16
    int64_t fresh, apart;              // tokens; each sees `apart` entries more than the one before it, the last all
    float scale;
} Token;
