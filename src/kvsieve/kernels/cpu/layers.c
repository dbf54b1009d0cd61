// The small operations of a decoder layer, each in one call: root-mean-square norms, rotary positions,
// gated activations. Numbers are rounded where the model's own operations round.
#include <string.h>
#include "common.h"

// Numbers of a call from which on several threads take part.
#define MANY 32768

INLINE float loaded(const void *x, int64_t at, int half) {
    return half ? of_half(((const uint16_t *)x)[at]) : ((const float *)x)[at];
}

INLINE void store(void *x, int64_t at, float is, int half) {
    if (half) ((uint16_t *)x)[at] = to_half(is);
    else ((float *)x)[at] = is;
}

// What is left of a number once it has been stored.
INLINE float rounded(float x, int half) { return half ? of_half(to_half(x)) : x; }

INLINE void norm_row(const void *x, const void *weight, void *out, int64_t from, int64_t dim, float eps, int half) {
    float sum = 0.0f;
    for (int64_t i = 0; i < dim; i++) {
        float is = loaded(x, from + i, half);
        sum += is * is;
    }
    float factor = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int64_t i = 0; i < dim; i++)
        store(out, from + i, loaded(weight, i, half) * rounded(loaded(x, from + i, half) * factor, half), half);
}

// x, out [rows, dim]; weight [dim].
void rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t dim, float eps, int64_t half,
              int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && rows > 1 && rows * dim > MANY)
    for (int64_t row = 0; row < rows; row++)
        if (half) norm_row(x, weight, out, row * dim, dim, eps, 1);
        else norm_row(x, weight, out, row * dim, dim, eps, 0);
}

INLINE void rotate_head(const void *x, const void *cosine, const void *sine, void *out, int64_t from, int64_t at,
                        int64_t dim, int half) {
    int64_t middle = dim / 2;
    // What is written is another tensor than those that are read.
#pragma GCC ivdep
    for (int64_t i = 0; i < middle; i++) {
        int64_t j = i + middle;
        float a = loaded(x, from + i, half), b = loaded(x, from + j, half);
        float first = rounded(a * loaded(cosine, at + i, half), half), turned = rounded(b * loaded(sine, at + i, half), half);
        float second = rounded(b * loaded(cosine, at + j, half), half), other = rounded(a * loaded(sine, at + j, half), half);
        store(out, from + i, first - turned, half);
        store(out, from + j, second + other, half);
    }
}

// x, out [tokens, heads, dim]; cosine and sine [angles, dim], of token t those at t % angles.
void rotate(const void *x, const void *cosine, const void *sine, void *out, int64_t tokens, int64_t heads, int64_t dim,
            int64_t angles, int64_t half, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && tokens * heads * dim > MANY)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t from = (token * heads + head) * dim, at = token % angles * dim;
            if (half) rotate_head(x, cosine, sine, out, from, at, dim, 1);
            else rotate_head(x, cosine, sine, out, from, at, dim, 0);
        }
}

INLINE void gate_some(const void *gate, const void *up, void *out, int64_t from, int64_t to, int half) {
    for (int64_t i = from; i < to; i++) {
        float x = loaded(gate, i, half), power = exp_of(x < 0 ? x : -x);
        float open = rounded((x < 0 ? x * power : x) / (1.0f + power), half);
        store(out, i, open * loaded(up, i, half), half);
    }
}

// gate, up, out [count]: silu(gate) * up.
void gated_silu(const void *gate, const void *up, void *out, int64_t count, int64_t half, int64_t threads) {
    int64_t part = 4096, parts = (count + part - 1) / part;
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && count > MANY)
    for (int64_t i = 0; i < parts; i++) {
        int64_t from = i * part, to = from + part < count ? from + part : count;
        if (half) gate_some(gate, up, out, from, to, 1);
        else gate_some(gate, up, out, from, to, 0);
    }
}

// A product of products.c; or of quantized.c, which takes the bias and the dtype apart.
typedef int64_t (*Multiply)(const void *weight, const void *x, void *out, int64_t rows, int64_t threads);
typedef int64_t (*MultiplyQuantized)(const void *weight, const void *bias, const void *x, void *out, int64_t rows,
                                     int64_t half, int64_t threads);

typedef struct {
    const void *function, *weight, *bias;
    int64_t quantized, width;
} Linear;

typedef struct {
    Linear query, key, value, output, gate, up, down;
    const void *before, *after; // weights of the norms before attention and after it
    const void *queries, *keys; // those of the norms of each head's query and key; null: none
    int64_t dim, head, half;    // head: channels of a head
    float eps_before, eps_after, eps_queries, eps_keys;
} Layer;

static int64_t product(const Layer *layer, const Linear *linear, const void *x, void *out, int64_t rows,
                       int64_t threads) {
    if (!linear->quantized) return ((Multiply)linear->function)(linear->weight, x, out, rows, threads);
    MultiplyQuantized multiply = (MultiplyQuantized)linear->function;
    return multiply(linear->weight, linear->bias, x, out, rows, layer->half, threads);
}

// out += x, both of `count` numbers.
INLINE void add(void *out, const void *x, int64_t count, int half) {
    for (int64_t i = 0; i < count; i++) store(out, i, loaded(out, i, half) + loaded(x, i, half), half);
}

// Queries or keys [rows, heads, head] of `normed`; straight: room for as many.
static int64_t rotated(const Layer *layer, const Linear *linear, const void *norm, float eps, const void *normed,
                       const void *cosine, const void *sine, void *straight, void *out, int64_t rows, int64_t angles,
                       int64_t threads) {
    int64_t half = layer->half, head = layer->head, heads = linear->width / head;
    if (!product(layer, linear, normed, straight, rows, threads)) return 0;
    if (norm) rms_norm(straight, norm, straight, rows * heads, head, eps, half, threads);
    rotate(straight, cosine, sine, out, rows, heads, head, angles, half, threads);
    return 1;
}

// Queries, keys and values [rows, heads, head] of x [rows, dim]; scratch: rows * (dim + width of queries or keys).
int64_t before_attention(const Layer *layer, const void *x, const void *cosine, const void *sine, void *scratch,
                         void *query, void *key, void *value, int64_t rows, int64_t angles, int64_t threads) {
    char *straight = (char *)scratch + rows * layer->dim * (layer->half ? 2 : 4);
    rms_norm(x, layer->before, scratch, rows, layer->dim, layer->eps_before, layer->half, threads);
    return rotated(layer, &layer->query, layer->queries, layer->eps_queries, scratch, cosine, sine, straight, query,
                   rows, angles, threads) &&
           rotated(layer, &layer->key, layer->keys, layer->eps_keys, scratch, cosine, sine, straight, key, rows,
                   angles, threads) &&
           product(layer, &layer->value, scratch, value, rows, threads);
}

// The layer's output [rows, dim] from what attention returned and from its input x; scratch: rows * (dim + twice the
// width of the gate).
int64_t after_attention(const Layer *layer, const void *attended, const void *x, void *scratch, void *out, int64_t rows,
                        int64_t threads) {
    int64_t half = layer->half, bytes = half ? 2 : 4, wide = layer->gate.width;
    char *gate = (char *)scratch + rows * layer->dim * bytes, *up = gate + rows * wide * bytes;
    if (!product(layer, &layer->output, attended, out, rows, threads)) return 0;
    if (half) add(out, x, rows * layer->dim, 1);
    else add(out, x, rows * layer->dim, 0);
    rms_norm(out, layer->after, scratch, rows, layer->dim, layer->eps_after, half, threads);
    if (!product(layer, &layer->gate, scratch, gate, rows, threads)) return 0;
    if (!product(layer, &layer->up, scratch, up, rows, threads)) return 0;
    gated_silu(gate, up, gate, rows * wide, half, threads);
    if (!product(layer, &layer->down, gate, scratch, rows, threads)) return 0;
    if (half) add(out, scratch, rows * layer->dim, 1);
    else add(out, scratch, rows * layer->dim, 0);
    return 1;
}
