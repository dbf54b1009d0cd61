// Sparse reading of the last tokens, a KV row at a time and one token after another: the token's entry is taken into the
// page table, pages are scored, the best entries chosen, gathered and attended to. A KV row is one task; scratch is the
// caller's.
#include <string.h>
#include "common.h"

// Pages scored at a time, so that sums stay in the nearest cache of a core; lanes of a vector.
#define BLOCK 512
#define LANES 16

// One KV row; see core/kv_rows.py, and core/pages.py for the table.
typedef struct {
    const void *keys, *values; // of slot 0
    const int64_t *body;       // slots of the first `kept` entries, or null
    void *table;               // [halves, dim, capacity]; null: all entries are read
    float *sum;                // [wide], of all values; null: nothing is blended in
    const int64_t *map;        // entries in place of the first `mapped` given ones, or null
    int64_t kept, tail, stride, size, capacity;
    int64_t page, channels, count, take; // channels: 0 for bounds in all; take: newest entries that the table lacks
    int64_t number;                      // of the KV row among queries and outputs
    int64_t mapped, place;               // place: among given or noted rows, -1 for none
} Row;

typedef struct {
    const void *query;  // [rows, groups, fresh, dim]
    void *out;          // [rows, groups, fresh, wide]
    const float *sinks; // [rows, groups], or null
    const Row *rows;
    const int64_t *given; // [places, fresh, listed], entries that are read; null: rows choose
    int64_t *noted;       // [places, fresh, listed], gets the entries that are chosen; or null
    char *scratch;
    int64_t count, more, groups, dim, wide, newest, half, bytes; // more: entries since `size`; half: bfloat16
    int64_t fresh;                                               // tokens; the last entries are theirs
    int64_t listed;                                              // entries of a list in `given` or `noted`
    float scale, cap;
} Job;

typedef struct {
    float *query, *asked, *scores, *weights, *x, *acc;
    int32_t *found, *spare;
    int64_t *slots, *channels;
} Scratch;

// n numbers from place `at` on.
INLINE const float *numbers(const void *from, int64_t at, int half, int n, float *restrict x) {
    if (!half) return (const float *)from + at;
    const uint16_t *restrict b = (const uint16_t *)from + at;
    for (int i = 0; i < n; i++) x[i] = of_half(b[i]);
    return x;
}

INLINE float greatest(const float *x, int64_t n, float most) {
    float m[LANES];
    for (int j = 0; j < LANES; j++) m[j] = most;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
    for (; i < n; i++) m[0] = x[i] > m[0] ? x[i] : m[0];
    for (int j = 0; j < LANES; j++) most = m[j] > most ? m[j] : most;
    return most;
}

INLINE int64_t slot_of(const Row *row, int64_t entry) {
    return entry < row->kept ? row->body[entry] : row->tail + (entry - row->kept) * row->stride;
}

static void take_in(const Job *job, const Row *row, int64_t entry) {
    int64_t slot = slot_of(row, entry), at = entry / row->page, step = row->capacity;
    int dim = (int)job->dim, begins = entry % row->page == 0;
    for (int half = 0; half < (row->page == 1 ? 1 : 2); half++) {
        int64_t to = half * dim * step + at;
        if (job->half) {
            const uint16_t *key = (const uint16_t *)row->keys + slot * dim;
            uint16_t *table = (uint16_t *)row->table + to;
            for (int d = 0; d < dim; d++) {
                float is = of_half(key[d]), was = of_half(table[d * step]);
                if (begins || (half ? is < was : is > was)) table[d * step] = key[d];
            }
        } else {
            const float *key = (const float *)row->keys + slot * dim;
            float *table = (float *)row->table + to;
            for (int d = 0; d < dim; d++)
                if (begins || (half ? key[d] < table[d * step] : key[d] > table[d * step])) table[d * step] = key[d];
        }
    }
    if (row->sum) {
        float x[job->wide];
        const float *value = numbers(row->values, slot * job->wide, (int)job->half, (int)job->wide, x);
        for (int j = 0; j < job->wide; j++) row->sum[j] += value[j];
    }
}

INLINE void add_times(float *restrict to, const float *restrict x, float weight, int n) {
    for (int i = 0; i < n; i++) to[i] += weight * x[i];
}

// Channels that are looked at, and the queries there at SparQ's temperature; see methods/hsa.py.
static void ask(const Job *job, const Row *row, Scratch *my) {
    int groups = (int)job->groups, dim = (int)job->dim, few = (int)row->channels;
    const float *query = my->query;
    float *sizes = my->x;
    for (int d = 0; d < dim; d++) {
        sizes[d] = 0;
        for (int g = 0; g < groups; g++) sizes[d] += fabsf(query[g * dim + d]);
    }
    largest(sizes, dim, few, my->found, my->spare);
    for (int i = 0; i < few; i++) {
        int d = my->found[i], up = 0;
        float sum = 0;
        for (int g = 0; g < groups; g++) sum += query[g * dim + d];
        up = row->page == 1 || sum > 0;
        my->channels[i] = d + (up ? 0 : dim);
    }
    for (int g = 0; g < groups; g++) {
        float part = 0, whole = 0;
        for (int d = 0; d < dim; d++) whole += fabsf(query[g * dim + d]);
        for (int i = 0; i < few; i++) part += fabsf(query[g * dim + my->found[i]]);
        const float tiny = 1.17549435e-38f;
        whole = whole > tiny ? whole : tiny;
        part = part / whole > tiny ? part / whole : tiny;
        for (int i = 0; i < few; i++)
            my->asked[g * dim + i] = query[g * dim + my->found[i]] * (job->scale / sqrtf(part));
    }
}

// Scores [groups, pages] of all pages.
static void score(const Job *job, const Row *row, int64_t pages, Scratch *my) {
    int groups = (int)job->groups, dim = (int)job->dim, half = (int)job->half, few = (int)row->channels;
    if (few) ask(job, row, my);
    else
        for (int i = 0; i < groups * dim; i++) my->asked[i] = my->query[i] * job->scale;
    for (int64_t first = 0; first < pages; first += BLOCK) {
        int n = pages - first < BLOCK ? (int)(pages - first) : BLOCK;
        for (int g = 0; g < groups; g++) memset(my->scores + g * pages + first, 0, n * sizeof(float));
        for (int i = 0; i < (few ? few : dim); i++) {
            int64_t channel = few ? my->channels[i] : i;
            const float *x = numbers(row->table, channel * row->capacity + first, half, n, my->x), *y = x;
            if (!few && row->page > 1)
                y = numbers(row->table, (channel + dim) * row->capacity + first, half, n, my->x + BLOCK);
            for (int g = 0; g < groups; g++) {
                float weight = my->asked[g * dim + i];
                add_times(my->scores + g * pages + first, few || weight > 0 ? x : y, weight, n);
            }
        }
    }
}

INLINE void capped(const Job *job, float *x, int64_t n) {
    if (job->cap > 0)
        for (int64_t i = 0; i < n; i++) x[i] = tanhf(x[i] / job->cap) * job->cap;
}

// Scores become powers, and weights [pages] their shares, of all query heads together; see page_softmax. The sum of a
// query head's powers, sinks left out, goes to its place in `acc`.
static void weigh(const Job *job, const Row *row, int64_t size, int64_t pages, Scratch *my) {
    int64_t rest = size % row->page;
    float part = rest ? (float)rest / row->page : 1.0f;
    for (int64_t p = 0; p < pages; p++) my->weights[p] = 0;
    for (int g = 0; g < job->groups; g++) {
        float *restrict s = my->scores + g * pages, *restrict w = my->weights, sum = 0, all;
        capped(job, s, pages);
        s[pages - 1] += logf(part);
        float sink = job->sinks ? job->sinks[row->number * job->groups + g] - logf((float)row->page) : -INFINITY;
        float most = greatest(s, pages, sink);
        for (int64_t p = 0; p < pages; p++) s[p] = exp_of(s[p] - most);
        for (int64_t p = 0; p < pages; p++) sum += s[p];
        all = 1 / (sum + (job->sinks ? exp_of(sink - most) : 0));
        for (int64_t p = 0; p < pages; p++) w[p] += s[p] * all;
        my->acc[g] = sum;
    }
    my->weights[pages - 1] /= part;
}

// Entries that are read, as best_entries chooses them; how many is count. Slots of them go to `slots`, and the parts of
// its powers that a query head gives them, where something is blended in, to `acc`.
static void choose(const Job *job, const Row *row, int64_t token, int64_t size, Scratch *my) {
    int64_t page = row->page, pages = (size + page - 1) / page, count = row->count < size ? row->count : size, n = 0;
    score(job, row, pages, my);
    weigh(job, row, size, pages, my);
    int64_t end = size, most = count / 2 < page ? count / 2 : page, rest = (size - 1) % page + 1;
    if (job->newest) {
        most = most > 1 ? most : 1, end = size - (rest < most ? rest : most);
        for (int64_t e = end; e < size; e++) my->slots[n++] = e;
    }
    int64_t needed = count - n, total, taken = (needed + page - 1) / page;
    taken = taken < pages ? taken : pages;
#define HELD(p) ((end < ((p) + 1) * page ? end : ((p) + 1) * page) - (p) * page)
    for (;; taken++) {
        largest(my->weights, pages, taken, my->found, my->spare);
        total = 0;
        for (int64_t i = 0; i < taken; i++) {
            int64_t held = HELD((int64_t)my->found[i]);
            my->spare[i] = held > 0 ? (int32_t)held : 0;
            total += my->spare[i];
        }
        if (total >= needed || taken == pages) break;
    }
    // Of the last page that is needed, the first entries.
    while (total > needed) {
        int64_t last = -1;
        for (int64_t i = 0; i < taken; i++) {
            if (!my->spare[i]) continue;
            if (last < 0) { last = i; continue; }
            float is = my->weights[my->found[i]], least = my->weights[my->found[last]];
            if (is < least || (is == least && my->found[i] > my->found[last])) last = i;
        }
        int64_t cut = total - needed < my->spare[last] ? total - needed : my->spare[last];
        my->spare[last] -= (int32_t)cut, total -= cut;
    }
    for (int64_t i = 0; i < taken; i++)
        for (int64_t e = 0; e < my->spare[i]; e++) my->slots[n++] = (int64_t)my->found[i] * page + e;
    if (row->sum)
        for (int g = 0; g < job->groups; g++) {
            float held = 0;
            for (int64_t i = 0; i < n; i++) held += my->scores[g * pages + my->slots[i]];
            my->acc[g] = held / my->acc[g];
        }
    if (job->noted) memcpy(job->noted + (row->place * job->fresh + token) * job->listed, my->slots, n * sizeof(int64_t));
    for (int64_t i = 0; i < n; i++) my->slots[i] = slot_of(row, my->slots[i]);
}

INLINE int reads_given(const Job *job, const Row *row) { return job->given && row->place >= 0; }

// Entries that another layer has chosen.
static void take_given(const Job *job, const Row *row, int64_t token, int64_t n, Scratch *my) {
    const int64_t *given = job->given + (row->place * job->fresh + token) * job->listed;
    for (int64_t i = 0; i < n; i++) {
        int64_t entry = given[i] < row->mapped ? row->map[given[i]] : given[i];
        my->slots[i] = slot_of(row, entry);
    }
}

INLINE void logits_of(const Job *job, const Row *row, int64_t n, int dim, int half, Scratch *my) {
    int groups = (int)job->groups;
    for (int64_t i = 0; i < n; i++) {
        const float *key = numbers(row->keys, my->slots[i] * dim, half, dim, my->x);
        for (int g = 0; g < groups; g++) {
            const float *restrict q = my->query + g * dim;
            float sum = 0;
            for (int j = 0; j < dim; j++) sum += q[j] * key[j];
            my->scores[g * n + i] = sum * job->scale;
        }
    }
}

INLINE void add_values(const Job *job, const Row *row, int64_t n, int wide, int half, float *out, Scratch *my) {
    int groups = (int)job->groups;
    for (int64_t i = 0; i < n; i++) {
        const float *value = numbers(row->values, my->slots[i] * wide, half, wide, my->x);
        for (int g = 0; g < groups; g++) add_times(out + g * wide, value, my->scores[g * n + i], wide);
    }
}

// Sizes that the compiler knows become straight code.
#define SIZED(WHAT, SIZE, ...)                                                                                        \
    do {                                                                                                              \
        if (SIZE == 64 && job->half) WHAT(job, row, n, 64, 1, __VA_ARGS__);                                           \
        else if (SIZE == 128 && job->half) WHAT(job, row, n, 128, 1, __VA_ARGS__);                                    \
        else if (job->half) WHAT(job, row, n, SIZE, 1, __VA_ARGS__);                                                  \
        else WHAT(job, row, n, SIZE, 0, __VA_ARGS__);                                                                 \
    } while (0)

// Token number `token` of a KV row, which then has `size` entries.
static void one_token(const Job *job, const Row *row, int64_t token, int64_t size, Scratch *my) {
    int groups = (int)job->groups, dim = (int)job->dim, wide = (int)job->wide, half = (int)job->half;
    int64_t n = size, first = row->number * groups, apart = job->fresh;
    int item = half ? 2 : 4;
    for (int g = 0; g < groups; g++) {
        float *to = my->query + g * dim;
        const float *asked = numbers(job->query, ((first + g) * apart + token) * dim, half, dim, to);
        if (asked != to) memcpy(to, asked, dim * sizeof(float));
    }
    if (row->table) {
        n = row->count < size ? row->count : size;
        choose(job, row, token, size, my);
    } else if (reads_given(job, row)) {
        n = row->count < size ? row->count : size;
        take_given(job, row, token, n, my);
    } else
        for (int64_t i = 0; i < n; i++) my->slots[i] = slot_of(row, i);
    // They lie anywhere: let them all come at once.
    for (int64_t i = 0; i < n; i++) {
        const char *key = (const char *)row->keys + my->slots[i] * dim * item;
        const char *value = (const char *)row->values + my->slots[i] * wide * item;
        for (int at = 0; at < dim * item; at += 64) __builtin_prefetch(key + at);
        for (int at = 0; at < wide * item; at += 64) __builtin_prefetch(value + at, 0, 2);
    }
    float *out = my->asked;
    SIZED(logits_of, dim, my);
    for (int i = 0; i < groups * wide; i++) out[i] = 0;
    for (int g = 0; g < groups; g++) {
        float *restrict s = my->scores + g * n, sum = 0;
        float sink = job->sinks ? job->sinks[first + g] : -INFINITY, held = row->sum ? my->acc[g] : 1, gate = 1;
        capped(job, s, n);
        float most = greatest(s, n, row->sum ? -INFINITY : sink);
        for (int64_t i = 0; i < n; i++) s[i] = exp_of(s[i] - most);
        for (int64_t i = 0; i < n; i++) sum += s[i];
        // Beside what is blended in, a sink has what it would have beside all entries.
        if (job->sinks && row->sum) gate = 1 / (1 + expf(sink - most - logf(sum / held)));
        else if (job->sinks) sum += exp_of(sink - most);
        float share = gate * held / sum;
        for (int64_t i = 0; i < n; i++) s[i] *= share;
        if (row->sum)
            for (int j = 0; j < wide; j++) out[g * wide + j] = gate * (1 - held) * row->sum[j] / size;
    }
    SIZED(add_values, wide, out, my);
    for (int g = 0; g < groups; g++) {
        int64_t to = ((first + g) * apart + token) * wide;
        if (half)
            for (int j = 0; j < wide; j++) ((uint16_t *)job->out)[to + j] = to_half(out[g * wide + j]);
        else memcpy((float *)job->out + to, out + g * wide, wide * sizeof(float));
    }
}

static void one_row(const Job *job, const Row *row, Scratch *my) {
    int64_t size = row->size + job->more, known = size - row->take;
    for (int64_t token = 0; token < job->fresh; token++) {
        int64_t now = size - job->fresh + 1 + token;
        for (; row->table && known < now; known++) take_in(job, row, known);
        one_token(job, row, token, now, my);
    }
}

INLINE char *part_of(char **at, int64_t bytes) {
    char *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

// Parts of a thread's scratch; null: how many bytes they take. most: pages or entries of a KV row; read: entries read.
static int64_t divide(const Job *job, int64_t most, int64_t read, char *scratch, Scratch *my) {
    char *at = scratch;
    int64_t groups = job->groups, wider = job->dim > job->wide ? job->dim : job->wide;
    int64_t scored = most > read ? most : read, listed = scored > job->dim ? scored : job->dim;
    my->query = (float *)part_of(&at, groups * job->dim * 4);
    my->asked = (float *)part_of(&at, groups * wider * 4);
    my->scores = (float *)part_of(&at, groups * scored * 4);
    my->weights = (float *)part_of(&at, most * 4);
    my->x = (float *)part_of(&at, (2 * BLOCK > wider ? 2 * BLOCK : wider) * 4 + groups * job->dim * 4);
    my->acc = (float *)part_of(&at, groups * 4);
    my->found = (int32_t *)part_of(&at, listed * 4);
    my->spare = (int32_t *)part_of(&at, listed * 4);
    my->slots = (int64_t *)part_of(&at, read * 8);
    my->channels = (int64_t *)part_of(&at, job->dim * 8);
    return at - scratch;
}

static void sizes_of(const Job *job, int64_t *most, int64_t *read) {
    *most = *read = 1;
    for (int64_t i = 0; i < job->count; i++) {
        const Row *row = job->rows + i;
        int64_t size = row->size + job->more, pages = row->table ? (size + row->page - 1) / row->page : 1;
        int64_t count = (row->table || reads_given(job, row)) && row->count < size ? row->count : size;
        *most = pages > *most ? pages : *most;
        *read = count > *read ? count : *read;
    }
}

// Bytes of scratch that `read_rows` wants for each thread.
int64_t scratch_of(const Job *job) {
    Scratch my;
    int64_t most, read;
    sizes_of(job, &most, &read);
    return divide(job, most, read, 0, &my);
}

// bytes: of each thread's scratch. Returns 1 where there is not enough of it.
int read_rows(const Job *job, int64_t threads) {
    int64_t most, read;
    Scratch sized;
    sizes_of(job, &most, &read);
    if (divide(job, most, read, 0, &sized) > job->bytes) return 1;
    if (threads > job->count) threads = job->count;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads) if (threads > 1)
    for (int64_t i = 0; i < job->count; i++) {
        Scratch my;
        int thread = 0;
#ifdef _OPENMP
        extern int omp_get_thread_num(void);
        thread = omp_get_thread_num();
#endif
        divide(job, most, read, job->scratch + thread * job->bytes, &my);
        one_row(job, job->rows + i, &my);
    }
    return 0;
}
