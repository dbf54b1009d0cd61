// Attention of a prompt over chosen blocks of keys, in bfloat16, of which a processor multiplies two at a time (AVX-512
// BF16). Keys and values of a layer are laid out in pairs once; a block of a head's queries is one task, which goes
// through its blocks of keys under an online softmax, so that logits never leave a core's nearest caches. Of a few
// tokens, all queries of a KV head and a part of its entries are one task, and keys and values are laid out tile by tile
// within it. Parts begin at the same entries whatever the number of tokens and threads, so that a token gets the same
// numbers beside others as alone.
#include "half.h"
#include "token.h"

// Rows whose logits are held at a time; queries of a task's part; entries that they meet at a time.
#define ROWS 32
#define PART 128
#define TILE 128
#define SPAN 2048 // entries of a part

typedef struct {
    const uint16_t *query, *keys, *values; // of [B, Hq, L, D], [B, H, N, D], [B, H, N, Dv], by strides
    uint16_t *out;                         // [B, L, Hq, Dv]
    const int32_t *lists, *counts;         // [B, sets, query blocks, listed], [B, sets, query blocks]
    const float *sinks;                    // [Hq], or null
    uint32_t *pairs;                       // [B * H, places * (D + Dv) / 2]
    char *scratch;                         // `scratch_of` bytes for each thread
    int64_t query_row, query_head, query_slot, key_row, key_head, key_slot, value_row, value_head, value_slot;
    int64_t batch, query_heads, heads, sets, fresh, length, pad, queries, block, query_blocks, listed, dim, wide, places;
    float scale, cap;
    const void *marks; // of [B, H, N], by strides: a head's own entries; null: all are
    int64_t mark_row, mark_head, item; // item: bytes of a mark; one byte is true, two are 0 for own entries
} Job;

#ifdef WITH_HALF
typedef struct {
    uint32_t *asked, *powers; // [PART, D / 2], [ROWS, TILE / 2]
    float *sums, *logits;     // [PART, Dv], [ROWS, TILE]
    float *most, *total, *shrink;
    uint32_t *tile;  // [TILE * (D + Dv) / 2]
    uint16_t *taken; // [TILE, D or Dv] where entries are marked
} Scratch;

// Of a few tokens, for all threads: sums of each part of a KV row's entries, its greatest logits and totals, and where
// entries are marked the slots of each row's own.
typedef struct {
    int64_t count, rows; // parts of a row at most; queries of a row
    float *sums;         // [B * H, count, rows, Dv + 2]
    int32_t *slots;      // [B * H, N]
    int64_t *lengths;    // [B * H]
} Parts;

// Entries of a tile that are seen: from `low` on, and up to each row's own: `own` is that of row 0, and every `together`
// rows have the same.
typedef struct {
    const uint32_t *keys, *values;
    int64_t size, low, own, together;
    const char *ahead; // values that are laid out next, or null
} Tile;

// The own entry of rows that see all of a tile.
#define ALL (INT64_MAX / 2)

// Values of TILE entries, from entry `first` on, in pairs of entries, channels side by side; 0 for entries that are not
// among [0, length).
static void lay_out_values(const uint16_t *values, int64_t slot, int64_t first, int64_t length, int64_t wide,
                           uint32_t *to) {
    uint16_t order[2][32];
    for (int i = 0; i < 32; i++) order[0][i] = (uint16_t)(i / 2 + i % 2 * 32), order[1][i] = order[0][i] + 16;
    __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
    for (int64_t p = 0; p < TILE; p += 2) {
        int64_t entry = first + p;
        const uint16_t *value = values + entry * slot;
        __mmask32 one = entry >= 0 && entry < length ? -1 : 0, other = entry + 1 >= 0 && entry + 1 < length ? -1 : 0;
        for (int64_t j = 0; j < wide; j += 2 * LANES) {
            __mmask32 there = wide - j < 2 * LANES ? 0xffff : -1;
            __m512i x = _mm512_maskz_loadu_epi16(one & there, value + j);
            __m512i y = _mm512_maskz_loadu_epi16(other & there, value + slot + j);
            _mm512_storeu_si512(to + p / 2 * wide + j, _mm512_permutex2var_epi16(x, low, y));
            if (there != 0xffff)
                _mm512_storeu_si512(to + p / 2 * wide + j + LANES, _mm512_permutex2var_epi16(x, high, y));
        }
    }
}

// Places [first, first + TILE) of a KV row. Keys: pairs of channels, LANES entries side by side. Values: pairs of
// entries, channels side by side. Places that hold no entry are 0.
static void lay_out(const Job *job, int64_t row, int64_t first) {
    int64_t b = row / job->heads, h = row % job->heads, half = job->dim / 2, wide = job->wide;
    const uint16_t *keys = job->keys + b * job->key_row + h * job->key_head;
    const uint16_t *values = job->values + b * job->value_row + h * job->value_head;
    uint32_t *to = job->pairs + row * job->places * (job->dim + wide) / 2;
    uint32_t *theirs = to + job->places * half;
    lay_out_keys(keys, job->key_slot, first - job->pad, TILE, job->length, half, to + first * half);
    lay_out_values(values, job->value_slot, first - job->pad, job->length, wide, theirs + first / 2 * wide);
}

// Products of up to FEW rows with FEW * LANES entries. ahead, lines: as in `dots`.
INLINE void logits_of(const uint32_t *q, const uint32_t *k, int64_t half, float *logits, int rows, const char *ahead,
                      int lines) {
    __m512 a[FEW][FEW];
    dots(q, half, k, half, a, rows, ahead, lines);
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < FEW; t++) _mm512_storeu_ps(logits + r * TILE + t * LANES, a[r][t]);
}

// Sums of up to FEW rows, in `vectors` * LANES channels, shrunk, and the values of `count` pairs of entries added.
INLINE void add_values(const uint32_t *p, const uint32_t *v, int64_t wide, int64_t count, const float *shrink, float *to,
                       int vectors, int rows) {
    __m512 a[FEW][FEW];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < vectors; t++)
            a[r][t] = _mm512_mul_ps(_mm512_loadu_ps(to + r * wide + t * LANES), _mm512_set1_ps(shrink[r]));
    for (int64_t c = 0; c < count; c++) {
        __m512bh x[FEW];
        for (int t = 0; t < vectors; t++) x[t] = two_of(v + c * wide + t * LANES);
        for (int r = 0; r < rows; r++) {
            __m512bh y = (__m512bh)_mm512_set1_epi32((int)p[r * (TILE / 2) + c]);
            for (int t = 0; t < vectors; t++) a[r][t] = _mm512_dpbf16_ps(a[r][t], y, x[t]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < vectors; t++) _mm512_storeu_ps(to + r * wide + t * LANES, a[r][t]);
}

static void cap_all(float *x, int64_t n, float scale, float cap) {
    for (int64_t i = 0; i < n; i += LANES) _mm512_storeu_ps(x + i, capped(_mm512_loadu_ps(x + i), scale, cap));
}

// Logits before `low` and from `high` on are hidden.
static void hide(float *x, int64_t n, int64_t low, int64_t high) {
    for (int64_t i = 0; i < low && i < n; i++) x[i] = -INFINITY;
    for (int64_t i = high > 0 ? high : 0; i < n; i++) x[i] = -INFINITY;
}

// A row's n logits become powers; its greatest logit, in units of log 2, and its total follow.
INLINE void weigh(const float *x, int64_t n, float factor, uint16_t *powers, float *most, float *total, float *shrink) {
    __m512 top = _mm512_loadu_ps(x);
    for (int64_t i = LANES; i < n; i += LANES) top = _mm512_max_ps(top, _mm512_loadu_ps(x + i));
    float is = _mm512_reduce_max_ps(top) * factor, now = is > *most ? is : *most;
    *shrink = now == *most ? 1.0f : exp2f(*most - now);
    *most = now;
    // Where nothing was seen yet, all powers are 0.
    __m512 by = _mm512_set1_ps(factor), less = _mm512_set1_ps(now == -INFINITY ? 0.0f : now);
    __m512 least = _mm512_set1_ps(-126.0f), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        __m512 y[2];
        for (int k = 0; k < 2; k++) {
            __m512 z = _mm512_fmsub_ps(_mm512_loadu_ps(x + i + k * LANES), by, less);
            // What is not a number stays so.
            y[k] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(z, least, _CMP_NLE_UQ), power(z));
            sum = _mm512_add_ps(sum, y[k]);
        }
        _mm512_storeu_si512(powers + i, (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]));
    }
    *total = *total * *shrink + _mm512_reduce_add_ps(sum);
}

// A call with the number of rows that the compiler knows: FEW, or those that are left.
#define WITH_ROWS(LEFT, CALL)                                                                                         \
    switch (LEFT) {                                                                                                   \
    case 1: CALL(1); break;                                                                                           \
    case 2: CALL(2); break;                                                                                           \
    case 3: CALL(3); break;                                                                                           \
    default: CALL(FEW);                                                                                               \
    }

// `rows` queries meet a tile.
INLINE void meet(const Job *job, const Tile *tile, int64_t rows, int64_t half, int64_t wide, Scratch *my) {
    float factor = 1.44269504f * (job->cap > 0 ? 1.0f : job->scale);
    for (int64_t first = 0; first < rows; first += ROWS) {
        int64_t some = rows - first < ROWS ? rows - first : ROWS, size = tile->size;
        // What lies behind the last of these rows is left out, in whole products.
        int64_t last = tile->own + (first + some - 1) / tile->together + 1;
        int64_t seen = last > 0 ? (last + FEW * LANES - 1) / (FEW * LANES) * (FEW * LANES) : 0;
        size = seen < size ? seen : size;
        if (!size) continue;
        for (int64_t k = 0; k < size; k += FEW * LANES)
            for (int64_t r = 0; r < some; r += FEW) {
                const uint32_t *q = my->asked + (first + r) * half, *key = tile->keys + k * half;
                float *logits = my->logits + r * TILE + k;
                // The first rows read the next values ahead, as many bytes as there are keys.
                int64_t part = k / FEW / LANES * half * 4 * LINE;
                int lines = !tile->ahead || first + r >= 2 * FEW ? 0 : rows > FEW ? 2 : 4;
                const char *ahead = lines ? tile->ahead + part + r / FEW * half * 2 * LINE : 0;
#define LOGITS(ROWS) logits_of(q, key, half, logits, ROWS, ahead, lines)
                WITH_ROWS(some - r, LOGITS)
            }
        for (int64_t r = 0; r < some; r++) {
            float *x = my->logits + r * TILE;
            int64_t at = first + r;
            if (job->cap > 0) cap_all(x, size, job->scale, job->cap);
            hide(x, size, tile->low, tile->own + at / tile->together + 1);
            weigh(x, size, factor, (uint16_t *)(my->powers + r * (TILE / 2)), my->most + at, my->total + at,
                  my->shrink + at);
        }
        for (int64_t j = 0; j < wide; j += FEW * LANES)
            for (int64_t r = 0; r < some; r += FEW) {
                const uint32_t *p = my->powers + r * (TILE / 2), *v = tile->values + j;
                float *to = my->sums + (first + r) * wide + j, *shrink = my->shrink + first + r;
#define VALUES(ROWS)                                                                                                  \
    switch (wide - j < FEW * LANES ? (wide - j) / LANES : FEW) {                                                      \
    case 1: add_values(p, v, wide, size / 2, shrink, to, 1, ROWS); break;                                             \
    case 2: add_values(p, v, wide, size / 2, shrink, to, 2, ROWS); break;                                             \
    case 3: add_values(p, v, wide, size / 2, shrink, to, 3, ROWS); break;                                             \
    default: add_values(p, v, wide, size / 2, shrink, to, FEW, ROWS);                                                 \
    }
                WITH_ROWS(some - r, VALUES)
            }
    }
}
#undef LOGITS
#undef VALUES

// Sizes that the compiler knows become straight code.
static void meet_sized(const Job *job, const Tile *tile, int64_t rows, Scratch *my) {
    if (job->dim == 64 && job->wide == 64) meet(job, tile, rows, 32, 64, my);
    else if (job->dim == 128 && job->wide == 128) meet(job, tile, rows, 64, 128, my);
    else meet(job, tile, rows, job->dim / 2, job->wide, my);
}

// Row r of the sums is the output of a token's head.
INLINE void write_row(const Job *job, int64_t b, int64_t head, int64_t token, int64_t r, Scratch *my) {
    int64_t wide = job->wide;
    float share = 1.0f / my->total[r];
    if (job->sinks) {
        float sink = 1.44269504f * job->sinks[head], over = sink > my->most[r] ? sink : my->most[r];
        float rest = exp2f(my->most[r] - over);
        share = rest / (my->total[r] * rest + exp2f(sink - over));
    }
    uint16_t *out = job->out + ((b * job->fresh + token) * job->query_heads + head) * wide;
    for (int64_t j = 0; j < wide; j += LANES) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(my->sums + r * wide + j), _mm512_set1_ps(share));
        _mm256_storeu_si256((__m256i *)(out + j), (__m256i)_mm512_cvtneps_pbh(x));
    }
}

// Query r of the task is that of a token's head.
INLINE void take_query(const Job *job, int64_t b, int64_t head, int64_t token, int64_t r, Scratch *my) {
    int64_t half = job->dim / 2;
    const uint16_t *query = job->query + b * job->query_row + head * job->query_head + token * job->query_slot;
    memcpy(my->asked + r * half, query, half * 4);
    my->most[r] = -INFINITY, my->total[r] = 0;
    memset(my->sums + r * job->wide, 0, job->wide * sizeof(float));
}

// The part from `inside` on of a block of a head's queries.
static void one_part(const Job *job, int64_t b, int64_t head, int64_t block, int64_t inside, Scratch *my) {
    int64_t groups = job->query_heads / job->heads, half = job->dim / 2, from = block * job->queries + inside;
    int64_t rows = job->queries - inside < PART ? job->queries - inside : PART;
    rows = job->fresh - from < rows ? job->fresh - from : rows;
    if (rows <= 0) return;
    for (int64_t r = 0; r < rows; r++) take_query(job, b, head, from + r, r, my);
    const uint32_t *keys = job->pairs + (b * job->heads + head / groups) * job->places * (job->dim + job->wide) / 2;
    const uint32_t *values = keys + job->places * half;
    int64_t item = (b * job->sets + head / (job->query_heads / job->sets)) * job->query_blocks + block;
    for (int64_t i = 0; i < job->counts[item]; i++) {
        int64_t first = job->lists[item * job->listed + i] * job->block, end = first + job->block;
        for (int64_t at = first; at < end; at += TILE) {
            int64_t low = job->pad - at, size = end - at < TILE ? end - at : TILE;
            if (low >= size) continue;
            Tile tile = {keys + at * half, values + at / 2 * job->wide, size, low > 0 ? low : 0, ALL, 1, 0};
            meet_sized(job, &tile, rows, my);
        }
    }
    int64_t diagonal = job->pad + job->length - job->fresh + block * job->queries;
    for (int64_t at = diagonal; at < diagonal + inside + rows; at += TILE) {
        int64_t low = job->pad - at, own = diagonal + inside - at;
        Tile tile = {keys + at * half, values + at / 2 * job->wide, TILE, low > 0 ? low : 0, own, 1, 0};
        meet_sized(job, &tile, rows, my);
    }
    for (int64_t r = 0; r < rows; r++) write_row(job, b, head, from + r, r, my);
}

// Slots of a head's own entries, as marked: how many.
static int64_t slots_of(const Job *job, int64_t b, int64_t h, int32_t *slots) {
    int64_t n = 0, marks = b * job->mark_row + h * job->mark_head;
    for (int64_t t = 0; t < job->length; t++) {
        slots[n] = (int32_t)t;
        if (job->item == 1) n += ((const uint8_t *)job->marks)[marks + t] != 0;
        else n += ((const uint16_t *)job->marks)[marks + t] == 0;
    }
    return n;
}

// The first of `count` rows of `wide` numbers that lie in these slots; they are copied unless they are side by side.
static const uint16_t *taken(const uint16_t *from, int64_t *slot, const int32_t *slots, int64_t count, int64_t wide,
                             uint16_t *to) {
    if (slots[count - 1] - slots[0] == count - 1) return from + slots[0] * *slot;
    for (int64_t i = 0; i < count; i++) memcpy(to + i * wide, from + slots[i] * *slot, wide * 2);
    *slot = wide;
    return to;
}

// A tile of a KV row, from entry `at` of `length` on; slots: those of the entries, where they are marked.
static void tile_of(const Job *job, const uint16_t *keys, const uint16_t *values, const int32_t *slots, int64_t at,
                    int64_t length, Scratch *my) {
    uint32_t *theirs = my->tile + TILE * job->dim / 2;
    int64_t count = length - at < TILE ? length - at : TILE, key = job->key_slot, value = job->value_slot;
    if (slots) {
        const uint16_t *from = taken(keys, &key, slots + at, count, job->dim, my->taken);
        lay_out_keys(from, key, 0, TILE, count, job->dim / 2, my->tile);
        from = taken(values, &value, slots + at, count, job->wide, my->taken);
        lay_out_values(from, value, 0, count, job->wide, theirs);
    } else {
        lay_out_keys(keys, key, at, TILE, length, job->dim / 2, my->tile);
        lay_out_values(values, value, at, length, job->wide, theirs);
    }
}

// Add values of new tokens, the first at place `first` of the tile, that are not finite to the sums of the rows that see
// them, and set them to 0, because a power of 0 does not hide them.
static void show_new(const Job *job, int64_t first, int64_t groups, Scratch *my) {
    uint16_t *values = (uint16_t *)(my->tile + TILE * job->dim / 2);
    for (int64_t p = first > 0 ? first : 0; p < TILE && p - first < job->fresh; p++)
        for (int64_t j = 0; j < job->wide; j++) {
            uint16_t *x = values + (p / 2 * job->wide + j) * 2 + p % 2;
            if ((*x & 0x7f80) != 0x7f80) continue;
            for (int64_t r = (p - first) * groups; r < job->fresh * groups; r++)
                my->sums[r * job->wide + j] += of_half(*x);
            *x = 0;
        }
}

// Row r is that of token r / groups.
INLINE void write_few(const Job *job, int64_t row, Scratch *my) {
    int64_t b = row / job->heads, h = row % job->heads, groups = job->query_heads / job->heads;
    for (int64_t r = 0; r < job->fresh * groups; r++) write_row(job, b, h * groups + r % groups, r / groups, r, my);
}

// All queries of a KV head, few of each head, meet a part of its entries. The last entries are the tokens' own.
static void part_of_head(const Job *job, const Parts *parts, int64_t row, int64_t part, Scratch *my) {
    int64_t b = row / job->heads, h = row % job->heads, groups = job->query_heads / job->heads, half = job->dim / 2;
    int64_t rows = parts->rows;
    int64_t length = job->marks ? parts->lengths[row] : job->length, own = length - job->fresh;
    int64_t end = (part + 1) * SPAN < length ? (part + 1) * SPAN : length;
    const int32_t *slots = job->marks ? parts->slots + row * job->length : 0;
    const uint16_t *keys = job->keys + b * job->key_row + h * job->key_head;
    const uint16_t *values = job->values + b * job->value_row + h * job->value_head;
    for (int64_t r = 0; r < rows; r++) take_query(job, b, h * groups + r % groups, r / groups, r, my);
    for (int64_t at = part * SPAN; at < end; at += TILE) {
        tile_of(job, keys, values, slots, at, length, my);
        show_new(job, own - at, groups, my);
        const char *ahead = slots || job->value_slot != job->wide ? 0 : (const char *)(values + (at + TILE) * job->wide);
        Tile tile = {my->tile, my->tile + TILE * half, TILE, 0, own - at, groups, ahead};
        meet_sized(job, &tile, rows, my);
    }
    if (parts->count == 1) {
        write_few(job, row, my);
        return;
    }
    float *to = parts->sums + (row * parts->count + part) * rows * (job->wide + 2);
    memcpy(to, my->sums, (size_t)(rows * job->wide) * sizeof(float));
    memcpy(to + rows * job->wide, my->most, (size_t)rows * sizeof(float));
    memcpy(to + rows * (job->wide + 1), my->total, (size_t)rows * sizeof(float));
}

// The output of a KV head's queries from their parts, in order.
static void join_parts(const Job *job, const Parts *parts, int64_t row, Scratch *my) {
    int64_t rows = parts->rows, wide = job->wide;
    for (int64_t r = 0; r < rows; r++) my->most[r] = -INFINITY, my->total[r] = 0;
    memset(my->sums, 0, (size_t)(rows * wide) * sizeof(float));
    for (int64_t part = 0; part < parts->count; part++) {
        const float *sums = parts->sums + (row * parts->count + part) * rows * (wide + 2);
        const float *most = sums + rows * wide, *total = most + rows;
        for (int64_t r = 0; r < rows; r++) {
            float now = most[r] > my->most[r] ? most[r] : my->most[r];
            // Where nothing was seen, there is nothing to shrink.
            float old = my->most[r] == now ? 1.0f : exp2f(my->most[r] - now);
            float new = most[r] == now ? 1.0f : exp2f(most[r] - now);
            my->most[r] = now, my->total[r] = my->total[r] * old + total[r] * new;
            for (int64_t j = 0; j < wide; j++)
                my->sums[r * wide + j] = my->sums[r * wide + j] * old + sums[r * wide + j] * new;
        }
    }
    write_few(job, row, my);
}

INLINE char *part_of(char **at, int64_t bytes) {
    char *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

static int64_t divide(const Job *job, char *scratch, Scratch *my) {
    char *at = scratch;
    my->asked = (uint32_t *)part_of(&at, PART * job->dim * 2);
    my->powers = (uint32_t *)part_of(&at, ROWS * TILE * 2);
    my->logits = (float *)part_of(&at, ROWS * TILE * 4);
    my->sums = (float *)part_of(&at, PART * job->wide * 4);
    my->most = (float *)part_of(&at, PART * 4);
    my->total = (float *)part_of(&at, PART * 4);
    my->shrink = (float *)part_of(&at, PART * 4);
    my->tile = (uint32_t *)part_of(&at, TILE * (job->dim + job->wide) * 2);
    my->taken = (uint16_t *)part_of(&at, job->marks ? TILE * (job->dim > job->wide ? job->dim : job->wide) * 2 : 0);
    return at - scratch;
}

static int64_t share(const Job *job, char *room, Parts *parts) {
    char *at = room;
    int64_t rows = job->batch * job->heads;
    parts->rows = job->query_heads / job->heads * job->fresh;
    parts->count = job->length > SPAN ? (job->length + SPAN - 1) / SPAN : 1;
    int64_t sums = parts->count > 1 ? rows * parts->count * parts->rows * (job->wide + 2) : 0;
    parts->sums = (float *)part_of(&at, sums * (int64_t)sizeof(float));
    parts->slots = (int32_t *)part_of(&at, job->marks ? rows * job->length * 4 : 0);
    parts->lengths = (int64_t *)part_of(&at, job->marks ? rows * 8 : 0);
    return at - room;
}

// Bytes of scratch that a thread needs; 0 where the compiler knows no products of bfloat16.
int64_t scratch_of(const Job *job) {
    Scratch my;
    return divide(job, 0, &my);
}

INLINE int number_of_thread(void) {
#ifdef _OPENMP
    extern int omp_get_thread_num(void);
    return omp_get_thread_num();
#else
    return 0;
#endif
}

void read_blocks(const Job *job, int64_t threads) {
    int64_t rows = job->batch * job->heads, tiles = job->places / TILE, items = job->batch * job->query_heads;
    Scratch sized;
    int64_t bytes = divide(job, 0, &sized);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Scratch my;
        divide(job, job->scratch + number_of_thread() * bytes, &my);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * tiles; i++) lay_out(job, i / tiles, i % tiles * TILE);
        // The last queries see most, and come first.
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items * job->query_blocks; i++) {
            int64_t block = job->query_blocks - 1 - i / items, head = i % items;
            for (int64_t inside = 0; inside < job->queries; inside += PART)
                one_part(job, head / job->query_heads, head % job->query_heads, block, inside, &my);
        }
    }
}

// 0: there is no memory.
int64_t read_few(const Job *job, int64_t threads) {
    int64_t rows = job->batch * job->heads;
    Scratch sized;
    Parts parts;
    int64_t bytes = divide(job, 0, &sized), shared = share(job, 0, &parts);
    char *room = allocate_lines((size_t)(shared + bytes * threads));
    if (!room) return 0;
    share(job, room, &parts);
#pragma omp parallel num_threads((int)threads) if (threads > 1 && rows * parts.count > 1)
    {
        Scratch my;
        divide(job, room + shared + number_of_thread() * bytes, &my);
        if (job->marks) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t row = 0; row < rows; row++)
                parts.lengths[row] = slots_of(job, row / job->heads, row % job->heads, parts.slots + row * job->length);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < rows * parts.count; i++)
            part_of_head(job, &parts, i / parts.count, i % parts.count, &my);
        if (parts.count > 1) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t row = 0; row < rows; row++) join_parts(job, &parts, row, &my);
        }
    }
    free_lines(room);
    return 1;
}

// The same as token.c describes it, of entries that all weigh 1; 0: there is no memory.
int64_t attend_few(const Token *token, int64_t threads) {
    int64_t dim = token->dim, heads = token->heads * token->groups, row = token->row * dim, head = token->head * dim;
    Job job = {
        .query = token->query, .query_row = token->fresh * heads * dim, .query_head = dim, .query_slot = heads * dim,
        .keys = token->keys, .key_row = row, .key_head = head, .key_slot = dim,
        .values = token->values, .value_row = row, .value_head = head, .value_slot = dim,
        .marks = token->seen, .mark_row = token->seen_row, .mark_head = token->seen_head, .item = token->item,
        .batch = token->batch, .query_heads = heads, .heads = token->heads, .fresh = token->fresh,
        .length = token->size, .dim = dim, .wide = dim, .scale = token->scale, .out = token->out};
    return read_few(&job, threads);
}
#else
int64_t scratch_of(const Job *job) {
    (void)job;
    return 0;
}

void read_blocks(const Job *job, int64_t threads) { (void)job, (void)threads; }

int64_t read_few(const Job *job, int64_t threads) {
    (void)job, (void)threads;
    return 0;
}

int64_t attend_few(const Token *token, int64_t threads) {
    (void)token, (void)threads;
    return 0;
}
#endif
