/* Trellis-coded quantisation on a CPU; the bits equal those of `reference.py`, so products are rounded before they are added
   (`-ffp-contract=off`).

   In the search a vector has `LANES` tokens. The costs of the best paths are in registers, one vector per state. Which of the two
   previous states was better is a bit per state, kept for every component until the path is traced back. */

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define MOST_COMPONENTS 1024 /* most components of a head */
#define STATES 8
#define SUBSETS 4
#define OUTSIDE 256.0f /* components are clamped to this many steps outside all levels */
#define FAR 1e30f
#define NEAREST 0x1.8p23f /* adding and subtracting it rounds to the nearest integer, halves to even */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

#define INLINE __attribute__((always_inline)) static inline

/* Lane-wise minimum. Written as a loop over lanes, which compilers turn into one instruction; a vector comparison becomes three. */
INLINE floats smaller(floats low, floats high) {
    floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = high[lane] < low[lane] ? high[lane] : low[lane];
    return found;
}

/* Lane-wise maximum; `least` where x is NaN. */
INLINE floats larger(floats x, floats least) {
    floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = x[lane] > least[lane] ? x[lane] : least[lane];
    return found;
}

INLINE floats each(float number) { return (floats){0} + number; }

/* f of the nearest level of a subset, for x in units of four steps from the subset's first level. */
INLINE floats nearest_free(floats x, float top) { return smaller(larger((x + NEAREST) - NEAREST, each(0)), each(top)); }

/* Weighted squared errors of the nearest level of each subset, minus the least of them. */
INLINE void squared_errors(floats at, float top, float weight, floats errors[SUBSETS]) {
    at *= 1.0f / SUBSETS;
    floats least;
#pragma GCC unroll 8
    for (int subset = 0; subset < SUBSETS; subset++) {
        floats off = at - (float)subset / SUBSETS;
        off -= nearest_free(off, top);
        errors[subset] = off * off;
        least = subset ? smaller(least, errors[subset]) : errors[0];
    }
#pragma GCC unroll 8
    for (int subset = 0; subset < SUBSETS; subset++) errors[subset] = (errors[subset] - least) * (SUBSETS * SUBSETS * weight);
}

/* Extends the paths by one component: state 2 m + u is reached from m + 4 h, h = 0, 1. Bit s of the result is 1 if h = 1 is better
   for state s. */
INLINE ints step(floats cost[STATES], const floats errors[SUBSETS]) {
    floats after[STATES];
    ints came = {0};
#pragma GCC unroll 8
    for (int m = 0; m < STATES / 2; m++)
#pragma GCC unroll 8
        for (int u = 0; u < 2; u++) {
            int z0 = m >> 1, even = 2 * (u ^ (m & 1)) + z0, odd = even ^ 2;
            floats low = errors[even] + cost[m], high = errors[odd] + cost[m + STATES / 2];
            came |= (high < low) & (1 << (2 * m + u));
            after[2 * m + u] = smaller(low, high);
        }
#pragma GCC unroll 8
    for (int state = 0; state < STATES; state++) cost[state] = after[state];
    return came;
}

/* Arguments of the search. In the order of the path, component n of a head is field n % fields of word n / fields, and is column
   n % fields * wide + n / fields of y. A head with fewer words than `wide` has further components of weight 0, which decide between
   equally good paths: three of them suffice for that. */
typedef struct {
    const float *y, *weights; /* [rows][heads][tokens][fields * wide], and [heads][fields * wide] of squared steps */
    const int32_t *widths, *begins; /* [fields]; [heads + 1]: first word of each head in a row, then the number of all words */
    int32_t rows, heads, tokens, fields, wide;
    int16_t *words; /* [rows][tokens][begins[heads]] */
} Search;

static void tokens_of(const Search *search, int item, int first) {
    int head = item % search->heads, fields = search->fields, wide = search->wide, columns = fields * wide;
    int begin = search->begins[head], count = search->begins[head + 1] - begin, all = search->begins[search->heads];
    int own = count * fields, idle = (wide - count) * fields < 3 ? (wide - count) * fields : 3;
    int left = search->tokens - first < LANES ? search->tokens - first : LANES;
    const float *y = search->y + ((int64_t)item * search->tokens + first) * columns, *weights = search->weights + head * columns;
    int16_t *out = search->words + ((int64_t)(item / search->heads) * search->tokens + first) * all + begin;
    floats at[MOST_COMPONENTS], cost[STATES], errors[SUBSETS];
    ints came[MOST_COMPONENTS + 3];

    for (int lane = 0; lane < LANES; lane++) /* missing tokens repeat the last one */
        for (int field = 0; field < fields; field++)
            for (int w = 0; w < count; w++)
                ((float *)at)[(w * fields + field) * LANES + lane] = y[(lane < left ? lane : left - 1) * columns + field * wide + w];
    for (int state = 0; state < STATES; state++) cost[state] = each(state ? FAR : 0);
    int n = 0;
    for (int w = 0; w < count; w++)
        for (int field = 0; field < fields; field++, n++) {
            float half = 1 << (search->widths[field] - 1), top = half - 1; /* levels are 4 half in number, 1 / (2 half) apart */
            floats here = larger(at[n] * (2 * half) + (2 * half - 0.5f), each(-OUTSIDE));
            at[n] = smaller(here, each(SUBSETS * top + OUTSIDE));
            squared_errors(at[n], top, weights[field * wide + w], errors);
            came[n] = step(cost, errors);
        }
    for (int subset = 0; subset < SUBSETS; subset++) errors[subset] = (floats){0};
    for (; n < own + idle; n++) came[n] = step(cost, errors);

    floats least = cost[0];
    ints state = {0};
    for (int other = 1; other < STATES; other++) {
        ints less = cost[other] < least;
        state = (less & other) | (~less & state);
        least = smaller(least, cost[other]);
    }
    for (n--; n >= own; n--) state = (state >> 1) | (((came[n] >> state) & 1) << 2);
    for (int w = count - 1; w >= 0; w--) {
        ints word = {0};
        for (int field = fields - 1; field >= 0; field--, n--) {
            int width = search->widths[field];
            ints u = state & 1;
            state = (state >> 1) | (((came[n] >> state) & 1) << 2);
            ints subset = (((u ^ state ^ (state >> 2)) & 1) << 1) | ((state >> 1) & 1);
            floats off = (at[n] - __builtin_convertvector(subset, floats)) * (1.0f / SUBSETS);
            ints f = __builtin_convertvector(nearest_free(off, (1 << (width - 1)) - 1), ints);
            word = (word << width) | u | (f << 1);
        }
        for (int lane = 0; lane < left; lane++) out[(int64_t)lane * all + w] = (int16_t)word[lane];
    }
}

void trellis_words(const Search *search, int threads) {
    int tiles = (search->tokens + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int unit = 0; unit < search->rows * search->heads * tiles; unit++)
        tokens_of(search, unit / tiles, unit % tiles * LANES);
}

/* Arguments of decoding: a tile of words, tokens contiguous. The words of row r and head h begin at words + r row_stride +
   begins[h] word_stride. */
typedef struct {
    const int16_t *words;
    const int32_t *widths, *begins;
    int64_t row_stride, word_stride;
    int32_t rows, heads, tokens, fields, wide;
    int16_t *levels; /* [rows][heads][fields * wide][tokens]; 0 where a head has no word */
} Tile;

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

/* Decodes `left` tokens of a head, at most a vector. */
INLINE void levels_of(const Tile *tile, const int16_t *words, int count, int16_t *out, int left) {
    size_t bytes = 2 * (size_t)left;
    shorts before = {0}, second = {0}, third = {0}; /* u of the components before */
    for (int w = 0; w < count; w++) {
        shorts word = {0};
        memcpy(&word, words + w * tile->word_stride, bytes);
        int first = 0;
        for (int field = 0; field < tile->fields; first += tile->widths[field++]) {
            shorts code = (word >> (int16_t)first) & (int16_t)((1 << tile->widths[field]) - 1), u = code & 1;
            shorts level = ((code >> 1) << 2) | ((u ^ before ^ third) << 1) | second;
            memcpy(out + ((int64_t)field * tile->wide + w) * tile->tokens, &level, bytes);
            third = second, second = before, before = u;
        }
    }
}

void trellis_levels(const Tile *tile, int threads) {
    int each = 2 * LANES, tiles = (tile->tokens + each - 1) / each, heads = tile->heads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int unit = 0; unit < tile->rows * heads * tiles; unit++) {
        int item = unit / tiles, at = unit % tiles * each, head = item % heads, left = tile->tokens - at;
        int begin = tile->begins[head], count = tile->begins[head + 1] - begin;
        const int16_t *words = tile->words + item / heads * tile->row_stride + begin * tile->word_stride + at;
        int16_t *out = tile->levels + (int64_t)item * tile->fields * tile->wide * tile->tokens + at;
        if (left >= each)
            levels_of(tile, words, count, out, each);
        else
            levels_of(tile, words, count, out, left);
        for (int field = 0; field < tile->fields; field++)
            for (int w = count; w < tile->wide; w++)
                memset(out + ((int64_t)field * tile->wide + w) * tile->tokens, 0, 2 * (size_t)(left < each ? left : each));
    }
}
